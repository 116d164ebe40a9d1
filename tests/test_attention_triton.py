"""The Triton back end of pallas_kernels.flash_attention by the 2× rule, in fp32, fp16 and TF32, and
its tiles and compiled kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton as triton_package
from attention_tools import (
    NAMES,
    call,
    check,
    inputs,
    plain_and_exact,
    results,
    segments,
    set_tiles,
    tf32_matmul,
)
from comparison_tools import rms
from kernel_tools import triton_kernels
from ptx_tools import to_tf32

from pallas_kernels import flash_attention_qkv

FP32, FP16 = jnp.float32, jnp.float16
TF32 = {"precision": None, "multiply": tf32_matmul}
# The worst of a few fp32 roundings is a matter of luck.
RMS = {"norms": (rms,)}


def check_triton(shape, dtype=FP32, **how):
    return check("triton", shape, dtype, **(RMS if dtype == FP32 else {}) | how)


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "shape, dtype", [((1, 70, 1, 1, 8), FP32), ((1, 300, 1, 1, 64), FP16)], ids=str
)
def test_the_tiles_of_the_file(shape, dtype, triton_on_cpu):
    """test_attention_options.py has small tiles."""
    check_triton(shape, dtype)


# ------------------------------------------------------------------------------------------ in TF32


@pytest.fixture
def tensor_cores(triton_on_cpu, monkeypatch):
    """Products in TF32 leave out the low 13 bits of their operands, and their only NaN is a GPU's.
    "tf32x3" splits operands as Triton's compiler does."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, *args):
        if precision.name == "TF32x3":
            (a, a_rest), (b, b_rest) = (
                (big := to_tf32(x.data), to_tf32(x.data - big)) for x in (a, b)
            )
            rest = np.matmul(a, b_rest) + np.matmul(a_rest, b)
            product = np.where(np.isnan(rest), 0, rest) + np.matmul(a, b) + d.data
            return interpreter.TensorHandle(product, d.dtype.scalar)
        if precision.name != "TF32":
            return multiply(self, a, b, d, precision, *args)
        cut = [
            (np.ascontiguousarray(x.data).view(np.uint32) & 0xFFFFE000).view(np.float32)
            for x in (a, b)
        ]
        product = np.matmul(*cut) + d.data
        product.view(np.uint32)[np.isnan(product)] = 0x7FFFFFFF
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    "shape, how",
    [
        ((1, 1, 1, 1, 1), {}),
        ((3, 77, 2, 1, 5), {}),
        ((1, 64, 2, 2, 16), {"packed": True, "window": 20}),
        ((1, 50, 2, 2, 20), {"packed": True} | segments((1, 50), 3)),
        ((1, 70, 1, 1, 64), {"causal": False, "scale": -0.2}),
    ],
    ids=str,
)
def test_tf32(shape, how, tensor_cores, monkeypatch):
    """Without rounding to nearest errors are three times as large."""
    if shape[4] < 64:  # else the tiles of the file
        set_tiles(monkeypatch, 16, 32)
    check_triton(shape, **TF32, **how)


def test_tf32_is_not_too_small(tensor_cores, monkeypatch):
    """One operand that is cut off and not rounded makes a product smaller by 2^−11.5 on average."""
    set_tiles(monkeypatch, 32, 32)
    args, directions = inputs((1, 150, 2, 2, 64), FP32)
    found = results(call("triton"), args, directions)
    for name, ours, true in zip(NAMES, found, plain_and_exact(args, directions)[1], strict=True):
        size = np.vdot(ours, true) / np.vdot(true, true)
        assert abs(size - 1) < 2.0**-14, (name, size - 1)


@pytest.mark.parametrize("t, d", [(128, 16), (70, 5), (1, 20)])
def test_delta_in_tf32(t, d, triton_on_cpu):
    """Of numbers that are not rounded: delta would be off by 2^−12 or so of the largest products.
    test_tf32 has the copies that the kernel also stores."""
    from pallas_kernels.attention import Options
    from pallas_kernels.attention.triton import _shape
    from pallas_kernels.attention.triton_tf32 import tf32_copies_of_dout

    (q, k, v), (dout, _) = inputs((2, t, 4, 4, d), jnp.float32)
    shape = _shape((q, k, v), None, Options(scale=1.0), {})
    *_, delta = tf32_copies_of_dout(dout, q, shape, transposed=128)
    products = np.asarray(dout, np.float64) * np.asarray(q, np.float64)
    error = np.abs(delta - products.sum(-1).swapaxes(1, 2))
    assert (error <= d * 2.0**-24 * np.abs(products).sum(-1).swapaxes(1, 2)).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_not_a_number_stays_so_in_tf32(bits, on_gpu, request, monkeypatch):
    """Numbers that are rounded by adding to their bits could become finite."""
    if not on_gpu:
        request.getfixturevalue("tensor_cores")
        set_tiles(monkeypatch, 16, 16)
    (q, k, v), directions = inputs((1, 40, 1, 1, 8), jnp.float32)
    bad = np.array(q)
    bad.view(np.uint32)[0, 20, 0, 3] = bits
    f = jax.jit(functools.partial(results, call("triton")))
    found = [f((x, k, v), directions) for x in (jnp.asarray(bad), q)]
    rows = np.arange(40)
    for name, ours, clean in zip(NAMES, *found, strict=True):
        if name == "lse":
            ours, clean = (np.moveaxis(np.asarray(x), 2, 1) for x in (ours, clean))
        touched = rows <= 20 if name in ("dk", "dv") else rows == 20
        assert np.isnan(ours[:, touched]).all(), name
        if name != "dk":  # there 0·NaN comes through to later keys of the block
            np.testing.assert_array_equal(ours[:, ~touched], clean[:, ~touched])


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_masked_values_in_true_fp32(on_gpu, request):
    """Values near the largest number become infinite in TF32, of which true fp32 is composed."""
    if not on_gpu:
        request.getfixturevalue("tensor_cores")
    (q, k, v), _ = inputs((1, 40, 1, 1, 64), FP32)
    seen = np.arange(40) < 23
    far = jnp.where(seen[None, :, None, None], v, np.finfo(np.float32).max)
    for how in (
        {"bias": jnp.broadcast_to(jnp.where(seen, 0, -jnp.inf), (1, 1, 40, 40))},
        {"key_range": (jnp.zeros((1, 40), jnp.int32), jnp.full((1, 40), 22))},
    ):
        f = jax.jit(call("triton", causal=False, precision="highest", **how))
        np.testing.assert_array_equal(f(q, k, far)[0], f(q, k, v)[0])


# --------------------------------------------------------------------------------- what is not read


# the interpreter's, about the other sequences
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", [{}, {"causal": False}, {"window": 12}], ids=str)
def test_nothing_leaks_from_the_next_sequence(how, packed, triton_on_cpu, monkeypatch):
    """What lies behind row T is the next sequence; here all of it is NaN, or infinite."""
    set_tiles(monkeypatch, 32, 16)
    args, (dout, dlse) = inputs((3, 37, 1, 1, 5), jnp.float32)
    bad = jnp.asarray([1, np.nan, np.inf], jnp.float32)[:, None, None, None]
    f = call("triton", packed=packed, precision="highest", **how)
    f = jax.jit(functools.partial(results, f))
    clean = f(*jax.tree.map(lambda x: x[:1], (args, (dout, dlse))))
    for one, other in zip(f([x * bad for x in args], (dout * bad, dlse)), clean, strict=True):
        np.testing.assert_array_equal(one[:1], other)


@pytest.mark.parametrize("queries, window, far", [(96, 10, 48), (32, 20, 32)])
def test_blocks_outside_the_window_are_not_read(queries, window, far, triton_on_cpu, monkeypatch):
    """Nor where there are more keys than queries. dk and dv of the far keys are not defined."""
    set_tiles(monkeypatch, 16, 16)
    (q, k, v), (dout, dlse) = inputs((1, 96, 1, 1, 8), jnp.float32)
    f = functools.partial(results, call("triton", window=window, precision="highest"))
    directions = dout[:, -queries:], dlse[..., -queries:]
    is_far = jnp.asarray(np.arange(96) < far)[None, :, None, None]
    changed = [jnp.where(is_far, jnp.nan, x) for x in (k, v)]
    found, clean = (f((q[:, -queries:], *kv), directions) for kv in (changed, (k, v)))
    for name, one, other in zip(NAMES, found, clean, strict=True):
        time = 2 if name == "lse" else 1
        near = range(min(one.shape[time], 32) * -1, 0)
        np.testing.assert_array_equal(*(np.take(x, near, time) for x in (one, other)))


@pytest.mark.parametrize("causal", [True, False])
def test_scores_far_below_those_of_no_key(causal, triton_on_cpu, monkeypatch):
    """Rows from T on are read as zeros: their scores of 0 are e^280 times as heavy as those of the
    keys that there are."""
    set_tiles(monkeypatch, 16, 32)
    (q, k, v), directions = inputs((1, 37, 1, 1, 8), jnp.float32)
    args = (10 + 0.01 * q, -10 + 0.01 * k, v)
    f = call("triton", causal=causal, precision="highest")
    found = jax.jit(functools.partial(results, f))(args, directions)
    for ours, true in zip(found, plain_and_exact(args, directions, causal=causal)[1], strict=True):
        np.testing.assert_allclose(ours, true, rtol=2e-3, atol=2e-3 * np.abs(true).max())


# -------------------------------------------------------------------------- tiles, compiled kernels


def packed_gradients(**how):
    f = functools.partial(flash_attention_qkv, implementation="triton", **how)
    return jax.grad(lambda qkv: f(qkv).astype(FP32).sum())


def test_groups_of_heads_are_even():
    """As few as may be of at most 32,768 rows, the last no more than a few heads smaller than the
    others."""
    from pallas_kernels.attention import triton

    tile = {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3}
    for heads, t, together in (
        *((48, 1024, 24), (384, 1024, 32), (33, 1024, 17), (5, 1024, 5), (1, 1024, 1)),
        *((3, 40_000, 1), (768, 700, 46)),
    ):
        found = triton._launched(tile, t, heads)
        assert found == tile | {"TOGETHER": together}
        assert -(-heads // together) == -(-heads // max(1, 32768 // t))


def test_tiles_of_every_gpu():
    from pallas_kernels.attention import triton

    for capability, listed in (
        *(((8, 0), "8.0"), ((8, 6), "8.6"), ((9, 0), "9.0"), ((10, 0), "9.0")),
        ((8, 7), "8.0"),  # 163 KB, as much as 8.0
        *(((8, 9), "8.6"), ((12, 0), "8.6")),  # 99 KB
        ((13, 0), "8.6"),  # unknown: the least
    ):
        for products in ("16", "tf32", "fp32"):
            # True fp32 in Hopper's tiles spills there.
            own = capability == (10, 0) and products == "fp32"
            entries = triton._tiles()["10.0" if own else listed][products]
            assert triton.tuning(capability, products, 5) is entries["64"]
            assert triton.tuning(capability, products, 65) is entries["128"]
            assert triton.tuning(capability, products, 129) is entries["256"]


SHARED_KB = {80: 163, 89: 99, 90: 227}


@pytest.mark.parametrize("capability", SHARED_KB)
@pytest.mark.parametrize(
    "dtype, head_dim, precision",
    [
        (jnp.bfloat16, 64, None),
        (jnp.bfloat16, 128, None),
        (jnp.float32, 64, None),
        (jnp.float32, 128, None),
        (jnp.float32, 64, "highest"),
    ],
    ids=["bf16 64", "bf16 128", "tf32 64", "tf32 128", "fp32 64"],
)
def test_compiles_without_spills(dtype, head_dim, precision, capability):
    # Bytes of the one kernel that spills, by version of Triton.
    spills = {("3.8", "dkv_kernel", jnp.float32, 128, 90): 88}
    version = triton_package.__version__.rpartition(".")[0]
    qkv = jax.ShapeDtypeStruct((64, 1024, 3, 12, head_dim), dtype)
    kernels = triton_kernels(packed_gradients(precision=precision), qkv, capability=capability)
    for kernel in kernels:
        spilled = spills.get((version, kernel.name, dtype, head_dim, capability), 0)
        assert kernel.spill_bytes == spilled, (kernel.name, kernel.registers, kernel.spill_bytes)
        assert kernel.shared_bytes <= SHARED_KB[capability] * 1024
        assert not kernel.serialized, kernel.name
    names = "forward delta dkv dq"
    if dtype == jnp.float32 and precision is None:
        # Copies of k and v; of q, k and v; and of dO, with delta.
        names = "tf32 forward tf32 tf32_dout dkv dq"
    assert [k.name for k in kernels] == [f"{name}_kernel" for name in names.split()]
    for kernel in kernels:
        if kernel.name not in ("forward_kernel", "dkv_kernel", "dq_kernel"):
            continue
        instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
        # True fp32 has products in threes on Hopper's tensor cores, and on the plain cores
        # elsewhere.
        assert (instruction in kernel.ptx) == (precision is None or capability == 90)
        if precision is None:
            # Tiles go from global to shared memory while others are multiplied.
            assert "cp.async" in kernel.ptx


# ---------------------------------------------------------------------------------------------- GPU

BF16 = jnp.bfloat16
GPU_CASES = [
    *(
        (shape, dtype, {})
        for shape in ((2, 1000, 2, 2, 64), (1, 1024, 8, 2, 64), (1, 1000, 2, 2, 128))
        for dtype in (BF16, FP16, "tf32", FP32)
    ),
    *(
        ((1, 1000, 2, 2, 64), dtype, how)
        for dtype in (BF16, "tf32")
        for how in ({"causal": False}, {"window": 256}, segments((1, 1000), 5))
    ),
    # Sorted ids: in a document of one token the exact gradient of q is that of L alone. The
    # difference of dO·V in TF32 and of Σ dO∘O in fp32 is more than the 2× rule allows.
    *(
        ((1, 1024, 2, 2, 64), dtype, {"window": 256, "seed": 2} | segments((1, 1024), 5, 2))
        for dtype in (BF16, "tf32", FP32)
    ),
    *(
        (shape, dtype, {"packed": True})
        for shape in ((1, 4096, 1, 1, 64), (1, 1000, 4, 4, 80))
        for dtype in (BF16, "tf32")
    ),
    *(((3, 77, 2, 1, 5), dtype, {}) for dtype in (BF16, "tf32", FP32)),
    ((1, 1, 1, 1, 1), BF16, {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype, how", GPU_CASES, ids=str)
def test_on_the_gpu(shape, dtype, how):
    dtype, tf32 = (FP32, TF32) if dtype == "tf32" else (dtype, {})
    check_triton(shape, dtype, **tf32, **how)


@pytest.mark.gpu
def test_packed_is_unpacked_on_the_gpu():
    found = [check_triton((2, 500, 2, 2, 64), BF16, packed=packed) for packed in (False, True)]
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.gpu
def test_more_than_2_to_the_31_numbers():
    """The last sequence of many that are equal has the output and the gradient of the first."""
    qkv = jax.random.normal(jax.random.key(0), (1, 1024, 3, 12, 64), jnp.bfloat16)
    batch = 2**31 // qkv.size + 2
    f = lambda qkv: flash_attention_qkv(qkv, implementation="triton")
    gradient = jax.jit(lambda qkv: jax.vjp(f, qkv)[1](qkv[:, :, 0])[0])
    many = gradient(jnp.broadcast_to(qkv, (batch, *qkv.shape[1:])))
    np.testing.assert_array_equal(many[-1], gradient(qkv)[0])


@pytest.mark.gpu
def test_the_gradient_of_a_packed_projection_is_not_copied():
    """dk, dv and dq go into one array: beside it and what attention saves there is no other of its
    size."""
    shape = jax.ShapeDtypeStruct((8, 1024, 3, 12, 64), jnp.bfloat16)
    compiled = jax.jit(packed_gradients()).lower(shape).compile()
    out_and_its_gradient = 2 * 8 * 1024 * 12 * 64 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * out_and_its_gradient
