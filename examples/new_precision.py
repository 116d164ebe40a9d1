"""A precision of its own: FP8 matmuls whose scales come from the largest number of each array.

    python train.py --config examples/new_precision.py

`pallas_kernels.gemm.Fp8` has constant scales for activations, and reads a sample of a gradient.
Here each conversion first reads its whole array (docs/precision.md). A class says how an
activation, a weight and a gradient become operands, and how two operands are multiplied; every
layer of GPT-2 with matmuls of the blocks, and the head, uses it in the training step. Evaluation
computes in bf16.
"""

import dataclasses

import jax.numpy as jnp

from gptjax import Config, GPT2Config, OptimizerConfig, Precision
from gptjax.precision import PRECISIONS, Parts
from pallas_kernels.gemm import E4M3, E5M2, Numerics, Operand, quantize, scale_for, scaled_matmul
from pallas_kernels.gemm.numerics import joined
from pallas_kernels.gemm.operands import Scale


def converted(x, dtype) -> Operand:
    """Return both layouts of x in FP8, with the largest scale at which no number is clipped."""
    scale = scale_for(jnp.abs(x).max(initial=0.0), dtype)
    q = quantize(x, scale, dtype, transposed=True)
    return Operand(q.rows, q.transposed, Scale.of(scale, 1.0))


@dataclasses.dataclass(frozen=True)
class DynamicFp8(Numerics):
    """e4m3 activations and weights, e5m2 gradients, one scale for each array."""

    name = "dynamic_fp8"

    def activation(self, x):
        return converted(x, E4M3)

    def weight(self, w, output_major=False):
        w = converted(joined(w, jnp.bfloat16), E4M3)
        return w.T if output_major else w

    def gradient(self, dy):
        return converted(dy, E5M2)

    def matmul(self, a, b, dtype):
        scale = a.scale.inverse * b.scale.inverse
        return scaled_matmul(a.rows, b.k_major, scale, out_dtype=dtype)


PRECISIONS["dynamic_fp8"] = Parts("bf16", "bfloat16", blocks=DynamicFp8(), head=DynamicFp8())

config = Config(
    name="dynamic_fp8",
    device="auto",
    dataset="stdlib_byte",
    model=GPT2Config(
        vocab_size=257,
        block_size=128,
        n_layer=2,
        n_head=4,
        n_embd=128,
        precision=Precision("dynamic_fp8"),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20),
    sequence_length=128,
    micro_batch=8,
    batch_tokens=1024,
    max_steps=200,
    val_every=100,
)
