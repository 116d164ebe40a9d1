"""Runs of a tiny model that are stored through the checkpoint API, without training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gptjax.config import Config, to_json
from gptjax.models.base import abstract_params, graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.checkpoint import Checkpoints
from gptjax.weights import checkpoint_files

# Eleven blocks: sorting block names as strings would change the order.
MODEL = GPT2Config(
    vocab_size=257, padded_vocab_size=264, block_size=16, n_layer=11, n_head=2, n_embd=8
)


@functools.cache
def random_params(model=MODEL, seed=0):
    """Every array is random, so that no two arrays of one shape are the same."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), abstract_params(model)
    )


def random_model(model=MODEL, seed=0):
    return nnx.merge(graph(model), random_params(model, seed))


def save_run(
    run, params_by_step, *, model=MODEL, tokenizer="byte", changes=None, stage=None, opt_state=None
):
    """Save checkpoints with the given parameters; `changes` replace entries of the config, `stage`
    is the number of the stage that all of them are in."""
    config = to_json(Config(model=model, sequence_length=model.block_size))
    config |= changes or {}
    meta = {"data": {"position": 0, "dataset": {"tokenizer": tokenizer}}, "config": config}
    meta["data"] |= {} if stage is None else {"stage": stage}
    checkpoints = Checkpoints(run / "checkpoints", keep_last=10)
    for step, params in params_by_step.items():
        state = {"step": jnp.int32(step), "params": params, "rng": jnp.zeros(2, jnp.uint32)}
        state |= {} if opt_state is None else {"opt_state": opt_state}
        checkpoints.save(step, state, meta)
    checkpoints.wait()
    checkpoints.close()
    return run


def restored(folder, step, like):
    """Return the state of a verified checkpoint, as a resumed run does."""
    arrays = checkpoint_files.verify(folder / str(step))["arrays"]
    return checkpoint_files.restore(folder / str(step), arrays, like, needs="this run")
