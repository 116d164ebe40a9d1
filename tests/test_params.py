"""Models from the parameters in a nested dict, for any architecture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_tools import assert_same
from saved_run_tools import MODEL, random_model

from gptjax.models.base import params_of
from gptjax.weights import WeightsError, model_from_params


@pytest.fixture
def tree():
    return {**params_of(random_model())}


def test_a_model_from_params_is_the_same_model(tree):
    """As strings, "10" sorts before "2": in this order, the blocks of 11 layers are permuted."""
    strings = dict(sorted((str(i), block) for i, block in tree["blocks"].items()))
    for params in (
        tree,
        jax.tree.map(np.asarray, tree),
        nnx.state(random_model(), nnx.Param),
        tree | {"blocks": strings},
    ):
        assert_same(model_from_params(MODEL, params), tree)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop("wpe"), r"wpe: the argument has nothing, the config needs float32\[16, 8"),
        (lambda t: t.update(extra=0), r"extra: the argument has int\[\], the config needs nothing"),
        (lambda t: t["blocks"].update({11: t["blocks"][2]}), r"blocks.11.attn.*needs nothing"),
        (lambda t: t.update(wpe=t["wpe"].T), r"wpe: the argument has float32\[8, 16\]"),
        (lambda t: t.update(wpe=t["wpe"].astype(jnp.bfloat16)), "wpe: the argument has bfloat16"),
        (lambda t: t.update(wpe=[0.0] * 7), r"wpe.0: the argument has float\[\]"),
    ],
)
def test_params_that_are_not_the_models_are_refused(tree, edit, message):
    edit(tree)
    with pytest.raises(WeightsError, match=message):
        model_from_params(MODEL, tree)
