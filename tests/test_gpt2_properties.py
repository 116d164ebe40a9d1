"""Properties of GPT2 that need no reference: padding, ids, memory, kernels."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpt2_tools import SHAPES, batch_of, config_of, random_of, run, split
from jax.sharding import NamedSharding, PartitionSpec
from kernel_tools import lower_for_h200

from gptjax import GPT2, GPT2Config, Precision, loss_fn


@pytest.mark.parametrize("precision, chunk", [("fp32", None), ("bf16", 7)])
def test_padding_is_invisible(precision, chunk):
    shape = SHAPES["odd"]
    bare = config_of(
        shape, n_layer=1, padded_vocab_size=61, precision=Precision(precision), loss_chunk=chunk
    )
    padded = dataclasses.replace(bare, padded_vocab_size=128)
    params = random_of(bare)
    tokens, targets = batch_of(bare, shape[-1])
    # What lies in the padded rows does not matter either: here it would win every softmax.
    rows = np.full((67, 12), 100, np.float32)
    with_rows = params | {"wte": np.concatenate([params["wte"], rows])}
    expected, found = run(bare, params, tokens, targets), run(padded, with_rows, tokens, targets)
    assert found[0].shape == (2, 7, 61)
    # The same products in another tiling may round another way; nothing else may differ.
    atol = 1e-6 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=atol)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=atol)
    for name in expected[2]:
        np.testing.assert_allclose(
            found[2][name], expected[2][name], rtol=0, atol=atol, err_msg=name
        )


@functools.cache
def tiny_model(vocab):
    """A model, and its logits and loss, compiled."""
    config = GPT2Config(vocab_size=vocab, block_size=8, n_layer=1, n_head=1, n_embd=4)
    return GPT2(config, rngs=nnx.Rngs(0)), jax.jit(GPT2.__call__), jax.jit(loss_fn)


@pytest.mark.parametrize(
    "vocab, dtype", [(61, jnp.int8), (61, jnp.uint32), (256, jnp.uint8), (65536, jnp.uint16)]
)
def test_tokens_of_any_integer_type(vocab, dtype):
    """Types that hold every id, though not the number of rows."""
    model, forward, loss = tiny_model(vocab)
    tokens = jnp.array([[1, 5, 60, 0, vocab - 1, 7, 2, 3]], jnp.int32) % min(
        vocab, jnp.iinfo(dtype).max + 1
    )
    np.testing.assert_array_equal(forward(model, tokens.astype(dtype)), forward(model, tokens))
    np.testing.assert_array_equal(
        loss(model, *[tokens.astype(dtype)] * 2), loss(model, tokens, tokens)
    )


@pytest.mark.parametrize("where", ["tokens", "targets"])
@pytest.mark.parametrize(
    "dtype, tokens",
    [
        (jnp.uint8, [61]),
        (jnp.int8, [-2]),
        (jnp.uint32, [2**31, 2**32 - 1]),
        (jnp.int32, [61, 128, 10**6, -2]),
    ],
)
def test_an_id_beyond_the_vocabulary_in_any_type_gives_nan(where, dtype, tokens):
    model, _, loss = tiny_model(61)
    for token in tokens:
        inputs = {name: jnp.ones((1, 8), dtype) for name in ("tokens", "targets")}
        inputs[where] = inputs[where].at[0, 3].set(token)
        assert np.isnan(loss(model, *inputs.values())), token


# -------------------------------------------------------------------------------- recompute, memory


def temp_bytes(config, size):
    graph, abstract = split(config)
    tokens = jax.ShapeDtypeStruct((size, config.block_size), jnp.int32)
    step = jax.grad(lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens, tokens))
    return jax.jit(step).lower(abstract, tokens).compile().memory_analysis().temp_size_in_bytes


def test_recompute_saves_memory():
    config = GPT2Config(
        vocab_size=64, padded_vocab_size=64, block_size=128, n_layer=5, n_head=4, n_embd=32
    )
    none, block, sublayer = (
        temp_bytes(dataclasses.replace(config, recompute=how), 4)
        for how in ("none", "block", "sublayer")
    )
    # Of a block's activations (4 heads · 128 scores and 20-odd widths a token) one width is kept,
    # or two.
    assert block < none / 2 and sublayer < none / 2, (none, block, sublayer)


# ------------------------------------------------------------------------- transformations, devices


def test_the_kernels_of_sharded_arrays():
    """Lowered for an H200: where the compiler splits arrays over a mesh, each kernel of ours is in
    a call with a sharding rule; it would gather the arrays of another one."""
    config = config_of(SHAPES["tiny gpt2"], n_layer=1, precision=Precision("tf32"))
    graph, params = split(config)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, by_batch = PartitionSpec(), PartitionSpec("data")
    of = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    tokens = of(jax.ShapeDtypeStruct((4, 64), jnp.int32), by_batch)
    step = jax.grad(lambda params, x: loss_fn(nnx.merge(graph, params), x, x))
    text = lower_for_h200(step, jax.tree.map(lambda x: of(x, everywhere), params), tokens)
    kernels = {*re.findall(r"custom_call @(\w+)", text)}
    assert kernels - {"Sharding"} == {"CustomSPMDPartitioning"}
