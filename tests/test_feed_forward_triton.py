"""The Triton back end of pallas_kernels.linear_gelu, linear_relu_squared and mlp: in Triton's
interpreter, compiled, and on a GPU."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feed_forward_tools import (
    FUNCTIONS,
    HIGH,
    HIGHEST,
    check_all,
    check_linear_fp32,
    check_mlp_fp32,
    exact_passes,
    inputs,
    loss,
    mlp_inputs,
    selected,
)
from kernel_tools import h200, lower_for_h200, triton_kernels
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels.feed_forward import linear_gelu, linear_relu_squared, mlp


# Triton's interpreter multiplies the bits of bf16 as integers in `tl.dot`: fp16 here, bf16 on the
# GPU.
@pytest.mark.parametrize(
    "lead, i, o, activation",
    [
        ((64,), 64, 64, "gelu"),  # one tile
        ((3, 43), 40, 140, "gelu"),  # ragged in every axis, several tiles
        ((65,), 33, 66, "relu_squared"),  # one past a tile
        ((1,), 1, 1, "gelu"),
    ],
    ids=str,
)
def test_triton_on_a_cpu(triton_on_cpu, lead, i, o, activation):
    check_all("triton", lead, i, o, jnp.float16, activation)


# N, O against the tiles of the two passes, 8×512 and 64×64; the wide one has two columns of both.
FP32_SHAPES = [(64, 8, 64), (129, 5, 70), (3, 7, 530), (1, 1, 1)]
# Triton's interpreter adds up a column number by number, a GPU and XLA in a tree: the worst of its
# sums is worse than they would be.
INTERPRETED = {"norms": (rms,)}


@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
@pytest.mark.parametrize("n, i, o", FP32_SHAPES)
def test_triton_in_fp32_on_a_cpu(triton_on_cpu, n, i, o, precision):
    for activation in FUNCTIONS:
        check_linear_fp32("triton", n, i, o, activation, precision, **INTERPRETED)


@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
@pytest.mark.parametrize("n, i, o", FP32_SHAPES[1:])
def test_triton_mlp_on_a_cpu(triton_on_cpu, n, i, o, precision):
    check_mlp_fp32("triton", n, i, o, 11, precision, **INTERPRETED)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_pass_backward_is_its_definition(triton_on_cpu, activation):
    """Every output by itself, more tiles down than one group holds, and nothing made that was not
    asked for."""
    from pallas_kernels.feed_forward import triton

    n, o = 64 * 17 + 5, 67
    rng = np.random.default_rng(0)
    dy, product = (jnp.asarray(rng.standard_normal((n, o)), jnp.float32) for _ in range(2))
    b = jnp.asarray(rng.standard_normal(o), jnp.float32)
    y, du, db = exact_passes(product, b, dy, activation)
    how = {"activation": activation, "du_transposed": True, "y_transposed": True}
    found = triton.activation_backward(dy, product, b, **how)
    for ours, true in zip(found, (du, du.T, y.T, db), strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], found[0].T)
    bare = triton.activation_backward(
        dy, product, None, activation=activation, du_transposed=False, y_transposed=False
    )
    assert bare[1:] == (None, None, None)
    np.testing.assert_allclose(
        bare[0], exact_passes(product, 0 * b, dy, activation)[1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("u", [-1e12, -100, -12, 0, 12, 100, 1e12])
def test_triton_in_the_tails(triton_on_cpu, u):
    w = jnp.ones((1, 1), jnp.float32)
    y, pull = jax.vjp(
        functools.partial(linear_gelu, implementation="triton"),
        jnp.full((1, 1), u, jnp.float32),
        w,
        w[0] * 0,
    )
    np.testing.assert_allclose(y, jnp.maximum(u, 0).reshape(1, 1), rtol=1e-6)
    np.testing.assert_allclose(pull(w)[2], [np.heaviside(u, 0.5)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("f", [linear_gelu, linear_relu_squared])
def test_nan_propagates(triton_on_cpu, f, dtype):
    """To the row of y that reads the NaN, and to its derivative."""
    x, w = jnp.asarray([[np.nan, 1], [1, 1]], dtype), jnp.ones((2, 2), dtype)
    y, pull = jax.vjp(lambda x: f(x, w, w[0] * 0, implementation="triton"), x)
    np.testing.assert_array_equal(jnp.isnan(y), [[True] * 2, [False] * 2])
    np.testing.assert_array_equal(jnp.isnan(pull(w)[0]), jnp.isnan(y))


def test_triton_vmap_in_fp32(triton_on_cpu):
    x, w, b, w2 = mlp_inputs(8, 16, 20, 12)
    loss = lambda x, w, b, w2: mlp(x, w, b, w2, implementation="triton", precision=HIGH).sum()
    f = jax.value_and_grad(loss, (0, 1, 2, 3))
    found = jax.vmap(f, (0, None, None, None))(jnp.stack([x, -x]), w, b, w2)
    for batched, single in zip(
        jax.tree.leaves(found), jax.tree.leaves(f(-x, w, b, w2)), strict=True
    ):
        np.testing.assert_allclose(batched[1], single, rtol=1e-5, atol=1e-5)


def saved(f, *args):
    """Shapes of what the backward pass keeps of the forward pass."""
    return sorted(
        leaf.shape
        for leaf in jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args))
    )


def test_in_tf32_the_hidden_layer_is_not_saved(triton_on_cpu):
    """But its product before bias and activation, from which it is made again."""
    args = mlp_inputs(16, 4, 20, 6)
    weights = [(4, 20), (20,), (20, 6)]
    kept = lambda precision: saved(
        functools.partial(mlp, implementation="triton", precision=precision), *args
    )
    assert kept(HIGH) == sorted([(16, 4), *weights, (16, 20)])
    assert kept(HIGHEST) == sorted([(16, 4), *weights, (16, 20), (16, 20)])


@pytest.mark.parametrize("precision, transposes", [(HIGH, 4), (HIGHEST, 0)])
def test_what_moves_the_hidden_layer_on_an_h200(precision, transposes):
    """Two products and two passes make all that is as large: no sum, no transpose, no elementwise
    pass of XLA's beside them."""
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((4096, 768), (768, 3072), (3072,), (3072, 768))
    ]
    with h200():
        assert selected("float32", 4096, 768, 3072) == "triton"
    text = lower_for_h200(
        jax.value_and_grad(lambda *args: jnp.sum(mlp(*args, precision=precision)), (0, 1, 2, 3)),
        *args,
    )
    calls = collections.Counter(re.findall(r"custom_call @(\w+)", text))
    # Of w and w2 forward; x and dy backward.
    assert calls == {"activate_forward": 1, "activate_backward": 1} | (
        {"transpose": transposes} if transposes else {}
    )
    large = [
        line
        for line in text.splitlines()
        if re.search(r"-> .*tensor<(4096x3072|3072x4096)xf32>", line)
    ]
    made = collections.Counter(
        re.search(r"(dot_general|custom_call @\w+|\w+)", line.split("stablehlo.")[-1])[1]
        for line in large
    )
    passes = {"custom_call @activate_forward": 1, "custom_call @activate_backward": 1}
    # In true fp32 the product for dw2 reads the hidden layer across where it is.
    assert made == {"dot_general": 2} | passes | ({} if transposes else {"transpose": 1}), large
    assert not [
        line
        for line in text.splitlines()
        if "stablehlo.reduce" in line and "tensor<4096x3072xf32>" in line
    ]


def test_triton_vmap(triton_on_cpu):
    x, w, b = inputs((2, 16), 16, 16, jnp.float16)
    f = jax.value_and_grad(functools.partial(loss, implementation="triton"), (0, 1, 2))
    found = jax.vmap(f, (0, None, None))(x, w, b)
    for batched, single in zip(jax.tree.leaves(found), jax.tree.leaves(f(x[1], w, b)), strict=True):
        np.testing.assert_array_equal(batched[1], single)


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_triton_compiles_without_spills(capability):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 768), (768, 3072), (3072,))]
    f = jax.grad(functools.partial(loss, implementation="triton"), (0, 1, 2))
    kernels = triton_kernels(f, *shapes, capability=capability)
    assert [k.name for k in kernels] == ["linear_forward", "scale"]
    assert ("wgmma" if capability == 90 else "mma.sync") in kernels[0].ptx
    for kernel in kernels:
        assert kernel.spill_bytes == 0, (kernel.name, kernel.registers, kernel.spill_bytes)
        assert (
            kernel.shared_bytes
            <= (99 if capability == 89 else 163 if capability == 80 else 227) * 1024
        )


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
def test_the_passes_read_and_write_16_bytes_at_a_time(capability, precision):
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((32768, 768), (768, 3072), (3072,), (3072, 768))
    ]
    loss = lambda *args: mlp(*args, implementation="triton", precision=precision).sum()
    kernels = triton_kernels(jax.grad(loss, (0, 1, 2, 3)), *shapes, capability=capability)
    kernels = {kernel.name: kernel for kernel in kernels if kernel.name != "transpose"}
    assert sorted(kernels) == ["activate_backward", "activate_forward"]
    for kernel in kernels.values():
        assert kernel.spill_bytes == 0, (kernel.name, kernel.registers, kernel.spill_bytes)
        loads, stores = (re.findall(rf"{way}\.global\S*", kernel.ptx) for way in ("ld", "st"))
        assert {"v4" in load for load in loads} == {True}, loads
        # A row of 64 sums is less than 16 bytes a thread.
        assert sum("v4" not in store for store in stores) == (kernel.name == "activate_backward"), (
            stores
        )
        # Three blocks of 256 threads on a multiprocessor.
        assert kernel.registers <= 80, (kernel.name, kernel.registers)


# ---------------------------------------------------------------------------------------------- GPU


# GPT-2 124M's, and ragged in every axis. In TF32 still whole 16 bytes: with others cuBLAS need not
# take the tensor cores on both sides.
GPU_FP32_CASES = [
    (4096, 768, 3072, HIGH),
    (1108, 332, 1004, HIGH),
    (4096, 768, 3072, HIGHEST),
    (1111, 333, 1001, HIGHEST),
    (1, 3, 5, HIGHEST),
]


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o, precision", GPU_FP32_CASES)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_triton_in_fp32_on_a_gpu(n, i, o, precision, activation):
    check_linear_fp32("triton", n, i, o, activation, precision)


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o, precision", GPU_FP32_CASES)
def test_triton_mlp_on_a_gpu(n, i, o, precision):
    check_mlp_fp32("triton", n, i, o, i, precision)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n, o", [(4096, 3072), (1111, 1001), (65, 4), (1, 1)])
def test_the_passes_on_a_gpu(n, o, bias, activation):
    """Without products beside them: they are true fp32, whatever those are. Transposes are
    exact."""
    from pallas_kernels.feed_forward import triton

    keys = jax.random.split(jax.random.key(0), 3)
    dy, product = (2 * jax.random.normal(key, (n, o)) for key in keys[:2])
    b = jax.random.normal(keys[2], (o,)) if bias else jnp.zeros(o)
    y, du, _ = exact_passes(product, b, dy, activation)

    @jax.jit
    def passes(product, b, dy):
        how = {"activation": activation}
        b = b if bias else None
        back = triton.activation_backward(
            dy, product, b, du_transposed=True, y_transposed=True, **how
        )
        return triton.activated(product, b, **how), *back

    plain = jax.nn.gelu if activation == "gelu" else lambda u: jnp.square(jax.nn.relu(u))
    their_y, pull = jax.vjp(lambda u: plain(u), product + b[None])
    # What the outputs are written to was full of NaN before.
    for _ in range(3):
        shapes = [(n, o), (o, n), (-(-n // 64), o)]
        poison = [jnp.full(shape, jnp.nan, jnp.float32) for shape in shapes for _ in range(4)]
        jax.block_until_ready(poison)
        del poison
        found_y, found_du, du_transposed, y_transposed, found_db = passes(product, b, dy)
        np.testing.assert_array_equal(du_transposed, found_du.T)
        np.testing.assert_array_equal(y_transposed, found_y.T)
    (their_du,) = pull(dy)
    for name, *arrays in (("y", found_y, their_y, y), ("du", found_du, their_du, du)):
        for norm in (rms, max_abs):
            assert_within_twice(*arrays, norm=norm, name=name)
    assert bias or found_db is None
    if bias:
        # Of what was written: the rounding of an fp32 sum of so many numbers.
        written = np.asarray(found_du, np.float64)
        assert (np.abs(found_db - written.sum(0)) <= 2e-6 * np.abs(written).sum(0)).all()
