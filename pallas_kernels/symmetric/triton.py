"""Symmetric matmuls in Triton, for NVIDIA GPUs from Ampere on.

A program computes one tile on or above the diagonal and also stores its mirror image.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels import _triton


@triton.jit
def _tile(
    a_ptr,
    bcd_ptr,
    out_ptr,
    # constants, so that the compiler knows that rows are aligned to 16 bytes
    m: tl.constexpr,
    k: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # aᵀ a: contracts the rows of a
    COEFFICIENTS: tl.constexpr,  # 2: b·a + c·a aᵀ; 3: and d on the diagonal
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INDEX: tl.constexpr,  # integer type of the offsets in a matrix
):
    EVEN_M: tl.constexpr = m % TILE == 0
    EVEN_K: tl.constexpr = k % BLOCK_K == 0
    N: tl.constexpr = (m + TILE - 1) // TILE
    per_matrix: tl.constexpr = N * (N + 1) // 2
    index = tl.program_id(0) % per_matrix
    matrix = (tl.program_id(0) // per_matrix).to(tl.int64)
    # Tiles are numbered column by column: column j has j + 1 tiles, from number j(j+1)/2 on. The
    # rounded square root may be off by one in either direction.
    j = ((tl.sqrt(8.0 * index + 1.0) - 1.0) / 2.0).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > index, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= index, j + 1, j)
    i = index - j * (j + 1) // 2

    a_ptr += matrix * m * k
    out_ptr += matrix * m * m
    rows = (i * TILE + tl.arange(0, TILE)).to(INDEX)
    columns = (j * TILE + tl.arange(0, TILE)).to(INDEX)
    depth = tl.arange(0, BLOCK_K)
    if TRANSPOSED:
        left = a_ptr + depth[:, None] * m + rows[None, :]
        right = a_ptr + depth[:, None] * m + columns[None, :]
    else:
        left = a_ptr + rows[:, None] * k + depth[None, :]
        right = a_ptr + columns[:, None] * k + depth[None, :]
    acc = tl.full((TILE, TILE), 0.0, tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_M and EVEN_K:
            x, y = tl.load(left), tl.load(right)
        elif TRANSPOSED:
            x = tl.load(left, mask=(depth < k - start)[:, None] & (rows < m)[None, :], other=0.0)
            y = tl.load(
                right, mask=(depth < k - start)[:, None] & (columns < m)[None, :], other=0.0
            )
        else:
            x = tl.load(left, mask=(rows < m)[:, None] & (depth < k - start)[None, :], other=0.0)
            y = tl.load(
                right, mask=(columns < m)[:, None] & (depth < k - start)[None, :], other=0.0
            )
        if TRANSPOSED:
            acc = tl.dot(tl.trans(x), y, acc)
            left += BLOCK_K * m
            right += BLOCK_K * m
        else:
            acc = tl.dot(x, tl.trans(y), acc)
            left += BLOCK_K
            right += BLOCK_K

    inside = (rows < m)[:, None] & (columns < m)[None, :]
    direct = rows[:, None] * m + columns[None, :]
    if COEFFICIENTS:
        own = tl.load(a_ptr + direct) if EVEN_M else tl.load(a_ptr + direct, mask=inside, other=0.0)
        acc = tl.load(bcd_ptr) * own.to(tl.float32) + tl.load(bcd_ptr + 1) * acc
    if COEFFICIENTS == 3:
        acc = tl.where(rows[:, None] == columns[None, :], acc + tl.load(bcd_ptr + 2), acc)
    out = acc.to(out_ptr.dtype.element_ty)
    mirrored = columns[None, :] * m + rows[:, None]
    if i == j:
        # Copy the values above the diagonal to below the diagonal: the tile is then symmetric for
        # any order of summation.
        tl.store(out_ptr + direct, out, mask=inside & (rows[:, None] <= columns[None, :]))
        tl.store(out_ptr + mirrored, out, mask=inside & (rows[:, None] < columns[None, :]))
    elif EVEN_M:
        tl.store(out_ptr + direct, out)
        tl.store(out_ptr + mirrored, out)
    else:
        tl.store(out_ptr + direct, out, mask=inside)
        tl.store(out_ptr + mirrored, out, mask=inside)


def symmetric_matmul(
    a_BXY: jax.Array, bcd: jax.Array | None = None, *, transposed: bool
) -> jax.Array:
    """Return a aᵀ of each matrix, or aᵀ a if `transposed`.

    With `bcd`, return b·a + c·a aᵀ, plus d on the diagonal if there are three coefficients.
    """
    batch, *sides = a_BXY.shape
    k, m = sides if transposed else sides[::-1]
    # Rows that are not aligned to 16 bytes are loaded by elements, with one pointer per element:
    # large tiles of such rows spill registers.
    tile, block_k, num_warps = (128, 64, 8) if a_BXY.shape[2] % 8 == 0 else (64, 32, 4)
    n = triton.cdiv(m, tile)
    (out_BMM,) = _triton.call(
        _tile,
        a_BXY,
        bcd,
        out=[jax.ShapeDtypeStruct((batch, m, m), a_BXY.dtype)],
        grid=(batch * n * (n + 1) // 2,),
        num_warps=num_warps,
        m=m,
        k=k,
        TRANSPOSED=transposed,
        COEFFICIENTS=0 if bcd is None else len(bcd),
        TILE=tile,
        BLOCK_K=block_k,
        INDEX=tl.int64 if m * max(m, k) > 2**31 - 1 else tl.int32,
    )
    return out_BMM
