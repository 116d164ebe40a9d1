"""gptjax.precision: the dtypes of each name; a precision affects only its own model."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from gpt2_tools import SHAPES, config_of, split
from process_tools import python

from gptjax import Precision, loss_fn
from gptjax.precision import PRECISIONS

MEANINGS = [
    ("fp32", "float32", "float32", "HIGHEST"),
    ("tf32", "float32", "float32", "HIGH"),
    ("bf16", "bfloat16", "bfloat16", "DEFAULT"),
    ("bf16_residual_fp32", "bfloat16", "float32", "DEFAULT"),
    ("fp8_head", "bfloat16", "bfloat16", "DEFAULT"),
    ("fp8", "bfloat16", "bfloat16", "DEFAULT"),
]


@pytest.mark.parametrize("name, compute, residual, matmul", MEANINGS)
def test_meaning(name, compute, residual, matmul):
    precision = Precision(name)
    assert str(precision) == name and set(PRECISIONS) == {row[0] for row in MEANINGS}
    assert (precision.compute_dtype.name, precision.residual_dtype.name) == (compute, residual)
    assert precision.param_dtype == jnp.float32 and precision.matmul.name == matmul


def test_the_parts_in_words():
    words = {name: str(parts) for name, parts in PRECISIONS.items()}
    assert words["tf32"] == "matmuls tf32, residual stream float32"
    assert words["fp8"] == "blocks fp8, head fp8, other matmuls bf16, residual stream bfloat16"


@pytest.mark.parametrize("name", ["fp16", "BF16", "", "bf16 "])
def test_an_unknown_name_lists_the_choices(name):
    with pytest.raises(
        ValueError,
        match=rf"unknown precision '{name}'; choose one of .*'fp32', 'tf32', 'bf16', 'bf16_res",
    ):
        Precision(name)


def test_every_product_of_the_model_asks_for_its_precision():
    """In the lowered program, forward and backward: one forgotten product would be TF32 on a GPU
    and unseen on a CPU."""

    def products(name, word):
        config = config_of(SHAPES["odd"], n_layer=1, precision=Precision(name))
        graphdef, params = split(config)
        model, tokens = lambda p: nnx.merge(graphdef, p), jnp.zeros((1, 7), jnp.int32)
        step = lambda p: (
            jax.grad(lambda p: loss_fn(model(p), tokens, tokens))(p),
            model(p)(tokens),
        )
        text = jax.jit(step).lower(params).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        # Four projections, two of attention, the head: once forward and twice backward; the head
        # once more for logits.
        assert len(lines) >= 3 * 7 + 1
        return [line for line in lines if f"precision = [{word}, {word}]" not in line]

    assert products("fp32", "HIGHEST") == []
    assert products("tf32", "HIGH") == []


def test_importing_and_running_gptjax_changes_no_setting():
    """In a fresh process: JAX's settings and the environment are the researcher's, not ours."""
    code = """
import json, os
import jax
before, environment = dict(jax.config.values), dict(os.environ)
import gptjax, gptjax.models.gpt2, gptjax.weights, gptjax.optim, gptjax.training.step
import pallas_kernels
from flax import nnx
import jax.numpy as jnp
config = gptjax.GPT2Config(vocab_size=7, padded_vocab_size=8, block_size=4, n_layer=1, n_head=1,
                           n_embd=4, precision=gptjax.Precision("tf32"))
tokens = jnp.zeros((1, 4), jnp.int32)
gptjax.loss_fn(gptjax.GPT2(config, rngs=nnx.Rngs(0)), tokens, tokens)
after = dict(jax.config.values)
changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
print(json.dumps([changed, sorted(set(os.environ.items()) ^ set(environment.items()))]))
"""
    settings, environment = json.loads(python("-W", "ignore", "-c", code).splitlines()[-1])
    assert settings == [] and environment == []
