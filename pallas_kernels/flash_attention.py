"""Scaled dot-product attention: O = softmax(scale · Q Kᵀ + mask) V, row by row, for each head.

Shapes: B batch, T queries, S keys, H heads, D head dimension; all tensors are B·T·H·D ("BTHD").

Back ends:
    cudnn: cuDNN's fused flash attention through `jax.nn.dot_product_attention`, memory O(T). bf16 or fp16 only.
    xla: the T×T matrix is materialised; any device, any dtype. Softmax statistics are fp32 in every dtype.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._choose import named, platform


def flash_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTHD: Float[Array, "B T H D"],
    v_BTHD: Float[Array, "B T H D"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    implementation: str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H D"]:
    """Attention of every query to the keys at or before it.

    Args:
        q_BTHD, k_BTHD, v_BTHD: queries, keys, values of one dtype.
        causal: query t sees keys 0…t; otherwise all.
        scale: multiplies Q·K; 1/√D when None.
        window: query t sees only its last `window` keys, t−window+1…t. Needs `causal`.
        implementation: "auto", or one of the back ends above.
        precision: of the fp32 matrix products in the `xla` back end (JAX's own default for fp32 on a GPU is TF32).

    Returns:
        An array like `q_BTHD`.

    Raises:
        ValueError: inputs disagree in shape or dtype, or the named back end cannot run them.
    """
    _check(q_BTHD, k_BTHD, v_BTHD, causal=causal, window=window)
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    backend = choose(q_BTHD.dtype, q_BTHD.shape[1], q_BTHD.shape[-1], implementation)
    if backend == "cudnn":
        return jax.nn.dot_product_attention(
            q_BTHD,
            k_BTHD,
            v_BTHD,
            scale=scale,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    return _materialised(q_BTHD, k_BTHD, v_BTHD, causal=causal, scale=scale, window=window, precision=precision)


def choose(dtype: jax.typing.DTypeLike, length: int, head_dim: int, implementation: str = "auto") -> str:
    """The back end that `flash_attention` uses for this dtype, sequence length and head dimension on the default device.

    Raises:
        ValueError: the named back end does not exist or cannot run here.
    """
    supported = {"cudnn": _why_not_cudnn(jnp.dtype(dtype), length, head_dim), "xla": None}
    if implementation == "auto":
        return next(name for name, why in supported.items() if why is None)
    return named("flash_attention", implementation, supported)


def reference(q_BTHD, k_BTHD, v_BTHD, *, causal: bool = True, scale: float | None = None, window: int | None = None):
    """The definition, in fp32 with true fp32 products, whatever the inputs are. Returns fp32, shape B·T·H·D."""
    q_BTHD, k_BTHD, v_BTHD = (x.astype(jnp.float32) for x in (q_BTHD, k_BTHD, v_BTHD))
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    return _materialised(
        q_BTHD, k_BTHD, v_BTHD, causal=causal, scale=scale, window=window, precision=jax.lax.Precision.HIGHEST
    )


def _materialised(q_BTHD, k_BTHD, v_BTHD, *, causal, scale, window, precision):
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, precision=precision, preferred_element_type=jnp.float32)
    scores_BHTS = scores_BHTS * scale
    if causal:
        t_T1, s_1S = jnp.arange(q_BTHD.shape[1])[:, None], jnp.arange(k_BTHD.shape[1])[None, :]
        visible_TS = s_1S <= t_T1
        if window is not None:
            visible_TS &= s_1S > t_T1 - window
        scores_BHTS = jnp.where(visible_TS[None, None], scores_BHTS, -jnp.inf)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD, precision=precision)


def _why_not_cudnn(dtype: jnp.dtype, length: int, head_dim: int) -> str | None:
    if platform() not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, and the default device is a {platform()}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, not {dtype.name}"
    if head_dim % 8 or head_dim > 128:
        return f"takes a head dimension that is a multiple of 8 and at most 128, not {head_dim}"
    if length % 2:
        return f"takes an even sequence length (its backward pass does), not {length}"
    return None


def _check(q_BTHD, k_BTHD, v_BTHD, *, causal, window):
    if not (q_BTHD.ndim == 4 and q_BTHD.shape == k_BTHD.shape == v_BTHD.shape):
        raise ValueError(
            "flash_attention: expected q, k, v of one shape (batch, time, heads, head_dim), "
            f"got {q_BTHD.shape}, {k_BTHD.shape}, {v_BTHD.shape}"
        )
    if not q_BTHD.dtype == k_BTHD.dtype == v_BTHD.dtype:
        raise ValueError(
            f"flash_attention: expected one dtype for q, k, v, got {q_BTHD.dtype}, {k_BTHD.dtype}, {v_BTHD.dtype}"
        )
    if window is not None and not (causal and window >= 1):
        raise ValueError(
            f"flash_attention: a window needs causal=True and a size of at least 1, got {causal=} {window=}"
        )
