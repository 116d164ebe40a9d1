"""pallas_kernels.softmax against the equations in fp64, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import triton_kernels
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import _dispatch
from pallas_kernels.row_softmax import gradient, reference, softmax

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
BACKENDS = ["xla", "triton", "reference"]

SHAPES = [
    (4, 128),  # aligned
    (2, 3, 77),  # all odd: no row starts where a 16-byte load may
    (3, 1),  # one column: the output is 1, its gradient 0
    (130,),  # a single row
    (2, 20000),  # a long row: several blocks, and a part of one
]
CAUSAL_SHAPES = [(2, 16, 16), (1, 2, 21, 21), (1, 1), (70, 70)]


def inputs(shape, dtype, seed=0, spread=3.0):
    """x and the cotangent of y, which holds NaN where a causal y is 0."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(spread * rng.standard_normal(shape), dtype), jnp.asarray(
        rng.standard_normal(shape), dtype
    )


def exact(x, dy, *, scale=1.0, causal=False):
    """y and dx in fp64, from the equations."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    z = scale * x
    if causal:
        future = np.triu(np.ones(x.shape[-2:], bool), 1)
        z, dy = np.where(future, -np.inf, z), np.where(future, 0, dy)
    y = np.exp(z - z.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    return y, scale * y * (dy - (dy * y).sum(-1, keepdims=True))


def plain(x, dy, *, scale=1.0, causal=False):
    """The textbook: fp32 between a forward and a backward pass that hand over y in the dtype of x,
    as PyTorch's do."""
    z = scale * x.astype(jnp.float32)
    if causal:
        visible = np.tril(np.ones(x.shape[-2:], bool))
        z, dy = (
            jnp.where(np.broadcast_to(visible, x.shape), z, -jnp.inf),
            jnp.where(np.broadcast_to(visible, x.shape), dy, 0),
        )
    y = jax.nn.softmax(z, axis=-1).astype(x.dtype)
    y32, dy32 = y.astype(jnp.float32), dy.astype(jnp.float32)
    return y, (scale * y32 * (dy32 - (dy32 * y32).sum(-1, keepdims=True))).astype(x.dtype)


def with_gradient(f, x, dy):
    y, pull = jax.vjp(f, x)
    return (y, *pull(dy))


def check(implementation, shape, dtype, seed=0, **how):
    x, dy = inputs(shape, dtype, seed)
    if how.get("causal"):
        future = jnp.asarray(np.broadcast_to(np.triu(np.ones(shape[-2:], bool), 1), shape))
        x, dy = (
            jnp.where(future, jnp.nan, x).astype(dtype),
            jnp.where(future, jnp.nan, dy).astype(dtype),
        )
    f = functools.partial(softmax, implementation=implementation, **how)
    found = jax.jit(functools.partial(with_gradient, f))(x, dy)
    for name, ours, theirs, true in zip(
        ("y", "dx"), found, plain(x, dy, **how), exact(x, dy, **how), strict=True
    ):
        assert ours.dtype == dtype
        for norm in (rms, max_abs):
            assert_within_twice(ours, theirs, true, norm=norm, name=name)
        if how.get("causal"):
            np.testing.assert_array_equal(np.asarray(ours, np.float32)[np.asarray(future)], 0)


@pytest.fixture
def long_rows(monkeypatch):
    """Every row is a long one, in blocks of few columns."""
    from pallas_kernels.row_softmax import triton

    monkeypatch.setattr(triton, "LONGEST_SHORT_ROW", 0)
    # Blocks of 32 · 4 or 32 · 8 columns, some kept in registers and some read again.
    monkeypatch.setattr(triton, "TWO_ROWS_FIT", 0)
    monkeypatch.setattr(triton, "FORWARD_KEPT", 2)
    monkeypatch.setattr(triton, "FORWARD_WARPS", 1)
    monkeypatch.setattr(triton, "BACKWARD_WARPS", 1)
    monkeypatch.setattr(triton, "MOST_KEPT", 2)


# The reference's own gradient is that of its fp32 y.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_output_and_gradient(implementation, dtype, shape, triton_on_cpu):
    check(implementation, shape, dtype, scale=0.7)


@pytest.mark.parametrize("shape", CAUSAL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_causal(implementation, dtype, shape, triton_on_cpu):
    check(implementation, shape, dtype, causal=True, scale=0.3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape, causal", [((3, 1111), False), ((1, 150, 150), True)], ids=str)
def test_long_rows(dtype, shape, causal, triton_on_cpu, long_rows):
    check("triton", shape, dtype, causal=causal)


@settings(max_examples=6, deadline=None)
@given(
    n=st.integers(1, 9),
    s=st.integers(1, 40),
    causal=st.booleans(),
    scale=st.sampled_from([1, 0.125, -2.0, 0]),
)
def test_drawn_shapes(n, s, causal, scale):
    check("xla", (n, s, s) if causal else (n, s), jnp.bfloat16, causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_the_definition(causal):
    x, dy = inputs((2, 21, 21), jnp.bfloat16)
    found = with_gradient(
        lambda x: reference(x, scale=0.7, causal=causal),
        x.astype(jnp.float32),
        dy.astype(jnp.float32),
    )
    for ours, true in zip(found, exact(x, dy, scale=0.7, causal=causal), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("scale", [-1.5, 0, 2])
def test_any_scale(implementation, scale, triton_on_cpu):
    check(implementation, (3, 33), jnp.float32, scale=scale)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows(dtype, long, implementation, triton_on_cpu, request):
    """As `jax.nn.softmax`: −∞ is a weight of 0, only −∞ is NaN, the lowest finite number everywhere
    is a uniform row."""
    if long:
        request.getfixturevalue("long_rows")
    low, inf = float(jnp.finfo(dtype).min), np.inf
    x = jnp.asarray(
        [[-inf, 0, 0, -inf], [low] * 4, [-low, low, low, low], [-inf] * 4, [np.nan, 0, 0, 0]], dtype
    )
    wanted = [[0, 0.5, 0.5, 0], [0.25] * 4, [1, 0, 0, 0], [np.nan] * 4, [np.nan] * 4]
    np.testing.assert_array_equal(
        np.asarray(jax.nn.softmax(x.astype(jnp.float32), axis=-1)), wanted
    )
    np.testing.assert_array_equal(
        np.asarray(softmax(x, implementation=implementation), np.float32), wanted
    )


@pytest.mark.parametrize("implementation", BACKENDS)
def test_rows_sum_to_one_and_a_shift_changes_nothing(implementation, triton_on_cpu):
    x, _ = inputs((5, 333), jnp.float32)
    y = softmax(x, implementation=implementation)
    np.testing.assert_allclose(np.asarray(y, np.float64).sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(
        softmax(x + 1000, implementation=implementation), y, atol=1e-4
    )  # fp32 near 1000 is coarse


@pytest.mark.parametrize("implementation", BACKENDS)
def test_under_the_transformations(implementation, triton_on_cpu):
    """vmap, also of one cotangent for a batch; checkpoint; shard_map over two devices."""
    f = functools.partial(softmax, scale=0.5, causal=True, implementation=implementation)
    x, dy = inputs((4, 2, 9, 9), jnp.float32)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    wanted = with_gradient(f, x, dy)
    jax.tree.map(same, jax.jit(jax.vmap(functools.partial(with_gradient, f)))(x, dy), wanted)
    _, pull = jax.vjp(f, x[0])
    same(jax.vmap(pull)(dy)[0][1], pull(dy[1])[0])
    jax.tree.map(same, jax.jit(functools.partial(with_gradient, jax.checkpoint(f)))(x, dy), wanted)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    shards = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    jax.tree.map(same, jax.jit(functools.partial(with_gradient, shards))(x, dy), wanted)


def test_nothing_in_nothing_out():
    assert softmax(jnp.zeros((0, 5))).shape == (0, 5)


def test_errors():
    x = jnp.zeros((2, 3, 4))
    with pytest.raises(
        ValueError, match=r"unknown implementation 'fast'; choose one of \['auto', "
    ):
        softmax(x, implementation="fast")
    with pytest.raises(
        ValueError, match="'triton' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"
    ):
        softmax(x, implementation="triton")
    with pytest.raises(
        ValueError, match=r"expected x of shape \(..., T, T\) for a causal softmax, got \(2, 3, 4\)"
    ):
        softmax(x, causal=True)
    with pytest.raises(ValueError, match="expected a finite scale, got nan"):
        softmax(x, scale=float("nan"))
    with pytest.raises(
        ValueError, match="expected float32, bfloat16 or float16, got float8_e4m3fn"
    ):
        softmax(x.astype(jnp.float8_e4m3fn))
    with pytest.raises((ValueError, TypeError)):
        softmax(jnp.zeros(()))
    with pytest.raises(
        ValueError,
        match=r"expected y and dy alike, got \(2, 3, 4\) float32 and \(2, 3, 4\) bfloat16",
    ):
        gradient(x, x.astype(jnp.bfloat16))


def test_auto(monkeypatch):
    assert _dispatch.select("softmax") == "xla"
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert _dispatch.select("softmax") == "triton"


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    "shape, causal",
    [((512, 1024), False), ((2, 1024, 1024), True), ((64, 16384), False), ((64, 50304), False)],
)
def test_compiles_without_spills(capability, shape, causal):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    f = functools.partial(softmax, causal=causal, implementation="triton")
    forward, backward = triton_kernels(
        functools.partial(with_gradient, f), x, x, capability=capability
    )
    for kernel in (forward, backward):
        assert kernel.spill_bytes == 0
        # Every load and store is one of 16 bytes.
        assert all(
            ".v4.b32" in line
            for line in kernel.ptx.splitlines()
            if "ld.global" in line or "st.global" in line
        )


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype, how",
    [
        ((100, 1024), jnp.bfloat16, {"scale": 0.7}),
        ((3, 1024, 1024), jnp.bfloat16, {"causal": True, "scale": 0.125}),
        ((2, 77, 77), jnp.bfloat16, {"causal": True}),  # no row starts where a 16-byte load may
        ((40, 50304), jnp.bfloat16, {}),
        ((21, 50257), jnp.bfloat16, {}),
        ((5, 131072), jnp.float32, {}),
        ((20, 333), jnp.float16, {}),
    ],
    ids=str,
)
def test_triton_on_the_gpu(shape, dtype, how):
    check("triton", shape, dtype, **how)


@pytest.mark.gpu
def test_the_same_each_time():
    x, dy = (jax.random.normal(jax.random.key(i), (600, 50304), jnp.bfloat16) for i in range(2))
    f = jax.jit(functools.partial(with_gradient, softmax))
    first, *others = (f(x, dy) for _ in range(3))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
