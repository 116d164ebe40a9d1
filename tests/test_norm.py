"""pallas_kernels.layer_norm and rms_norm against the equations in fp64, by the 2× rule; y in FP8
against a conversion of y."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import on_gpu, triton_kernels
from rule_tools import check as check_rule
from rule_tools import refused, with_gradients

from pallas_kernels import _dispatch, _triton, linear, mlp, swiglu
from pallas_kernels.gemm import E4M3, Fp8, Operand, quantize
from pallas_kernels.norm import layer_norm, reference, rms_norm, rms_reference

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@dataclasses.dataclass(frozen=True)
class Norm:
    """One way to call layer_norm or rms_norm, of its arrays (x, residual, scale, bias,
    residual_bias)."""

    centred: bool = True
    scaled: bool = True
    residual: bool = True
    residual_bias: bool = False
    eps: float = 1e-5
    out_dtype: jnp.dtype | None = None
    parameters: jnp.dtype | None = jnp.float32
    """None: the dtype of x."""

    def arrays(self, shape, dtype, offset=0.0):
        """The arguments that this call has."""
        rng = np.random.default_rng(0)
        parameters = dtype if self.parameters is None else self.parameters
        draw = lambda shape, dtype: jnp.asarray(rng.standard_normal(shape), dtype)
        made = {"x": (2 * draw(shape, jnp.float32) + np.float32(offset)).astype(dtype)}
        made["residual"] = draw(shape, dtype)
        made["scale"] = (1 + 0.3 * draw(shape[-1], jnp.float32)).astype(parameters)
        made |= {name: draw(shape[-1], parameters) for name in ("bias", "residual_bias")}
        return tuple(made[name] for name in self.names())

    def names(self) -> tuple[str, ...]:
        has = {"x": True, "residual": self.residual, "scale": self.scaled, "bias": self.centred}
        return tuple(k for k, v in (has | {"residual_bias": self.residual_bias}).items() if v)

    def given(self, args):
        return dict(zip(self.names(), args, strict=True))

    def call(self, implementation=None, **options):
        """A function of the arguments, in the order of `names`, that returns a tuple; the
        definition if no back end is named."""
        options = {"eps": self.eps} | options
        if implementation is None:
            norm = reference if self.centred else rms_reference
        else:
            norm = layer_norm if self.centred else rms_norm
            options = {"out_dtype": self.out_dtype, "implementation": implementation} | options

        def f(*args):
            found = norm(**self.given(args), **options)
            return found if self.residual else (found,)

        return f

    def plain(self, *args):
        """The textbook in the inputs' own dtype; the arithmetic of a row is fp32."""
        dtype = args[0].dtype
        given = {name: x.astype(jnp.float32) for name, x in self.given(args).items()}
        row = lambda name, y: jnp.broadcast_to(given[name], y.shape)
        total = given["x"] + given["residual"] if self.residual else given["x"]
        if self.residual_bias:
            total = total + row("residual_bias", total)
        total = total.astype(dtype)
        y = total.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True) if self.centred else y
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * row("scale", y) if self.scaled else y
        y = y + row("bias", y) if self.centred else y
        y = y.astype(self.out_dtype or dtype)
        return (y, total) if self.residual else (y,)


BIASED = Norm(residual_bias=True)
BF16 = jnp.dtype(jnp.bfloat16)


def check(norm, implementation, shape, dtype, offset=0.0):
    args = norm.arrays(shape, dtype, offset)
    check_rule(norm.call(implementation), norm.plain, norm.call(), args, seed=1)


SHAPES = [
    (16, 64),  # aligned
    (3, 7, 33),  # no access of 16 bytes is aligned; rows are no multiple of a tile
    (5, 1),  # one channel: it is its own mean
    (1, 100),  # one row
]
PARAMETERS = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]
FORMS = [
    # The dtype changes loads, casts and stores: every dtype for one shape.
    *((Norm(), shape, jnp.bfloat16) for shape in SHAPES),
    *((Norm(), SHAPES[1], dtype) for dtype in (jnp.float32, jnp.float16)),
    *(
        (norm, (3, 4, 40), dtype)
        for norm in (
            BIASED,
            Norm(residual_bias=True, parameters=None),
            Norm(residual=False),
            Norm(parameters=None),
            Norm(eps=0.1),
            Norm(centred=False),
            Norm(centred=False, scaled=False),
            Norm(centred=False, scaled=False, residual=False),
        )
        for dtype in (jnp.bfloat16, jnp.float32)[: 2 if norm.parameters else 1]
    ),
    # y has x's dtype, each gradient the dtype of its array.
    *(
        (Norm(centred, residual_bias=centred, parameters=jnp.dtype(p)), (3, 40), jnp.dtype(dtype))
        for centred in (True, False)
        for dtype, p in PARAMETERS
    ),
    # An fp32 residual stream with bf16 output.
    (Norm(out_dtype=BF16), (5, 96), jnp.float32),
    (Norm(out_dtype=BF16, residual_bias=True), (5, 96), jnp.float32),
    (Norm(out_dtype=jnp.dtype(jnp.float32), residual=False), (5, 96), jnp.bfloat16),
    # More rows than a program takes at once, of GPT-2's width.
    (BIASED, (50, 768), jnp.bfloat16),
]
GPU_FORMS = [
    (BIASED, (2, 1024, 768), jnp.bfloat16),  # GPT-2 124M
    # GPT-2 XL: C is no power of two, a row lies in several warps
    (Norm(), (999, 1600), jnp.bfloat16),
    (BIASED, (301, 769), jnp.float16),  # no row but the first is aligned
    (Norm(), (1, 3), jnp.float32),  # less than a warp
    (BIASED, (3, 8191), jnp.bfloat16),  # the longest, and no access is aligned
    (Norm(centred=False), (1000, 64), jnp.bfloat16),  # many rows in a warp
    # an fp32 residual stream
    (Norm(residual_bias=True, out_dtype=BF16), (500, 768), jnp.float32),
    (Norm(residual=False, parameters=None), (500, 768), jnp.bfloat16),
    (BIASED, (9000, 768), jnp.bfloat16),  # more than the table's few
    (BIASED, (9000, 768), jnp.float32),
    (Norm(residual_bias=True, parameters=None), (500, 768), jnp.bfloat16),
    (Norm(centred=False, scaled=False, residual=False), (500, 768), jnp.bfloat16),
]


@pytest.mark.parametrize(
    "back_end, norm, shape, dtype",
    [
        *((back_end, *form) for back_end in ("xla", "triton") for form in FORMS),
        *on_gpu(*(("triton", *form) for form in GPU_FORMS)),
    ],
    ids=str,
)
def test_outputs_and_gradients(back_end, norm, shape, dtype, interpreter):
    check(norm, back_end, shape, dtype)


def test_a_mean_far_from_zero_costs_no_precision(backend):
    """Σx²/C − mean² would lose all digits of the variance here."""
    check(Norm(), backend, (4, 128), jnp.float32, offset=3e3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_as_many_rows_are_walked_over(triton_on_cpu, monkeypatch, dtype):
    """The programs that walk over many rows, on a few."""
    # `pallas_kernels.layer_norm` is also the name of the function in it.
    monkeypatch.setattr(importlib.import_module("pallas_kernels.norm.triton"), "FEW_ROWS", 0)
    check(BIASED, "triton", (33, 257), dtype)


@pytest.mark.parametrize(
    "norm", [Norm(), BIASED, Norm(centred=False, eps=1e-6), Norm(residual=False)], ids=str
)
def test_reference_is_the_definition(norm):
    args = norm.arrays((6, 50), jnp.bfloat16)
    given = {name: np.asarray(x, np.float64) for name, x in norm.given(args).items()}
    total = given["x"] + given.get("residual", 0) + given.get("residual_bias", 0)
    y = total - total.mean(-1, keepdims=True) if norm.centred else total
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + norm.eps)
    y = y * given["scale"] + given.get("bias", 0)
    for ours, true in zip(norm.call()(*args), (y, total), strict=False):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, true, rtol=0, atol=2e-6)


def test_total_is_rounded_once_and_normalized_as_rounded(backend):
    """The next layer reads total: what is normalized must be the same number. Of three numbers too:
    2⁻⁹ and 2⁻⁸ are each lost beside 1, their sum is not."""
    row = lambda a, b, dtype=jnp.bfloat16: jnp.asarray([[a, b, a, b]], dtype)
    one, zero = jnp.ones((4,), jnp.float32), jnp.zeros((4,), jnp.float32)
    f = functools.partial(layer_norm, row(1, 1), one, zero, eps=0.0, implementation=backend)
    of_two = f(residual=row(2.0**-9, 2.0**-7))
    of_three = f(residual=row(2.0**-9, 2.0**-9), residual_bias=row(2.0**-8, 0, jnp.float32)[0])
    for (y, total), sign in ((of_two, 1), (of_three, -1)):
        np.testing.assert_array_equal(y, row(-sign, sign))
        np.testing.assert_array_equal(total, row(*[1.0, 1 + 2.0**-7][::sign]))


def test_total_that_nobody_reads_costs_no_array(triton_on_cpu, monkeypatch):
    launched, call = {}, _triton.call

    def watched(kernel, *args, **options):
        launched[kernel.__name__] = args
        return call(kernel, *args, **options)

    monkeypatch.setattr(_triton, "call", watched)
    args = BIASED.arrays((4, 16), jnp.float32)
    for read in (0, 1):
        f = lambda *args, read=read: jnp.square(BIASED.call("triton")(*args)[read]).sum()
        dx, dresidual, dresidual_bias = jax.grad(f, argnums=(0, 1, 4))(*args)
        dtotal = launched["norm_backward"][1]
        assert (dtotal is not None) == bool(read)
        np.testing.assert_array_equal(dx, dresidual)
        np.testing.assert_allclose(dresidual_bias, dx.sum(0), rtol=0, atol=1e-5)
        if read:
            np.testing.assert_allclose(dx, 2 * BIASED.call("xla")(*args)[1], rtol=0, atol=1e-6)


def test_one_array_is_the_gradient_of_both(backend):
    args = Norm().arrays((4, 16), jnp.float32)
    run = with_gradients(Norm().call(backend))
    jaxpr = jax.make_jaxpr(lambda *args: run(args, args[:2])[1][:2])(*args)
    assert jaxpr.jaxpr.outvars[0] is jaxpr.jaxpr.outvars[1]


def test_auto_takes_rows_that_fit_into_registers(monkeypatch):
    select = functools.partial(_dispatch.select, "layer_norm")
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert select(channels=8192) == "triton" and select(channels=8193) == "xla"
    with pytest.raises(ValueError, match="'triton' supports at most 8192 channels, not 8193"):
        select("triton", channels=8193)


def test_errors():
    x, residual, scale, bias = Norm().arrays((2, 8), jnp.bfloat16)
    narrow, integer = bias.astype(jnp.bfloat16), bias.astype(jnp.int32)
    both = {"residual": residual}
    for gain, shift, how, message in [
        (scale, bias, {"residual": residual.astype(jnp.float32)},
         r"like x, \(2, 8\) in bfloat16, got \(2, 8\) in float32; .* cast x and pass out_dtype"),
        (scale, None, {}, r"layer_norm: expected bias of shape \(8,\), got None"),
        (scale, narrow, {}, "expected scale and bias in one dtype, .* got float32, bfloat16"),
        (scale, bias, {"residual_bias": bias}, "added together with a residual, and there is no"),
        (scale, bias, both | {"residual_bias": narrow}, "residual_bias in one dtype, .*bfloat16"),
        (scale, bias, both | {"residual_bias": bias[:4]}, r"residual_bias of shape .* \(4,\)"),
        (integer, integer, {}, "got int32, int32"),
        (scale, bias, {"out_dtype": jnp.int8}, "out_dtype float32, bfloat16 or float16, got int8"),
        (scale, bias[None], {}, r"expected bias of shape \(8,\), got \(1, 8\)"),
        (scale, bias, FP8 | {"implementation": "reference"}, "'reference' has no fp8 matmuls"),
    ]:  # fmt: skip
        refused(layer_norm, x, gain, shift, **how, match=message)
    with pytest.raises(TypeError, match="rms_norm: unknown option weight: .* named scale"):
        rms_norm(x, weight=scale)
    with pytest.raises(TypeError, match="passed by name, such as residual=…, after 3 arrays"):
        layer_norm(x, scale, bias, residual)
    assert jax.jit(rms_norm)(x, scale).shape == x.shape  # a traced scale is an array


# ---------------------------------------------------------------------------------------------- FP8

FP8 = {"numerics": "fp8"}


@pytest.mark.parametrize(
    "back_end, n, c", [("xla", 36, 48), ("triton", 36, 48), *on_gpu(("triton", 4096, 768))]
)
def test_rows_in_fp8(back_end, n, c, interpreter):
    """y in FP8 is a conversion of y, and its cotangent is that of y."""
    x, residual, scale, *vectors = BIASED.arrays((2, n // 2, c), jnp.bfloat16)
    # One gain is so large that the conversion clips.
    args = x, residual, scale.at[3].set(90.0), *vectors
    f, fp8 = BIASED.call(back_end), BIASED.call(back_end, **FP8)
    y, total = jax.jit(f)(*args)
    fp32 = BIASED.call(back_end, out_dtype=jnp.float32)(*args)[0].reshape(n, c)
    factor = Fp8().activation_scale
    expected = quantize(fp32, factor, E4M3, implementation="xla").rows.astype(jnp.float32)

    # Not differentiated, y is not rounded.
    plain, same_total = jax.jit(fp8)(*args)
    np.testing.assert_array_equal(plain.exact, y)
    np.testing.assert_array_equal(same_total, total)

    @jax.jit
    def differentiated(*args):
        out, pull = jax.vjp(fp8, *args)
        zeros = jax.tree.map(jnp.zeros_like, out)
        return out, pull((dataclasses.replace(zeros[0], exact=y), total))

    (rows, new_total), grads = differentiated(*args)
    assert isinstance(rows, Operand) and rows.rows.dtype == rows.k_major.dtype == E4M3
    np.testing.assert_array_equal(new_total, total)
    np.testing.assert_array_equal(rows.rows.astype(jnp.float32), expected)
    np.testing.assert_array_equal(rows.k_major.astype(jnp.float32), expected.T)
    np.testing.assert_array_equal(rows.exact.reshape(n, c).astype(jnp.float32), expected / factor)
    assert float(expected.max()) == 448
    same_grads = jax.jit(lambda *args: jax.vjp(f, *args)[1]((y, total)))(*args)
    jax.tree.map(np.testing.assert_array_equal, grads, same_grads)


def test_no_rows_in_fp8(backend):
    args = BIASED.arrays((2, 0, 48), jnp.bfloat16)
    y, _ = BIASED.call(backend, **FP8)(*args)
    assert (y.exact.shape, y.rows.shape, y.k_major.shape) == ((2, 0, 48), (0, 48), (48, 0))


LAYERS = {
    "linear": lambda x, w, w2, **how: linear(x, (w[:, :30], w[:, 30:]), **how),
    "mlp": lambda x, w, w2, **how: mlp(x, w, jnp.zeros(64), w2, **how),
    "swiglu": lambda x, w, w2, **how: swiglu(x, w, w, w2, **how),
}


@pytest.mark.parametrize("f", [layer_norm, rms_norm])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_reads_the_rows_in_fp8(layer, f):
    """As it would convert y itself; also where the norm is not differentiated."""
    x, *parameters = Norm(residual=False).arrays((2, 18, 48), jnp.bfloat16)
    parameters = parameters[: 1 + (f is layer_norm)]
    rng = np.random.default_rng(1)
    w, w2 = (jnp.asarray(rng.standard_normal(s) * 0.2, jnp.float32) for s in ((48, 64), (64, 48)))

    def loss(numerics, x, w, w2):
        y = f(x, *parameters, numerics=numerics, out_dtype=jnp.float32)
        return (LAYERS[layer](y, w, w2, **FP8) ** 2).sum()

    fused, separate = (
        jax.jit(jax.value_and_grad(functools.partial(loss, numerics), (0, 1, 2)))(x, w, w2)
        for numerics in ("fp8", None)
    )
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(separate), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()))
    gradient = jax.jit(jax.grad(functools.partial(loss, "fp8"), 1))(x, w, w2)
    np.testing.assert_allclose(gradient, fused[1][1], atol=2e-6 * float(jnp.abs(fused[1][1]).max()))


def test_compiled_code_of_fp8():
    args = jax.eval_shape(lambda: BIASED.arrays((65536, 768), jnp.bfloat16))
    f = BIASED.call("triton", **FP8)
    kernels = triton_kernels(lambda *args: jax.vjp(f, *args)[0], *args)
    (kernel,) = [k for k in kernels if k.name == "norm_forward"]
    assert kernel.spill_bytes == 0 and "cvt.rn.satfinite.e4m3x2.f32" in kernel.ptx
