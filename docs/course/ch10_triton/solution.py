"""Chapter 10: a fused classifier in Triton.

One program computes one row of logits: its loss, and the gradient, which overwrites the row.

Shapes: N rows (tokens), V vocabulary. A program loads BLOCK columns at a time.
"""

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
    m, s = -jnp.inf, 0.0
    blocks_V = [logits_V[i : i + block] for i in range(0, len(logits_V), block)]
    for x in blocks_V:
        new_m = jnp.maximum(m, x.max())
        s = s * jnp.exp(m - new_m) + jnp.exp(x - new_m).sum()
        m = new_m
    gradient_V = jnp.concatenate([jnp.exp(x - m) / s for x in blocks_V])
    return m + jnp.log(s) - logits_V[target], gradient_V.at[target].add(-1.0)


@triton.jit
def classifier_kernel(logits_ptr, targets_ptr, losses_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Store the loss of this program's row, and overwrite the row with its gradient."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row * V
    target = tl.load(targets_ptr + row)
    x_target = tl.load(row_ptr + target)

    m = -float("inf")
    s = 0.0
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < V, other=-float("inf"))
        new_m = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - new_m) + tl.sum(tl.exp(x - new_m), axis=0)
        m = new_m
    tl.store(losses_ptr + row, m + tl.log(s) - x_target)

    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < V, other=-float("inf"))
        gradient = tl.exp(x - m) / s - tl.where(column == target, 1.0, 0.0)
        tl.store(row_ptr + column, gradient, mask=column < V)


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
