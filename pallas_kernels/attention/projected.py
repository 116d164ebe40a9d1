"""Causal attention of a packed projection, qkv = x W + b. The attention kernels compute the
gradient of b.

    db_q = Σ_t dq_t      db_k = Σ_s dk_s = 0      db_v = Σ_s dv_s = Σ_t do_t

The rows of P sum to one, so Σ_s dV_s = Σ_t (Σ_s P_ts) dO_t = Σ_t dO_t. The rows of dS = P ∘ (dO Vᵀ
− D) sum to D − D = 0, so Σ_s dK_s = scale · Σ_t (Σ_s dS_ts) Q_t = 0: a bias of the keys adds the
same number to all scores of a query, and the softmax is invariant to such a shift. A sum over all
of dqkv would read three arrays as large as the residual stream. The kernels' sums read at most dq.

Shapes: B batch, T time, C channels, H heads, D head dimension; N = B·T.

Back ends: the back ends of `flash_attention_qkv`. With `mosaic` the attention kernels compute db;
the other back ends sum dqkv. `reference` also uses the reference of `linear`: forward mode and
higher derivatives work. The other back ends are differentiable once, in reverse mode.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels.attention import Implementation, flash_attention_qkv
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.fp8.clipping import count, counted
from pallas_kernels.fp8.conversion import E5M2, Fp8Rows, rows_of, scale_for
from pallas_kernels.fp8.own_scale import GROUP, SAMPLED, Scale, Scaled
from pallas_kernels.matmul import checked_linear, weight_gradient
from pallas_kernels.matmul import reference as linear_reference

QKV_HEADROOM = 1024.0
"""With dqkv stored in FP8: largest supported ratio of max |dqkv| to the largest |dO| of the sampled
columns. |dV| ≤ T · max |dO|, since Σ_t P_ts ≤ T. Numbers down to 2⁻¹⁹ of max |dO| are normal in
e5m2."""


def projected_attention(
    x_BTC: Float[Array, "B T C"] | Fp8Rows,
    w_CO: Float[Array, "C O"],
    b_O: Float[Array, " O"],
    *,
    heads: int,
    fp8: bool = False,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"]:
    """Compute flash_attention_qkv(x W + b), causal. O = 3·H·D: all queries, all keys, all values.

    Args:
        x_BTC: fp32, bf16 or fp16.
        w_CO, b_O: of x's dtype or fp32. fp32 is rounded as in `pallas_kernels.linear`. The
            gradients have the dtypes of w_CO and b_O and are summed in fp32.
        fp8: whether the projection's matmuls are in FP8 where the call is differentiated
            (pallas_kernels/fp8/layers.py); not with "reference". x may then be the `Fp8Rows` of
            `layer_norm(fp8_scale=ACTIVATION_SCALE)`.
        implementation: "auto", "mosaic", "triton", "cudnn", "xla" or "reference".
        precision: precision of fp32 matmuls, also of the projection; as in `flash_attention`.

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    given, x_BTC = x_BTC, rows_of(x_BTC)
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
    if x_BTC.dtype not in _dispatch.DTYPES or any(
        a.dtype not in (x_BTC.dtype, jnp.float32) for a in (w_CO, b_O)
    ):
        raise ValueError(
            "projected_attention: expected x in float32, bfloat16 or float16, W and b in x's dtype "
            f"or float32, got {x_BTC.dtype}, {w_CO.dtype}, {b_O.dtype}"
        )
    length, head_dim, arrays = x_BTC.shape[1], b_O.size // (3 * heads), (x_BTC, w_CO, b_O)
    backend = _dispatch.select(
        "flash_attention",
        implementation,
        arrays=arrays,
        dtype=x_BTC.dtype,
        length=length,
        head_dim=head_dim,
        precision=precision,
    )
    options = Options(heads, precision, fp8)
    if backend == "mosaic":
        f = counted("projected_attention", _projected) if fp8 else _projected
        return _calls.differentiable("projected_attention", f, given, w_CO, b_O, options)
    qkv_BT3HD = _projection(*arrays, options, "reference" if backend == "reference" else "xla")
    return flash_attention_qkv(qkv_BT3HD, implementation=implementation, precision=precision)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    heads: int
    precision: jax.lax.PrecisionLike
    fp8: bool = False
    """Whether the projection's matmuls are in FP8 where the call is differentiated."""


def _projection(x_BTC, w_CO, b_O, options, implementation="xla"):
    qkv_BTO = checked_linear(
        "projected_attention", x_BTC, w_CO, b_O, implementation, options.precision, options.fp8
    )
    return qkv_BTO.reshape(*x_BTC.shape[:2], 3, options.heads, b_O.size // (3 * options.heads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _projected(x_BTC, w_CO, b_O, options):
    qkv_BT3HD = _projection(rows_of(x_BTC), w_CO, b_O, options)
    return flash_attention_qkv(qkv_BT3HD, implementation="mosaic")


def _projected_forward(x_BTC, w_CO, b_O, options):
    if options.fp8:
        from pallas_kernels.fp8 import layers

        b, t, c = rows_of(x_BTC).shape
        x_NC = x_BTC if isinstance(x_BTC, Fp8Rows) else x_BTC.reshape(b * t, c)
        qkv_NO, operands = layers.linear_forward(x_NC, w_CO, b_O)
        operands = operands, layers.kind_of(x_BTC)
        qkv_BT3HD = qkv_NO.reshape(b, t, 3, options.heads, -1)
    else:
        operands, qkv_BT3HD = (x_BTC, w_CO), _projection(x_BTC, w_CO, b_O, options)
    out_BTHD, lse_BHT = flash_attention_qkv(qkv_BT3HD, return_lse=True, implementation="mosaic")
    like = jnp.zeros((), w_CO.dtype)
    return out_BTHD, (operands, like, b_O, qkv_BT3HD, out_BTHD, lse_BHT)


def _projected_backward(options, saved, dout_BTHD):
    operands, like, b_O, *tensors = saved
    qkv_BT3HD, out_BTHD, lse_BHT = tensors
    arrays = (qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD)
    if options.fp8:
        from pallas_kernels.fp8 import layers

        dx_NC, dw_CO, dq_HD, dout_HD = _fp8_backward(operands[0], *arrays)
        dx_BTC = layers.cotangent(dx_NC.reshape(*qkv_BT3HD.shape[:2], -1), operands[1])
    else:
        (dqkv_BT3HD,), dq_HD, dout_HD = _attention_backward(*arrays)
        dqkv_NO = dqkv_BT3HD.reshape(-1, b_O.size)
        x_BTC, w_CO = operands
        dx_NC = jnp.matmul(dqkv_NO, w_CO.astype(dqkv_NO.dtype).T, precision=options.precision)
        x_NC = x_BTC.reshape(-1, x_BTC.shape[2])
        dw_CO = weight_gradient(x_NC, dqkv_NO, precision=options.precision)
        dx_BTC = dx_NC.reshape(x_BTC.shape)
    db_3HD = jnp.stack([dq_HD, jnp.zeros_like(dq_HD), dout_HD])
    return (
        dx_BTC,
        dw_CO.astype(like.dtype),
        db_3HD.reshape(-1).astype(b_O.dtype),
    )


_projected.defvjp(_projected_forward, _projected_backward)


def _fp8_backward(operands, qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD):
    """Return (dx, dW, Σ dq, Σ dO) with FP8 matmuls.

    Args:
        operands: saved by `layers.linear_forward`.
    """
    from pallas_kernels.attention import mosaic_backward
    from pallas_kernels.fp8 import layers

    batch, length, _, heads, head_dim = qkv_BT3HD.shape
    arrays, dtype = (qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD), qkv_BT3HD.dtype
    if not mosaic_backward.stores_fp8(batch, length, heads):
        (dqkv_BT3HD,), *sums = _attention_backward(*arrays)
        dqkv_NO = dqkv_BT3HD.reshape(batch * length, 3 * heads * head_dim)
        return *layers.linear_backward(operands, dqkv_NO), *sums
    scale = _scale_of_gradient(dout_BTHD.reshape(batch * length, heads * head_dim))
    (rows, transposed), *sums = _attention_backward(*arrays, scale.value)
    shape = batch * length, 3 * heads * head_dim
    count("output_gradient", rows)
    dqkv = Scaled(rows.reshape(shape), transposed.reshape(shape[::-1]), scale)
    return *layers.linear_gradients(operands, dqkv, dtype), *sums


def _scale_of_gradient(dout_NC):
    """Return the scale of dqkv."""
    from pallas_kernels.fp8.layers import ACTIVATION_SCALE

    n, c = dout_NC.shape
    sample = dout_NC.reshape(n, c // GROUP, GROUP)[:, :, :SAMPLED] if c % GROUP == 0 else dout_NC
    scale = scale_for(jnp.abs(sample).max(), E5M2, QKV_HEADROOM)
    return Scale(scale, 1 / scale, 1 / (ACTIVATION_SCALE * scale))


def _attention_backward(*arrays):
    """Return (dqkv, Σ dq, Σ dO), with dqkv as `mosaic_backward.backward` returns it.

    Args:
        arrays: qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD, and the scale of dqkv if dqkv is stored in
            FP8.
    """
    from pallas_kernels.attention import mosaic_backward

    def kernel(qkv_BT3HD, lse_BHT, dout_BTHD, out_BTHD, fp8_scale=None):
        return mosaic_backward.backward(
            (qkv_BT3HD,),
            None,
            lse_BHT,
            dout_BTHD,
            out_BTHD,
            None,
            causal=True,
            scale=qkv_BT3HD.shape[-1] ** -0.5,
            window=None,
            deterministic=False,
            true_fp32=False,
            bias=True,
            fp8_scale=fp8_scale,
        )

    return _calls.looped("projected_attention", kernel)(*arrays)


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
