"""Models from the parameters in a nested dict, for any architecture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gptjax
from gptjax.models.base import params_of
from gptjax.weights import WeightsError, model_from_params


def random_model(n_layer=3):
    config = gptjax.GPT2Config(
        vocab_size=11, padded_vocab_size=16, block_size=7, n_layer=n_layer, n_head=2, n_embd=6
    )
    model, rng = config.build(nnx.Rngs(0)), np.random.default_rng(0)
    # Distinct numbers, and no bias of 0.
    nnx.update(
        model,
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params_of(model)),
    )
    return model


def test_a_model_from_params_is_the_same_model():
    model = random_model()
    for tree in (
        params_of(model),
        jax.tree.map(np.asarray, params_of(model)),
        nnx.state(model, nnx.Param),
    ):
        again = model_from_params(model.config, tree)
        jax.tree.map(np.testing.assert_array_equal, params_of(again), params_of(model))


def test_blocks_with_string_keys_are_found_by_number():
    """As strings, "10" sorts before "2": in this order, the blocks of 12 layers are permuted."""
    model = random_model(n_layer=12)
    tree = params_of(model)
    blocks = {str(i): block for i, block in tree["blocks"].items()}
    tree["blocks"] = dict(sorted(blocks.items()))
    again = model_from_params(model.config, tree)
    jax.tree.map(np.testing.assert_array_equal, params_of(again), params_of(model))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop("wpe"), r"wpe: the argument has nothing, the config needs float32\[7, 6"),
        (lambda t: t.update(extra={}), "extra: the argument has dict, the config needs nothing"),
        (lambda t: t["blocks"].update({3: t["blocks"][2]}), r"blocks.3.attn.*needs nothing"),
        (lambda t: t.update(wpe=t["wpe"].T), r"wpe: the argument has float32\[6, 7\]"),
        (lambda t: t.update(wpe=t["wpe"].astype(jnp.bfloat16)), "wpe: the argument has bfloat16"),
        (lambda t: t.update(wpe=[[0.0] * 6] * 7), "wpe: the argument has list"),
        (lambda t: t.update(blocks=[*t["blocks"].values()]), "blocks.0.attn.*has nothing"),
    ],
)
def test_params_that_are_not_the_models_are_refused(edit, message):
    model = random_model()
    tree = params_of(model)
    edit(tree)
    with pytest.raises(WeightsError, match=message):
        model_from_params(model.config, tree)
