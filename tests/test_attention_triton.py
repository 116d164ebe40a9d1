"""The Triton back end of pallas_kernels.flash_attention against the equations in fp64, by the 2×
rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_triton_tools import (
    NAMES,
    attend,
    attend_packed,
    check,
    equations,
    gradients,
    inputs,
    packed_gradients,
    set_tiles,
    tf32_product,
    with_gradients,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import flash_attention_qkv


@pytest.fixture
def small(triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 16, 16)


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 64, 2, 2, 16),  # whole blocks
        (1, 1, 1, 1, 1),  # one key: the output is v
        (2, 7, 3, 3, 5),  # less than a block
        (1, 33, 2, 2, 20),  # one row into a new block, a head dimension between two powers of two
        (1, 150, 2, 1, 16),  # many blocks, and a part of one
    ],
    ids=str,
)
def test_output_and_gradients(shape, dtype, small):
    check(shape, dtype)


@pytest.mark.parametrize(
    "dtype, shape", [(jnp.float32, (1, 70, 1, 1, 8)), (jnp.float16, (1, 300, 1, 1, 64))], ids=str
)
def test_the_tiles_of_the_file(dtype, shape, triton_on_cpu):
    check(shape, dtype)


MASKS = [
    {"causal": False},
    {"window": 1},
    {"window": 10},  # within a block
    {"window": 17},  # over the edge of one
    {"window": 40},  # whole blocks inside
    {"scale": -0.7},
    {"scale": 0.0},
]


@pytest.mark.parametrize("how", MASKS, ids=str)
@pytest.mark.parametrize("m, n", [(16, 32), (32, 16)])
@pytest.mark.parametrize("backward", ["split", "fused"])
def test_masks_over_every_kind_of_block(backward, m, n, how, triton_on_cpu, monkeypatch):
    """128 rows end with a block, 107 inside one."""
    set_tiles(monkeypatch, m, n, backward)
    check((1, 107, 1, 1, 8), **how)
    if "window" in how or "causal" in how:
        check((1, 128, 1, 1, 16), **how)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("seed", [0, 1], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize("how", [{}, {"window": 20}, {"causal": False}], ids=str)
def test_segments(how, seed, backward, triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 16, 16, backward)
    check((2, 75, 1, 1, 8), segments=4, seed=seed, **how)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("heads, key_heads", [(4, 2), (3, 1)])
def test_grouped_heads(heads, key_heads, backward, triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 16, 16, backward)
    check((2, 40, heads, key_heads, 8), window=30)
    check((1, 32, heads, key_heads, 16), jnp.float16)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("head_dim", [5, 20, 64, 80, 128])
def test_head_dimensions(head_dim, backward, triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 32, 32, backward)
    check((1, 50, 1, 1, head_dim), jnp.float16)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("shape", [(2, 48, 3, 3, 16), (1, 35, 2, 2, 5)], ids=str)
def test_packed_is_unpacked(shape, backward, triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 16, 16, backward)
    args = inputs(shape, jnp.float16, segments=3)
    found = [jax.jit(functools.partial(with_gradients, f))(*args) for f in (attend, attend_packed)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    check(shape, packed=True)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_drawn_shapes(data, triton_on_cpu, monkeypatch):
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    set_tiles(monkeypatch, draw(16, 32), draw(16, 32), draw("split", "fused"))
    key_heads = draw(1, 2)
    t, d = data.draw(st.integers(20, 70)), data.draw(st.integers(1, 40))
    causal = draw(True, False)
    window = data.draw(st.none() | st.integers(1, 80)) if causal else None
    shape = (draw(1, 2), t, key_heads * draw(1, 2), key_heads, d)
    # Of few numbers, or in fp16, the textbook may be right by luck.
    check(shape, jnp.float32, draw(None, 3), draw(0, 1), causal=causal, window=window)


# --------------------------------------------------------------------------------- what is not read


# the interpreter's, about the other sequences
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("f", [attend, attend_packed])
@pytest.mark.parametrize(
    "how, backward",
    [({}, "split"), ({"causal": False}, "split"), ({"window": 12}, "split"), ({}, "fused")],
    ids=str,
)
def test_nothing_leaks_from_the_next_sequence(how, backward, f, triton_on_cpu, monkeypatch):
    """What lies behind row T is the next sequence; here all of it is NaN, or infinite."""
    set_tiles(monkeypatch, 32, 16, backward)
    q, k, v, _, dout, dlse = inputs((3, 37, 1, 1, 5), jnp.float32)
    bad = jnp.asarray([1, np.nan, np.inf], jnp.float32)[:, None, None, None]
    f = jax.jit(functools.partial(with_gradients, functools.partial(f, **how)))
    clean = f(q[:1], k[:1], v[:1], None, dout[:1], dlse[:1])
    for one, other in zip(f(q * bad, k * bad, v * bad, None, dout * bad, dlse), clean, strict=True):
        np.testing.assert_array_equal(one[:1], other)


def test_blocks_outside_the_window_are_not_read(small):
    q, k, v, _, dout, dlse = inputs((1, 96, 1, 1, 8), jnp.float32)
    f = functools.partial(with_gradients, functools.partial(attend, window=10))
    far = jnp.asarray(np.arange(96) < 48)[None, :, None, None]
    found = f(q, jnp.where(far, jnp.nan, k), jnp.where(far, jnp.nan, v), None, dout, dlse)
    for name, one, other in zip(NAMES, found, f(q, k, v, None, dout, dlse), strict=True):
        axis = 2 if name == "lse" else 1
        np.testing.assert_array_equal(*(np.take(x, range(64, 96), axis) for x in (one, other)))


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_far_below_those_of_no_key(causal, backward, triton_on_cpu, monkeypatch):
    """Rows from T on are read as zeros: their scores of 0 are e^280 times as heavy as those of the
    keys that there are."""
    set_tiles(monkeypatch, 16, 32, backward)
    q, k, v, _, dout, dlse = inputs((1, 37, 1, 1, 8), jnp.float32)
    q, k = 10 + 0.01 * q, -10 + 0.01 * k
    f = jax.jit(functools.partial(with_gradients, functools.partial(attend, causal=causal)))
    for ours, true in zip(
        f(q, k, v, None, dout, dlse),
        equations(q, k, v, None, dout, dlse, causal=causal),
        strict=True,
    ):
        np.testing.assert_allclose(ours, true, rtol=2e-3, atol=2e-3 * np.abs(true).max())


def test_rows_of_huge_scores_stay_finite(small):
    q, k, v, _, dout, dlse = inputs((1, 40, 1, 1, 8), jnp.float16)
    found = with_gradients(attend, q * jnp.float16(100), k * jnp.float16(100), v, None, dout, dlse)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


# ---------------------------------------------------------------------------------- transformations


def test_vmap_checkpoint_and_jit(small):
    q, k, v, ids, dout, dlse = (
        jnp.stack([x, x[::-1]]) for x in inputs((2, 20, 2, 1, 8), jnp.float32, segments=2)
    )
    f = functools.partial(with_gradients, attend)
    singly = [f(*(x[i] for x in (q, k, v, ids, dout, dlse))) for i in range(2)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *singly)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(jax.vmap(f))(q, k, v, ids, dout, dlse), want
    )
    # One key and value for all.
    shared = jax.vmap(f, (0, None, None, None, 0, 0))(q, k[0], v[0], ids[0], dout, dlse)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], shared), singly[0])
    again = jax.jit(functools.partial(with_gradients, jax.checkpoint(attend)))
    jax.tree.map(
        np.testing.assert_array_equal, again(q[0], k[0], v[0], ids[0], dout[0], dlse[0]), singly[0]
    )


# ---------------------------------------------------------------------------------------------- GPU


def check_on_the_gpu(shape, dtype, **how):
    if dtype == "tf32":
        how = {"precision": None, "product": tf32_product, **how}
    check(shape, jnp.float32 if dtype in ("tf32", "fp32") else dtype, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "tf32"])
@pytest.mark.parametrize(
    "shape, how",
    [
        ((2, 100, 3, 3, 64), {}),
        ((2, 1000, 2, 2, 64), {}),
        ((2, 1024, 3, 3, 64), {}),
        ((1, 4096, 1, 1, 64), {}),
        ((1, 1000, 2, 2, 64), {"causal": False}),
        ((1, 1000, 2, 2, 64), {"window": 256}),
        ((1, 1000, 2, 2, 64), {"segments": 5, "seed": 0}),
        # Sorted ids: in a document of one token the exact gradient of q is that of L alone. The
        # difference of dO·V in TF32 and of Σ dO∘O in fp32 is more than the 2× rule allows.
        ((1, 1024, 2, 2, 64), {"segments": 5, "seed": 2, "window": 256}),
        ((1, 1024, 2, 2, 64), {"packed": True}),
        ((1, 1000, 4, 4, 80), {"packed": True}),
        ((1, 1024, 8, 2, 64), {}),
        ((1, 1024, 2, 2, 128), {}),
        ((1, 1000, 2, 2, 128), {"packed": True}),
        ((3, 77, 2, 1, 5), {}),
        ((1, 1, 1, 1, 1), {}),
    ],
    ids=str,
)
def test_on_the_gpu(shape, how, dtype):
    check_on_the_gpu(shape, dtype, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float16, "fp32"])
@pytest.mark.parametrize(
    "shape, how",
    [
        ((2, 1000, 2, 2, 64), {}),
        ((1, 1000, 2, 2, 64), {"causal": False}),
        ((1, 1024, 2, 2, 64), {"segments": 5, "seed": 2, "window": 256}),
        ((1, 1000, 4, 4, 80), {"packed": True}),
        ((1, 1024, 8, 2, 64), {}),
        ((1, 1000, 2, 2, 128), {"packed": True}),
        ((3, 77, 2, 1, 5), {}),
    ],
    ids=str,
)
def test_other_dtypes_on_the_gpu(shape, how, dtype):
    """The kernels of bf16 and TF32, with other instructions."""
    check_on_the_gpu(shape, dtype, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "tf32", "fp32"])
def test_both_forms_of_the_backward_pass_on_the_gpu(dtype, backward, monkeypatch):
    from pallas_kernels.attention import triton

    tuning = triton.tuning
    monkeypatch.setattr(triton, "tuning", lambda *where: tuning(*where) | {"backward": backward})
    for packed in (False, True):
        check_on_the_gpu((2, 1000, 2, 2, 64), dtype, packed=packed)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 256])
def test_runs_are_equal(window):
    q, k, v, *_ = inputs((4, 1024, 12, 12, 64), jnp.bfloat16)
    f = jax.jit(gradients(deterministic=True, window=window))
    first, *others = (f(q, k, v) for _ in range(4))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.gpu
def test_packed_is_unpacked_on_the_gpu():
    args = inputs((2, 1000, 4, 4, 64), jnp.bfloat16)
    how = {"deterministic": True}
    found = [with_gradients(functools.partial(f, **how), *args) for f in (attend, attend_packed)]
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.gpu
def test_more_than_2_to_the_31_numbers():
    """The last sequence of many that are equal has the output and the gradient of the first."""
    qkv = jax.random.normal(jax.random.key(0), (1, 1024, 3, 12, 64), jnp.bfloat16)
    batch = 2**31 // qkv.size + 2
    f = lambda qkv: flash_attention_qkv(qkv, implementation="triton", deterministic=True)
    gradient = jax.jit(lambda qkv: jax.vjp(f, qkv)[1](qkv[:, :, 0])[0])
    many = gradient(jnp.broadcast_to(qkv, (batch, *qkv.shape[1:])))
    np.testing.assert_array_equal(many[-1], gradient(qkv)[0])


@pytest.mark.gpu
def test_memory_is_linear_in_time():
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    compiled = jax.jit(gradients()).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4096 * 4096


@pytest.mark.gpu
def test_the_gradient_of_a_packed_projection_is_not_copied():
    """dk, dv and dq go into one array: beside it and what attention saves there is no other of its
    size."""
    shape = jax.ShapeDtypeStruct((8, 1024, 3, 12, 64), jnp.bfloat16)
    f = lambda qkv: packed_gradients(deterministic=True)(qkv)
    compiled = jax.jit(f).lower(shape).compile()
    out_and_its_gradient = 2 * 8 * 1024 * 12 * 64 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * out_and_its_gradient
