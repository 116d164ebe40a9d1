"""FP8: conversions bit for bit, matmuls of FP8 operands against their definition."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice
from fp8_tools import XLAS_DEFAULT, assert_fp8, matmuls
from kernel_tools import on_gpu, triton_kernels, unchecked

from gptjax.training.compilation import compiler_options
from pallas_kernels import _dispatch
from pallas_kernels.gemm import (
    E4M3,
    E5M2,
    largest,
    quantize,
    reference,
    scale_for,
    scaled_matmul,
    stochastic_e5m2,
    transposed,
)

FORMATS = [E4M3, E5M2]


def values(shape, dtype, seed=0):
    """Numbers of every size that FP8 distinguishes, and beyond both ends."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-22, 14, shape)
    return jnp.asarray(x, dtype)


def rounded(x, scale, dtype):
    """NumPy's conversion: to the nearest, ties to even."""
    exact = np.asarray(x, np.float32) * np.float32(scale)
    return np.clip(exact, -largest(dtype), largest(dtype)).astype(dtype)


def assert_bits(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        *(np.ascontiguousarray(x).view(np.uint8) for x in (found, expected))
    )


def check_quantize(backend, shape, x_dtype, dtype, scale=4.0, rows=True, transposed=False):
    x = values(shape, x_dtype)
    copies = {"rows": rows, "transposed": transposed}
    out = jax.jit(functools.partial(quantize, dtype=dtype, implementation=backend, **copies))(
        x, scale
    )
    expected = rounded(x, scale, dtype)
    for wanted, found, copy in (
        (rows, out.rows, expected),
        (transposed, out.transposed, expected.T),
    ):
        assert (found is not None) == wanted
        if wanted:
            assert_bits(found, copy)
    assert out.amax == np.abs(np.asarray(x, np.float32)).max()


BF16, FP32 = jnp.bfloat16, jnp.float32
ROWS, COPY, BOTH = {}, {"rows": False, "transposed": True}, {"transposed": True}
QUANTIZED = [
    # Several tiles both ways, ragged.
    *itertools.product(["xla", "triton"], [(130, 260)], [FP32, BF16], FORMATS, [BOTH]),
    *itertools.product(["xla", "triton"], [(33, 65)], [jnp.float16], [E4M3], [ROWS]),
    *itertools.product(["xla", "triton"], [(33, 65)], [BF16], [E5M2], [COPY]),
    *on_gpu(
        *itertools.product(
            ["triton"],
            [(4096, 768), (1000, 333), (7, 3), (768, 2304)],
            [BF16, FP32],
            FORMATS,
            [BOTH, ROWS, COPY],
        )
    ),
]


@pytest.mark.parametrize("back_end, shape, x_dtype, dtype, copies", QUANTIZED, ids=str)
def test_quantize(back_end, shape, x_dtype, dtype, copies, interpreter):
    check_quantize(back_end, shape, x_dtype, dtype, **copies)


def test_what_is_not_finite(backend):
    """NaN stays NaN, infinity becomes the largest number."""
    x = jnp.array([[jnp.nan, jnp.inf, -jnp.inf, 0.0]])
    for dtype in FORMATS:
        out = quantize(x, 2.0, dtype, implementation=backend).rows.astype(jnp.float32)
        np.testing.assert_array_equal(out, [[np.nan, largest(dtype), -largest(dtype), 0]])


def test_nan_in_amax(backend):
    """NaN anywhere in x, in the last tile too."""
    # On a CPU, the maximum of XLA 0.12.0 ignores NaN in larger arrays.
    shape = (66, 130) if backend == "triton" else (2, 3)
    for place in ((0, 0), (-1, -1)):
        x = jnp.ones(shape).at[place].set(-jnp.nan)
        assert jnp.isnan(quantize(x, 1.0, implementation=backend).amax)
    assert quantize(-jnp.inf * x[:1, :2], 1.0, implementation=backend).amax == jnp.inf


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)], ids=str)
def test_quantize_of_an_empty_array(backend, shape):
    out = quantize(jnp.zeros(shape), 1.0, transposed=True, implementation=backend)
    assert (out.rows.shape, out.transposed.shape, out.amax) == (shape, shape[::-1], 0)


def test_64_bit_offsets(triton_on_cpu, monkeypatch):
    import triton.language as tl

    from pallas_kernels import _triton

    call = _triton.call
    monkeypatch.setattr(_triton, "call", lambda *a, **o: call(*a, **o | {"INDEX": tl.int64}))
    check_quantize("triton", (33, 65), jnp.bfloat16, E4M3, transposed=True)


def test_scales_are_the_largest_powers_of_two():
    for dtype in FORMATS:
        for amax in (1.0, 0.75, 448.0, 449.0, 1e-30, 1e-36, 2e-38, 1e20, 57344.0):
            scale = float(jax.jit(scale_for, static_argnums=1)(jnp.float32(amax), dtype))
            assert np.frexp(scale)[0] == 0.5
            assert scale * amax <= largest(dtype)
            assert 2 * scale * amax > largest(dtype) or scale == 2.0**60
    assert scale_for(jnp.float32(1.0), E4M3, 2.0) == 128
    for odd in (0.0, np.nan, np.inf):
        assert scale_for(jnp.float32(odd), E4M3) == 1
    # Where headroom · amax, or the largest FP8 number over amax, is infinite in fp32.
    for more in ((), (1024.0,)):
        assert scale_for(jnp.float32(3e38), E4M3, *more) == 2.0**-60


def operands(m, n, k, formats, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, k)) * 4 for size in (m, n))
    return jnp.asarray(a).astype(formats[0]), jnp.asarray(b).astype(formats[1])


def test_stochastic_rounding():
    every = np.arange(256, dtype=np.uint8).view(E5M2)
    finite = every[np.isfinite(every.astype(np.float32))]
    same = stochastic_e5m2(jnp.asarray(finite.astype(np.float32)))
    assert_bits(same, finite)
    assert np.isnan(np.asarray(stochastic_e5m2(jnp.float32(np.nan))).astype(np.float32))
    # One of the two neighbours, with the right mean: normal and subnormal numbers.
    rng = np.random.default_rng(0)
    for low, high in ((1.0, 1.25), (-3.5, -3.0), (2.0**-15, 1.5 * 2.0**-15)):
        for x in low + (high - low) * np.array([0.1, 0.5, 0.8]):
            near = np.float32(x * (1 + 1e-3 * rng.uniform(-1, 1, 10_000)))
            found = np.asarray(stochastic_e5m2(jnp.asarray(near))).astype(np.float32)
            assert {*found.tolist()} <= {low, high}
            # Four standard deviations of the mean of independent roundings.
            assert abs(found.mean() - near.mean()) < 4 * 0.5 * (high - low) / 100


def sums_bound(a, b, promoted):
    """Return the bound of the errors of an FP8 tensor core's sums, elementwise.

    Each step adds 32 products to a sum that keeps about 14 bits, the first included (DeepSeek-V3
    technical report, section 3.3.2): at most 2⁻¹³ of the largest term is lost. Every `promoted`
    products, the sum is added to an fp32 number, and a new sum begins.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], promoted):
        total = np.zeros_like(bound)
        for step in range(start, min(start + promoted, a.shape[1]), 32):
            columns = slice(step, min(step + 32, start + promoted))
            before, total = np.abs(total), total + a[:, columns] @ b[:, columns].T
            bound += 2.0**-13 * np.maximum(before, np.abs(total))
    return bound


PAIRS, SIZES, LARGE = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], (48, 32, 64), (1024, 768, 768)
MULTIPLIED = [
    *itertools.product([SIZES], PAIRS, [BF16, FP32], [True], [False]),
    ((33, 17, 70), PAIRS[2], BF16, False, False),
    *on_gpu(
        *itertools.product([LARGE], PAIRS, [BF16, FP32], [True, False], [False]),
        *itertools.product([LARGE], PAIRS[:2], [BF16], [True], [True]),
    ),
]


@pytest.mark.parametrize("sizes, formats, out_dtype, fast, default", MULTIPLIED, ids=str)
def test_matmul(sizes, formats, out_dtype, fast, default, request):
    """At most twice the error of rounding to out_dtype; in fp32, that of the sums. On a GPU
    cuBLASLt computes it, with the scale, as training compiles it; also a matmul that XLA compiles
    with Triton, by its default options, has FP8 operands.

    `scale` is a power of two, so the result is rounded once also where XLA multiplies it after the
    rounding.
    """
    m, n, k = sizes
    on_a_gpu = "gpu" in request.keywords
    options = None if not on_a_gpu else XLAS_DEFAULT if default else compiler_options()
    a, b = operands(m, n, k, formats)
    scale = jnp.float32(2.0**-7)
    how = {"fast_accumulation": fast, "implementation": "xla"}
    f = functools.partial(scaled_matmul, out_dtype=out_dtype, **how)
    compiled = jax.jit(f).lower(a, b, scale).compile(compiler_options=options)
    y = compiled(a, b, scale)
    assert y.dtype == out_dtype
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T * float(scale)
    plain = reference(a, b, scale).astype(out_dtype)
    if out_dtype == jnp.float32:  # the error of the sums remains
        error = np.abs(np.asarray(y, np.float64) - exact).max()
        if not on_a_gpu:  # fp32 sums
            allowed = 2.0**-16 * np.abs(exact).max()
        else:  # cuBLASLt's accurate sums are promoted every 128 products
            allowed = float(scale) * sums_bound(a, b, promoted=k if fast else 128).max()
        assert error <= allowed, f"y: error {error:.3g} > {allowed:.3g} by {matmuls(compiled)}"
    else:
        assert_within_twice(y, plain, exact, name=f"y by {matmuls(compiled)}")
    if on_a_gpu:
        assert_fp8(compiled, 1, cublaslt=not default)
    if on_a_gpu and not default:
        outside = re.findall(r" = \w+\[\d\S* multiply\(", compiled.as_text())
        assert not outside, f"another pass multiplies the result by the scale: {outside}"


def test_no_derivative():
    a, b = operands(4, 4, 4, (E4M3, E4M3))
    for f in (
        lambda s: scaled_matmul(a, b, s, out_dtype=jnp.float32).sum(),
        lambda s: quantize(jnp.ones((4, 4)) * s, 1.0).amax,
    ):
        with pytest.raises(NotImplementedError, match="has no derivative"):
            jax.grad(f)(1.0)


def test_errors():
    a, b = operands(4, 4, 4, (E4M3, E5M2))
    x = jnp.ones((4, 4))
    for f, message in [
        (lambda: scaled_matmul(b, b), "one of them in float8_e5m2, got float8_e5m2 and float8_e5"),
        (lambda: scaled_matmul(x, b), "got float32 and float8_e5m2"),
        (lambda: scaled_matmul(a, b, out_dtype=jnp.int8), "expected out_dtype float32, .* int8"),
        (lambda: unchecked(scaled_matmul)(a, b[:, :2]), r"b \(N, K\), got \(4, 4\), \(4, 2\)"),
        (lambda: scaled_matmul(a, b, implementation="mosaic"), "unknown implementation 'mosaic'"),
        (lambda: quantize(x, 1.0, jnp.bfloat16), "or float8_e5m2 as dtype, got .* and bfloat16"),
        (lambda: quantize(a, 1.0), r"got \(4, 4\) in float8_e4m3fn"),
        (lambda: quantize(x, 1.0, rows=False), "rows=True or transposed=True, got neither"),
        (lambda: quantize(x, 1.0, implementation="triton"), "'triton' needs an NVIDIA GPU"),
    ]:
        with pytest.raises(ValueError, match=message):
            f()


def test_the_triton_kernel_needs_hardware_conversions(monkeypatch):
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    monkeypatch.setattr(_dispatch, "capability", lambda: (8, 0))
    assert _dispatch.select("quantize") == "xla"
    with pytest.raises(ValueError, match=r"needs compute capability 8.9 \(Ada\) or later for FP8"):
        quantize(jnp.ones((4, 4)), 1.0, implementation="triton")
    # XLA would compute in fp16.
    for operation, facts in [
        ("scaled_matmul", {}),
        ("linear_cross_entropy", {"numerics": "fp8"}),
        (
            "mlp",
            dict.fromkeys(("rows", "inputs", "outputs"), 1)
            | {"dtype": jnp.bfloat16, "numerics": "fp8"},
        ),
    ]:
        back_end = "fused" if operation == "linear_cross_entropy" else "xla"
        for name in (back_end, "auto"):
            with pytest.raises(ValueError, match=f"{operation}: .*needs compute capability 8.9"):
                _dispatch.select(operation, name, **facts)


@pytest.mark.parametrize("copies", [{}, {"transposed": True}], ids=str)
def test_compiled_code(copies):
    """Wide accesses, no spills, conversions by the instruction for pairs."""
    x = jax.ShapeDtypeStruct((65536, 3072), jnp.bfloat16)
    f = functools.partial(quantize, implementation="triton", **copies)
    (kernel,) = triton_kernels(f, x, jax.ShapeDtypeStruct((), jnp.float32))
    assert kernel.spill_bytes == 0
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
    assert "ld.global.v4" in kernel.ptx
    stores = re.findall(r"st\.global\S*", kernel.ptx)
    # But for the tile's amax.
    assert sum("v2" not in s and "v4" not in s for s in stores) <= 1, stores


def test_compiled_transpose(monkeypatch):
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    (kernel,) = triton_kernels(transposed, jax.ShapeDtypeStruct((16384, 50304), E5M2))
    assert kernel.spill_bytes == 0
    for access in ("ld.global.v4", "st.global.v4"):
        assert access in kernel.ptx


@pytest.mark.parametrize("shape", [(130, 260), (7, 3)], ids=str)
def test_transposed(triton_on_cpu, shape):
    q = values(shape, jnp.float32).astype(E5M2)
    assert_bits(jax.jit(transposed)(q), np.asarray(q).T)
