"""Storage, compute and accumulation dtypes of each part of the model.

Precision belongs to a model, not to the process: importing gptjax changes no JAX setting.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gemm import Numerics


@dataclasses.dataclass(frozen=True)
class Parts:
    """Precision of each part of a model. Numerics are arguments of `pallas_kernels.linear`.

    Attributes:
        matmuls: numerics of all matmuls except those of `blocks` and `head`: fp32, tf32 or bf16.
        residual: dtype of the residual stream.
        blocks: numerics of the q, k and v projection, of attention's output projection of at least
            `WIDE` channels, and of the MLP, in the training step; None: `matmuls`.
        head: numerics of the LM head in the training step; None: `matmuls`.
    """

    matmuls: str
    residual: str
    blocks: str | Numerics | None = None
    head: str | Numerics | None = None

    @property
    def in_training(self) -> dict[str, str]:
        """Names of the numerics of `blocks` and `head`, without a part that is None."""
        parts = {"blocks": self.blocks, "head": self.head}
        given = {part: how for part, how in parts.items() if how is not None}
        return {part: str(getattr(how, "name", how)) for part, how in given.items()}

    def __str__(self) -> str:
        own = "".join(f"{part} {name}, " for part, name in self.in_training.items())
        matmuls = "other matmuls" if own else "matmuls"
        return f"{own}{matmuls} {self.matmuls}, residual stream {self.residual}"


PRECISIONS = {
    "fp32": Parts("fp32", "float32"),
    "tf32": Parts("tf32", "float32"),
    "bf16": Parts("bf16", "bfloat16"),
    "bf16_residual_fp32": Parts("bf16", "float32"),
    "fp8_head": Parts("bf16", "bfloat16", head="fp8"),
    "fp8": Parts("bf16", "bfloat16", blocks="fp8", head="fp8"),
}
"""By name. A further entry is a further precision: examples/new_precision.py."""

WIDE = 1024
"""Least number of channels for which attention's output projection is in FP8. With 768, the
conversion of the operands is estimated to cost the time that FP8 matmuls save."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """Precision configuration, equivalent to a configuration of PyTorch.

    | name               | matmul inputs | residual stream | PyTorch equivalent               |
    | ------------------ | ------------- | --------------- | -------------------------------- |
    | fp32               | true fp32     | fp32            | float32_matmul_precision highest |
    | tf32               | TF32          | fp32            | float32_matmul_precision high    |
    | bf16               | bf16          | bf16            | llm.c's bf16 with fp32 masters   |
    | bf16_residual_fp32 | bf16          | fp32            | torch.autocast(bfloat16)         |
    | fp8_head, fp8      | bf16, FP8     | bf16            | none                             |

    All use fp32 for parameters, for the accumulation of matmuls and gradients, and for the
    statistics of LayerNorm, softmax and the loss.

    fp8_head is bf16 with the matmuls of the LM head in FP8 (`pallas_kernels.linear_cross_entropy`)
    in the training step. In fp8, the matmuls of the q, k and v projection and of the MLP are also
    in FP8 (pallas_kernels/gemm), and those of attention's output projection of at least `WIDE`
    channels. Evaluation and generation compute as bf16.

    Raises:
        ValueError: the name is not in the table.
    """

    name: str = "fp32"

    def __post_init__(self):
        if self.name not in PRECISIONS:
            raise ValueError(f"unknown precision {self.name!r}; choose one of {list(PRECISIONS)}")

    def __str__(self) -> str:
        return self.name

    @property
    def parts(self) -> Parts:
        """Precision of each part."""
        return PRECISIONS[self.name]

    @property
    def plain(self) -> str:
        """Name of the precision of evaluation and generation."""
        return self.parts.matmuls if self.parts.in_training else self.name

    @property
    def blocks(self) -> str | Numerics:
        """Numerics of the matmuls of the blocks in the training step."""
        return self.parts.blocks or self.parts.matmuls

    def output_projection(self, width: int) -> str | Numerics:
        """Numerics of attention's output projection of `width` channels in the training step."""
        return self.blocks if width >= WIDE else self.parts.matmuls

    @property
    def head(self) -> str | Numerics:
        """Numerics of the matmuls of the LM head in the training step."""
        return self.parts.head or self.parts.matmuls

    @property
    def fp8_head(self) -> bool:
        """Whether the matmuls of the LM head are in FP8."""
        return self.parts.head == "fp8"

    @property
    def param_dtype(self) -> jnp.dtype:
        """Dtype of parameters, their gradients and the optimizer's moments."""
        return jnp.dtype(jnp.float32)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the inputs and outputs of matmuls."""
        return jnp.dtype(jnp.bfloat16 if self.parts.matmuls == "bf16" else jnp.float32)

    @property
    def residual_dtype(self) -> jnp.dtype:
        """Dtype of the residual stream."""
        return jnp.dtype(self.parts.residual)

    @property
    def matmul(self) -> jax.lax.Precision:
        """`precision` argument of matmuls in JAX's functions, and of attention.

        JAX's default for an fp32 matmul on Ampere and later is TF32, so true fp32 must be
        requested. The preset TF32_TF32_F32 would turn bf16 matmuls into TF32 matmuls at half the
        speed; HIGH means TF32 for fp32 inputs only.
        """
        return {"fp32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.HIGH}.get(
            self.parts.matmuls, jax.lax.Precision.DEFAULT
        )
