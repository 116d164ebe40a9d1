"""The backward pass of flash attention on Hopper: in JAX's interpreter for Mosaic GPU, lowered for
an H200, and on a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import forget_races, lower_for_h200
from reference.attention import at_once
from reference.attention import textbook as plain
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import _dispatch
from pallas_kernels.attention import (
    flash_attention,
    flash_attention_qkv,
    mosaic_backward,
    reference,
)
from pallas_kernels.attention.mosaic_backward import (
    Tiles,
    _lse_and_delta,
    backward,
    why_not_tiles,
)


def inputs(batch, time, heads, key_heads=None, head_dim=64, dtype=jnp.float16, seed=0):
    """q, k, v, and a direction for the gradient. Scores have a standard deviation of 2: weights are
    far from uniform."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, time, n, head_dim) for n in (heads, key_heads or heads, key_heads or heads, heads)
    ]
    q, k, v, direction = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q * jnp.asarray(2, dtype), k, v, direction


def gradients_of(f):
    def run(operands, direction, dlse):
        (out, _), pull = jax.vjp(f, *operands)
        return pull((direction.astype(out.dtype), dlse))

    return run


def gradients(f, operands, direction, dlse):
    """One sequence after another: the scores of many would fill a GPU that other tests use."""
    run = at_once(gradients_of(f))
    operands, *rest = jax.device_get((operands, direction, dlse))
    sequences = [slice(b, b + 1) for b in range(len(direction))]
    parts = [run([x[b] for x in operands], *(x[b] for x in rest)) for b in sequences]
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


def compare(results, operands, direction, dlse, **mask):
    """dq, dk and dv of each of the results by the 2× rule."""
    exact = gradients(
        functools.partial(reference, return_lse=True, **mask),
        [x.astype(jnp.float32) for x in operands],
        direction,
        dlse,
    )
    theirs = gradients(functools.partial(plain, **mask), operands, direction, dlse)
    for found in results:
        for name, *three in zip(("dq", "dk", "dv"), found, theirs, exact, strict=True):
            for norm in (rms, max_abs):
                assert_within_twice(*three, norm=norm, name=name)


def check(
    q, k, v, direction, tiles=None, *, packed=False, with_lse=False, deterministic=False, **mask
):
    """dq, dk and dv by the 2× rule. Returns them."""
    true = functools.partial(reference, return_lse=True, **mask)
    out, lse = at_once(true)(q, k, v)
    dlse = jnp.asarray(np.random.default_rng(1).standard_normal(lse.shape) * with_lse, jnp.float32)
    how = {"causal": True, "scale": q.shape[-1] ** -0.5, "window": None} | mask
    how |= {"deterministic": deterministic, "true_fp32": False, "tiles": tiles}
    operands = (jnp.stack((q, k, v), axis=2),) if packed else (q, k, v)
    f = jax.jit(lambda operands, *rest: backward(operands, None, *rest, **how))
    # Not while products of XLA are under way: they and the interpreter can wait for each other's
    # threads.
    args = jax.block_until_ready(
        (operands, lse, direction, out.astype(q.dtype), dlse if with_lse else None)
    )
    ours = jax.block_until_ready(f(*args))
    if not (deterministic or (tiles and tiles.whole_heads)):
        forget_races()
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in operands]
    ours = tuple(ours[0][:, :, i] for i in range(3)) if packed else ours
    compare([ours], (q, k, v), direction, dlse, **mask)
    return ours


WHOLE, SPLIT = Tiles(whole_heads=True), Tiles(whole_heads=False)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients(mosaic_on_cpu, dtype):
    check(*inputs(1, 384, 1, dtype=dtype), WHOLE)


# Not a multiple of 8; one more than two blocks of keys; two in the last block.
@pytest.mark.parametrize(("time", "tiles"), [(100, WHOLE), (257, WHOLE), (130, SPLIT)])
def test_ragged_lengths(mosaic_on_cpu, time, tiles):
    check(*inputs(1, time, 1), tiles)


@pytest.mark.parametrize("time", [1, 7])
def test_tiny_lengths(mosaic_on_cpu, time):
    check(*inputs(2, time, 1, dtype=jnp.bfloat16), WHOLE)


@pytest.mark.parametrize("tiles", [WHOLE, SPLIT])
def test_grouped_queries(mosaic_on_cpu, tiles):
    check(*inputs(2, 136, 4, key_heads=2), tiles)


def test_packed_equals_separate(mosaic_on_cpu):
    args = inputs(1, 200, 2)
    for one, other in zip(check(*args, WHOLE, packed=True), check(*args, WHOLE), strict=True):
        np.testing.assert_array_equal(one, other)


def test_packed_split_heads(mosaic_on_cpu):
    check(*inputs(1, 384, 2), SPLIT, packed=True)


def test_every_key_seen(mosaic_on_cpu):
    check(*inputs(1, 257, 1), WHOLE, causal=False)


# Inside a block; over two blocks, with keys in the middle whose tiles need no mask.
@pytest.mark.parametrize(
    ("time", "window", "tiles"), [(264, 70, WHOLE), (400, 270, WHOLE), (264, 140, SPLIT)]
)
def test_windows(mosaic_on_cpu, time, window, tiles):
    check(*inputs(1, time, 1), tiles, window=window)


def test_a_window_of_one(mosaic_on_cpu):
    """dq and dk are zero: all that is left is what fp32 rounds, smaller than what the rule lets
    pass only for small gradients."""
    q, k, v, direction = inputs(1, 136, 1)
    check(q, k, v, direction / jnp.float16(16), WHOLE, window=1)


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 90}], ids=str)
def test_head_dimension_128(mosaic_on_cpu, mask):
    check(*inputs(1, 264, 1, head_dim=128), WHOLE, **mask)


def test_head_dimension_128_split_and_grouped(mosaic_on_cpu):
    check(*inputs(1, 200, 2, key_heads=1, head_dim=128, dtype=jnp.bfloat16), SPLIT)


def test_the_gradient_of_lse(mosaic_on_cpu):
    check(*inputs(1, 136, 1), WHOLE, with_lse=True)


def test_a_negative_scale(mosaic_on_cpu):
    check(*inputs(1, 136, 1), WHOLE, scale=-0.2)


def test_very_negative_scores(mosaic_on_cpu):
    """Far below any exponent: what lies past the end, with scores of 0, would be infinitely more
    likely than any key."""
    q, k, v, direction = inputs(1, 100, 1)
    ours = check(
        jnp.abs(q) * jnp.float16(8), -jnp.abs(k) * jnp.float16(8), v, direction, WHOLE, causal=False
    )
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in ours)


@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (64, Tiles(stages=3, more_barriers=False, whole_heads=True)),
        (64, Tiles(key_stages=2, whole_heads=True)),
        (64, Tiles(score_stages=2, whole_heads=True)),
        (64, Tiles(key_stages=2, whole_heads=False)),
        (128, Tiles(score_stages=2, slots=2, whole_heads=True)),
    ],
    ids=str,
)
def test_options(mosaic_on_cpu, head_dim, tiles):
    check(*inputs(1, 272, 1, head_dim=head_dim), tiles)


def test_which_way_dq_is_summed():
    sms = 132
    assert mosaic_backward.whole_heads_are_faster(64 * 12, 1024, sms)  # six rounds, 97 % busy
    assert not mosaic_backward.whole_heads_are_faster(16 * 12, 4096, sms)  # two rounds, 73 % busy
    assert not mosaic_backward.whole_heads_are_faster(12, 1024, sms)
    # the sums are never more than the first
    assert mosaic_backward.whole_heads_are_faster(60, 64, sms)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    "length, head_dim, sums", [(300, 64, True), (256, 128, True), (77, 128, False)]
)
def test_lse_and_delta_of_each_query(triton_on_cpu, monkeypatch, length, head_dim, sums, with_dlse):
    """By Triton as by XLA, zeros past the end included."""
    _, _, out, dout = inputs(2, length, 3, head_dim=head_dim)
    lse, dlse = (
        jnp.asarray(np.random.default_rng(i).standard_normal((2, 3, length)), jnp.float32)
        for i in (5, 6)
    )
    make = functools.partial(
        _lse_and_delta, lse, dout, out, dlse if with_dlse else None, sums=sums, bias=with_dlse
    )
    rows, zeros, total = make()
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: "not here")
    rows_of_xla, zeros_of_xla, total_of_xla = make()
    if with_dlse:
        np.testing.assert_allclose(
            total, np.asarray(dout, np.float64).sum((0, 1)), rtol=0, atol=1e-4
        )
        np.testing.assert_allclose(total, total_of_xla, rtol=0, atol=1e-4)
    else:
        assert total is None and total_of_xla is None
    queries = 8192 // head_dim
    assert rows.shape == (2, 3, 2, -(-length // queries) * queries)
    np.testing.assert_allclose(rows, rows_of_xla, atol=1e-4)
    assert not np.asarray(rows[..., length:]).any()
    if sums:
        assert zeros.shape == zeros_of_xla.shape == (2, length + -length % 8, 3, head_dim)
        assert not np.asarray(zeros).any()


@pytest.mark.parametrize("length, heads, head_dim", [(8, 3, 64), (2056, 2, 128), (8200, 1, 64)])
def test_sums_become_dq_where_it_lies(triton_on_cpu, length, heads, head_dim):
    """More columns than a program has; more rows than one time of every program."""
    from pallas_kernels.attention import triton_passes

    rng = np.random.default_rng(0)
    sums = jnp.asarray(rng.standard_normal((2, length, heads, head_dim)), jnp.float32)
    dqkv = jnp.asarray(rng.standard_normal((2, length, 3, heads, head_dim)), jnp.bfloat16)
    found, total = jax.jit(functools.partial(triton_passes.into_packed, scale=0.125))(sums, dqkv)
    np.testing.assert_array_equal(found[:, :, 0], (sums * 0.125).astype(jnp.bfloat16))
    np.testing.assert_array_equal(found[:, :, 1:], dqkv[:, :, 1:])
    np.testing.assert_allclose(
        total, np.asarray(sums, np.float64).sum((0, 1)) / 8, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("time, tiles", [(200, WHOLE), (130, SPLIT)])
def test_sums_for_a_bias(mosaic_on_cpu, time, tiles):
    """Of dq as it is written, and of dO; and the sum of dk is what rounding leaves of 0, that of dv
    the sum of dO."""
    q, k, v, direction = inputs(2, time, 2)
    out, lse = reference(q, k, v, return_lse=True)
    args = ((jnp.stack((q, k, v), axis=2),), None, lse, direction, out.astype(q.dtype), None)
    how = {
        "causal": True,
        "scale": 0.125,
        "window": None,
        "deterministic": False,
        "true_fp32": False,
        "tiles": tiles,
    }
    f = jax.jit(lambda *args: backward(*args, **how, bias=True))
    (dqkv,), dq_sum, dout_sum = jax.block_until_ready(f(*jax.block_until_ready(args)))
    if not tiles.whole_heads:
        forget_races()
    sums = np.asarray(dqkv, np.float64).sum((0, 1))
    rounded = 2e-3 * np.abs(np.asarray(dqkv, np.float64)).sum((0, 1))
    assert (np.abs(dq_sum - sums[0]) <= rounded[0]).all()
    assert (np.abs(sums[1]) <= rounded[1]).all() and (
        np.abs(dout_sum - sums[2]) <= rounded[2]
    ).all()
    np.testing.assert_allclose(
        dout_sum, np.asarray(direction, np.float64).sum((0, 1)), rtol=0, atol=1e-3
    )


def test_tiles_that_cannot_be():
    assert why_not_tiles(Tiles(stages=3), 64) is None
    assert "bytes of shared memory" in why_not_tiles(Tiles(stages=5), 64)
    assert "bytes of shared memory" in why_not_tiles(Tiles(key_stages=2), 128)
    assert "at least one" in why_not_tiles(Tiles(stages=0), 64)
    assert "only 1 of the slots" in why_not_tiles(Tiles(slots=2), 64)
    q, k, v, direction = inputs(1, 8, 1)
    with pytest.raises(ValueError, match="cannot be used with head_dim=64: .* shared memory"):
        check(q, k, v, direction, Tiles(stages=9))


# ------------------------------------------------------------------------------ lowered for an H200


def lowered(
    batch, time, heads, head_dim, *, packed, key_heads=None, causal=True, window=None, **how
):
    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    q, k = shape(batch, time, heads, head_dim), shape(batch, time, key_heads or heads, head_dim)
    operands = (shape(batch, time, 3, heads, head_dim),) if packed else (q, k, k)
    row = shape(batch, heads, time, dtype=jnp.float32)
    how = {
        "causal": causal,
        "scale": 0.1,
        "window": window,
        "deterministic": False,
        "true_fp32": False,
    } | how
    text = lower_for_h200(
        lambda o, *rest: backward(o, None, *rest, None, **how), operands, row, q, q
    )
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("batch", "time"), [(64, 1024), (4, 16384)])  # whole heads, split heads
def test_lowers_for_an_h200(batch, time, head_dim, causal):
    text = lowered(batch, time, 12, head_dim, packed=True, causal=causal)
    assert text.count("custom_call @mosaic_gpu") == 1
    # The gradient is written where it belongs; D comes with L, and with zeros for dQ, from one
    # launch.
    assert (
        "transpose" not in text and "concatenate" not in text and text.count("@delta_kernel") == 1
    )
    assert "dense<0.000000e+00>" not in text
    assert ("dynamic_update_slice" in text) == (batch == 4)


def test_deterministic_means_whole_heads():
    one = lowered(4, 4096, 12, 64, packed=True, deterministic=True)
    assert one == lowered(4, 4096, 12, 64, packed=True, tiles=Tiles(key_stages=2, whole_heads=True))


@pytest.mark.parametrize(("batch", "time"), [(64, 1024), (4, 16384)])
def test_lowers_inside_of_a_model(batch, time):
    """Under `scan`, `checkpoint` and `vmap`: the sums of split heads are a reference, which not
    everything takes."""

    def layer(x, w):
        qkv = jnp.einsum("btc,cd->btd", x, w).reshape(batch, time, 3, 12, 64)
        f = jax.vmap(lambda one: flash_attention_qkv(one[None], implementation="mosaic"))
        return f(qkv).reshape(batch, time, 768), None

    def loss(w, x):
        return jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 768, 2304), (batch, time, 768))
    ]
    text = lower_for_h200(jax.grad(loss), *shapes)
    # Forward, forward again, backward; each kernel is lowered once.
    assert len(re.findall(r"call @(?:forward|backward)\w*\(", text)) == 3
    assert text.count("custom_call @mosaic_gpu") == 2


def test_lowers_windows_grouped_queries_and_ragged_lengths():
    lowered(2, 1000, 12, 64, packed=False, key_heads=4, window=256)
    lowered(2, 1001, 12, 128, packed=False, key_heads=4, window=256)


@pytest.mark.parametrize(
    "tiles",
    [Tiles(stages=3, more_barriers=False), Tiles(key_stages=2), Tiles(score_stages=2)],
    ids=str,
)
def test_tiles_that_the_model_lets_through_fit(tiles):
    """Mosaic itself raises where shared memory does not suffice."""
    assert why_not_tiles(tiles, 64) is None
    lowered(2, 1024, 12, 64, packed=True, tiles=tiles)


# ----------------------------------------------------------------------------------------- on a GPU

GPU_CASES = [
    # batch, time, heads, key heads, head dimension, dtype, mask
    (2, 1024, 12, 12, 64, jnp.bfloat16, {}),
    (2, 1024, 12, 12, 64, jnp.float16, {}),
    (2, 100, 3, 3, 64, jnp.bfloat16, {}),
    (2, 1000, 3, 3, 64, jnp.bfloat16, {}),
    (1, 4096, 4, 4, 64, jnp.bfloat16, {}),
    (1, 4096, 4, 4, 128, jnp.bfloat16, {}),
    (2, 1024, 4, 4, 64, jnp.bfloat16, {"window": 256}),
    (2, 1024, 4, 4, 128, jnp.float16, {"window": 256}),
    (2, 1024, 8, 2, 64, jnp.bfloat16, {}),
    (2, 1024, 8, 2, 128, jnp.bfloat16, {}),
    (2, 1000, 4, 4, 64, jnp.bfloat16, {"causal": False}),
    (2, 1024, 4, 4, 128, jnp.bfloat16, {"causal": False}),
    (24, 1024, 12, 12, 64, jnp.bfloat16, {}),  # whole heads, more than two each
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_a_gpu(case):
    """dQ summed in any order, and deterministic."""
    batch, time, heads, key_heads, head_dim, dtype, mask = case
    q, k, v, direction = inputs(batch, time, heads, key_heads, head_dim, dtype)

    dlse = jnp.asarray(np.random.default_rng(1).standard_normal((batch, heads, time)), jnp.float32)
    # Memory that the allocator hands out next is full of NaN: what is never written shows.
    poison = jax.jit(lambda: jnp.full((2 * q.size,), jnp.nan, jnp.float32))
    results = []
    for deterministic in (False, True):
        how = {"implementation": "mosaic", "deterministic": deterministic, "return_lse": True}
        ours = jax.jit(gradients_of(functools.partial(flash_attention, **how, **mask)))
        poison().block_until_ready()
        results.append(ours((q, k, v), direction, dlse))
    compare(results, (q, k, v), direction, dlse, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_on_a_gpu(head_dim, deterministic):
    q, k, v, direction = inputs(2, 1024, 4, head_dim=head_dim, dtype=jnp.bfloat16)
    how = {"implementation": "mosaic", "deterministic": deterministic}

    def packed(qkv):
        return jax.vjp(functools.partial(flash_attention_qkv, **how), qkv)[1](direction)[0]

    def separate(q, k, v):
        return jax.vjp(functools.partial(flash_attention, **how), q, k, v)[1](direction)

    one = jax.jit(packed)(jnp.stack((q, k, v), axis=2))
    for i, other in enumerate(jax.jit(separate)(q, k, v)):
        if deterministic or i > 0:
            np.testing.assert_array_equal(
                np.asarray(one[:, :, i], np.float32), np.asarray(other, np.float32)
            )
        else:
            # The sums' order differs from run to run: a unit in the last place of bf16.
            np.testing.assert_allclose(
                np.asarray(one[:, :, i], np.float32),
                np.asarray(other, np.float32),
                rtol=2**-7,
                atol=1e-4,
            )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 1024, 12, 64), (2, 4096, 4, 128)], ids=str)
def test_deterministic_on_a_gpu(shape):
    batch, time, heads, head_dim = shape
    q, k, v, direction = inputs(batch, time, heads, head_dim=head_dim, dtype=jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        f = functools.partial(flash_attention, implementation="mosaic", deterministic=True)
        return jax.vjp(f, q, k, v)[1](direction)

    first = run(q, k, v)
    for _ in range(10):
        for one, other in zip(first, run(q, k, v), strict=True):
            np.testing.assert_array_equal(
                np.asarray(one, np.float32), np.asarray(other, np.float32)
            )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "tiles"),
    [
        (64, WHOLE),
        (64, SPLIT),
        (64, Tiles(stages=3)),
        (64, Tiles(key_stages=2, more_barriers=False)),
        (64, Tiles(score_stages=2)),
        (128, Tiles(slots=3)),
        (128, Tiles(score_stages=2, more_barriers=False, whole_heads=True)),
        (128, Tiles(score_stages=2, more_barriers=False, whole_heads=False)),
    ],
    ids=str,
)
def test_options_on_a_gpu(head_dim, tiles):
    check(*inputs(12, 1024, 12, head_dim=head_dim, dtype=jnp.bfloat16), tiles)
