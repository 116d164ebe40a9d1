"""Storage, compute and accumulation dtypes of each part of the model.

Precision belongs to a model, not to the process: importing gptjax changes no JAX setting.
"""

import dataclasses

import jax
import jax.numpy as jnp

NAMES = ("fp32", "tf32", "bf16", "bf16_residual_fp32", "fp8_head", "fp8")


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
    in FP8 (pallas_kernels/fp8). Evaluation and generation compute as bf16.

    Raises:
        ValueError: the name is not in the table.
    """

    name: str = "fp32"

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"unknown precision {self.name!r}; choose one of {list(NAMES)}")

    def __str__(self) -> str:
        return self.name

    @property
    def plain(self) -> str:
        """Name of the precision without FP8 matmuls."""
        return "bf16" if self.name.startswith("fp8") else self.name

    @property
    def fp8_head(self) -> bool:
        """Whether the matmuls of the LM head are in FP8."""
        return self.name.startswith("fp8")

    @property
    def fp8_blocks(self) -> bool:
        """Whether the matmuls of the blocks are in FP8."""
        return self.name == "fp8"

    @property
    def param_dtype(self) -> jnp.dtype:
        """Dtype of parameters, their gradients and the optimizer's moments."""
        return jnp.dtype(jnp.float32)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the inputs and outputs of matmuls."""
        return jnp.dtype(jnp.float32 if self.plain in ("fp32", "tf32") else jnp.bfloat16)

    @property
    def residual_dtype(self) -> jnp.dtype:
        """Dtype of the residual stream."""
        return jnp.dtype(jnp.bfloat16 if self.plain == "bf16" else jnp.float32)

    @property
    def matmul(self) -> jax.lax.Precision:
        """`precision` argument of every matmul.

        JAX's default for an fp32 matmul on Ampere and later is TF32, so true fp32 must be
        requested. The preset TF32_TF32_F32 would turn bf16 matmuls into TF32 matmuls at half the
        speed; HIGH means TF32 for fp32 inputs only.
        """
        return {"fp32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.HIGH}.get(
            self.name, jax.lax.Precision.DEFAULT
        )
