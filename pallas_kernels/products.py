"""Matrix products and sums around the kernels that XLA makes, in the form that is fast on a GPU.

In TF32 Hopper's tensor cores want both operands contiguous along the axis that is summed over; cuBLAS's kernels for the other orders
reach half the rate (H200: xᵀ dy of 32768×768 and 32768×3072 at 193 TFLOP/s, where x wᵀ has 413). So operands that lie across are
transposed first where a precision of HIGH asks for TF32. bf16's tensor cores take any order.

Shapes: N rows, I inputs, O outputs.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.transpose import transpose_copy

# Rows of a column that are summed at a time, where there are no more than so many.
ROWS, FEW = 64, 8192


def product(x_NI, w_IO, *, precision: jax.lax.PrecisionLike, dtype: jax.typing.DTypeLike):
    """x w in `dtype`."""
    # Few rows, such as those of a sampled token, would not pay for the copy of w.
    if precision == jax.lax.Precision.HIGH and x_NI.shape[0] >= x_NI.shape[1]:
        w_OI = transpose_copy(w_IO)
        return jnp.einsum("ni,oi->no", x_NI, w_OI, precision=precision, preferred_element_type=dtype)
    return jnp.matmul(x_NI, w_IO, precision=precision, preferred_element_type=dtype)


def weight_gradient(x_NI, dy_NO, *, precision: jax.lax.PrecisionLike):
    """xᵀ dy in fp32."""
    if precision == jax.lax.Precision.HIGH:
        x_IN, dy_ON = transpose_copy(x_NI), transpose_copy(dy_NO)
        return jnp.einsum("in,on->io", x_IN, dy_ON, precision=precision, preferred_element_type=jnp.float32)
    return jnp.matmul(x_NI.T, dy_NO, precision=precision, preferred_element_type=jnp.float32)


def sum_rows(x_NO):
    """Σ_n x in fp32, the gradient of a bias."""
    x_NO = x_NO.astype(jnp.float32)
    n, o = x_NO.shape
    if n % ROWS or n > FEW:
        return x_NO.sum(0)
    # In one step XLA gives 4096×2304 to 18 programs, which take 41 µs on an H200. The barrier keeps it from making one step of two.
    # 65,536 rows it splits by itself: GPT-2 124M's biases cost 1.6 ms of a step so, and 2.9 in two steps.
    return jax.lax.optimization_barrier(x_NO.reshape(n // ROWS, ROWS, o).sum(1)).sum(0)
