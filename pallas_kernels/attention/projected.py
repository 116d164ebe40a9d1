"""Causal attention of a packed projection, qkv = x W + b. The attention kernels compute the
gradient of b.

    db_q = Σ_t dq_t      db_k = Σ_s dk_s = 0      db_v = Σ_s dv_s = Σ_t do_t

The rows of P sum to one, so Σ_s dV_s = Σ_t (Σ_s P_ts) dO_t = Σ_t dO_t. The rows of dS = P ∘ (dO Vᵀ
− D) sum to D − D = 0, so Σ_s dK_s = scale · Σ_t (Σ_s dS_ts) Q_t = 0: a bias of the keys adds the
same number to all scores of a query, and the softmax is invariant to such a shift. A sum over all
of dqkv would read three arrays as large as the residual stream. The kernels' sums read at most dq.

Shapes: B batch, T time, C channels, H heads, D head dimension; N = B·T.

Back ends: the back ends of `flash_attention_qkv`. With `mosaic` the attention kernels compute db;
the other back ends sum dqkv. `reference` also uses the reference of `linear`.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._partition import Rule, automatic
from pallas_kernels._types import Array, Float
from pallas_kernels.attention import Implementation, Options, flash_attention_qkv
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.gemm.numerics import Fp8, Numerics, like, numerics_of, split_like
from pallas_kernels.gemm.operands import Operand, check_dtypes, exact, separate
from pallas_kernels.linear import checked_linear, forward
from pallas_kernels.linear import reference as linear_reference

QKV_HEADROOM = 1024.0
"""With dqkv stored in FP8: largest supported ratio of max |dqkv| to the largest |dO| of the sampled
columns. |dV| ≤ T · max |dO|, since Σ_t P_ts ≤ T. Numbers down to 2⁻¹⁹ of max |dO| are normal in
e5m2."""


def projected_attention(
    x_BTC: Float[Array, "B T C"] | Operand,
    w_CO: Float[Array, "C O"],
    b_O: Float[Array, " O"],
    *,
    heads: int,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"]:
    """Compute flash_attention_qkv(x W + b), causal. O = 3·H·D: all queries, all keys, all values.

    Args:
        x_BTC: fp32, bf16 or fp16; or the `Operand` of a norm with the same numerics.
        w_CO, b_O: of x's dtype or fp32. fp32 is rounded as in `pallas_kernels.linear`. The
            gradients have the dtypes of w_CO and b_O and are summed in fp32.
        numerics: of the projection: "fp32", "tf32", "bf16", "fp8", or a
            `pallas_kernels.gemm.Numerics`. None: follows the dtypes and `precision`. "fp8": FP8
            matmuls where the call is differentiated; not with "reference". x may then be the
            `Operand` of a norm.
        implementation: "auto", "mosaic", "triton", "cudnn", "xla" or "reference".
        precision: precision of fp32 matmuls, also of the projection; as in `flash_attention`.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    given, x_BTC = x_BTC, exact(x_BTC)
    numerics = numerics_of("projected_attention", numerics, precision, Fp8())
    if (
        heads < 1
        or x_BTC.ndim != 3
        or w_CO.shape != (x_BTC.shape[2], *b_O.shape)
        or b_O.ndim != 1
        or b_O.size % (3 * heads)
    ):
        raise ValueError(
            "projected_attention: expected x (B, T, C), W (C, 3·H·D) and b (3·H·D,) with "
            f"H={heads}, got {x_BTC.shape}, {w_CO.shape}, {b_O.shape}"
        )
    check_dtypes("projected_attention", x_BTC, "W and b", w_CO, b_O)
    length, head_dim, arrays = x_BTC.shape[1], b_O.size // (3 * heads), (x_BTC, w_CO, b_O)
    backend = _dispatch.select(
        "flash_attention",
        implementation,
        arrays=arrays,
        dtype=x_BTC.dtype,
        length=length,
        head_dim=head_dim,
        precision=numerics.plain.precision,
    )
    if backend == "mosaic":

        def call(*arrays):
            return numerics.call("projected_attention", _projected, *arrays, heads, numerics)

        return automatic(call, x_BTC)(x_BTC, separate(given)[1], w_CO, b_O)
    named = "reference" if backend == "reference" else "auto"
    qkv_BTO = checked_linear("projected_attention", given, w_CO, b_O, named, numerics)
    qkv_BT3HD = qkv_BTO.reshape(*x_BTC.shape[:2], 3, heads, head_dim)
    how = {"implementation": implementation, "numerics": numerics.plain}
    return flash_attention_qkv(qkv_BT3HD, **how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _projected(x_BTC, converted, w_CO, b_O, heads, numerics):
    qkv_BT3HD, _ = _projection(x_BTC, None, w_CO, b_O, heads, numerics.plain)
    return flash_attention_qkv(qkv_BT3HD, implementation="mosaic")


def _projection(x_BTC, converted, w_CO, b_O, heads, numerics):
    """Return qkv, and the operands of the projection for the backward pass."""
    (b, t, c) = x_BTC.shape
    qkv_NO, operands = forward(x_BTC.reshape(b * t, c), converted, w_CO, b_O, numerics)
    return qkv_NO.reshape(b, t, 3, heads, -1), operands


def _projected_forward(x_BTC, converted, w_CO, b_O, heads, numerics):
    qkv_BT3HD, operands = _projection(x_BTC, converted, w_CO, b_O, heads, numerics)
    out = flash_attention_qkv(qkv_BT3HD, return_lse=True, implementation="mosaic")
    qkv_BT3HD, (out_BTHD, lse_BHT) = _calls.saved("flash_attention", (qkv_BT3HD, out))
    return out_BTHD, (operands, like(w_CO), b_O, qkv_BT3HD, out_BTHD, lse_BHT)


def _projected_backward(heads, numerics, saved, dout_BTHD):
    from pallas_kernels.attention import mosaic_backward

    (x, w), w_like, b_O, qkv_BT3HD, out_BTHD, lse_BHT = saved
    arrays, (b, t) = (qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD), qkv_BT3HD.shape[:2]
    shape, dtype = (b * t, b_O.size), qkv_BT3HD.dtype
    scale = None
    if mosaic_backward.stores_fp8(b, t, heads):
        scale = numerics.kernel_scale(dout_BTHD.reshape(b * t, -1), QKV_HEADROOM)
    if scale is not None:
        (rows, k_major), dq_HD, dout_HD = _attention_backward(*arrays, scale.value)
        dqkv = Operand(rows.reshape(shape), k_major.reshape(shape[::-1]), scale)
        numerics.count("output_gradient", dqkv)
    else:
        (dqkv_BT3HD,), dq_HD, dout_HD = _attention_backward(*arrays)
        dqkv = numerics.output_gradient(dqkv_BT3HD.reshape(shape))
    dx_NC = numerics.input_gradient(dqkv, w, dtype)
    dw_CO = split_like(numerics.weight_gradient(x, dqkv), w_like)
    db_3HD = jnp.stack([dq_HD, jnp.zeros_like(dq_HD), dout_HD])
    return dx_NC.reshape(b, t, -1), None, dw_CO, db_3HD.reshape(-1).astype(b_O.dtype)


_projected.defvjp(_projected_forward, _projected_backward)


def _attention_backward(*arrays):
    """Return (dqkv, Σ dq, Σ dO), with dqkv as `mosaic_backward.backward` returns it.

    Args:
        arrays: qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD, and the scale of dqkv if dqkv is stored in
            FP8.
    """
    from pallas_kernels.attention import mosaic_backward

    def kernel(qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD, fp8_scale=None):
        how = {"options": Options(scale=qkv_BT3HD.shape[-1] ** -0.5), "bias": True}
        args = ((qkv_BT3HD,), None, lse_BHT, dout_BTHD, out_BTHD, None)
        return mosaic_backward.backward(*args, **how, fp8_scale=fp8_scale)

    given = "b t z h d, b h t, b t h d, b t h d"
    results = "h d, h d"
    if len(arrays) > 4:
        given, results = f"{given}, ", f"z h d b t, {results}"
    rule = Rule(f"{given} -> b t z h d, {results}", "b h")
    return _calls.looped("projected_attention", kernel, rule=rule)(*arrays)


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("flash_attention")
def _example(rows, dtype):
    """Projection and heads of GPT-2 in 16 bits: the kernels that sum the bias's gradient."""
    if dtype == jnp.float32:
        return None
    t = min(rows, 1024)

    def call(x_BTC, w_CO, b_O, **how):
        return projected_attention(x_BTC, w_CO * 768**-0.5, b_O, heads=12, **how)

    def expected(x_BTC, w_CO, b_O):
        qkv_NO = linear_reference(x_BTC.reshape(rows, 768), w_CO * 768**-0.5, b_O)
        qkv_BT3HD = qkv_NO.reshape(*x_BTC.shape[:2], 3, 12, 64)
        return attention_reference(*jnp.moveaxis(qkv_BT3HD, 2, 0))

    sizes = ((rows // t, t, 768), (768, 2304), (2304,))
    arrays = tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)
    return _dispatch.Example(call, expected, arrays)
