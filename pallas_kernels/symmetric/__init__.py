"""Symmetric matmuls: a aᵀ, aᵀ a, and b·a + c·a a of a symmetric a, as used by Polar Express.

Shapes: M rows, K columns; any leading axes are a batch of matrices. Results are exactly symmetric:
the kernels compute only the tiles on and above the diagonal, n(n+1)/2 of n². Each tile above the
diagonal is stored a second time, transposed. Sums are fp32 and rounded once, also in b·a + c·a a.

Back ends (reference as in pallas_kernels/__init__.py):
    mosaic: bf16 or fp16, sides that are multiples of 64.
    xla: a batched matmul. The result is exactly symmetric only if the library's matmul result is
        exactly symmetric.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float
from pallas_kernels.gemm.numerics import Numerics, numerics_of

Implementation = Literal["auto", "mosaic", "xla", "reference"]


def xxt(
    a: Float[Array, "*batch M K"],
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
    numerics: str | Numerics | None = None,
) -> Float[Array, "*batch M M"]:
    """Compute a aᵀ of each matrix.

    Args:
        a: matrices in fp32, bf16 or fp16. The result has the same dtype.
        implementation: "auto", or a back end: "mosaic", "xla", "reference". Forward mode needs
            "reference"; second derivatives need "reference" or "xla".
        precision: precision of fp32 matmuls in the "xla" back end (JAX's default for fp32 on a GPU
            is TF32).
        numerics: "fp32", "tf32", "bf16", or a `pallas_kernels.gemm.Plain`. None: follows the dtype
            and `precision`.

    Raises:
        ValueError: wrong shape, dtype or numerics, or the named back end cannot run this call.
    """
    return _apply("xxt", a, [], implementation, precision, numerics)


def xtx(
    a: Float[Array, "*batch M K"],
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
    numerics: str | Numerics | None = None,
) -> Float[Array, "*batch K K"]:
    """Compute aᵀ a of each matrix, without a transposed copy of `a`.

    Args:
        implementation: "auto", "mosaic", "xla" or "reference".

    The other arguments and the errors are as in `xxt`.
    """
    return _apply("xtx", a, [], implementation, precision, numerics)


def ba_plus_caa(
    a: Float[Array, "*batch M M"],
    *,
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    d: float | Float[Array, ""] | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
    numerics: str | Numerics | None = None,
) -> Float[Array, "*batch M M"]:
    """Compute b·a + c·a a of each symmetric matrix a, plus d on the diagonal; rounded once.

    Args:
        a: symmetric matrices; the result for others is undefined.
        b, c, d: coefficients, in fp32. With d the result is the polynomial d·1 + b·a + c·a².
        implementation: "auto", "mosaic", "xla" or "reference".
        precision, numerics: as in `xxt`.

    Raises:
        ValueError: as in `xxt`; `a` is not square, or a coefficient is no scalar.
    """
    bcd = [jnp.asarray(x, jnp.float32) for x in (b, c, d) if x is not None]
    if any(x.ndim for x in bcd):
        raise ValueError(
            "ba_plus_caa: expected scalars b, c and d, got shapes "
            f"{', '.join(str(x.shape) for x in bcd)}"
        )
    return _apply("ba_plus_caa", a, bcd, implementation, precision, numerics)


def _apply(operation, a, bcd, implementation, precision, numerics):
    if a.ndim < 2 or a.dtype not in _dispatch.DTYPES:
        raise ValueError(
            f"{operation}: expected matrices (..., M, K) in float32, bfloat16 or float16, got "
            f"{a.dtype} of shape {a.shape}"
        )
    if bcd and a.shape[-1] != a.shape[-2]:
        raise ValueError(f"{operation}: expected square matrices (..., M, M), got shape {a.shape}")
    how = numerics_of(operation, numerics, precision)
    facts = {"dtype": a.dtype, "shape": a.shape}
    backend = _dispatch.select(operation, implementation, arrays=(a, bcd), **facts)
    if backend == "reference":
        return REFERENCES[operation](a, **dict(zip("bcd", bcd, strict=False))).astype(a.dtype)
    options = Options(operation, backend, how.precision)
    return _calls.differentiable(operation, _symmetric, a, jnp.stack(bcd) if bcd else None, options)


# ------------------------------------------------------------------------------------------ choice


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    shape: tuple[int, ...]


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic() or _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.shape[-1] % 64 or call.shape[-2] % 64:
        return f"supports matrices whose sides are multiples of 64, not {call.shape}"
    return None


def _order(operation: str, call: Facts, partitioned: bool) -> tuple[str, ...]:
    faster = _why_not_mosaic(call) is None and _is_faster(operation, call.shape)
    return ("mosaic", "xla") if faster else ("xla",)


def _is_faster(operation: str, shape: tuple[int, ...]) -> bool:
    """Return whether `mosaic` computes half of the tiles in less time than XLA computes all tiles.

    The criterion is the number of rounds of work items over the SMs, measured on an H200
    (docs/kernels/symmetric.md). A work item of `mosaic` is two tiles; a work item of XLA's kernel
    has as many results, 128×256.
    """
    from pallas_kernels import _mosaic

    batch, side = math.prod(shape[:-2]), shape[-1] if operation == "xtx" else shape[-2]
    n = math.ceil(side / 128)
    items, all_tiles, sms = batch * math.ceil(n * (n + 1) / 4), batch * n * n, _mosaic.num_sms()
    rounds = math.ceil(items / sms)
    # XLA stores a matmul and loads it again for b·a + c·a a.
    return all_tiles / 2 >= (1.0 if operation == "ba_plus_caa" else 1.15) * rounds * sms


for _operation in ("xxt", "xtx", "ba_plus_caa"):
    _dispatch.register(
        _operation,
        back_ends=[BackEnd("mosaic", _why_not_mosaic, custom=True, rule=True), XLA, REFERENCE],
        facts=Facts,
        order=functools.partial(_order, _operation),
    )


# -------------------------------------------------------------------------------------- definitions


def xxt_reference(a):
    """Compute a aᵀ in fp32 with true fp32 matmuls, for every dtype."""
    return _in_fp32(a, a.mT)


def xtx_reference(a):
    """Compute aᵀ a in fp32 with true fp32 matmuls, for every dtype."""
    return _in_fp32(a.mT, a)


def ba_plus_caa_reference(a, *, b, c, d=None):
    """Compute b·a + c·a a + d·1 in fp32 with true fp32 matmuls, for every dtype."""
    return _polynomial(_in_fp32, a.astype(jnp.float32), b, c, d)


def _in_fp32(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _polynomial(matmul, a, b, c, d=None):
    out = b * a.astype(jnp.float32) + c * matmul(a, a)
    return out if d is None else out + d * _ones_on_the_diagonal(out)


def _ones_on_the_diagonal(x):
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


REFERENCES = {"xxt": xxt_reference, "xtx": xtx_reference, "ba_plus_caa": ba_plus_caa_reference}


# -------------------------------------------------------------------------- back ends and gradients


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    operation: str
    backend: str
    precision: jax.lax.PrecisionLike

    def matmul(self, x, y, dtype=None):
        """Return x y with XLA."""
        return jnp.matmul(x, y, precision=self.precision, preferred_element_type=dtype)


def _run(a, bcd, options):
    """Return a aᵀ or aᵀ a; with `bcd`, b·a + c·a a, plus d on the diagonal if there is a d."""
    if options.backend == "mosaic":
        kernel = _mosaic_kernel(options.operation)
        return kernel(a) if bcd is None else kernel(a, bcd)
    if bcd is not None:
        matmul = functools.partial(options.matmul, dtype=jnp.float32)
        return _polynomial(matmul, a, *bcd).astype(a.dtype)
    return options.matmul(*((a.mT, a) if options.operation == "xtx" else (a, a.mT)))


@functools.cache
def _mosaic_kernel(operation):
    """Return the kernel, cached: the kernel's jaxpr is lowered once for each shape."""
    from pallas_kernels.symmetric import mosaic

    kernel = jax.jit(functools.partial(mosaic.symmetric_matmul, transposed=operation == "xtx"))
    coefficients = ", d" if operation == "ba_plus_caa" else ""
    rule = Rule(f"b* x y{coefficients} -> b* m n", over="b*")
    return _calls.batched(operation, kernel, rule=rule)


_symmetric = jax.custom_vjp(_run, nondiff_argnums=(2,))


def _forward(a, bcd, options):
    return _run(a, bcd, options), (a, bcd)


def _backward(options, saved, g):
    a, bcd = saved
    if bcd is None:
        both = g + g.mT
        return options.matmul(*((a, both) if options.operation == "xtx" else (both, a))), None
    matmul = functools.partial(options.matmul, dtype=jnp.float32)
    a32, g32 = a.astype(jnp.float32), g.astype(jnp.float32)
    da = bcd[0] * g32 + bcd[1] * (matmul(g, a.mT) + matmul(a.mT, g))
    # Under jit, XLA removes these gradients if the coefficients are constants.
    derivatives = (a32, matmul(a, a), _ones_on_the_diagonal(g32))[: len(bcd)]
    return da.astype(a.dtype), jnp.stack([jnp.sum(g32 * x) for x in derivatives])


_symmetric.defvjp(_forward, _backward)


# ----------------------------------------------------------------------------------------- examples


def _example(f, reference, dtype, size=(2, 256, 768)):
    # Two matrices for every number of tokens: the matrices are parameters.
    return _dispatch.Example(f, reference, (jax.ShapeDtypeStruct(size, dtype),))


@_dispatch.example("xxt")
def _xxt_example(rows, dtype):
    """Two wide matrices."""
    return _example(xxt, xxt_reference, dtype)


@_dispatch.example("xtx")
def _xtx_example(rows, dtype):
    """Two wide matrices: the contracted axis is not contiguous."""
    return _example(xtx, xtx_reference, dtype)


@_dispatch.example("ba_plus_caa")
def _ba_plus_caa_example(rows, dtype):
    """Two symmetric matrices, with all three coefficients."""

    def polynomial(f):
        return lambda a, **how: f((a + a.mT) * 0.05, b=-1.5, c=0.7, d=0.3, **how)

    call, reference = polynomial(ba_plus_caa), polynomial(ba_plus_caa_reference)
    return _example(call, reference, dtype, (2, 256, 256))
