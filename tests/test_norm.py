"""pallas_kernels.layer_norm and rms_norm against the equations in fp64, by the 2× rule."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import triton_kernels, unchecked
from norm_tools import BIASED, Norm, check, with_gradients
from reference.torch_gpt2 import rms

from pallas_kernels import _dispatch, _triton
from pallas_kernels.norm import layer_norm, reference, rms_norm, rms_reference

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
BACKENDS = ["xla", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "triton":
        request.getfixturevalue("triton_on_cpu")
    return request.param


SHAPES = [
    (16, 64),  # aligned
    (3, 7, 33),  # no access of 16 bytes is aligned; rows are no multiple of a tile
    (5, 1),  # one channel: it is its own mean
    (1, 100),  # one row
]


NORMS = [
    Norm(),
    BIASED,
    Norm(residual_bias=True, parameters=None),
    Norm(residual=False),
    Norm(parameters=None),
    Norm(eps=0.1),
    Norm(centred=False),
    Norm(centred=False, scaled=False),
    Norm(centred=False, scaled=False, residual=False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_gradients(backend, shape, dtype):
    check(Norm(), backend, shape, dtype)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_every_form(backend, norm):
    check(norm, backend, (3, 4, 40), jnp.bfloat16)
    check(norm, backend, (3, 4, 40), jnp.float32)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(
    "dtype, parameters",
    [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")],
)
def test_parameters_of_another_dtype(backend, centred, dtype, parameters):
    """y has x's dtype, each gradient the dtype of its array."""
    norm = Norm(centred=centred, residual_bias=centred, parameters=jnp.dtype(parameters))
    check(norm, backend, (3, 40), jnp.dtype(dtype))


def test_an_fp32_residual_stream_with_bf16_output(backend):
    check(Norm(out_dtype=jnp.dtype(jnp.bfloat16)), backend, (5, 96), jnp.float32)
    check(
        Norm(out_dtype=jnp.dtype(jnp.bfloat16), residual_bias=True), backend, (5, 96), jnp.float32
    )
    check(Norm(out_dtype=jnp.dtype(jnp.float32), residual=False), backend, (5, 96), jnp.bfloat16)


def test_gpt2s_width_and_more_rows_than_a_program_takes_at_once(backend):
    check(Norm(), backend, (50, 768), jnp.bfloat16)
    check(BIASED, backend, (50, 768), jnp.bfloat16)


def test_a_mean_far_from_zero_costs_no_precision(backend):
    """Σx²/C − mean² would lose all digits of the variance here."""
    check(Norm(), backend, (4, 128), jnp.float32, offset=3e3)


def test_the_reference_as_an_implementation():
    check(Norm(), "reference", (5, 40), jnp.float32)
    check(BIASED, "reference", (5, 40), jnp.bfloat16)
    check(Norm(centred=False, scaled=False, residual=False), "reference", (5, 40), jnp.bfloat16)


@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 20), channels=st.integers(1, 70), seed=st.integers(0, 99))
def test_any_shape(rows, channels, seed):
    check(Norm(), "xla", (rows, channels), jnp.float32, norms=(rms,), seed=seed)


@pytest.mark.parametrize("norm", [Norm(), BIASED], ids=str)
@pytest.mark.parametrize("rows, channels", [(9, 130), (17, 257), (33, 8)])
def test_any_shape_in_triton(triton_on_cpu, rows, channels, norm):
    check(norm, "triton", (rows, channels), jnp.bfloat16, seed=rows)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_as_many_rows_are_walked_over(triton_on_cpu, monkeypatch, dtype):
    """The programs that walk over many rows, on a few."""
    # `pallas_kernels.layer_norm` is also the name of the function in it.
    monkeypatch.setattr(importlib.import_module("pallas_kernels.norm.triton"), "FEW_ROWS", 0)
    check(BIASED, "triton", (33, 257), dtype)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_nothing_stays_nothing(backend, shape):
    x, one = jnp.zeros(shape, jnp.bfloat16), jnp.ones(8)
    f = lambda x, scale: (
        layer_norm(x, scale, one, residual=x, implementation=backend)[0].astype(jnp.float32).sum()
    )
    dx, dscale = jax.grad(f, (0, 1))(x, one)
    assert dx.shape == shape and not dscale.any()


def test_reference_is_the_definition():
    for norm, f in [
        (Norm(), reference),
        (BIASED, reference),
        (Norm(centred=False, eps=1e-6), rms_reference),
    ]:
        given, directions = norm.arrays((6, 50), jnp.bfloat16)
        named = {name: given.pop(name) for name in ("residual", "residual_bias") if name in given}
        found = f(*given.values(), **named)
        assert all(a.dtype == jnp.float32 for a in found)
        for ours, true in zip(found, norm.exact(given | named, directions)[:2], strict=True):
            np.testing.assert_allclose(ours, true, rtol=0, atol=2e-6)


def test_total_is_rounded_once_and_normalized_as_rounded(backend):
    """The next layer reads total: what is normalized must be the same number."""
    x, residual = (
        jnp.full((1, 4), 1.0, jnp.bfloat16),
        jnp.asarray([[2.0**-9, 2.0**-7, 2.0**-9, 2.0**-7]], jnp.bfloat16),
    )
    one, zero = jnp.ones((4,), jnp.float32), jnp.zeros((4,), jnp.float32)
    y, total = layer_norm(x, one, zero, residual=residual, eps=0.0, implementation=backend)
    np.testing.assert_array_equal(total, [[1.0, 1 + 2.0**-7, 1.0, 1 + 2.0**-7]])
    np.testing.assert_array_equal(y, [[-1, 1, -1, 1]])
    # Of three numbers too: 2⁻⁹ and 2⁻⁸ are each lost beside 1, their sum is not.
    bias = jnp.asarray([2.0**-8, 0, 2.0**-8, 0], jnp.float32)
    how = {"residual_bias": bias, "eps": 0.0, "implementation": backend}
    y, total = layer_norm(x, one, zero, residual=jnp.full((1, 4), 2.0**-9, jnp.bfloat16), **how)
    np.testing.assert_array_equal(total, [[1 + 2.0**-7, 1.0, 1 + 2.0**-7, 1.0]])
    np.testing.assert_array_equal(y, [[1, -1, 1, -1]])


def test_rows_have_mean_zero_and_variance_one_and_do_not_see_shift_or_size(backend):
    given, _ = Norm(residual=False).arrays((8, 200), jnp.float32)
    one, zero = jnp.ones((200,), jnp.float32), jnp.zeros((200,), jnp.float32)
    f = functools.partial(layer_norm, scale=one, bias=zero, implementation=backend)
    y = f(given["x"])
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(jnp.square(y).mean(-1), 1, atol=1e-5)
    np.testing.assert_allclose(f(3 * given["x"] + 7), y, atol=2e-5)


def test_total_that_nobody_reads_costs_no_array(triton_on_cpu, monkeypatch):
    launched = []
    call = _triton.call
    monkeypatch.setattr(
        _triton,
        "call",
        lambda kernel, *a, **k: launched.append((kernel.__name__, k)) or call(kernel, *a, **k),
    )
    given, _ = BIASED.arrays((4, 16), jnp.float32)
    for read in (0, 1):
        launched.clear()
        f = lambda *args, read=read: jnp.square(BIASED.call("triton")(*args)[read]).sum()
        dx, dresidual, dresidual_bias = jax.grad(f, argnums=(0, 1, 4))(*given.values())
        assert [k["HAS_DTOTAL"] for name, k in launched if name == "norm_backward"] == [bool(read)]
        np.testing.assert_array_equal(dx, dresidual)
        np.testing.assert_allclose(dresidual_bias, dx.sum(0), rtol=0, atol=1e-5)
        if read:
            np.testing.assert_allclose(
                dx, 2 * BIASED.call("xla")(*given.values())[1], rtol=0, atol=1e-6
            )


def test_one_array_is_the_gradient_of_both(backend):
    given, directions = Norm().arrays((4, 16), jnp.float32)
    jaxpr = jax.make_jaxpr(
        lambda *args: with_gradients(Norm().call(backend), args, directions)[2:4]
    )(*given.values())
    assert jaxpr.jaxpr.outvars[0] is jaxpr.jaxpr.outvars[1]


@pytest.mark.parametrize("norm", [Norm(centred=False), BIASED], ids=str)
def test_transformations(backend, norm):
    given, directions = norm.arrays((4, 6, 32), jnp.float32)
    args = tuple(given.values())
    f = norm.call(backend)
    expected = with_gradients(f, args, directions)

    recomputed = with_gradients(jax.checkpoint(f), args, directions)
    for a, b in zip(recomputed, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)

    over_batch = functools.partial(with_gradients, f)
    mapped = jax.jit(jax.vmap(lambda x, r, d: over_batch((x, r, *args[2:]), d)))(
        *args[:2], directions
    )
    for a, b in zip(
        (*mapped[:4], *(gradient.sum(0) for gradient in mapped[4:])), expected, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)

    # A gradient without vjp: one of a scalar through grad.
    gradient = jax.grad(lambda x: f(x, *args[1:])[0].sum())(args[0])
    assert gradient.shape == args[0].shape and np.isfinite(gradient).all()


def test_on_two_devices(backend):
    norm = BIASED
    given, directions = norm.arrays((4, 16), jnp.float32)
    args = tuple(given.values())
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    f = norm.call(backend)
    specs = (P("data"), P("data"), P(), P(), P())
    sharded = jax.shard_map(
        f, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data")), check_vma=False
    )
    found = jax.jit(functools.partial(with_gradients, sharded))(args, directions)
    for a, b in zip(found, with_gradients(f, args, directions), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    "n, channels", [(65536, 64), (65536, 768), (65536, 1600), (4096, 768), (4096, 1600)]
)
@pytest.mark.parametrize(
    "norm, dtype", [(Norm(), jnp.bfloat16), (BIASED, jnp.bfloat16), (BIASED, jnp.float32)], ids=str
)
def test_compiled_code_keeps_a_row_in_registers(capability, n, channels, norm, dtype):
    rows = jax.ShapeDtypeStruct((n, channels), dtype)
    parameter = jax.ShapeDtypeStruct((channels,), jnp.float32)

    def f(*args):
        return with_gradients(norm.call("triton"), args[:-2], args[-2:])

    parameters = [parameter] * (len(norm.names()) - 2)
    found = triton_kernels(f, rows, rows, *parameters, rows, rows, capability=capability)
    assert [k.name for k in found] == ["norm_forward", "norm_backward", "sum_partials"]
    assert [k.spill_bytes for k in found] == [0, 0, 0]
    for kernel in found[:2]:
        # 16 bytes an access; two-byte ones would cost eight times the instructions. cp.async.cg is
        # always 16.
        assert "ld.global.v4" in kernel.ptx or "cp.async.cg" in kernel.ptx
        assert "st.global.v4" in kernel.ptx and "global.b16" not in kernel.ptx


def selected(channels, implementation="auto"):
    return _dispatch.select("layer_norm", implementation, channels=channels)


def test_auto_on_a_cpu_is_xla_and_on_a_gpu_triton(monkeypatch):
    assert selected(768) == "xla"
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert selected(768) == "triton"
    assert selected(100_000) == "xla"
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: True)
    assert selected(768) == "xla"
    with pytest.raises(
        ValueError, match="layer_norm: implementation 'triton' needs arrays of one device"
    ):
        selected(768, "triton")
    with pytest.raises(
        ValueError,
        match="layer_norm: implementation 'triton' supports at most 8192 channels, not 100000",
    ):
        selected(100_000, "triton")


def test_errors():
    norm = Norm()
    given, _ = norm.arrays((2, 8), jnp.bfloat16)
    x, residual, scale, bias = given.values()
    with pytest.raises(
        ValueError,
        match=r"rms_norm: unknown implementation 'cudnn'; choose one of \['auto', 'triton'",
    ):
        rms_norm(x, implementation="cudnn")
    with pytest.raises(
        ValueError, match="layer_norm: implementation 'triton' needs an NVIDIA GPU, .* cpu; .*'xla'"
    ):
        layer_norm(x, scale, bias, implementation="triton")
    with pytest.raises(
        ValueError,
        match=r"expected a residual like x, \(2, 8\) in bfloat16, got \(2, 8\) in float32",
    ):
        layer_norm(x, scale, bias, residual=residual.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"layer_norm: expected bias of shape \(8,\), got None"):
        unchecked(layer_norm)(x, scale, None)
    with pytest.raises(
        ValueError,
        match="expected scale and bias in one dtype, .*bfloat16 or float16, got float32, bfloat16",
    ):
        layer_norm(x, scale, bias.astype(jnp.bfloat16))
    with pytest.raises(
        ValueError, match="residual_bias is added together with a residual, and there is none"
    ):
        layer_norm(x, scale, bias, residual_bias=bias)
    with pytest.raises(
        ValueError,
        match="expected scale and bias and residual_bias in one dtype, .* got .*, bfloat16",
    ):
        layer_norm(x, scale, bias, residual=residual, residual_bias=bias.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"expected residual_bias of shape \(8,\), got \(4,\)"):
        unchecked(layer_norm)(x, scale, bias, residual=residual, residual_bias=bias[:4])
    with pytest.raises(ValueError, match="got int32, int32"):
        unchecked(layer_norm)(x, scale.astype(jnp.int32), bias.astype(jnp.int32))
    with pytest.raises(
        ValueError, match="expected out_dtype float32, bfloat16 or float16, got int8"
    ):
        layer_norm(x, scale, bias, out_dtype=jnp.int8)
    # jaxtyping refuses these first under pytest; without it the function itself does.
    for bad, message in [
        ((x, scale[:4], bias), r"expected scale of shape \(8,\), got \(4,\)"),
        ((x, scale, bias[None]), r"expected bias of shape \(8,\), got \(1, 8\)"),
        (
            (x.astype(jnp.int32), scale, bias),
            r"in float32, bfloat16 or float16, got \(2, 8\) in int32",
        ),
    ]:
        with pytest.raises((ValueError, TypeError)):
            layer_norm(*bad)
        with pytest.raises(ValueError, match=message):
            unchecked(layer_norm)(*bad)
    with pytest.raises(ValueError, match=r"expected a residual like x, .* got \(8,\) in bfloat16"):
        unchecked(layer_norm)(x, scale, bias, residual=residual[0])


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "norm, shape, dtype",
    [
        (Norm(), (2, 1024, 768), jnp.bfloat16),  # GPT-2 124M
        # GPT-2 XL: C is no power of two, a row lies in several warps
        (Norm(), (999, 1600), jnp.bfloat16),
        (Norm(), (301, 769), jnp.float16),  # no row but the first is aligned
        (Norm(), (1, 3), jnp.float32),  # less than a warp
        (Norm(), (64, 1280), jnp.float32),
        (Norm(), (3, 8191), jnp.bfloat16),  # the longest, and no access is aligned
        (Norm(centred=False), (1000, 64), jnp.bfloat16),  # many rows in a warp
        # an fp32 residual stream
        (Norm(out_dtype=jnp.dtype(jnp.bfloat16)), (500, 768), jnp.float32),
        (Norm(residual=False, parameters=None), (500, 768), jnp.bfloat16),
        (BIASED, (2, 1024, 768), jnp.bfloat16),
        (BIASED, (999, 1600), jnp.bfloat16),
        (BIASED, (9000, 768), jnp.bfloat16),  # more than the table's few
        (BIASED, (9000, 768), jnp.float32),
        (BIASED, (301, 769), jnp.float16),
        (BIASED, (3, 8191), jnp.bfloat16),
        (BIASED, (64, 1280), jnp.float32),
        (Norm(residual_bias=True, out_dtype=jnp.dtype(jnp.bfloat16)), (500, 768), jnp.float32),
        (Norm(residual_bias=True, parameters=None), (500, 768), jnp.bfloat16),
        (Norm(centred=False), (500, 1024), jnp.bfloat16),
        (Norm(centred=False, scaled=False, residual=False), (500, 768), jnp.bfloat16),
    ],
    ids=str,
)
def test_triton_on_the_gpu(norm, shape, dtype):
    check(norm, "triton", shape, dtype)


@pytest.mark.gpu
def test_repeated_runs_are_bit_equal():
    given, directions = BIASED.arrays((4096, 768), jnp.bfloat16)
    f = jax.jit(functools.partial(with_gradients, BIASED.call("triton")))
    first = f(tuple(given.values()), directions)
    for _ in range(5):
        for a, b in zip(f(tuple(given.values()), directions), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_under_vmap_and_checkpoint_on_the_gpu():
    norm = Norm(centred=False)
    given, directions = norm.arrays((3, 40, 64), jnp.bfloat16)
    args = tuple(given.values())
    f = jax.checkpoint(norm.call("triton"))
    expected = jax.jit(functools.partial(with_gradients, f))(args, directions)
    mapped = jax.jit(jax.vmap(lambda x, r, d: with_gradients(f, (x, r, args[2]), d)))(
        *args[:2], directions
    )
    for a, b in zip(mapped[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton():
    assert selected(768) == "triton"
