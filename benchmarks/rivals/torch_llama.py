"""Llama 3 in PyTorch, written for fast training: the model that `bench step --torch` compares with
gptjax's.

q, k and v are one linear layer, and so are gate and up: two GEMMs less than in `transformers`.
Attention is scaled_dot_product_attention with `enable_gqa`. The optimizer and the step are those of
`torch_gpt2.TorchStep`.

Shapes: B batch, T time, C channels, H query heads, K key and value heads, D = C/H, E = D/2, F
channels of the MLP, V rows of the embedding. Padding counts as vocabulary here: the loss covers it.
"""

import math

import torch
import torch_fp8
from torch import nn
from torch.nn import functional
from torch_gpt2 import How

from gptjax.models.llama3 import HIGH_TURNS, INIT_STD, LOW_TURNS, Llama3Config


def rotation(config: Llama3Config, length: int, like: torch.Tensor):
    """Return cosine and sine of the angles of each position, (T, E), in at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    pair_E = torch.arange(0, config.head_dim, 2, device=like.device).to(dtype)
    f_E = config.rope_theta ** -(pair_E / config.head_dim)
    turns_E = config.rope_original_length * f_E / (2 * math.pi)
    kept_E = ((turns_E - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
    f_E = kept_E * f_E + (1 - kept_E) * f_E / config.rope_scaling
    angle_TE = torch.arange(length, device=like.device).to(dtype)[:, None] * f_E
    return angle_TE.cos(), angle_TE.sin()


def rotated(x_BHTD, rotate):
    cos_TE, sin_TE = rotate
    a, b = x_BHTD.to(cos_TE.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos_TE - b * sin_TE, b * cos_TE + a * sin_TE], -1).to(x_BHTD.dtype)


class Attention(nn.Module):
    def __init__(self, config: Llama3Config, how: How):
        super().__init__()
        self.heads, self.flash = [config.n_head, config.kv_heads, config.kv_heads], how.flash
        outputs = sum(self.heads) * config.head_dim
        self.qkv = how.linear(config.n_embd, outputs, bias=False)
        self.o = how.linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x_BTC, rotate):
        b, t, c = x_BTC.shape
        heads_BHTD = self.qkv(x_BTC).view(b, t, sum(self.heads), -1).transpose(1, 2)
        q, k, v = heads_BHTD.split(self.heads, dim=1)
        q, k = rotated(q, rotate), rotated(k, rotate)
        if self.flash:
            y_BHTD = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        else:
            group = self.heads[0] // self.heads[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores_BHTT = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            future_TT = torch.ones(t, t, dtype=torch.bool, device=x_BTC.device).triu(1)
            y_BHTD = scores_BHTT.masked_fill(future_TT, float("-inf")).softmax(-1) @ v
        return self.o(y_BHTD.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config: Llama3Config, how: How):
        super().__init__()
        self.gate_up = how.linear(config.n_embd, 2 * config.n_inner, bias=False)
        self.down = how.linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x_BTC):
        gate_BTF, up_BTF = self.gate_up(x_BTC).chunk(2, dim=-1)
        return self.down(functional.silu(gate_BTF) * up_BTF)


class Block(nn.Module):
    def __init__(self, config: Llama3Config, how: How):
        super().__init__()
        c, eps = config.n_embd, config.norm_eps
        self.norm_1, self.attn = nn.RMSNorm(c, eps=eps), Attention(config, how)
        self.norm_2, self.mlp = nn.RMSNorm(c, eps=eps), MLP(config, how)

    def forward(self, x_BTC, rotate):
        x_BTC = x_BTC + self.attn(self.norm_1(x_BTC), rotate)
        return x_BTC + self.mlp(self.norm_2(x_BTC))


def head_loss(x_BTC, scale_C, eps: float, head_VC, targets_BT, fp8: bool = False):
    """Return the loss of the residual stream: last norm, head, mean cross-entropy in fp32."""
    x_BTC = functional.rms_norm(x_BTC, scale_C.shape, scale_C, eps)
    logits_BTV = (torch_fp8.linear if fp8 else functional.linear)(x_BTC, head_VC)
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Llama3(nn.Module):
    """The model with its loss: (tokens_BT, targets_BT) → mean cross-entropy in nats."""

    def __init__(self, config: Llama3Config, how: How):
        super().__init__()
        rows = config.padded_vocab_size if how.padded else config.vocab_size
        self.wte = nn.Parameter(torch.empty(rows, config.n_embd))
        self.blocks = nn.ModuleList(Block(config, how) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Parameter(torch.empty(rows, config.n_embd))
        self.config, self.head_loss, self.fp8_head = config, head_loss, how.fp8_head
        for name, parameter in self.named_parameters():
            self.initialize(name, parameter)

    def initialize(self, name: str, parameter: torch.Tensor) -> None:
        """Fill the parameter of that name with its initial values."""
        if parameter.ndim == 2:
            to_residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
            depth = (2 * len(self.blocks)) ** 0.5 if to_residual else 1
            nn.init.normal_(parameter, std=INIT_STD / depth)
        else:
            nn.init.ones_(parameter)

    def forward(self, tokens_BT, targets_BT):
        x_BTC = functional.embedding(tokens_BT, self.wte)
        rotate = rotation(self.config, tokens_BT.shape[1], x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotate)
        head_VC = self.wte if self.lm_head is None else self.lm_head
        norm = self.norm.weight, self.config.norm_eps
        return self.head_loss(x_BTC, *norm, head_VC, targets_BT, self.fp8_head)
