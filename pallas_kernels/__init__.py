"""GPU kernels for GPT-2, importable without gptjax.

Each folder holds one operation: its mathematics, a plain-JAX `reference()`, one file for each back
end, and public functions whose `implementation=` argument names the back end. "auto" selects the
fastest back end that supports the device, dtype and shape; a named back end runs or raises.
`select` returns the name of the back end that an operation uses.

Unless the docstring of a folder says otherwise:

    mosaic: Hopper (TMA and wgmma). Differentiable once, in reverse mode.
    triton: NVIDIA GPUs from Ampere on. Differentiable once, in reverse mode.
    xla: plain JAX; any device. Differentiable in reverse mode, its gradient in both modes.
    reference: the definition in fp32 with true fp32 matmuls; any device. JAX differentiates it:
        forward mode and higher derivatives work.
"""

from pallas_kernels._dispatch import select
from pallas_kernels.attention import flash_attention, flash_attention_qkv
from pallas_kernels.attention.projected import projected_attention
from pallas_kernels.attention.ring import ring_attention
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.classifier import SigmoidCap, fused_classifier
from pallas_kernels.decode import DecoderCache, DecoderWeights, decode_step
from pallas_kernels.feed_forward import linear_gelu, linear_relu_squared, mlp
from pallas_kernels.gated_mlp import swiglu
from pallas_kernels.gemm import quantize, scaled_matmul
from pallas_kernels.linear import linear
from pallas_kernels.lm_head import linear_cross_entropy
from pallas_kernels.norm import layer_norm, rms_norm
from pallas_kernels.rotary import rotary_qkv
from pallas_kernels.row_softmax import softmax
from pallas_kernels.sampling import Filters, sample_token
from pallas_kernels.symmetric import ba_plus_caa, xtx, xxt
from pallas_kernels.transpose import transpose_add, transpose_copy

__all__ = [
    "DecoderCache",
    "DecoderWeights",
    "Filters",
    "SigmoidCap",
    "ba_plus_caa",
    "cached_attention",
    "decode_step",
    "flash_attention",
    "flash_attention_qkv",
    "fused_classifier",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu_squared",
    "mlp",
    "projected_attention",
    "quantize",
    "ring_attention",
    "rms_norm",
    "rotary_qkv",
    "sample_token",
    "scaled_matmul",
    "select",
    "softmax",
    "swiglu",
    "transpose_add",
    "transpose_copy",
    "xtx",
    "xxt",
]
