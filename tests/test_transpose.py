"""pallas_kernels.transpose_copy and transpose_add: a transpose is exact, a sum is rounded once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import triton_kernels, unchecked

from pallas_kernels import _dispatch, _triton
from pallas_kernels.transpose import (
    reference,
    transpose_add,
    transpose_copy,
    transpose_sum_rows,
)

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

# src
SHAPES = [
    (128, 64),  # whole tiles
    (1, 5),  # a row
    (33, 130),  # both ragged, no 16-byte access is aligned
    (2, 3, 7, 65),  # a batch over two axes
]


@pytest.fixture(params=["xla", "triton"])
def backend(request):
    if request.param == "triton":
        request.getfixturevalue("triton_on_cpu")
    return request.param


def arrays(shape, dst_dtype, src_dtype, seed=0):
    """dst, src, and a direction for the gradient."""
    rng = np.random.default_rng(seed)
    turned = (*shape[:-2], shape[-1], shape[-2])
    dst, direction = (jnp.asarray(rng.standard_normal(turned), dst_dtype) for _ in range(2))
    return dst, jnp.asarray(rng.standard_normal(shape), src_dtype), direction


def rounded(x, dtype):
    """fp64 → dtype, through fp32: where the sum of two fp32 numbers is exact in fp64, that is one
    rounding in fp32."""
    return np.asarray(x, np.float32).astype(dtype)


def turned(x):
    return np.swapaxes(np.asarray(x), -1, -2)


def check(backend, shape, dst_dtype, src_dtype, *, in_place=True, seed=0):
    """Values and gradients, all of them bit for bit."""
    dst, src, direction = arrays(shape, dst_dtype, src_dtype, seed)

    @jax.jit
    def of_copy(src, d):
        out, pull = jax.vjp(functools.partial(transpose_copy, implementation=backend), src)
        return out, *pull(d)

    out, dsrc = of_copy(src, direction.astype(src_dtype))
    np.testing.assert_array_equal(out, turned(src))
    np.testing.assert_array_equal(dsrc, turned(direction.astype(src_dtype)))

    @jax.jit
    def of_add(dst, src, d):
        f = functools.partial(transpose_add, in_place=in_place, implementation=backend)
        out, pull = jax.vjp(f, dst, src)
        return out, *pull(d)

    out, ddst, dsrc = of_add(dst, src, direction)
    assert (out.dtype, ddst.dtype, dsrc.dtype) == (dst_dtype, dst_dtype, src_dtype)
    exact = np.asarray(dst, np.float64) + turned(src).astype(np.float64)
    np.testing.assert_array_equal(out, rounded(exact, dst_dtype))
    np.testing.assert_array_equal(ddst, direction)
    np.testing.assert_array_equal(dsrc, turned(direction.astype(src_dtype)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(backend, shape, dtype):
    check(backend, shape, dtype, dtype)


@pytest.mark.parametrize(
    "dst, src",
    [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)],
)
def test_two_dtypes(backend, dst, src):
    check(backend, (33, 65), dst, src)


def test_out_of_place(backend):
    check(backend, (33, 65), jnp.bfloat16, jnp.bfloat16, in_place=False)


def check_sum(backend, shape, dtype):
    """The transpose bit for bit; the sums against fp64, by the rounding of an fp32 sum of so many
    numbers."""
    src = arrays(shape, dtype, dtype)[1]
    out, sums = jax.jit(functools.partial(transpose_sum_rows, implementation=backend))(src)
    assert out.dtype == dtype and sums.dtype == jnp.float32
    np.testing.assert_array_equal(out, turned(src))
    size = np.abs(np.asarray(src, np.float64)).sum(-2)
    assert (np.abs(sums - np.asarray(src, np.float64).sum(-2)) <= 2e-6 * size).all()


@pytest.mark.parametrize("shape", [*SHAPES, (200, 150), (64, 1), (1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_transpose_and_its_sums(backend, shape, dtype):
    check_sum(backend, shape, dtype)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 5)])
def test_empty_arrays(backend, shape):
    check(backend, shape, jnp.float32, jnp.bfloat16)
    out, sums = transpose_sum_rows(jnp.zeros(shape), implementation=backend)
    assert out.shape == (*shape[:-2], shape[-1], shape[-2])
    assert sums.shape == (*shape[:-2], shape[-1]) and not sums.any()


def test_a_transpose_and_its_sums_under_vmap(backend):
    src = arrays((3, 9, 70), jnp.float32, jnp.float32)[1]
    out, sums = jax.vmap(functools.partial(transpose_sum_rows, implementation=backend))(src)
    np.testing.assert_array_equal(out, turned(src))
    np.testing.assert_allclose(sums, np.asarray(src).sum(1), rtol=1e-5, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_twice_is_nothing(rows, columns, batch, seed):
    _, src, _ = arrays((batch, rows, columns), jnp.bfloat16, jnp.bfloat16, seed)
    np.testing.assert_array_equal(transpose_copy(transpose_copy(src)), src)


def test_more_tiles_than_one_each_way(triton_on_cpu):
    check("triton", (2, 200, 150), jnp.bfloat16, jnp.bfloat16)


def test_64_bit_offsets(triton_on_cpu, monkeypatch):
    """The code of matrices beyond 2³¹ elements, on one that fits here."""
    import triton.language as tl

    from pallas_kernels.transpose import triton as kernels

    launch = kernels._launch
    assert launch(jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.bfloat16))["INDEX"] == tl.int64
    monkeypatch.setattr(kernels, "_launch", lambda *args: launch(*args) | {"INDEX": tl.int64})
    check("triton", (33, 65), jnp.bfloat16, jnp.bfloat16)


def test_the_sum_is_rounded_once(backend):
    """1 + 2⁻⁹ rounds to 1 in bf16: an addend rounded to dst's dtype first would already be gone."""
    dst, src = (
        jnp.full((2, 2), 1 - 2.0**-8, jnp.bfloat16),
        jnp.full((2, 2), 2.0**-8 + 2.0**-12, jnp.float32),
    )
    assert transpose_add(dst, src + 1, implementation=backend)[0, 0] == 2.0
    dst = jnp.full((2, 2), 2.0**-7, jnp.bfloat16)
    src = jnp.full((2, 2), 1 + 2.0**-8, jnp.float32)  # in bf16 this is 1
    assert transpose_add(dst, src, implementation=backend)[0, 0] == rounded(
        1 + 2.0**-7 + 2.0**-8, jnp.bfloat16
    )


def test_dst_is_left_alone_where_it_lives_on(backend):
    dst, src, _ = arrays((8, 16), jnp.float32, jnp.float32)
    before = np.asarray(dst).copy()
    total, kept = jax.jit(lambda dst, src: (transpose_add(dst, src, implementation=backend), dst))(
        dst, src
    )
    np.testing.assert_array_equal(dst, before)
    np.testing.assert_array_equal(kept, before)
    np.testing.assert_array_equal(total, before + turned(src))


def test_in_place_asks_for_no_new_array(triton_on_cpu, monkeypatch):
    launched = []
    call = _triton.call
    monkeypatch.setattr(
        _triton, "call", lambda *args, **options: launched.append(options) or call(*args, **options)
    )
    dst, src, _ = arrays((8, 16), jnp.float32, jnp.float32)
    for in_place in (True, False):
        transpose_add(dst, src, in_place=in_place, implementation="triton")
    assert [(options.get("in_place", ()), len(options["out"])) for options in launched] == [
        ((1,), 0),
        ((), 1),
    ]


def test_transformations(backend):
    dst, src, direction = arrays((3, 9, 20), jnp.float32, jnp.float32)
    f = functools.partial(transpose_add, implementation=backend)
    np.testing.assert_array_equal(jax.vmap(f)(dst, src), dst + turned(src))
    np.testing.assert_array_equal(
        jax.vmap(functools.partial(transpose_copy, implementation=backend), in_axes=1)(src),
        np.swapaxes(np.moveaxis(src, 1, 0), 1, 2),
    )
    loss = lambda dst, src: (jax.checkpoint(f)(dst, src) * direction).sum()
    gradients = jax.jit(jax.grad(loss, (0, 1)))(dst, src)
    np.testing.assert_array_equal(gradients[0], direction)
    np.testing.assert_array_equal(gradients[1], turned(direction))


def test_on_two_devices(backend):
    dst, src, _ = arrays((4, 9, 20), jnp.float32, jnp.float32)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    f = functools.partial(transpose_add, implementation=backend)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(sharded)(dst, src), dst + turned(src))


def test_reference_is_the_definition():
    dst, src, _ = arrays((5, 9), jnp.float16, jnp.bfloat16)
    np.testing.assert_array_equal(reference(src), turned(src).astype(np.float32))
    np.testing.assert_array_equal(
        reference(src, dst), np.asarray(dst, np.float32) + turned(src).astype(np.float32)
    )
    assert reference(src).dtype == reference(src, dst).dtype == jnp.float32
    np.testing.assert_array_equal(transpose_copy(src, implementation="reference"), turned(src))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compiled_code(capability, dtype):
    """16 bytes an access on both sides, no spills."""
    src, dst = jax.ShapeDtypeStruct((768, 50304), dtype), jax.ShapeDtypeStruct((50304, 768), dtype)

    def f(dst, src):
        return transpose_copy(src, implementation="triton"), transpose_add(
            dst, src, implementation="triton"
        )

    for kernel in triton_kernels(f, dst, src, capability=capability):
        assert kernel.spill_bytes == 0
        assert (
            "ld.global.v4" in kernel.ptx
            and "st.global.v4" in kernel.ptx
            and "global.b16" not in kernel.ptx
        )


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_with_sums(capability):
    f = lambda src: transpose_sum_rows(src, implementation="triton")
    (kernel,) = triton_kernels(
        f, jax.ShapeDtypeStruct((32768, 2304), jnp.float32), capability=capability
    )
    assert kernel.name == "transpose_sum" and kernel.spill_bytes == 0
    assert re.findall(r"ld\.global\S*", kernel.ptx) == re.findall(r"ld\.global\.v4\S*", kernel.ptx)
    # But for the tile's row of sums.
    assert sum("v4" not in store for store in re.findall(r"st\.global\S*", kernel.ptx)) == 1


def test_auto_on_a_cpu_is_xla_and_on_a_gpu_triton(monkeypatch):
    assert _dispatch.select("transpose_copy") == "xla"
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert _dispatch.select("transpose_copy") == "triton"
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: True)
    assert _dispatch.select("transpose_copy") == "xla"
    with pytest.raises(
        ValueError, match="transpose_copy: implementation 'triton' needs arrays of one device"
    ):
        _dispatch.select("transpose_copy", "triton")


def test_errors():
    dst, src, _ = arrays((2, 8), jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"transpose_add: unknown implementation 'mosaic'; choose one of \['auto', 'triton'",
    ):
        transpose_add(dst, src, implementation="mosaic")
    with pytest.raises(
        ValueError,
        match="transpose_copy: implementation 'triton' needs an NVIDIA GPU, .* cpu; .*'xla'",
    ):
        transpose_copy(src, implementation="triton")
    with pytest.raises(
        ValueError, match=r"in float32, bfloat16 or float16, got \(2, 8\) in float8_e4m3fn"
    ):
        transpose_copy(src.astype(jnp.float8_e4m3fn))
    # jaxtyping refuses these first under pytest; without it the function itself does.
    for f, bad, message in [
        (transpose_copy, (src[0],), r"expected matrices .* got \(8,\) in bfloat16"),
        (transpose_copy, (src.astype(jnp.int32),), r"got \(2, 8\) in int32"),
        (
            transpose_add,
            (src, src),
            r"expected dst \(…, C, R\) and src \(…, R, C\), got \(2, 8\) and \(2, 8\)",
        ),
        (transpose_add, (dst[None], src), r"got \(1, 8, 2\) and \(2, 8\)"),
    ]:
        with pytest.raises((ValueError, TypeError)):
            f(*bad)
        with pytest.raises(ValueError, match=message):
            unchecked(f)(*bad)


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dst, src, in_place",
    [
        ((768, 50304), jnp.bfloat16, jnp.bfloat16, True),  # GPT-2's head
        ((768, 50304), jnp.float32, jnp.bfloat16, True),  # its fp32 gradient
        ((301, 1003), jnp.float16, jnp.float16, False),  # both ragged, nothing aligned
        ((3, 65, 200), jnp.float32, jnp.float32, True),  # ragged in a batch
        ((1, 7), jnp.bfloat16, jnp.float32, True),  # less than a tile
    ],
    ids=str,
)
def test_triton_on_the_gpu(shape, dst, src, in_place):
    check("triton", shape, dst, src, in_place=in_place)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 2304), (301, 1003), (3, 65, 200), (1, 7)], ids=str)
def test_a_transpose_and_its_sums_on_the_gpu(shape):
    """What the outputs are written to was full of NaN before."""
    for _ in range(3):
        jax.block_until_ready([jnp.full(shape, jnp.nan, jnp.float32) for _ in range(4)])
        check_sum("triton", shape, jnp.float32)


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


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton():
    assert _dispatch.select("transpose_copy") == "triton"
