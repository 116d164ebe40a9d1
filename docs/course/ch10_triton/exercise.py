"""Chapter 10: a fused classifier in Triton.

One program computes one row of logits: its loss, and the gradient, which overwrites the row.

Shapes: N rows (tokens), V vocabulary. A program loads BLOCK columns at a time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

BLOCK = 1024


def classify_row(logits_V, target, block):
    """Return the loss and the gradient of one row, as the kernel computes them.

    Pass 1 updates the maximum m and the sum s = Σ exp(x − m), `block` columns at a time:

        m' = max(m, max x)      s' = s · exp(m − m') + Σ exp(x − m')

    The loss is m + log s − x[target]. Pass 2 computes exp(x − m)/s − [column = target].
    """
    raise NotImplementedError("TODO: two passes over the blocks of the row")


@triton.jit
def classifier_kernel(logits_ptr, targets_ptr, losses_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Store the loss of this program's row, and overwrite the row with its gradient."""
    pass  # TODO: two loops over the blocks of the row, as in classify_row


def fused_classifier(logits_NV, targets_N):
    """Return the losses (N,) and the gradient (N, V) of fp32 logits, on a GPU.

    The launch needs an NVIDIA GPU. On a CPU, `triton_on_cpu.interpret` runs the kernel.
    """
    from pallas_kernels.extend import triton_call

    rows, vocab = logits_NV.shape
    gradient_NV, losses_N = triton_call(
        classifier_kernel,
        logits_NV,
        targets_N,
        out=[jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=(rows,),
        in_place=(0,),
        V=vocab,
        BLOCK=BLOCK,
    )
    return losses_N, gradient_NV
