"""Chunks of `linear_cross_entropy` with FP8 matmuls.

    x8 = e4m3(x·s_x)      w8 = e4m3(W·s_w)      d8 = e5m2(dlogits·s_d)
    logits = x8 w8ᵀ / (s_x·s_w)      dx = d8 w8 / (s_d·s_w)      dW = Σ_chunks d8ᵀ x8 / (s_d·s_x)

Each FP8 matmul reads both operands K-major. x and W are stored in two copies, and a separate pass
transposes d8. dx and dW are sums of many terms, and use cuBLASLt's slower, more accurate sums.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.classifier import classify_to_fp8
from pallas_kernels.fp8 import E4M3, quantize, scale_for, scaled_matmul, transposed
from pallas_kernels.fp8.clipping import count


class HeadScales(NamedTuple):
    """Factors by which the operands are multiplied before they are rounded to FP8.

    The defaults are powers of two near the factors of the modded-nanogpt speedrun (x 448/100, w
    448/1.6, gradient 448/0.75). Scaled numbers beyond 448 (x, w) or 57,344 (gradient) are clipped.
    """

    x: float = 4.0
    w: float | None = None
    """Factor of W. None: computed from the largest weight at each call."""
    gradient: float = 512.0
    """Factor of dlogits. |dlogits| is at most the sum of the target weights times the cap's slope.
    """


def quantized_head(scales: HeadScales, w_VC):
    """Return the weights in FP8 (rows and transposed), and their scale."""
    w_scale = scales.w
    if w_scale is None:
        w_scale = scale_for(jnp.abs(w_VC).max(), E4M3)
    return quantize(w_VC, w_scale, E4M3, transposed=True), w_scale


def chunk_gradients(scales: HeadScales, x_KC, head, targets, weights_M, **loss):
    """Return (losses_K, dx_KC, the chunk's part of dW_VC in fp32).

    Args:
        head: from `quantized_head`.
        loss: vocab_size, softcap and ignore_index.
    """
    w8, w_scale = head
    x8 = quantize(x_KC, scales.x, E4M3, transposed=True)
    logits_KV = scaled_matmul(x8.rows, w8.rows, 1 / (scales.x * w_scale), out_dtype=x_KC.dtype)
    losses_K, d8_KV = classify_to_fp8(logits_KV, targets, weights_M, scale=scales.gradient, **loss)
    count("input", x8.rows)
    count("output_gradient", d8_KV)
    exact = {"fast_accumulation": False}
    dx_scale, dw_scale = 1 / (scales.gradient * w_scale), 1 / (scales.gradient * scales.x)
    dx_KC = scaled_matmul(d8_KV, w8.transposed, dx_scale, out_dtype=x_KC.dtype, **exact)
    dw_VC = scaled_matmul(
        transposed(d8_KV), x8.transposed, dw_scale, out_dtype=jnp.float32, **exact
    )
    return losses_K, dx_KC, dw_VC
