"""pallas_kernels.linear_gelu and linear_relu_squared against NumPy in fp64 and against
`reference()`, by the 2× rule."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import check, h200, lower_for_h200, triton_kernels, unchecked
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import _dispatch
from pallas_kernels.feed_forward import (
    ACTIVATIONS,
    linear_gelu,
    linear_relu_squared,
    mlp,
    reference,
)

FUNCTIONS = {"gelu": linear_gelu, "relu_squared": linear_relu_squared}
HIGH, HIGHEST = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST
# (leading axes of x, I, O)
SHAPES = [
    ((2, 8), 16, 32),  # aligned
    ((1,), 1, 1),  # one number
    ((3, 5), 7, 9),  # all odd
    ((), 5, 3),  # no leading axis
    ((33,), 33, 17),  # just above a power of two
]


def inputs(lead, i, o, dtype, bias_dtype=None, seed=0):
    """x, w, b: pre-activations have a standard deviation near 1.5, so both tails and the bend of
    GELU are visited."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((*lead, i)), dtype)
    w = jnp.asarray(rng.standard_normal((i, o)) * 1.4 / i**0.5, dtype)
    b = jnp.asarray(rng.standard_normal(o) * 0.5, bias_dtype or dtype)
    return x, w, b


def selected(dtype, rows, inputs, outputs, implementation="auto"):
    facts = {"dtype": dtype, "rows": rows, "inputs": inputs, "outputs": outputs}
    return _dispatch.select("linear_gelu", implementation, **facts)


def plain(x, w, b, *, activation="gelu", precision=HIGHEST):
    """The textbook in the inputs' own dtype."""
    u = jnp.matmul(x, w, precision=precision) + b.astype(x.dtype).reshape(
        (1,) * (x.ndim - 1) + (-1,)
    )
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


def check_all(implementation, lead, i, o, dtype, activation="gelu", bias_dtype=None):
    """Output and the three gradients."""
    options = {"precision": "highest"} if implementation == "xla" else {}
    check(
        functools.partial(FUNCTIONS[activation], implementation=implementation, **options),
        functools.partial(plain, activation=activation),
        functools.partial(reference, activation=activation),
        inputs(lead, i, o, dtype, bias_dtype),
        argnums=(0, 1, 2),
        names=("x", "w", "b"),
    )


def exact_passes(product, b, dy, activation):
    """y, du, and its sum over rows in fp64, from the equations."""
    product, b, dy = (np.asarray(a, np.float64) for a in (product, b, dy))
    u = product + b
    if activation == "gelu":
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (u + 0.044715 * u**3))
        y = 0.5 * u * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * u * (1 - t**2) * c * (1 + 3 * 0.044715 * u**2)
    else:
        y, slope = np.maximum(u, 0) ** 2, 2 * np.maximum(u, 0)
    du = dy * slope
    return y, du, du.sum(0)


def exact(x, w, b, dy, activation):
    """y, dx, dw, db in fp64; x is N×I."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y, du, db = exact_passes(x @ w, b, dy, activation)
    return y, du @ w.T, x.T @ du, db


def exact_mlp(x, w, b, w2, dy):
    """y, dx, dw, db, dw2 in fp64."""
    x, w, b, w2, dy = (np.asarray(a, np.float64) for a in (x, w, b, w2, dy))
    h, *gradients = exact(x, w, b, dy @ w2.T, "gelu")
    return h @ w2, *gradients, h.T @ dy


def check_fp32(f, plain, exact, args, *, norms=(rms, max_abs), seed=1):
    """Output and gradients by the 2× rule. Against fp64: the reference is fp32 itself."""
    dy = jnp.asarray(
        np.random.default_rng(seed).standard_normal(jax.eval_shape(f, *args).shape), jnp.float32
    )

    def with_gradients(f, *args):
        y, pull = jax.vjp(f, *args)
        return y, *pull(dy)

    ours, theirs = (
        jax.jit(functools.partial(with_gradients, f))(*args),
        with_gradients(plain, *args),
    )
    names = ("y", "dx", "dw", "db", "dw2")[: 1 + len(args)]
    for name, *arrays in zip(names, ours, theirs, exact(*args, dy), strict=True):
        for norm in norms:
            assert_within_twice(*arrays, norm=norm, name=name)


def check_linear_fp32(implementation, n, i, o, activation, precision, **norms):
    how = {"precision": precision}
    check_fp32(
        functools.partial(FUNCTIONS[activation], implementation=implementation, **how),
        functools.partial(plain, activation=activation, **how),
        functools.partial(exact, activation=activation),
        inputs((n,), i, o, jnp.float32),
        **norms,
    )


def mlp_inputs(n, i, o, c, dtype=jnp.float32):
    x, w, b = inputs((n,), i, o, dtype)
    return x, w, b, jnp.asarray(np.random.default_rng(2).standard_normal((o, c)) / o**0.5, dtype)


def plain_mlp(x, w, b, w2, *, precision=HIGHEST):
    return jnp.matmul(plain(x, w, b, precision=precision), w2, precision=precision)


def check_mlp(implementation, n, i, o, c, dtype):
    """Output and the four gradients."""
    check(
        functools.partial(mlp, implementation=implementation),
        plain_mlp,
        lambda x, w, b, w2: jnp.matmul(
            reference(x, w, b), w2.astype(jnp.float32), precision=HIGHEST
        ),
        mlp_inputs(n, i, o, c, dtype),
        argnums=(0, 1, 2, 3),
        names=("x", "w", "b", "w2"),
    )


def check_mlp_fp32(implementation, n, i, o, c, precision, **norms):
    how = {"precision": precision}
    check_fp32(
        functools.partial(mlp, implementation=implementation, **how),
        functools.partial(plain_mlp, **how),
        exact_mlp,
        mlp_inputs(n, i, o, c),
        **norms,
    )


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_reference_is_the_definition(activation):
    x, w, b = inputs((6,), 5, 4, jnp.float32)
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((6, 4)), jnp.float32)
    y, pull = jax.vjp(functools.partial(reference, activation=activation), x, w, b)
    for found, true in zip((y, *pull(dy)), exact(x, w, b, dy, activation), strict=True):
        np.testing.assert_allclose(found, true, rtol=0, atol=3e-6)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("u", [-100, -12, -6, -1, 0, 1, 6, 12, 100])
def test_derivative_in_the_tails(activation, u):
    """Out to where tanh is 1, and u³ is large."""
    u = jnp.float32(u)
    y, slope = ACTIVATIONS[activation](u)
    true = exact(u.reshape(1, 1), np.eye(1), np.zeros(1), np.ones((1, 1)), activation)
    np.testing.assert_allclose([y, slope], [true[0][0, 0], true[1][0, 0]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_xla_output_and_gradients(shape, activation):
    check_all("xla", *shape, jnp.bfloat16, activation)


def test_xla_output_and_gradients_in_fp16():
    check_all("xla", *SHAPES[2], jnp.float16)


@pytest.mark.parametrize("n, i, o", [(15, 7, 9), (1, 1, 1), (257, 33, 65)])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_xla_output_and_gradients_in_fp32(n, i, o, activation):
    check_linear_fp32("xla", n, i, o, activation, HIGHEST)


@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
def test_mlp_in_fp32(precision):
    check_mlp_fp32("xla", 37, 7, 29, 11, precision)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_mlp_is_linear_gelu_and_a_product(implementation):
    x, w, b, w2 = mlp_inputs(12, 7, 9, 5, jnp.bfloat16)
    found = mlp(
        x.reshape(3, 4, 7),
        w,
        b.astype(jnp.float32),
        w2.astype(jnp.float32),
        implementation=implementation,
    )
    h = linear_gelu(x, w, b, implementation=implementation)
    np.testing.assert_array_equal(
        found.reshape(12, 5), jnp.matmul(h, w2, preferred_element_type=jnp.float32).astype(x.dtype)
    )
    gradients = jax.grad(
        lambda *a: mlp(*a, implementation=implementation).astype(jnp.float32).sum(), (0, 3)
    )(x, w, b, w2.astype(jnp.float32))
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(
        gradients[1], np.asarray(h, np.float32).sum(0)[:, None].repeat(5, 1), rtol=1e-5, atol=1e-5
    )


def test_fp32_parameters_have_fp32_gradients():
    check_all("xla", (3, 5), 7, 9, jnp.bfloat16, bias_dtype=jnp.float32)
    x, w, b = inputs((4,), 3, 2, jnp.bfloat16)
    rounded = jax.grad(loss, (0, 1, 2))(x, w, b)
    gradients = jax.grad(loss, (0, 1, 2))(x, w.astype(jnp.float32), b.astype(jnp.float32))
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for one, other in zip(gradients, rounded, strict=True):
        np.testing.assert_array_equal(one.astype(jnp.bfloat16), other)


def test_the_result_is_rounded_once():
    """A bias too small to move a bf16 sum still moves gelu of it where it is added in fp32."""
    x, w = jnp.full((1, 1), 0.5, jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    b = jnp.asarray([0.00195, 0], jnp.float32)
    y = linear_gelu(x, w, b, implementation="xla")[0]
    np.testing.assert_array_equal(y, reference(x, w, b)[0].astype(jnp.bfloat16))
    assert y[0] != y[1]


def test_relu_squared_without_a_bias():
    x, w, b = inputs((3,), 4, 5, jnp.float32)
    found, pull = jax.vjp(linear_relu_squared, x, w)
    with_zeros, pull_zeros = jax.vjp(linear_relu_squared, x, w, jnp.zeros_like(b))
    np.testing.assert_array_equal(found, with_zeros)
    np.testing.assert_array_equal(pull(found)[1], pull_zeros(found)[1])
    assert len(pull(found)) == 2


@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 9), i=st.integers(1, 9), o=st.integers(1, 9), seed=st.integers(0, 99))
def test_gelu_of_a_linear_layer(n, i, o, seed):
    """gelu(u) − gelu(−u) = u, whatever u; and gelu is never below −0.171."""
    x, w, b = inputs((n,), i, o, jnp.float32, seed=seed)
    y = linear_gelu(x, w, b, precision="highest")
    np.testing.assert_allclose(
        y - linear_gelu(x, -w, -b, precision="highest"),
        jnp.matmul(x, w, precision="highest") + b[None, :],
        atol=1e-5,
    )
    assert y.min() >= -0.171


# ---------------------------------------------------------------------------------- transformations


def loss(x, w, b, implementation="auto"):
    return linear_gelu(x, w, b, implementation=implementation).astype(jnp.float32).sum()


def test_checkpoint_and_jit():
    args = inputs((4, 8), 16, 32, jnp.float32)
    want = jax.grad(loss, (0, 1, 2))(*args)
    for found, true in zip(
        jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*args), want, strict=True
    ):
        np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-5)


def test_shard_map():
    args = inputs((4, 8), 16, 32, jnp.float32)
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    def sharded(x, w, b):
        return linear_gelu(x, w, b)

    np.testing.assert_allclose(jax.jit(sharded)(*args), linear_gelu(*args), rtol=1e-6, atol=1e-6)


def test_vmap():
    x, w, b = inputs((3, 8), 16, 32, jnp.float32)
    weights = jnp.stack([w, 2 * w, -w])
    found = jax.vmap(linear_gelu, (0, 0, None))(x, weights, b)
    for j in range(3):
        np.testing.assert_allclose(found[j], linear_gelu(x[j], weights[j], b), rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------- Triton


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
    how = {"activation": activation, "du_across": True, "y_across": True}
    found = triton.through_activation(dy, product, b, **how)
    for ours, true in zip(found, (du, du.T, y.T, db), strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], found[0].T)
    bare = triton.through_activation(
        dy, product, None, activation=activation, du_across=False, y_across=False
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


def test_no_rows():
    x, w, b = inputs((0,), 3, 2, jnp.bfloat16)
    y, pull = jax.vjp(linear_gelu, x, w, b)
    assert y.shape == (0, 2) and not pull(y)[1].any() and not pull(y)[2].any()


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


# ------------------------------------------------------------------------------------------- Mosaic


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that a CPU can go through; the interpreter takes no left operand from registers."""
    from pallas_kernels.feed_forward import mosaic, mosaic_backward

    small = mosaic.Tiles(rows=64, columns=64, stages=2, slots=1)
    monkeypatch.setattr(mosaic, "FORWARD", (dataclasses.replace(small, cluster=2), small))
    backward = mosaic_backward.BackwardTiles(columns=64, stages=2, registers=False)
    monkeypatch.setattr(mosaic_backward, "BACKWARD", (backward,))


@pytest.mark.parametrize(
    "n, i, o, dtype, activation",
    [
        # pairs of blocks that share w; each warpgroup has several tiles
        (256, 128, 192, jnp.bfloat16, "gelu"),
        # single blocks, one step a tile, one warpgroup has more tiles than the other
        (384, 64, 64, jnp.float16, "relu_squared"),
    ],
)
def test_mosaic_on_a_cpu(mosaic_on_cpu, small_tiles, n, i, o, dtype, activation):
    check_all("mosaic", (n,), i, o, dtype, activation)


@pytest.mark.parametrize(
    "n, i, o, c, rows, columns, slots, dtype",
    [
        # pairs of blocks that share w2; each warpgroup has several tiles
        (256, 128, 192, 64, 64, 64, 1, jnp.bfloat16),
        # single blocks, two parts a tile through one slot
        (192, 64, 256, 128, 64, 128, 1, jnp.bfloat16),
        (128, 64, 384, 64, 64, 192, 1, jnp.float16),  # three parts
        (128, 64, 1280, 64, 64, 192, 1, jnp.bfloat16),  # the last tile is cut
        (256, 64, 1344, 64, 128, 128, 2, jnp.bfloat16),  # and its parts go through two slots
        # the same warpgroup goes on with another tile
        (512, 64, 448, 64, 128, 192, 2, jnp.bfloat16),
    ],
)
def test_mosaic_mlp_on_a_cpu(
    mosaic_on_cpu, small_tiles, monkeypatch, n, i, o, c, rows, columns, slots, dtype
):
    from pallas_kernels.feed_forward import mosaic

    sizes = {"rows": rows, "columns": columns, "slots": slots}
    forward = tuple(dataclasses.replace(tiles, **sizes) for tiles in mosaic.FORWARD)
    monkeypatch.setattr(mosaic, "FORWARD", forward)
    monkeypatch.setattr(mosaic, "MOST_WASTED", 0.5)
    check_mlp("mosaic", n, i, o, c, dtype)


@pytest.mark.parametrize(
    "n, o, columns",
    [
        (256, 3072, 192),
        (256, 4096, 192),
        (256, 6400, 192),
        (128, 4096, 128),
        (256, 256, 128),
        (256, 320, None),
    ],
)
def test_tiles_for_a_width(n, o, columns):
    """192 columns, up to 5 % of them past the end; else 128, which must divide O."""
    from pallas_kernels.feed_forward import mosaic

    tiles = mosaic.forward_tiles(n, 64, o)
    assert (tiles and tiles.columns) == columns


def test_slots_that_the_next_tile_would_find_taken():
    from pallas_kernels.feed_forward import mosaic

    with pytest.raises(ValueError, match="2 slots do not divide the 1 parts of a column"):
        mosaic.Tiles(rows=64, columns=192)


def test_mosaic_mlp_without_gradients_saves_nothing(mosaic_on_cpu, small_tiles, monkeypatch):
    from pallas_kernels.feed_forward import mosaic

    saved, forward = [], mosaic.forward
    monkeypatch.setattr(
        mosaic, "forward", lambda *a, save: saved.append(save) or forward(*a, save=save)
    )
    args = mlp_inputs(64, 64, 64, 64, jnp.bfloat16)
    f = functools.partial(mlp, implementation="mosaic")
    jax.eval_shape(f, *args)
    assert saved == [False]
    jax.eval_shape(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum()), *args)
    assert saved[-1] is True


def test_mlp_for_any_width_of_its_result():
    """No tiles divide 96: the gradient of the second product is XLA's, and linear_gelu's kernel
    goes on from there."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((256, 768), (768, 3072), (3072,), (3072, 96))
    ]
    gradients = jax.grad(
        lambda *args: mlp(*args, implementation="mosaic").astype(jnp.float32).sum(), (0, 1, 2, 3)
    )
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == 2


# No tiles of linear_gelu's own backward pass divide 1600.
@pytest.mark.parametrize("width, kernels", [(768, 2), (1024, 2), (1280, 2), (1600, 1)])
def test_gpt2_widths_lower_for_an_h200(width, kernels):
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((4096, width), (width, 4 * width), (4 * width,))
    ]
    gradients = jax.grad(functools.partial(loss, implementation="mosaic"), (0, 1, 2))
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == kernels
    gradients = jax.grad(
        lambda *args: mlp(*args, implementation="mosaic").astype(jnp.float32).sum(), (0, 1, 2, 3)
    )
    shapes.append(jax.ShapeDtypeStruct((4 * width, width), jnp.bfloat16))
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == 2


# ------------------------------------------------------------------------------------------- choice


def test_auto_on_a_cpu_is_xla():
    assert selected("bfloat16", 4096, 768, 3072) == "xla"


def test_auto_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    assert selected("bfloat16", 4096, 768, 3072) == "mosaic"
    assert selected("bfloat16", 100, 768, 3072) == "triton"
    assert selected("float32", 4096, 768, 3072) == selected("float32", 1, 1, 1) == "triton"
    assert selected("float64", 4096, 768, 3072) == "xla"
    monkeypatch.setattr(_dispatch, "capability", lambda: (8, 0))
    assert selected("bfloat16", 4096, 768, 3072) == "triton"
    with pytest.raises(ValueError, match="'mosaic' needs a Hopper GPU"):
        selected("bfloat16", 4096, 768, 3072, "mosaic")


def test_errors(monkeypatch):
    x, w, b = inputs((4,), 3, 2, jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"unknown implementation 'cublas'; choose one of \['auto', 'mosaic', 'triton'",
    ):
        linear_gelu(x, w, b, implementation="cublas")
    with pytest.raises(
        ValueError, match="'triton' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"
    ):
        linear_gelu(x, w, b, implementation="triton")
    with pytest.raises(
        ValueError, match="w and b in x's dtype or float32, got float16, bfloat16, bfloat16"
    ):
        linear_gelu(x.astype(jnp.float16), w, b)
    with pytest.raises(ValueError, match="got bfloat16, bfloat16, float16"):
        linear_relu_squared(x, w, b.astype(jnp.float16))
    # jaxtyping refuses first under pytest; without it the function itself does.
    for bad in ((x, w.T, b), (x, w, b[:1]), (x, w[0], b), (x[0, 0], w, b)):
        with pytest.raises((ValueError, TypeError)):
            linear_gelu(*bad)
        with pytest.raises(
            ValueError, match=r"linear_gelu: expected x \(..., I\), w \(I, O\) and b \(O,\), got"
        ):
            unchecked(linear_gelu)(*bad)
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    with pytest.raises(ValueError, match="'mosaic' takes bfloat16 or float16, not float32"):
        selected("float32", 4096, 768, 3072, "mosaic")
    with pytest.raises(
        ValueError,
        match="'mosaic' has no tiles that divide N=4000, I=768, O=3072: it takes N of 128",
    ):
        selected("bfloat16", 4000, 768, 3072, "mosaic")
    with pytest.raises(
        ValueError, match="'triton' takes float32, bfloat16 or float16, not float64"
    ):
        selected("float64", 4096, 768, 3072, "triton")
    w2 = jnp.zeros((2, 3), jnp.bfloat16)
    for bad in (w2.T, w2[0], w2.astype(jnp.float16)):
        with pytest.raises(
            ValueError, match=r"mlp: expected w2 \(O, C\) with O=2, of x's dtype or float32, got"
        ):
            unchecked(mlp)(x, w, b, bad)


# ---------------------------------------------------------------------------------------------- GPU

GPU_SHAPES = [
    ("mosaic", 4096, 768, 3072, jnp.bfloat16, "gelu"),  # GPT-2 124M
    (
        "mosaic",
        768,
        1600,
        6400,
        jnp.bfloat16,
        "gelu",
    ),  # GPT-2 XL: the widest, and fewer tiles than multiprocessors below
    ("mosaic", 256, 256, 384, jnp.float16, "relu_squared"),
    ("triton", 4096, 768, 3072, jnp.bfloat16, "gelu"),
    ("triton", 1111, 333, 1001, jnp.bfloat16, "gelu"),  # ragged in every axis
    ("triton", 1, 1, 1, jnp.float16, "relu_squared"),
    ("xla", 1111, 333, 1001, jnp.bfloat16, "gelu"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation, n, i, o, dtype, activation", GPU_SHAPES)
def test_output_and_gradients_on_a_gpu(implementation, n, i, o, dtype, activation):
    check_all(implementation, (n,), i, o, dtype, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_runs_are_equal(implementation):
    args = inputs((4096,), 768, 3072, jnp.bfloat16)
    f = jax.jit(jax.value_and_grad(functools.partial(loss, implementation=implementation), (0, 1)))
    first = jax.tree.leaves(f(*args))
    for _ in range(5):
        for one, other in zip(first, jax.tree.leaves(f(*args)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o", [(4096, 768, 3072), (768, 1600, 6400), (256, 256, 384)])
def test_mosaic_mlp_on_a_gpu(n, i, o):
    check_mlp("mosaic", n, i, o, i, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o", [(65536, 768, 3072), (16384, 1280, 5120)])
def test_mosaic_mlp_over_many_tiles_and_again(n, i, o):
    """Every block has a dozen tiles or more, and what is left of a race shows as a difference
    between runs."""
    args = mlp_inputs(n, i, o, i, jnp.bfloat16)

    def gradients(implementation):
        y, pull = jax.vjp(functools.partial(mlp, implementation=implementation), *args)
        return y, *pull(y)

    f = jax.jit(gradients, static_argnums=0)
    found = f("mosaic")
    for ours, theirs in zip(found, f("xla"), strict=True):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.abs(ours - theirs).max() <= 2**-7 * jnp.abs(theirs).max()
        assert jnp.sqrt(jnp.mean((ours - theirs) ** 2)) <= 2**-7 * jnp.sqrt(jnp.mean(theirs**2))
    for _ in range(5):
        for one, other in zip(f("mosaic"), found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_mosaic_over_many_tiles(bias):
    """Every block has a dozen tiles: an operand overwritten too early shows in one of them."""
    x, w, b = inputs((65536,), 768, 3072, jnp.bfloat16)

    def gradients(implementation):
        f = lambda x, w: linear_relu_squared(
            x, w, b if bias else None, implementation=implementation
        )
        y, pull = jax.vjp(f, x, w)
        return y, *pull(y)

    for ours, theirs in zip(
        jax.jit(gradients, static_argnums=0)("mosaic"), gradients("xla"), strict=True
    ):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.abs(ours - theirs).max() <= 2**-7 * jnp.abs(theirs).max()
        assert jnp.sqrt(jnp.mean((ours - theirs) ** 2)) <= 2**-7 * jnp.sqrt(jnp.mean(theirs**2))


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o", [(512, 256, 512), (512, 256, 1024)])
def test_bias_goes_along_the_right_axis(n, i, o):
    """XLA once added cuBLASLt's bias along the wrong axis of a square output, and lost a factor on
    it."""
    x, w, _ = inputs((n,), i, o, jnp.bfloat16)
    b = jnp.arange(o, dtype=jnp.float32) / o
    found = jax.jit(functools.partial(linear_gelu, implementation="xla"))(x, w, b)
    halved = jax.jit(
        lambda x, w, b: 0.5 * (jnp.matmul(x, w, preferred_element_type=jnp.float32) + b[None, :])
    )(x, w, b)
    np.testing.assert_allclose(found.astype(jnp.float32), reference(x, w, b), rtol=1e-2, atol=1e-2)
    u = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b, np.float64)
    np.testing.assert_allclose(halved, 0.5 * u, atol=2e-3)


@pytest.mark.gpu
def test_auto_on_this_gpu():
    assert (
        selected("bfloat16", 65536, 768, 3072) != "xla"
        and selected("float32", 65536, 768, 3072) == "triton"
    )


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
        back = triton.through_activation(dy, product, b, du_across=True, y_across=True, **how)
        return triton.activated(product, b, **how), *back

    plain = jax.nn.gelu if activation == "gelu" else lambda u: jnp.square(jax.nn.relu(u))
    their_y, pull = jax.vjp(lambda u: plain(u), product + b[None])
    # What the outputs are written to was full of NaN before.
    for _ in range(3):
        shapes = [(n, o), (o, n), (-(-n // 64), o)]
        poison = [jnp.full(shape, jnp.nan, jnp.float32) for shape in shapes for _ in range(4)]
        jax.block_until_ready(poison)
        del poison
        found_y, found_du, du_across, y_across, found_db = passes(product, b, dy)
        np.testing.assert_array_equal(du_across, found_du.T)
        np.testing.assert_array_equal(y_across, found_y.T)
    (their_du,) = pull(dy)
    for name, *arrays in (("y", found_y, their_y, y), ("du", found_du, their_du, du)):
        for norm in (rms, max_abs):
            assert_within_twice(*arrays, norm=norm, name=name)
    assert bias or found_db is None
    if bias:
        # Of what was written: the rounding of an fp32 sum of so many numbers.
        written = np.asarray(found_du, np.float64)
        assert (np.abs(found_db - written.sum(0)) <= 2e-6 * np.abs(written).sum(0)).all()


@pytest.mark.gpu
def test_a_tf32_mlp_gives_the_same_every_time():
    args = mlp_inputs(4096, 768, 3072, 768)
    f = jax.jit(jax.grad(lambda *args: jnp.square(mlp(*args, precision=HIGH)).sum(), (0, 1, 2, 3)))
    first = f(*args)
    for _ in range(5):
        for one, other in zip(first, f(*args), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)
