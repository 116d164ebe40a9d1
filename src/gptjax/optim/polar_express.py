"""Orthogonal factor of a matrix by matmuls only: Polar Express, and Muon's Newton–Schulz iteration.

Both methods scale X ← X / (‖X‖_F · margin + 1e-6), then iterate X ← a·X + b·(X Xᵀ)X + c·(X Xᵀ)²X.
Polar Express has other coefficients in each step. The iteration moves each singular value towards 1
and keeps the singular vectors: U Σ Vᵀ becomes approximately U Vᵀ.

Gram matrices and polynomials are the symmetric matmuls of `pallas_kernels`.

Amsel, Persson, Musco, Gower, "The Polar Express", 2025; Jordan et al., "Muon", 2024.

Shapes: M×N matrices, any leading axes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# From modded-nanogpt's record: for singular values down to 1e-3, with a margin of 2 % for bf16.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),)


def polar_express(
    x: Float[Array, "*B M N"],
    *,
    steps: int = 5,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str = "auto",
) -> Float[Array, "*B M N"]:
    """Return approximately U Vᵀ of each matrix U Σ Vᵀ.

    Five exact steps map singular values from 0.00102 to 1 times the norm to 0.859 … 1.141, and
    0.001 to 0.847. Rounding to bf16 changes small singular values further. A zero matrix stays
    zero; a matrix with a NaN becomes NaN.

    Args:
        x: matrices of any shape, in fp32 or 16 bits.
        steps: number of iterations. Iterations after the fifth use the fifth's coefficients.
        dtype: dtype of the matmuls' inputs; float32 selects true fp32 matmuls. The norm, the
            coefficients and every sum are always fp32.
        implementation: back end of the symmetric matmuls (`pallas_kernels.xxt` lists them).

    Returns:
        An array like x.

    Raises:
        ValueError: x is not a matrix, steps is not positive, or the named back end cannot run here.
    """
    return _iterate(x, POLAR_EXPRESS, steps, 1.02, dtype, implementation)


def newton_schulz(
    x: Float[Array, "*B M N"],
    *,
    steps: int = 5,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str = "auto",
) -> Float[Array, "*B M N"]:
    """Return approximately U Vᵀ of each matrix, with the coefficients of Muon in every step.

    Five exact steps map singular values from 0.002 to 1 times the norm to 0.68 … 1.20. Args and
    errors: see `polar_express`.
    """
    return _iterate(x, NEWTON_SCHULZ, steps, 1.0, dtype, implementation)


def _iterate(x, coefficients, steps, margin, dtype, implementation):
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"expected matrices (..., M, N) of floating-point numbers, got {x.shape} in {x.dtype}"
        )
    if steps < 1:
        raise ValueError(f"expected at least one step, got {steps}")
    # Imported here: an optimizer that does not call this function imports no kernels.
    from pallas_kernels import ba_plus_caa, xtx, xxt

    dtype = jnp.dtype(dtype)
    options = {
        "implementation": implementation,
        "precision": "highest" if dtype == jnp.float32 else None,
    }
    wide = x.shape[-2] <= x.shape[-1]
    x32 = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.square(x32).sum((-2, -1), keepdims=True))
    y = _rounded(x32 / (norm * margin + 1e-6), dtype)
    for a, b, c in (coefficients + coefficients[-1:] * steps)[:steps]:
        # Use the smaller of X Xᵀ and Xᵀ X; no matrix is transposed.
        gram = _rounded(xxt(y, **options) if wide else xtx(y, **options), dtype)
        # a·1 + b·gram + c·gram²: the step is then one matmul. A separate addition of a·y would need
        # another pass over fp32 results (docs/tried.md).
        polynomial = _rounded(ba_plus_caa(gram, b=b, c=c, d=a, **options), dtype)
        left, right = (polynomial, y) if wide else (y, polynomial)
        y = _rounded(jnp.matmul(left, right, precision=options["precision"]), dtype)
    return y.astype(x.dtype)


def _rounded(x, dtype):
    # Without the barrier XLA uses the unrounded value in fp32 operations and the rounded value in
    # matmuls: the polynomial of one matrix is applied to another, with an error of 2.2 % instead of
    # 1.2 % (256×1024, on a CPU).
    return jax.lax.optimization_barrier(x.astype(dtype))
