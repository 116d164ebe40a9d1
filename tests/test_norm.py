"""pallas_kernels.layer_norm and rms_norm against the equations in fp64, by the 2× rule."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_tools import check as check_rule
from rule_tools import refused, with_gradients

from pallas_kernels import _dispatch, _triton
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

    def arrays(self, shape, dtype, seed=0, offset=0.0):
        """The arguments that this call has."""
        rng = np.random.default_rng(seed)
        parameters = dtype if self.parameters is None else self.parameters
        draw = lambda shape, dtype: jnp.asarray(rng.standard_normal(shape), dtype)
        made = {"x": (2 * draw(shape, jnp.float32) + np.float32(offset)).astype(dtype)}
        made["residual"] = draw(shape, dtype)
        made["scale"] = (1 + 0.3 * draw(shape[-1], jnp.float32)).astype(parameters)
        made["bias"] = draw(shape[-1], parameters)
        made["residual_bias"] = draw(shape[-1], parameters)
        return tuple(made[name] for name in self.names())

    def names(self) -> tuple[str, ...]:
        has = {"x": True, "residual": self.residual, "scale": self.scaled, "bias": self.centred}
        return tuple(k for k, v in (has | {"residual_bias": self.residual_bias}).items() if v)

    def given(self, args):
        return dict(zip(self.names(), args, strict=True))

    def call(self, implementation=None):
        """A function of the arguments, in the order of `names`, that returns a tuple; the
        definition if no back end is named."""
        options = {"eps": self.eps}
        layer, root = reference, rms_reference
        if implementation is not None:
            options |= {"out_dtype": self.out_dtype, "implementation": implementation}
            layer, root = layer_norm, rms_norm

        def f(*args):
            given = self.given(args)
            x, scale = given.pop("x"), given.pop("scale", None)
            bias = (given.pop("bias"),) if self.centred else ()
            found = (layer if self.centred else root)(x, scale, *bias, **given, **options)
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


def check(norm, implementation, shape, dtype, seed=0, offset=0.0, **how):
    args = norm.arrays(shape, dtype, seed, offset)
    check_rule(norm.call(implementation), norm.plain, norm.call(), args, seed=seed + 1, **how)


@pytest.fixture(params=["xla", "triton"])
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
PARAMETERS = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "bfloat16")]
FORMS = [
    *((Norm(), shape, dtype) for shape in SHAPES for dtype in DTYPES),
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
        for dtype in (jnp.bfloat16, jnp.float32)
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
    # More rows than a program takes at once, of GPT-2's width, and of a ragged width.
    (BIASED, (50, 768), jnp.bfloat16),
    (Norm(), (17, 257), jnp.bfloat16),
]


@pytest.mark.parametrize("norm, shape, dtype", FORMS, ids=str)
def test_outputs_and_gradients(backend, norm, shape, dtype):
    check(norm, backend, shape, dtype)


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


def test_rows_have_mean_zero_and_variance_one_and_do_not_see_shift_or_size(backend):
    x = 2 * jnp.asarray(np.random.default_rng(0).standard_normal((8, 200)), jnp.float32)
    one, zero = jnp.ones((200,), jnp.float32), jnp.zeros((200,), jnp.float32)
    f = functools.partial(layer_norm, scale=one, bias=zero, implementation=backend)
    y = f(x)
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(jnp.square(y).mean(-1), 1, atol=1e-5)
    np.testing.assert_allclose(f(3 * x + 7), y, atol=2e-5)


def test_total_that_nobody_reads_costs_no_array(triton_on_cpu, monkeypatch):
    launched = []
    call = _triton.call

    def watched(kernel, *args, **options):
        launched.append((kernel.__name__, options))
        return call(kernel, *args, **options)

    monkeypatch.setattr(_triton, "call", watched)
    args = BIASED.arrays((4, 16), jnp.float32)
    for read in (0, 1):
        launched.clear()
        f = lambda *args, read=read: jnp.square(BIASED.call("triton")(*args)[read]).sum()
        dx, dresidual, dresidual_bias = jax.grad(f, argnums=(0, 1, 4))(*args)
        assert [k["HAS_DTOTAL"] for name, k in launched if name == "norm_backward"] == [bool(read)]
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
    assert select(channels=768) == "triton" and select(channels=100_000) == "xla"
    with pytest.raises(ValueError, match="'triton' supports at most 8192 channels, not 100000"):
        select("triton", channels=100_000)


def test_errors():
    x, residual, scale, bias = Norm().arrays((2, 8), jnp.bfloat16)
    narrow, integer = bias.astype(jnp.bfloat16), bias.astype(jnp.int32)
    both = {"residual": residual}
    for gain, shift, how, message in [
        (scale, bias, {"residual": residual.astype(jnp.float32)},
         r"like x, \(2, 8\) in bfloat16, got \(2, 8\) in float32"),
        (scale, None, {}, r"layer_norm: expected bias of shape \(8,\), got None"),
        (scale, narrow, {}, "expected scale and bias in one dtype, .* got float32, bfloat16"),
        (scale, bias, {"residual_bias": bias}, "added together with a residual, and there is no"),
        (scale, bias, both | {"residual_bias": narrow}, "residual_bias in one dtype, .*bfloat16"),
        (scale, bias, both | {"residual_bias": bias[:4]}, r"residual_bias of shape .* \(4,\)"),
        (integer, integer, {}, "got int32, int32"),
        (scale, bias, {"out_dtype": jnp.int8}, "out_dtype float32, bfloat16 or float16, got int8"),
        (scale, bias[None], {}, r"expected bias of shape \(8,\), got \(1, 8\)"),
    ]:  # fmt: skip
        refused(layer_norm, x, gain, shift, **how, match=message)


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "norm, shape, dtype",
    [
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
    ],
    ids=str,
)
def test_triton_on_the_gpu(norm, shape, dtype):
    check(norm, "triton", shape, dtype)
