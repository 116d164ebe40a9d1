"""pallas_kernels.linear_gelu and linear_relu_squared against NumPy in fp64 and against
`reference()`, by the 2× rule."""

import functools

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
    exact,
    inputs,
    loss,
    mlp_inputs,
    selected,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import OPTIMIZED, unchecked

from pallas_kernels import _dispatch
from pallas_kernels.feed_forward import (
    ACTIVATIONS,
    linear_gelu,
    linear_relu_squared,
    mlp,
    reference,
)

# (leading axes of x, I, O)
SHAPES = [
    ((2, 8), 16, 32),  # aligned
    ((1,), 1, 1),  # one number
    ((3, 5), 7, 9),  # all odd
    ((), 5, 3),  # no leading axis
    ((33,), 33, 17),  # just above a power of two
]


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


def test_checkpoint_and_jit():
    args = inputs((4, 8), 16, 32, jnp.float32)
    want = jax.grad(loss, (0, 1, 2))(*args)
    for found, true in zip(
        jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)), compiler_options=OPTIMIZED)(*args),
        want,
        strict=True,
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


def test_no_rows():
    x, w, b = inputs((0,), 3, 2, jnp.bfloat16)
    y, pull = jax.vjp(linear_gelu, x, w, b)
    assert y.shape == (0, 2) and not pull(y)[1].any() and not pull(y)[2].any()


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_no_inputs(implementation):
    """x w is 0: the results are those of the bias."""
    x, w, b, w2 = mlp_inputs(6, 0, 3, 4)
    x = x.reshape(2, 3, 0)
    how = {"implementation": implementation}
    for f, expected in (
        (linear_gelu, jax.nn.gelu(b)),
        (linear_relu_squared, jax.nn.relu(b) ** 2),
        (lambda x, w, b, **how: mlp(x, w, b, w2, **how), jax.nn.gelu(b) @ w2),
    ):
        y, pull = jax.vjp(functools.partial(f, **how), x, w, b)
        np.testing.assert_allclose(y, jnp.broadcast_to(expected, y.shape), rtol=1e-5, atol=1e-6)
        assert y.shape == (2, 3, expected.size)
        assert [g.shape for g in pull(y)] == [x.shape, w.shape, b.shape]


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
    with pytest.raises(ValueError, match="'mosaic' supports bfloat16 or float16, not float32"):
        selected("float32", 4096, 768, 3072, "mosaic")
    with pytest.raises(
        ValueError,
        match="'mosaic' has no tiles that divide N=4000, I=768, O=3072: N must be a multiple",
    ):
        selected("bfloat16", 4000, 768, 3072, "mosaic")
    with pytest.raises(
        ValueError, match="'triton' supports float32, bfloat16 or float16, not float64"
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


@pytest.mark.gpu
def test_a_tf32_mlp_gives_the_same_every_time():
    args = mlp_inputs(4096, 768, 3072, 768)
    f = jax.jit(jax.grad(lambda *args: jnp.square(mlp(*args, precision=HIGH)).sum(), (0, 1, 2, 3)))
    first = f(*args)
    for _ in range(5):
        for one, other in zip(first, f(*args), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)
