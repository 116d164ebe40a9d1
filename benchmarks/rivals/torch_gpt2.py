"""GPT-2 in PyTorch, written for fast training, and the training step of any PyTorch model, which
`bench step --torch` and `bench ladder` measure.

The model follows "reproduce GPT-2 (124M)": `torch.compile` of the model with its loss,
scaled_dot_product_attention, autocast to bf16, fused AdamW with decay of matrices alone, clip by
the global norm. Parameters have Hugging Face's names and PyTorch's layout.

Shapes: B batch, T time, C channels, H heads, D = C/H, V rows of the embedding. Padding counts as
vocabulary here: the loss covers it, as in the original.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable

import torch
import torch_fp8
from torch import nn
from torch.nn import functional
from torch_side import torch_model

from gptjax.models.base import ModelConfig
from gptjax.models.gpt2 import INIT_STD, GPT2Config


@dataclasses.dataclass(frozen=True)
class How:
    """Options of PyTorch's step; the ladder switches them on one by one."""

    precision: str = "bf16"
    """fp32, tf32, bf16 by autocast; fp8_head and fp8 are bf16 with FP8 matmuls (`torch_fp8`) in the
    head, or in the head and all linear layers of the blocks."""
    compiled: bool = True
    """torch.compile of the model and its loss."""
    flash: bool = True
    """PyTorch's scaled_dot_product_attention with its default kernel; otherwise all scores are in
    memory."""
    padded: bool = True
    """The padded vocabulary; otherwise the real one."""
    fused: bool = True
    """AdamW in one kernel."""

    @property
    def autocast(self) -> bool:
        """Whether bf16 is the dtype of the computation."""
        return self.precision not in ("fp32", "tf32")

    @property
    def fp8_head(self) -> bool:
        """Whether the matmuls of the head are in FP8."""
        return self.precision.startswith("fp8")

    @property
    def linear(self) -> type[nn.Linear]:
        """Class of the linear layers of the blocks."""
        return torch_fp8.Linear if self.precision == "fp8" else nn.Linear

    def __str__(self) -> str:
        fp8 = {"fp8": ["FP8 matmuls"], "fp8_head": ["FP8 head"]}.get(self.precision, [])
        parts = (
            "compile" if self.compiled else "eager",
            "SDPA" if self.flash else "attention by hand",
        )
        return ", ".join(
            [*parts, *fp8, *["padded vocabulary"] * self.padded, *["fused AdamW"] * self.fused]
        )


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, how: How):
        super().__init__()
        self.n_head, self.flash = config.n_head, how.flash
        self.c_attn = how.linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = how.linear(config.n_embd, config.n_embd)
        if not how.flash:
            future = torch.ones(config.block_size, config.block_size, dtype=torch.bool).triu(1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x_BTC):
        b, t, c = x_BTC.shape
        q, k, v = (
            y.view(b, t, self.n_head, -1).transpose(1, 2)
            for y in self.c_attn(x_BTC).split(c, dim=-1)
        )
        if self.flash:
            y_BHTD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores_BHTT = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y_BHTD = scores_BHTT.masked_fill(self.future[:t, :t], float("-inf")).softmax(-1) @ v
        return self.c_proj(y_BHTD.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config: GPT2Config, how: How):
        super().__init__()
        self.c_fc = how.linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = how.linear(4 * config.n_embd, config.n_embd)

    def forward(self, x_BTC):
        return self.c_proj(functional.gelu(self.c_fc(x_BTC), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, how: How):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config, how)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config, how)

    def forward(self, x_BTC):
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        return x_BTC + self.mlp(self.ln_2(x_BTC))


def head_loss(x_BTC, scale_C, bias_C, wte_VC, targets_BT, fp8: bool = False):
    """Return the loss of the residual stream: last norm, head, mean cross-entropy in fp32."""
    x_BTC = functional.layer_norm(x_BTC, scale_C.shape, scale_C, bias_C)
    logits_BTV = (torch_fp8.linear if fp8 else functional.linear)(x_BTC, wte_VC)
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class GPT2(nn.Module):
    """The model with its loss: (tokens_BT, targets_BT) → mean cross-entropy in nats."""

    def __init__(self, config: GPT2Config, how: How):
        super().__init__()
        rows = config.padded_vocab_size if how.padded else config.vocab_size
        self.wte = nn.Parameter(torch.empty(rows, config.n_embd))
        self.wpe = nn.Parameter(torch.empty(config.block_size, config.n_embd))
        self.blocks = nn.ModuleList(Block(config, how) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head_loss, self.fp8_head = head_loss, how.fp8_head
        for name, parameter in self.named_parameters():
            self.initialize(name, parameter)

    def initialize(self, name: str, parameter: torch.Tensor) -> None:
        """Fill the parameter of that name with its initial values."""
        if parameter.ndim == 2:
            depth = (2 * len(self.blocks)) ** 0.5 if "c_proj" in name else 1
            nn.init.normal_(parameter, std=INIT_STD / depth)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens_BT, targets_BT):
        x_BTC = functional.embedding(tokens_BT, self.wte) + self.wpe[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        norm = self.ln_f.weight, self.ln_f.bias
        return self.head_loss(x_BTC, *norm, self.wte, targets_BT, self.fp8_head)


def free_torch() -> None:
    """Free the device memory that PyTorch holds and does not use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class TorchStep:
    """A training step, or the forward pass alone, on random tokens.

    Args:
        config: the model's shape; its precision and back ends are ignored.
        device: "cuda" or "cpu".
        forward: the loss alone, without gradients.
        like: a step that differs only in precision or optimizer: its compiled model is shared.

    Attributes:
        peak: the most bytes that PyTorch held in a step; None before the first `rest`, and on a
            CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        how: How,
        *,
        batch: int,
        sequence_length: int,
        device: str,
        forward: bool = False,
        like: "TorchStep | None" = None,
    ):
        self.how, self.device, self.forward = how, device, forward
        self.autocast = how.autocast
        self.peak: int | None = None
        self.model, self.loss = (like.model, like.loss) if like else self.build(config)
        with torch.device(device):
            torch.manual_seed(1)
            windows = torch.randint(0, config.vocab_size, (batch, sequence_length + 1))
        self.tokens_BT, self.targets_BT = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=how.fused
        )

    def build(self, config: ModelConfig) -> tuple[nn.Module, Callable]:
        """Return the model, and the function that is called for its loss."""
        with torch.device(self.device):
            torch.manual_seed(0)
            model = torch_model(config, self.how)
        # dynamic=False: otherwise a model with another vocabulary would be compiled for dynamic
        # sizes.
        return model, torch.compile(model, dynamic=False) if self.how.compiled else model

    def run(self, steps: int) -> float:
        """Return the device's seconds for this number of consecutive steps; the first call
        compiles."""
        # TF32 stays on under autocast, as in the original.
        torch.set_float32_matmul_precision("highest" if self.how.precision == "fp32" else "high")
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return time.perf_counter() - started

    def step(self) -> torch.Tensor:
        """Run one step; return the loss before the update."""
        bf16 = torch.autocast(self.device, torch.bfloat16, enabled=self.autocast)
        with bf16, torch.no_grad() if self.forward else contextlib.nullcontext():
            loss = self.loss(self.tokens_BT, self.targets_BT)
        if not self.forward:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def rest(self) -> None:
        """Between two turns: measure the peak of one more step, and free the unused memory for
        JAX."""
        if self.device != "cuda":
            return
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        self.peak = torch.cuda.max_memory_allocated()
        free_torch()

    def make_room(self, needed: int) -> None:
        """Free the model and its optimizer if the device has fewer free bytes than needed. No step
        runs after that."""
        if self.device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
            self.model = self.loss = self.optimizer = None
            # The compiled functions also hold the parameters.
            torch._dynamo.reset()
            free_torch()

    def has_room(self) -> bool:
        """Return whether a step can run in the free memory; call it after `rest`."""
        if self.model is None:
            return False
        return (
            not self.peak
            or torch.cuda.mem_get_info()[0] >= self.peak - torch.cuda.memory_allocated()
        )

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
