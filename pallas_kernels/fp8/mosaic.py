"""FP8 kernels for Hopper (Pallas Mosaic GPU): matmul, linear layer with an activation, and its
gradient.

Operands and results are FP8 (e4m3fn or e5m2), K-major. If the next matmul reads a result by
columns, a transposed copy is also stored.

    quantize(v) = v · scale, clipped to the largest finite value, rounded to nearest even

The scale of a matmul is an fp32 scalar, or a tuple of scalars whose product is the scale. XLA would
launch a kernel to multiply two scalars.

Shapes: M rows (tokens), N or O columns of the result, K or C contracted. A warpgroup stores its
tile in parts of 64 rows.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import pl, plgpu, store_transposed, swizzled
from pallas_kernels.fp8.activations import GELU, Activation
from pallas_kernels.fp8.mosaic_tiles import DEPTH, Tiles, tiled

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class MatmulScratch(NamedTuple):
    """Scratch of `matmul`'s epilogue, in the order of its allocation. `bias` and `bias_full` are
    None without a bias."""

    out: Any
    bias: Any
    bias_full: Any


class ForwardScratch(NamedTuple):
    """Scratch of `linear_activated`'s epilogue, in the order of its allocation. None without a
    bias, without a transposed copy, or without a stored derivative."""

    bias: Any
    y: Any
    transposed: Any
    derivative: Any
    bias_full: Any


class BackwardScratch(NamedTuple):
    """Scratch of `activated_backward`'s epilogue, in the order of its allocation."""

    saved: Any
    du: Any
    transposed: Any
    saved_full: Any


# Largest K of one sum in the tensor core. The error, 1e-3, equals that of rounding a sum to bf16.
FAST = 4096
# Model for `split`: seconds per step of a 128×192 tile on one SM, and per byte of partial results.
STEP_SECONDS, BYTE_SECONDS = 0.7e-6, 1 / 3.5e12
MOST_SHARES = 16


def column_tiles(n: int) -> Tiles:
    """Return tiles whose columns divide n, if there are such tiles."""
    return Tiles() if n % Tiles().columns == 0 else Tiles(columns=128, stages=5)


def matmul_tiles(m: int, n: int, k: int, out_dtype) -> Tiles:
    """Return the tiles of `matmul`. Long sums over K are promoted, and K is split if the result has
    too few tiles for all SMs."""
    part_columns = 128 // jnp.dtype(out_dtype).itemsize
    if k <= FAST:
        return dataclasses.replace(column_tiles(n), part_columns=part_columns)
    tiles = dataclasses.replace(column_tiles(n), rows=64, cooperative=True, promote=4)
    pairs = m // (tiles.block_rows * tiles.cluster) * (n // tiles.columns)
    clusters = _mosaic.num_sms() // tiles.cluster

    def seconds(split: int) -> float:
        steps = pl.cdiv(k // DEPTH, split) * pl.cdiv(pairs * split, clusters)
        moved = (2 * split + 1) * m * n * 4 if split > 1 else 0
        return steps * STEP_SECONDS + moved * BYTE_SECONDS

    split = min(range(1, MOST_SHARES + 1), key=seconds)
    # Partial results of a split K are fp32.
    part_columns = 32 if split > 1 else part_columns
    return dataclasses.replace(tiles, split=split, part_columns=part_columns)


def why_not(m: int, n: int, k: int) -> str | None:
    """Return None if the kernels compute M×N results over K, else the reason."""
    columns = Tiles().columns, column_tiles(1).columns
    if all(n % number for number in columns):
        return f"needs N a multiple of {columns[0]} or {columns[1]}, got N={n}"
    return column_tiles(n).why_not(m, n, k)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles"))
def matmul(a_MK, b_NK, scale, out_dtype=jnp.bfloat16, bias_N=None, *, tiles: Tiles | None = None):
    """Return scale · a bᵀ + bias, M×N in `out_dtype`.

    Args:
        a_MK, b_NK: e4m3fn or e5m2, mixed too.
        scale: see the top of this file.
        bias_N: fp32, or None.
    """
    m, n = a_MK.shape[0], b_NK.shape[0]
    sizes = m, n, a_MK.shape[1]
    _refuse("matmul", tiles.why_not(*sizes) if tiles else why_not(*sizes))
    tiles = tiles or matmul_tiles(*sizes, out_dtype)
    split = tiles.split > 1
    bias_N = None if bias_N is None else bias_N.astype(jnp.float32)
    dtype = jnp.dtype(jnp.float32 if split else out_dtype)
    # XLA adds the partial results of a split K, then the bias.
    in_kernel = [] if split or bias_N is None else [bias_N]

    scales = _scalars(scale)

    def begin(at, others, scratch):
        if in_kernel:
            _start_bias(at, others[-1], scratch)

    def finish(at, acc_RP, others, out_gmem, scratch):
        factor = _product(others[: len(scales)])
        if in_kernel:
            plgpu.barrier_wait(scratch.bias_full.at[at.wg])
        for part, (rows, columns) in enumerate(tiles.parts()):
            smem = scratch.out.at[at.wg, part % tiles.slots]
            result = acc_RP[rows, columns] * factor
            if in_kernel:
                result = _add_bias(result, at, columns, scratch)
            plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
            smem[...] = result.astype(dtype)
            target = out_gmem[0].at[at.share, at.rows, at.columns].at[rows, columns]
            _copy_to_gmem([(smem, target)])

    (out_SMN,) = tiled(
        a_MK,
        b_NK,
        *scales,
        *in_kernel,
        tiles=tiles,
        begin=begin,
        finish=finish,
        out_type=[jax.ShapeDtypeStruct((tiles.split, m, n), dtype)],
        scratch=MatmulScratch(
            out=swizzled((2, tiles.slots, 64, tiles.part_columns), dtype),
            bias=plgpu.SMEM((2, tiles.columns), jnp.float32) if in_kernel else None,
            bias_full=plgpu.Barrier(num_barriers=2) if in_kernel else None,
        ),
    )
    if not split:
        return out_SMN[0]
    out_MN = out_SMN.sum(0)
    return (out_MN if bias_N is None else out_MN + bias_N[None]).astype(out_dtype)


@functools.partial(jax.jit, static_argnames=("activation", "transposed", "tiles"))
def linear_activated(
    x_MK,
    w_NK,
    b_N,
    scale,
    *,
    activation: Activation = GELU,
    transposed: bool = True,
    tiles: Tiles | None = None,
):
    """Return (y, yᵀ, derivative) of the activation of u = scale · x wᵀ + b.

    y is quantize(activation(u)) in e4m3, M×N, and yᵀ its transposed copy, or None without
    `transposed`. The derivative times `activation.stored_scale` is M×N in
    `activation.derivative_dtype`; None if that is None.

    Args:
        b_N: fp32, or None.
        scale: see the top of this file.
    """
    (m, k), n = x_MK.shape, w_NK.shape[0]
    _refuse("linear_activated", tiles.why_not(m, n, k) if tiles else why_not(m, n, k))
    tiles = tiles or column_tiles(n)
    scales, bias = _scalars(scale), [] if b_N is None else [b_N.astype(jnp.float32)]
    dtype = activation.derivative_dtype
    stored = [] if dtype is None else [jnp.dtype(dtype)]

    def begin(at, others, scratch):
        if bias:
            _start_bias(at, others[-1], scratch)

    def finish(at, acc_RP, others, out_gmem, scratch):
        factor = _product(others[: len(scales)])
        y_gmem, *rest = out_gmem
        if bias:
            plgpu.barrier_wait(scratch.bias_full.at[at.wg])
        for part, (rows, columns) in enumerate(tiles.parts()):
            slot = part % tiles.slots
            u = acc_RP[rows, columns] * factor
            y, derivative = activation(_add_bias(u, at, columns, scratch) if bias else u)
            plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
            y_smem = scratch.y.at[at.wg, slot]
            copies = [(y_smem, y_gmem.at[at.rows, at.columns].at[rows, columns])]
            quantized = (y * activation.scale).astype(E4M3)
            y_smem[...] = quantized
            if stored:
                smem = scratch.derivative.at[at.wg, slot]
                smem[...] = (derivative * activation.stored_scale).astype(stored[0])
                copies.append((smem, rest[0].at[at.rows, at.columns].at[rows, columns]))
            if transposed:
                smem = scratch.transposed.at[at.wg, slot]
                store_transposed(smem, quantized)
                copies.append((smem, rest[-1].at[at.columns, at.rows].at[columns, rows]))
            _copy_to_gmem(copies)

    part_shape = (2, tiles.slots, 64, tiles.part_columns)
    y_MN, *rest = tiled(
        x_MK,
        w_NK,
        *scales,
        *bias,
        tiles=tiles,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, n), E4M3),
            *[jax.ShapeDtypeStruct((m, n), dtype) for dtype in stored],
            *[jax.ShapeDtypeStruct((n, m), E4M3)] * transposed,
        ],
        scratch=ForwardScratch(
            bias=plgpu.SMEM((2, tiles.columns), jnp.float32) if bias else None,
            y=swizzled(part_shape, E4M3),
            transposed=swizzled(_transposed(part_shape), E4M3) if transposed else None,
            derivative=swizzled(part_shape, stored[0]) if stored else None,
            bias_full=plgpu.Barrier(num_barriers=2) if bias else None,
        ),
    )
    return y_MN, rest[-1] if transposed else None, rest[0] if stored else None


@functools.partial(jax.jit, static_argnames=("activation", "bias", "out_dtype", "tiles"))
def activated_backward(
    dy_MC,
    w2_OC,
    saved_MO,
    scale,
    du_scale,
    *,
    activation: Activation = GELU,
    bias: bool = True,
    out_dtype=E5M2,
    tiles: Tiles | None = None,
):
    """Return (du, duᵀ, db) with v = (scale · dy w₂ᵀ) ∘ derivative.

    du is quantize(v) in `out_dtype`, M×O, and duᵀ its transposed copy. db is the sum over M of
    du / du_scale in fp32, or None without `bias`.

    Args:
        saved_MO: the derivative that `linear_activated` stored; y if it stores none.
        scale: see the top of this file.
        du_scale: fp32 scalar.
        out_dtype: e5m2 or e4m3fn.
    """
    (m, c), o = dy_MC.shape, w2_OC.shape[0]
    _refuse("activated_backward", tiles.why_not(m, o, c) if tiles else why_not(m, o, c))
    tiles = tiles or column_tiles(o)
    parts, slots = tiles.parts(), tiles.slots
    part_sums = tiles.rows // 64
    scales = _scalars(scale)

    def fetch(at, saved_gmem, scratch, part):
        if part < len(parts):
            plgpu.copy_gmem_to_smem(
                saved_gmem.at[at.rows, at.columns].at[parts[part]],
                scratch.saved.at[at.wg, part % slots],
                scratch.saved_full.at[at.wg, part % slots],
            )

    def begin(at, others, scratch):
        for part in range(slots):
            fetch(at, others[0], scratch, part)

    def finish(at, acc_RP, others, out_gmem, scratch):
        saved_gmem, du_scale_gmem, *scales_gmem = others
        du_gmem, transposed_gmem, *db_gmem = out_gmem
        factor = _product(scales_gmem) * (1 / activation.derivative_scale)
        du_factor = du_scale_gmem[0]
        inverse, sum_P = 1 / du_factor, None
        for part, (rows, columns) in enumerate(parts):
            slot = part % slots
            du_smem = scratch.du.at[at.wg, slot]
            transposed_smem = scratch.transposed.at[at.wg, slot]
            plgpu.barrier_wait(scratch.saved_full.at[at.wg, slot])
            saved = plgpu.load(scratch.saved.at[at.wg, slot], layout=plgpu.Layout.WGMMA)
            derivative = activation.derivative(saved.astype(jnp.float32))
            v = acc_RP[rows, columns] * factor * derivative
            quantized = (v * du_factor).astype(out_dtype)
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            du_smem[...] = quantized
            store_transposed(transposed_smem, quantized)
            _copy_to_gmem(
                [
                    (du_smem, du_gmem.at[at.rows, at.columns].at[rows, columns]),
                    (transposed_smem, transposed_gmem.at[at.columns, at.rows].at[columns, rows]),
                ]
            )
            # All threads of the warpgroup have read the saved array.
            fetch(at, saved_gmem, scratch, part + slots)
            if not bias:
                continue
            # Read the transposed part from shared memory: the sum over rows is then within a warp.
            du_PR = plgpu.load(transposed_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            part_P = du_PR.sum(1)
            sum_P = part_P if sum_P is None or part % part_sums == 0 else sum_P + part_P
            if (part + 1) % part_sums == 0:
                db_gmem[0].at[at.row_tile, at.columns].at[columns][...] = sum_P * inverse

    part_shape = (2, slots, 64, tiles.part_columns)
    du_MO, du_OM, *db_RO = tiled(
        dy_MC,
        w2_OC,
        saved_MO,
        *_scalars(du_scale),
        *scales,
        tiles=tiles,
        begin=begin,
        finish=finish,
        out_type=[
            jax.ShapeDtypeStruct((m, o), out_dtype),
            jax.ShapeDtypeStruct((o, m), out_dtype),
            *[jax.ShapeDtypeStruct((m // tiles.rows, o), jnp.float32)] * bias,
        ],
        scratch=BackwardScratch(
            saved=swizzled(part_shape, saved_MO.dtype),
            du=swizzled(part_shape, out_dtype),
            transposed=swizzled(_transposed(part_shape), out_dtype),
            saved_full=plgpu.Barrier(num_barriers=(2, slots)),
        ),
    )
    return du_MO, du_OM, db_RO[0].sum(0) if bias else None


# ------------------------------------------------------------------------------------------ helpers


def _refuse(kernel: str, why: str | None) -> None:
    if why is not None:
        raise ValueError(f"fp8 {kernel}: implementation 'mosaic' {why}")


def _scalars(scale) -> list[jax.Array]:
    """Return the factors of a scale as arrays of one element."""
    return [jnp.asarray(factor, jnp.float32).reshape(1) for factor in jax.tree.leaves(scale)]


def _product(refs):
    return functools.reduce(lax.mul, [ref[0] for ref in refs])


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _start_bias(at, bias_gmem, scratch) -> None:
    """Start the copy of the tile's columns of the bias."""
    plgpu.copy_gmem_to_smem(
        bias_gmem.at[at.columns], scratch.bias.at[at.wg], scratch.bias_full.at[at.wg]
    )


def _add_bias(part, at, columns: slice, scratch):
    """Return a part plus its columns of the bias."""
    bias_P = plgpu.load(
        scratch.bias.at[at.wg, columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
    )
    return part + lax.broadcast_in_dim(bias_P, part.shape, [1])


def _copy_to_gmem(copies) -> None:
    """Copy the warpgroup's stores from shared to global memory, as one commit group."""
    plgpu.commit_smem()
    for i, (smem, target) in enumerate(copies):
        plgpu.copy_smem_to_gmem(smem, target, commit_group=i == len(copies) - 1)
