"""pallas_kernels.transpose_copy and transpose_add: a transpose is exact, a sum is rounded once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import on_gpu
from rule_tools import refused, with_gradients

from pallas_kernels import _triton
from pallas_kernels.transpose import transpose_add, transpose_copy, transpose_sum_rows

# src, and the dtypes of dst and src
SHAPES = [
    ((128, 64), jnp.float32, jnp.float32),  # whole tiles
    ((128, 64), jnp.bfloat16, jnp.bfloat16),
    ((1, 5), jnp.float32, jnp.float32),  # a row
    ((33, 130), jnp.float32, jnp.float32),  # both ragged, no 16-byte access is aligned
    ((33, 130), jnp.float16, jnp.float16),
    ((2, 3, 7, 65), jnp.bfloat16, jnp.bfloat16),  # a batch over two axes
    ((2, 65, 70), jnp.bfloat16, jnp.bfloat16),  # more tiles than one each way
    ((33, 65), jnp.float32, jnp.bfloat16),
    ((33, 65), jnp.bfloat16, jnp.float32),
    ((33, 65), jnp.float16, jnp.bfloat16),
    *((shape, jnp.float32, jnp.bfloat16) for shape in ((0, 5), (5, 0), (0, 3, 5))),
]
BOTH = ("xla", "triton")
CASES = [
    *((back_end, *case, True) for back_end in BOTH for case in SHAPES),
    *((back_end, (33, 65), jnp.bfloat16, jnp.bfloat16, False) for back_end in BOTH),
    *on_gpu(
        ("triton", (768, 50304), jnp.float32, jnp.bfloat16, True),  # GPT-2's head
        ("triton", (301, 1003), jnp.float16, jnp.float16, False),  # both ragged, nothing aligned
        ("triton", (3, 65, 200), jnp.float32, jnp.float32, True),  # ragged in a batch
        ("triton", (1, 7), jnp.bfloat16, jnp.float32, True),  # less than a tile
    ),
]
# The shapes above, a column and a row, in each item size.
SUMS = {(shape, src) for shape, _, src in SHAPES}
SUMS |= {((64, 1), jnp.float32), ((1, 64), jnp.bfloat16)}
SUM_CASES = [
    *((back_end, *case) for back_end in BOTH for case in sorted(SUMS, key=str)),
    *on_gpu(*(("triton", shape, jnp.float32) for shape in ((8192, 2304), (3, 65, 200), (1, 7)))),
]


def arrays(shape, dst_dtype, src_dtype, seed=0):
    """dst, src, and a direction for the gradient."""
    rng = np.random.default_rng(seed)
    sizes = (*shape[:-2], shape[-1], shape[-2])
    dst, direction = (jnp.asarray(rng.standard_normal(sizes), dst_dtype) for _ in range(2))
    return dst, jnp.asarray(rng.standard_normal(shape), src_dtype), direction


def turned(x):
    return np.swapaxes(np.asarray(x), -1, -2)


def check(back_end, shape, dst_dtype, src_dtype, in_place):
    """Values and gradients, all of them bit for bit."""
    dst, src, direction = arrays(shape, dst_dtype, src_dtype)
    copy = functools.partial(transpose_copy, implementation=back_end)
    out, (dsrc,) = jax.jit(with_gradients(copy))((src,), direction)
    np.testing.assert_array_equal(out, turned(src))
    np.testing.assert_array_equal(dsrc, turned(direction.astype(src_dtype)))

    add = functools.partial(transpose_add, in_place=in_place, implementation=back_end)
    out, (ddst, dsrc) = jax.jit(with_gradients(add))((dst, src), direction)
    assert (out.dtype, ddst.dtype, dsrc.dtype) == (dst_dtype, dst_dtype, src_dtype)
    exact = np.asarray(dst, np.float64) + turned(src).astype(np.float64)
    # Where the sum of two fp32 numbers is exact in fp64, this is one rounding in fp32.
    np.testing.assert_array_equal(out, np.asarray(exact, np.float32).astype(dst_dtype))
    np.testing.assert_array_equal(ddst, direction)
    np.testing.assert_array_equal(dsrc, turned(direction.astype(src_dtype)))


@pytest.mark.parametrize("back_end, shape, dst, src, in_place", CASES, ids=str)
def test_values_and_gradients(back_end, shape, dst, src, in_place, interpreter):
    check(back_end, shape, dst, src, in_place)


@pytest.mark.parametrize("back_end, shape, dtype", SUM_CASES, ids=str)
def test_a_transpose_and_its_sums(back_end, shape, dtype, interpreter):
    """The transpose bit for bit; the sums against fp64, by the rounding of an fp32 sum of so many
    numbers. Memory that the allocator gives to the outputs was full of NaN before."""
    src = arrays(shape, dtype, dtype)[1]
    jax.block_until_ready([jnp.full(shape, jnp.nan, jnp.float32) for _ in range(4)])
    out, sums = jax.jit(functools.partial(transpose_sum_rows, implementation=back_end))(src)
    assert out.dtype == dtype and sums.dtype == jnp.float32
    np.testing.assert_array_equal(out, turned(src))
    size = np.abs(np.asarray(src, np.float64)).sum(-2)
    assert (np.abs(sums - np.asarray(src, np.float64).sum(-2)) <= 2e-6 * size).all()


def test_a_transpose_and_its_sums_under_vmap(backend):
    src = arrays((3, 9, 70), jnp.float32, jnp.float32)[1]
    out, sums = jax.vmap(functools.partial(transpose_sum_rows, implementation=backend))(src)
    np.testing.assert_array_equal(out, turned(src))
    np.testing.assert_allclose(sums, np.asarray(src).sum(1), rtol=1e-5, atol=1e-5)


def test_64_bit_offsets(triton_on_cpu, monkeypatch):
    """The code of matrices beyond 2³¹ elements, on one that fits here."""
    import triton.language as tl

    from pallas_kernels.transpose import triton as kernels

    launch = kernels._launch
    assert launch(jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.bfloat16))["INDEX"] == tl.int64
    monkeypatch.setattr(kernels, "_launch", lambda *args: launch(*args) | {"INDEX": tl.int64})
    check("triton", (33, 65), jnp.bfloat16, jnp.bfloat16, True)


def test_dst_is_left_alone_where_it_lives_on(backend):
    dst, src, _ = arrays((8, 16), jnp.float32, jnp.float32)
    before = np.asarray(dst).copy()
    add = functools.partial(transpose_add, implementation=backend)
    total, kept = jax.jit(lambda dst, src: (add(dst, src), dst))(dst, src)
    for found, expected in ((dst, before), (kept, before), (total, before + turned(src))):
        np.testing.assert_array_equal(found, expected)


def test_in_place_asks_for_no_new_array(triton_on_cpu, monkeypatch):
    launched, call = [], _triton.call
    watched = lambda *args, **how: launched.append(how) or call(*args, **how)
    monkeypatch.setattr(_triton, "call", watched)
    dst, src, _ = arrays((8, 16), jnp.float32, jnp.float32)
    for in_place, expected in ((True, ((1,), 0)), (False, ((), 1))):
        transpose_add(dst, src, in_place=in_place, implementation="triton")
        assert (launched[-1].get("in_place", ()), len(launched[-1]["out"])) == expected


def test_errors():
    dst, src, _ = arrays((2, 8), jnp.bfloat16, jnp.bfloat16)
    refused(transpose_copy, src[0], match=r"expected matrices .* got \(8,\) in bfloat16")
    message = r"expected dst \(…, C, R\) and src \(…, R, C\), got \(2, 8\) and \(2, 8\)"
    refused(transpose_add, src, src, match=message)
    refused(transpose_add, dst[None], src, match=r"got \(1, 8, 2\) and \(2, 8\)")


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_donated_dst_is_overwritten_on_the_gpu():
    dst, src, _ = arrays((768, 1024), jnp.float32, jnp.float32)
    expected = np.asarray(dst) + turned(src)
    f = functools.partial(transpose_add, implementation="triton")
    compiled = jax.jit(f, donate_argnums=0).lower(dst, src).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    assert compiled.memory_analysis().alias_size_in_bytes == dst.nbytes
    np.testing.assert_array_equal(compiled(dst, src), expected)
    assert dst.is_deleted()
