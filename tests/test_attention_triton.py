"""The Triton back end of pallas_kernels.flash_attention against the equations in fp64, by the 2×
rule."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_tools import to_tf32, triton_kernels
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import flash_attention
from pallas_kernels.attention import flash_attention_qkv

NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(shape, dtype, segments=None, seed=0):
    """q, k, v, segment ids, and directions for the gradients of the output and of L; shape = (B, T,
    H, K, D).

    Scores have a standard deviation of 2: weights are far from uniform.
    """
    b, t, h, k, d = shape
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    q = normal(b, t, h, d) * jnp.asarray(2, dtype)
    ids = rng.integers(0, segments or 1, (b, t))
    if segments and seed % 2 == 0:
        ids.sort(axis=1)
    ids = jnp.asarray(ids, jnp.int32) if segments else None
    return (
        q,
        normal(b, t, k, d),
        normal(b, t, k, d),
        ids,
        normal(b, t, h, d),
        normal(b, h, t, dtype=jnp.float32),
    )


def visible(ids, t, causal, window):
    t_T1, s_1T = np.arange(t)[:, None], np.arange(t)[None, :]
    seen = np.ones((1, t, t), bool)
    if causal:
        seen = seen & (s_1T <= t_T1) & (t_T1 - s_1T < (window or t))
    if ids is not None:
        seen = seen & (np.asarray(ids)[:, :, None] == np.asarray(ids)[:, None, :])
    return seen


def equations(
    q, k, v, ids, dout, dlse, *, dtype=None, product=np.matmul, causal=True, scale=None, window=None
):
    """Output, L and the three gradients from the equations, a head at a time; in fp64.

    With a dtype they are the textbook: fp32, and every product's result rounded to the dtype.
    """
    wide = np.float64 if dtype is None else np.float32
    rounded = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(np.float32))
    q, k, v, dout, dlse = (np.asarray(x).astype(wide) for x in (q, k, v, dout, dlse))
    scale = wide(q.shape[-1] ** -0.5 if scale is None else scale)
    b, t, heads, _ = q.shape
    seen = np.broadcast_to(visible(ids, t, causal, window), (b, t, t))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.zeros((b, heads, t), wide)
    for i, h in np.ndindex(b, heads):
        g = h // (heads // k.shape[2])
        scores = np.where(seen[i], scale * rounded(product(q[i, :, h], k[i, :, g].T)), -np.inf)
        highest = scores.max(-1, keepdims=True)
        lse[i, h] = highest[:, 0] + np.log(np.exp(scores - highest).sum(-1))
        weights = np.exp(scores - highest)
        weights /= weights.sum(-1, keepdims=True)
        out[i, :, h] = rounded(product(rounded(weights), v[i, :, g]))
        dweights = rounded(product(dout[i, :, h], v[i, :, g].T))
        dscores = weights * (
            dweights - (weights * dweights).sum(-1, keepdims=True) + dlse[i, h][:, None]
        )
        dscores = rounded(scale * dscores)
        dq[i, :, h] = rounded(product(dscores, k[i, :, g]))
        dk[i, :, g] = rounded(dk[i, :, g] + rounded(product(dscores.T, q[i, :, h])))
        dv[i, :, g] = rounded(dv[i, :, g] + rounded(product(rounded(weights).T, dout[i, :, h])))
    return out, lse, dq, dk, dv


def tf32_product(a, b):
    """Of TF32's numbers, without further rounding. XLA multiplies small arrays as they are, also
    where it has TF32."""
    return to_tf32(a).astype(np.float64) @ to_tf32(b).astype(np.float64)


def with_gradients(f, q, k, v, ids, dout, dlse):
    (out, lse), pull = jax.vjp(lambda q, k, v: f(q, k, v, ids), q, k, v)
    return out, lse, *pull((dout, dlse))


def attend(q, k, v, ids, **how):
    how = {"precision": "highest", **how}
    return flash_attention(
        q, k, v, segment_ids=ids, return_lse=True, implementation="triton", **how
    )


def attend_packed(q, k, v, ids, **how):
    how = {"precision": "highest", **how}
    qkv = jnp.stack([q, k, v], 2)
    return flash_attention_qkv(
        qkv, segment_ids=ids, return_lse=True, implementation="triton", **how
    )


def check(shape, dtype=jnp.float32, segments=None, seed=0, packed=False, product=np.matmul, **how):
    args, f = inputs(shape, dtype, segments, seed), attend_packed if packed else attend
    found = jax.jit(functools.partial(with_gradients, functools.partial(f, **how)))(*args)
    mask = {name: how[name] for name in ("causal", "scale", "window") if name in how}
    textbook, exact = (
        equations(*args, dtype=dtype, product=product, **mask),
        equations(*args, **mask),
    )
    for name, ours, theirs, true in zip(NAMES, found, textbook, exact, strict=True):
        assert ours.dtype == (jnp.float32 if name == "lse" else dtype)
        # The worst of a few fp32 roundings is a matter of luck.
        for norm in (rms,) if dtype == jnp.float32 else (rms, max_abs):
            assert_within_twice(ours, theirs, true, norm=norm, name=name)


def set_tiles(monkeypatch, m, n, backward="split"):
    """Blocks so small that a few rows make several of them."""
    from pallas_kernels.attention import triton

    tile = {"M": m, "N": n, "rows": 100, "num_warps": 4, "num_stages": 2}
    entry = {"backward": backward, "products": "ieee", **dict.fromkeys(triton.PASSES, tile)}
    monkeypatch.setattr(triton, "tuning", lambda *_: entry)


@pytest.fixture
def small(triton_on_cpu, monkeypatch):
    set_tiles(monkeypatch, 16, 16)


@pytest.mark.parametrize(
    "heads, t, together",
    [
        (48, 1024, 24),
        (384, 1024, 32),
        (33, 1024, 17),
        (5, 1024, 5),
        (1, 1024, 1),
        (3, 40_000, 1),
        (768, 700, 46),
    ],
)
def test_groups_of_heads_are_even(heads, t, together):
    """As few as may be of at most 32,768 rows, the last no more than a few heads smaller than the
    others."""
    from pallas_kernels.attention import triton

    tile = {"M": 64, "N": 64, "rows": 32768, "num_warps": 4, "num_stages": 3}
    found = triton._launched(tile, t, heads)
    assert found == {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3, "TOGETHER": together}
    assert -(-heads // together) == -(-heads // max(1, 32768 // t))


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


# --------------------------------------------------------------------------------------------- TF32


@pytest.fixture
def tensor_cores(triton_on_cpu, monkeypatch):
    """Products in TF32 leave out the low 13 bits of their operands, and their only NaN is a
    GPU's."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, *args):
        if not precision.name.startswith("TF32"):
            return multiply(self, a, b, d, precision, *args)
        cut = [
            (np.ascontiguousarray(x.data).view(np.uint32) & 0xFFFFE000).view(np.float32)
            for x in (a, b)
        ]
        product = np.matmul(*cut) + d.data
        product.view(np.uint32)[np.isnan(product)] = 0x7FFFFFFF
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize(
    "shape, how",
    [
        ((1, 1, 1, 1, 1), {}),
        ((3, 77, 2, 1, 5), {}),
        ((1, 64, 2, 2, 16), {"packed": True, "window": 20}),
        ((1, 50, 2, 2, 20), {"packed": True, "segments": 3}),
        ((1, 70, 1, 1, 64), {"causal": False, "scale": -0.2}),
    ],
    ids=str,
)
def test_tf32(shape, how, backward, tensor_cores, monkeypatch):
    """Without rounding to nearest errors are three times as large."""
    set_tiles(monkeypatch, 16, 32, backward)
    check(shape, precision=None, product=tf32_product, **how)


def test_tf32_in_the_tiles_of_the_file(tensor_cores):
    check((1, 150, 1, 1, 64), precision=None, product=tf32_product)


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_tf32_is_not_too_small(backward, tensor_cores, monkeypatch):
    """One operand that is cut off and not rounded makes a product smaller by 2^−11.5 on average."""
    set_tiles(monkeypatch, 32, 32, backward)
    args = inputs((1, 150, 2, 2, 64), jnp.float32)
    found = with_gradients(functools.partial(attend, precision=None), *args)
    for name, ours, true in zip(NAMES, found, equations(*args), strict=True):
        size = np.vdot(ours, true) / np.vdot(true, true)
        assert abs(size - 1) < 2.0**-14, (name, size - 1)


def turned(x_BTHD, rows):
    """Rounded, B·H·D·T′ with zeros from T on, and of 8 columns the even ones first."""
    b, t, h, d = x_BTHD.shape
    x_BHDT = np.zeros((b, h, d, -(-t // rows) * rows), np.float32)
    x_BHDT[..., :t] = to_tf32(np.asarray(x_BTHD)).transpose(0, 2, 3, 1)
    return x_BHDT.reshape(b, h, d, -1, 4, 2).swapaxes(-1, -2).reshape(x_BHDT.shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t, d", [(128, 16), (70, 5), (1, 20)])
def test_copies_in_tf32(t, d, packed, triton_on_cpu):
    """Blocks are of 64 rows there; those of 128 and 16 rows, for which the turned copies are, end
    elsewhere."""
    from pallas_kernels.attention.triton import _inputs, _shape
    from pallas_kernels.attention.triton_tf32 import tf32_copies, tf32_copies_of_dout

    q, k, v, _, dout, _ = inputs((2, t, 4, 4 if packed else 2, d), jnp.float32)
    operands = (jnp.stack([q, k, v], 2),) if packed else (q, k, v)
    shape = _shape(operands, None, True, 1.0, None, False, {})
    held = _inputs(operands, None)[:3]
    backward = sum(tf32_copies(*held, shape, straight="qkv", turned={"q": 128, "k": 16}), ())[:5]
    _, k_straight, _, _, _, v_turned = sum(
        tf32_copies(*held, shape, straight="k", turned={"v": 16}), ()
    )
    dout_straight, dout_turned, delta = tf32_copies_of_dout(dout, q, shape, turned=128)
    found = (*backward, k_straight, v_turned, dout_straight, dout_turned)
    wanted = [to_tf32(np.asarray(x)) for x in (q, k, v)]
    wanted += [turned(q, 128), turned(k, 16), to_tf32(np.asarray(k)), turned(v, 16)]
    wanted += [to_tf32(np.asarray(dout)), turned(dout, 128)]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    # Of numbers that are not rounded: those would be off by 2^−12 or so of the largest products.
    products = np.asarray(dout, np.float64) * np.asarray(q, np.float64)
    error = np.abs(delta - products.sum(-1).swapaxes(1, 2))
    assert (error <= d * 2.0**-24 * np.abs(products).sum(-1).swapaxes(1, 2)).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_not_a_number_stays_so_in_tf32(bits, tensor_cores, monkeypatch):
    set_tiles(monkeypatch, 16, 16)
    not_a_number(bits)


def not_a_number(bits):
    """Numbers that are rounded by adding to their bits could become finite."""
    q, k, v, _, dout, dlse = inputs((1, 40, 1, 1, 8), jnp.float32)
    bad = np.array(q)
    bad.view(np.uint32)[0, 20, 0, 3] = bits
    f = jax.jit(functools.partial(with_gradients, functools.partial(attend, precision=None)))
    rows = np.arange(40)
    for name, ours, clean in zip(
        NAMES,
        f(jnp.asarray(bad), k, v, None, dout, dlse),
        f(q, k, v, None, dout, dlse),
        strict=True,
    ):
        ours, clean = (
            np.moveaxis(np.asarray(x), 2, 1) if name == "lse" else np.asarray(x)
            for x in (ours, clean)
        )
        touched = rows <= 20 if name in ("dk", "dv") else rows == 20
        assert np.isnan(ours[:, touched]).all(), name
        if name != "dk":  # there 0·NaN comes through to later keys of the block
            np.testing.assert_array_equal(ours[:, ~touched], clean[:, ~touched])


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


# -------------------------------------------------------------------------------- tiles and kernels


def gradients(deterministic=False, **how):
    def f(q, k, v):
        out = flash_attention(q, k, v, implementation="triton", deterministic=deterministic, **how)
        return out.astype(jnp.float32).sum()

    return jax.grad(f, (0, 1, 2))


def packed_gradients(**how):
    f = lambda qkv: (
        flash_attention_qkv(qkv, implementation="triton", **how).astype(jnp.float32).sum()
    )
    return jax.grad(f)


def test_deterministic_is_split(monkeypatch):
    """The names are the only thing that a CPU can tell apart: its interpreter adds in one order."""
    set_tiles(monkeypatch, 64, 64, "fused")
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    names = lambda deterministic: [
        k.name for k in triton_kernels(gradients(deterministic), x, x, x)
    ]
    assert names(True) == ["forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel"]
    assert names(False) == ["forward_kernel", "delta_kernel", "dkv_kernel", "convert_kernel"]


@pytest.mark.parametrize(
    "capability, listed",
    [
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 7), "8.0"),  # 163 KB, as much as 8.0
        ((8, 9), "8.6"),
        ((9, 0), "9.0"),
        ((10, 0), "9.0"),
        ((12, 0), "8.6"),  # 99 KB
        ((13, 0), "8.6"),  # unknown: the least
    ],
)
def test_tiles_of_every_gpu(capability, listed):
    from pallas_kernels.attention import triton

    for products in ("16", "tf32", "fp32"):
        entries = triton._tiles()[listed][products]
        assert triton.tuning(capability, products, 5) is entries["64"]
        assert triton.tuning(capability, products, 65) is entries["128"]


def test_errors_of_tiles():
    from pallas_kernels.attention import triton

    with pytest.raises(
        ValueError,
        match=r"nothing for compute capability 7.5 with 99 KB of shared memory; it lists \['9.0'",
    ):
        triton.tuning((7, 5), "16", 64)
    with pytest.raises(
        ValueError, match="nothing under '9.0', '16' for a head dimension of 129; it has "
    ):
        triton.tuning((9, 0), "16", 129)
    with pytest.raises(ValueError, match="nothing under '9.0', '8' for a head dimension of 64"):
        triton.tuning((9, 0), "8", 64)
    tiles = copy.deepcopy(triton._tiles())
    assert triton._checked(tiles) is tiles
    entry = tiles["9.0"]["16"]["64"]
    entry["dq"]["M"] = 48
    with pytest.raises(
        ValueError,
        match="'9.0', '16', '64': M and N of 'dq' are powers of two from 16 on, not {'M': 48",
    ):
        triton._checked(tiles)
    del entry["dq"]["M"]
    with pytest.raises(
        ValueError,
        match="'9.0', '16', '64': 'dq' needs a positive number for each of .*, and has {'N'",
    ):
        triton._checked(tiles)
    fp32 = copy.deepcopy(triton._tiles())
    fp32["9.0"]["fp32"]["64"]["products"] = "tf32"
    with pytest.raises(
        ValueError, match="'9.0', 'fp32', '64': 'products' is 'ieee' or 'tf32x3', not 'tf32'"
    ):
        triton._checked(fp32)
    entry["backward"] = "both"
    with pytest.raises(
        ValueError, match="'9.0', '16', '64': 'backward' is 'split' or 'fused', not 'both'"
    ):
        triton._checked(tiles)
    del tiles["9.0"]["shared_kb"]
    with pytest.raises(ValueError, match="'9.0' needs a number of 'shared_kb'"):
        triton._checked(tiles)


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
    qkv = jax.ShapeDtypeStruct((64, 1024, 3, 12, head_dim), dtype)
    kernels = triton_kernels(packed_gradients(precision=precision), qkv, capability=capability)
    for kernel in kernels:
        assert kernel.spill_bytes == 0, (kernel.name, kernel.registers, kernel.spill_bytes)
        assert kernel.shared_bytes <= SHARED_KB[capability] * 1024
        assert not kernel.serialised, kernel.name
    names = ["forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel"]
    if dtype == jnp.float32 and precision is None:
        # Copies of k and v; of q, k and v; and of dO, with delta.
        names = [
            "tf32_kernel",
            "forward_kernel",
            "tf32_kernel",
            "tf32_dout_kernel",
            "dkv_kernel",
            "dq_kernel",
        ]
    assert [k.name for k in kernels] == names
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


def check_on_the_gpu(shape, dtype, **how):
    if dtype == "tf32":
        how = {"precision": None, "product": tf32_product, **how}
    check(shape, jnp.float32 if dtype in ("tf32", "fp32") else dtype, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_not_a_number_stays_so_in_tf32_on_the_gpu(bits):
    not_a_number(bits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, "tf32", "fp32"])
@pytest.mark.parametrize(
    "shape, how",
    [
        ((2, 100, 3, 3, 64), {}),
        ((2, 1000, 2, 2, 64), {}),
        ((2, 1024, 12, 12, 64), {}),
        ((1, 4096, 2, 2, 64), {}),
        ((1, 1000, 2, 2, 64), {"causal": False}),
        ((1, 1024, 2, 2, 64), {"window": 256}),
        ((1, 1000, 2, 2, 64), {"window": 256}),
        ((1, 1000, 2, 2, 64), {"segments": 5, "seed": 0}),
        ((1, 1024, 2, 2, 64), {"segments": 5, "seed": 1, "window": 256}),
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
