"""Symmetric matmuls: a aᵀ, aᵀ a, and b·a + c·a a of a symmetric a, as used by Polar Express.

Shapes: M rows, K columns; any leading axes are a batch of matrices. Results are exactly symmetric:
the kernels compute only the tiles on and above the diagonal, n(n+1)/2 of n². Each tile above the
diagonal is stored a second time, transposed. Sums are fp32 and rounded once, also in b·a + c·a a.

Back ends:
    mosaic: Hopper (TMA and wgmma through Pallas Mosaic GPU). bf16 or fp16, sides that are multiples
        of 64.
    triton: NVIDIA GPUs from Ampere on. bf16 or fp16, any shape.
    xla: a batched matmul; any device. The result is exactly symmetric only if the library's matmul
        result is exactly symmetric.
    reference: the definition in fp32 with true fp32 matmuls, its gradients by JAX: forward mode and
        higher derivatives work. Any device.
mosaic, triton and xla are differentiable once, in reverse mode.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd

Implementation = Literal["auto", "mosaic", "triton", "xla", "reference"]


def xxt(
    a: Float[Array, "*batch M K"],
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch M M"]:
    """Compute a aᵀ of each matrix.

    Args:
        a: matrices in fp32, bf16 or fp16. The result has the same dtype.
        implementation: "auto", or a back end: "mosaic", "triton", "xla", "reference". Forward mode
            and second derivatives need "reference".
        precision: precision of fp32 matmuls in the "xla" back end (JAX's default for fp32 on a GPU
            is TF32).

    Raises:
        ValueError: wrong shape or dtype, or the named back end cannot run this call.
    """
    _check("xxt", a)
    backend = _dispatch.select("xxt", implementation, arrays=a, dtype=a.dtype, shape=a.shape)
    if backend == "reference":
        return xxt_reference(a).astype(a.dtype)
    return _calls.differentiable("xxt", _xxt, a, backend, precision)


def xtx(
    a: Float[Array, "*batch M K"],
    *,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch K K"]:
    """Compute aᵀ a of each matrix, without a transposed copy of `a`.

    Args:
        implementation: "auto", "mosaic", "triton", "xla" or "reference".

    The other arguments and the errors are as in `xxt`.
    """
    _check("xtx", a)
    backend = _dispatch.select("xtx", implementation, arrays=a, dtype=a.dtype, shape=a.shape)
    if backend == "reference":
        return xtx_reference(a).astype(a.dtype)
    return _calls.differentiable("xtx", _xtx, a, backend, precision)


def ba_plus_caa(
    a: Float[Array, "*batch M M"],
    *,
    b: float | Float[Array, ""],
    c: float | Float[Array, ""],
    d: float | Float[Array, ""] | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch M M"]:
    """Compute b·a + c·a a of each symmetric matrix a, plus d on the diagonal; rounded once.

    Args:
        a: symmetric matrices; the result for others is undefined.
        b, c, d: coefficients, in fp32. With d the result is the polynomial d·1 + b·a + c·a².
        implementation: "auto", "mosaic", "triton", "xla" or "reference".
        precision: as in `xxt`.

    Raises:
        ValueError: `a` is not square, or the named back end cannot run this call.
    """
    _check("ba_plus_caa", a)
    bcd = [jnp.asarray(x, jnp.float32) for x in (b, c, d) if x is not None]
    if any(x.ndim for x in bcd):
        raise ValueError(
            "ba_plus_caa: expected scalars b, c and d, got shapes "
            f"{', '.join(str(x.shape) for x in bcd)}"
        )
    backend = _dispatch.select(
        "ba_plus_caa", implementation, arrays=(a, bcd), dtype=a.dtype, shape=a.shape
    )
    if backend == "reference":
        return ba_plus_caa_reference(a, **dict(zip("bcd", bcd, strict=False))).astype(a.dtype)
    return _calls.differentiable("ba_plus_caa", _ba_plus_caa, a, jnp.stack(bcd), backend, precision)


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


def _why_not_triton(call: Facts) -> str | None:
    return _dispatch.why_not_triton() or _dispatch.why_not_16_bit(call.dtype)


def _order(operation: str, call: Facts, partitioned: bool) -> tuple[str, ...]:
    """Return the back ends, fastest first. Triton is slower than XLA: see
    docs/kernels/symmetric.md."""
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
        back_ends=[
            BackEnd("mosaic", _why_not_mosaic, custom=True),
            BackEnd("triton", _why_not_triton, custom=True),
            XLA,
            REFERENCE,
        ],
        facts=Facts,
        order=functools.partial(_order, _operation),
    )


# -------------------------------------------------------------------------------------- definitions


def xxt_reference(a):
    """Compute a aᵀ in fp32 with true fp32 matmuls, for every dtype."""
    return _matmul(
        a.astype(jnp.float32), _transposed(a.astype(jnp.float32)), jax.lax.Precision.HIGHEST
    )


def xtx_reference(a):
    """Compute aᵀ a in fp32 with true fp32 matmuls, for every dtype."""
    return _matmul(
        _transposed(a.astype(jnp.float32)), a.astype(jnp.float32), jax.lax.Precision.HIGHEST
    )


def ba_plus_caa_reference(a, *, b, c, d=0.0):
    """Compute b·a + c·a a + d·1 in fp32 with true fp32 matmuls, for every dtype."""
    a = a.astype(jnp.float32)
    return b * a + c * _matmul(a, a, jax.lax.Precision.HIGHEST) + d * _ones_on_the_diagonal(a)


# ---------------------------------------------------------------------------------------- gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _xxt(a, backend, precision):
    return _run(a, None, 2, backend, precision)


def _xxt_forward(a, backend, precision):
    return _xxt(a, backend, precision), a


def _xxt_backward(backend, precision, a, g):
    return (_matmul(g + _transposed(g), a, precision),)


_xxt.defvjp(_xxt_forward, _xxt_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _xtx(a, backend, precision):
    return _run(a, None, 1, backend, precision)


def _xtx_forward(a, backend, precision):
    return _xtx(a, backend, precision), a


def _xtx_backward(backend, precision, a, g):
    return (_matmul(a, g + _transposed(g), precision),)


_xtx.defvjp(_xtx_forward, _xtx_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _ba_plus_caa(a, bcd, backend, precision):
    return _run(a, bcd, 2, backend, precision)


def _ba_plus_caa_forward(a, bcd, backend, precision):
    return _ba_plus_caa(a, bcd, backend, precision), (a, bcd)


def _ba_plus_caa_backward(backend, precision, saved, g):
    a, bcd = saved
    matmul = functools.partial(_matmul, precision=precision, dtype=jnp.float32)
    a32, g32 = a.astype(jnp.float32), g.astype(jnp.float32)
    da = bcd[0] * g32 + bcd[1] * (matmul(g, _transposed(a)) + matmul(_transposed(a), g))
    # Under jit, XLA removes these gradients if the coefficients are constants.
    dbcd = [
        jnp.sum(g32 * a32),
        jnp.sum(g32 * matmul(a, a)),
        jnp.sum(g32 * _ones_on_the_diagonal(g32)),
    ]
    return da.astype(a.dtype), jnp.stack(dbcd[: len(bcd)])


_ba_plus_caa.defvjp(_ba_plus_caa_forward, _ba_plus_caa_backward)


# ---------------------------------------------------------------------------------------- back ends


def _run(a, bcd, contract, backend, precision):
    """Return a aᵀ (contract=2) or aᵀ a (contract=1).

    With `bcd`, return b·a + c·a aᵀ, plus d on the diagonal if there are three coefficients.
    """
    if backend == "xla" and bcd is not None:
        out = bcd[0] * a.astype(jnp.float32) + bcd[1] * _matmul(a, a, precision, dtype=jnp.float32)
        return (out if len(bcd) == 2 else out + bcd[2] * _ones_on_the_diagonal(out)).astype(a.dtype)
    if backend == "xla":
        x, y = (a, _transposed(a)) if contract == 2 else (_transposed(a), a)
        return _matmul(x, y, precision)
    a_BXY = a.reshape(-1, *a.shape[-2:])
    name = "ba_plus_caa" if bcd is not None else "xxt" if contract == 2 else "xtx"
    out_BMM = _kernel(name, backend, contract)(a_BXY, *([] if bcd is None else [bcd]))
    return out_BMM.reshape(*a.shape[:-2], *out_BMM.shape[1:])


@functools.cache
def _kernel(operation, backend, contract):
    """Return the kernel, cached: the kernel's jaxpr is lowered once for each shape."""
    if backend == "mosaic":
        from pallas_kernels.symmetric import mosaic as module
    else:
        from pallas_kernels.symmetric import triton as module

    symmetric_matmul = jax.jit(module.symmetric_matmul, static_argnames="contract")

    def kernel(a_BXY, bcd=None):
        return symmetric_matmul(a_BXY, bcd, contract=contract)

    return _calls.batched(operation, kernel, shared=int(operation == "ba_plus_caa"))


def _matmul(x, y, precision, dtype=None):
    return jnp.matmul(x, y, precision=precision, preferred_element_type=dtype)


def _ones_on_the_diagonal(x):
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _check(kernel, a):
    if a.ndim < 2 or a.dtype not in _dispatch.DTYPES:
        raise ValueError(
            f"{kernel}: expected matrices (..., M, K) in float32, bfloat16 or float16, got "
            f"{a.dtype} of shape {a.shape}"
        )
    if kernel == "ba_plus_caa" and a.shape[-1] != a.shape[-2]:
        raise ValueError(f"ba_plus_caa: expected square matrices (..., M, M), got shape {a.shape}")


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
        def call(a, **how):
            a = (a + jnp.swapaxes(a, -1, -2)) * 0.05
            return f(a, b=-1.5, c=0.7, d=0.3, **how)

        return call

    return _example(
        polynomial(ba_plus_caa), polynomial(ba_plus_caa_reference), dtype, (2, 256, 256)
    )
