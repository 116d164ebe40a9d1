"""Which type each part of the model is stored, multiplied and accumulated in.

Precision belongs to a model, not to the process: importing gptjax changes no JAX setting.
"""

import dataclasses

import jax
import jax.numpy as jnp

NAMES = ("fp32", "tf32", "bf16", "bf16_residual_fp32")


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision configuration, equal in meaning to one of PyTorch's.

    | name               | matmul inputs | residual stream | equal in meaning to              |
    | ------------------ | ------------- | --------------- | -------------------------------- |
    | fp32               | true fp32     | fp32            | float32_matmul_precision highest |
    | tf32               | TF32          | fp32            | float32_matmul_precision high    |
    | bf16               | bf16          | bf16            | llm.c's bf16 with fp32 masters   |
    | bf16_residual_fp32 | bf16          | fp32            | torch.autocast(bfloat16)         |

    Parameters, the accumulation of matmuls and gradients, and the statistics of LayerNorm, softmax
    and the loss are fp32 in each.

    Raises:
        ValueError: a name that is not in the table.
    """

    name: str = "fp32"

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"unknown precision {self.name!r}; choose one of {list(NAMES)}")

    def __str__(self) -> str:
        return self.name

    @property
    def param_dtype(self) -> jnp.dtype:
        """Storage of parameters, their gradients and the optimizer's moments."""
        return jnp.dtype(jnp.float32)

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Inputs and outputs of matrix products."""
        return jnp.dtype(jnp.bfloat16 if self.name.startswith("bf16") else jnp.float32)

    @property
    def residual_dtype(self) -> jnp.dtype:
        """The stream that blocks add to."""
        return jnp.dtype(jnp.bfloat16 if self.name == "bf16" else jnp.float32)

    @property
    def matmul(self) -> jax.lax.Precision:
        """The `precision=` of every matrix product.

        JAX's default for an fp32 product on Ampere and later is TF32, so true fp32 has to be asked
        for. The preset TF32_TF32_F32 would turn bf16 products into TF32 ones at half the speed;
        HIGH means TF32 for fp32 inputs only.
        """
        return {"fp32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.HIGH}.get(
            self.name, jax.lax.Precision.DEFAULT
        )
