"""A sampled text of the model in training."""

import jax
import numpy as np
from flax import nnx

from gptjax import distributed
from gptjax.config import Config
from gptjax.generation import generate
from gptjax.parallel import Parallel
from gptjax.training.inputs import Inputs
from gptjax.training.step import TrainState


def draw(
    config: Config,
    inputs: Inputs,
    graphdef: nnx.GraphDef,
    parallel: Parallel,
    state: TrainState,
    step: int,
) -> str | None:
    """Return a text after the end-of-text token; None in all processes but the first.

    Every process must call this function: it gathers the parameters.
    """
    assert inputs.tokenizer is not None
    prompt = np.full((1, 1), inputs.tokenizer.eot, np.int32)
    length = min(config.sample_tokens, config.model.block_size - 1)
    params, rng = distributed.on_one_device((parallel.whole(state.params), state.rng))
    if jax.process_index():
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    tokens = generate(nnx.merge(graphdef, params), prompt, max_new_tokens=length, key=key)
    tokens = np.asarray(tokens)[0, 1:]
    # The model's vocabulary may be larger than the tokenizer's.
    return inputs.tokenizer.decode(tokens[tokens < inputs.tokenizer.vocab_size])
