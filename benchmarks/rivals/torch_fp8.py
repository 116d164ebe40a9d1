"""Linear layers with FP8 matmuls in PyTorch, by `torch._scaled_mm`, as nanochat's and torchao's.

    y = x wᵀ + b      dx = dy w      dw = dyᵀ x

x and w are e4m3, dy is e5m2. Each array has one scale, from its largest magnitude at each call. The
forward matmul accumulates in the tensor cores, the others add to fp32 registers at intervals.
Results are bf16.

Shapes: N rows, I inputs, O outputs, each a multiple of 16.
"""

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x times a scale in FP8, and the inverse of the scale, fp32."""
    largest = torch.finfo(dtype).max
    inverse = x.abs().max().float().clamp(min=1e-30) / largest
    return (x.float() / inverse).clamp(-largest, largest).to(dtype), inverse


def matmul(a_NK, b_MK, scales, *, fast: bool, bias=None) -> torch.Tensor:
    """Return a bᵀ of FP8 matrices, each times its factor in `scales`, and the bias in bf16."""
    a_scale, b_scale = scales
    return torch._scaled_mm(
        a_NK,
        b_MK.t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NI, w_OI, b_O):
        (x, x_scale), (w, w_scale) = quantize(x_NI, E4M3), quantize(w_OI, E4M3)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        ctx.dtypes = x_NI.dtype, w_OI.dtype, None if b_O is None else b_O.dtype
        bias = None if b_O is None else b_O.to(torch.bfloat16)
        return matmul(x, w, (x_scale, w_scale), fast=True, bias=bias)

    @staticmethod
    def backward(ctx, dy_NO):
        x_NI, x_scale, w_OI, w_scale = ctx.saved_tensors
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        dy, scale = quantize(dy_NO, E5M2)
        # Tensor cores read FP8 operands along the axis of the sum only.
        dx_NI = matmul(dy, w_OI.t().contiguous(), (scale, w_scale), fast=False)
        dw_OI = matmul(dy.t().contiguous(), x_NI.t().contiguous(), (scale, x_scale), fast=False)
        db_O = None if b_dtype is None else dy_NO.sum(0, dtype=torch.float32).to(b_dtype)
        return dx_NI.to(x_dtype), dw_OI.to(w_dtype), db_O


def linear(x: torch.Tensor, w_OI: torch.Tensor, b_O: torch.Tensor | None = None) -> torch.Tensor:
    """Return x wᵀ + b in bf16, (…, O).

    Raises:
        ValueError: a size is not a multiple of 16.
    """
    x_NI = x.flatten(0, -2)
    if any(size % 16 for size in (*x_NI.shape, *w_OI.shape)):
        raise ValueError(
            "PyTorch's FP8 matmuls: expected multiples of 16 as sizes, got "
            f"{tuple(x_NI.shape)} and {tuple(w_OI.shape)}; choose another --batch or --precision"
        )
    return _Linear.apply(x_NI, w_OI, b_O).unflatten(0, x.shape[:-1])


class Linear(nn.Linear):
    """`nn.Linear` with FP8 matmuls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)
