"""GPT-2 in PyTorch, from the equations, for the tests to compare with. The code is written for
reading, not for speed.

    x = wte[token] + wpe[position]
    x = x + attention(layer_norm(x));  x = x + mlp(layer_norm(x))        for each block
    logits = layer_norm(x) wteᵀ

Shapes: B batch, T time, C channels, H heads, D = C/H, V vocabulary. There is no padding of the
vocabulary here. Softmax, LayerNorm and loss statistics are at least fp32, and fp64 in an fp64
model.
"""

import contextlib
import math

import numpy as np
import torch
from comparison_tools import flatten
from torch import nn


class LayerNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        x = _at_least_fp32(x)
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class _Rounded(torch.autograd.Function):
    """Round x in the forward pass and the gradient in the backward pass; None rounds nothing."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.dtype = backward
        return _round(x, forward)

    @staticmethod
    def backward(ctx, gradient):
        return _round(gradient, ctx.dtype), None, None


def _round(x, dtype):
    """Round to an FP8 dtype, with a power of two that makes the largest number representable."""
    if dtype is None or not x.any():
        return x
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / x.abs().max().float())))
    return ((x * scale).to(dtype).to(torch.float32) / scale).to(x.dtype)


def fp8_linear(x, weight, bias=None):
    """A linear layer with FP8 matmuls in both passes: e4m3 times e4m3, or e5m2 for the gradient."""
    x, weight = (_Rounded.apply(a, torch.float8_e4m3fn, None) for a in (x, weight))
    return _Rounded.apply(nn.functional.linear(x, weight, bias), None, torch.float8_e5m2)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, c, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(c, 3 * c)
        self.c_proj = nn.Linear(c, c)

    def forward(self, x):
        b, t, c = x.shape
        d = c // self.n_head
        q, k, v = (
            y.view(b, t, self.n_head, d).transpose(1, 2) for y in self.c_attn(x).split(c, dim=-1)
        )
        scores = _at_least_fp32(q @ k.transpose(-1, -2)) / math.sqrt(d)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        y = weights.to(v.dtype) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c, 4 * c)
        self.c_proj = nn.Linear(4 * c, c)

    def forward(self, x):
        h = self.c_fc(x)
        gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.c_proj(gelu)


class Block(nn.Module):
    def __init__(self, c, n_head):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(c), Attention(c, n_head)
        self.ln_2, self.mlp = LayerNorm(c), MLP(c)


class TorchGPT2(nn.Module):
    """GPT-2. `residual` is the type of the stream that blocks add to; None is the type of the
    embeddings."""

    def __init__(self, *, vocab_size, block_size, n_layer, n_head, n_embd, residual=None):
        super().__init__()
        self.wte = nn.Parameter(torch.zeros(vocab_size, n_embd))
        self.wpe = nn.Parameter(torch.zeros(block_size, n_embd))
        self.blocks = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = LayerNorm(n_embd)
        self.residual = residual
        self.head = nn.functional.linear

    def in_fp8(self):
        """Use FP8 for the matmuls that are in FP8 in `gptjax.Precision("fp8")`."""
        for block in self.blocks:
            for layer in (block.attn.c_attn, block.mlp.c_fc, block.mlp.c_proj):
                layer.__class__ = Fp8Linear
        self.head = fp8_linear
        return self

    def forward(self, tokens):
        x = self.wte[tokens] + self.wpe[: tokens.shape[1]]
        x = x.to(self.residual or x.dtype)
        for block in self.blocks:
            x = x + block.attn(block.ln_1(x)).to(x.dtype)
            x = x + block.mlp(block.ln_2(x)).to(x.dtype)
        return self.head(self.ln_f(x), self.wte)

    def loss(self, tokens, targets):
        log_probs = torch.log_softmax(_at_least_fp32(self(tokens)), dim=-1)
        return -log_probs.gather(-1, targets[..., None]).mean()


def from_params(
    config, params: dict, *, dtype=torch.float32, device="cpu", residual=None
) -> TorchGPT2:
    """A model with the weights of ours.

    Args:
        config: a `gptjax.GPT2Config`; its padding is left out.
        params: `nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])`.
    """
    sizes = {
        name: getattr(config, name)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    }
    model = TorchGPT2(**sizes, residual=residual).to(dtype)
    ours = flatten(params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            array = np.array(ours.pop(_our_name(name)))
            array = (
                array[: config.vocab_size]
                if name == "wte"
                else array.T
                if _is_matrix(name)
                else array
            )
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    assert not ours, f"parameters without a counterpart in PyTorch: {list(ours)}"
    return model.to(device)


def to_numpy(model: TorchGPT2, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """The parameters or their gradients in fp64, under our names and in our layout."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = (parameter.grad if gradients else parameter.detach()).double().cpu().numpy()
        found[_our_name(name)] = tensor.T if _is_matrix(name) else tensor
    return found


def autocasts(precision: str) -> bool:
    """Whether a precision of ours is PyTorch's autocast to bf16."""
    return precision.startswith(("bf16", "fp8"))


@contextlib.contextmanager
def computing(precision: str, device: str = "cpu"):
    """PyTorch in the meaning of one of our precision names, until the block ends."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=autocasts(precision)):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _our_name(name: str) -> str:
    if name.endswith(".weight"):
        return name.removesuffix("weight") + ("scale" if "ln_" in name else "kernel")
    return name


def _is_matrix(name: str) -> bool:
    # nn.Linear keeps (out, in), our kernels are (in, out)
    return name.endswith(".weight") and "ln_" not in name


def _at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))
