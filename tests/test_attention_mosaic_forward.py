"""The forward pass of flash attention on Hopper: in JAX's interpreter for Mosaic GPU, lowered for
an H200, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200
from reference.attention import at_once
from reference.attention import textbook as plain
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels._mosaic import schedule
from pallas_kernels.attention import (
    flash_attention,
    flash_attention_qkv,
    mosaic_forward,
    reference,
)
from pallas_kernels.attention.mosaic_forward import (
    Tiles,
    forward,
    key_blocks,
    why_not_tiles,
)

SMALL = Tiles(block_kv=64, stages=2, warpgroups=2, q_slots=1)
EVERYWHERE = {"head_dim": 64, "causal": True, "tiles": dataclasses.asdict(SMALL)}


def inputs(batch, time, heads, key_heads=None, head_dim=64, dtype=jnp.float16, seed=0):
    """q, k, v. Scores have a standard deviation of 2: weights are far from uniform."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, time, n, head_dim) for n in (heads, key_heads or heads, key_heads or heads)]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q * jnp.asarray(2, dtype), k, v


def run(operands, tiles=None, *, causal=True, scale=None, window=None):
    scale = operands[0].shape[-1] ** -0.5 if scale is None else scale
    how = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "deterministic": False,
        "true_fp32": False,
    }
    return forward(operands, None, **how, tiles=tiles)


def plain_and_exact(q, k, v, **mask):
    """O and L in the inputs' dtype, and from the definition."""
    forms = plain, functools.partial(reference, return_lse=True)
    return [at_once(functools.partial(f, **mask))(q, k, v) for f in forms]


def check(q, k, v, tiles=None, packed=False, **mask):
    operands = (jnp.stack((q, k, v), axis=2),) if packed else (q, k, v)
    ours = jax.jit(functools.partial(run, tiles=tiles, **mask))(operands)
    assert ours[0].dtype == q.dtype and ours[1].dtype == jnp.float32
    for name, found, theirs, exact in zip(
        ("out", "lse"), ours, *plain_and_exact(q, k, v, **mask), strict=True
    ):
        for norm in (rms, max_abs):
            assert_within_twice(found, theirs, exact, norm=norm, name=name)
    return ours


# -------------------------------------------------------------------------------------- on the host


@pytest.mark.parametrize("window", [None, 1, 20, 64, 100, 129])
@pytest.mark.parametrize("causal", [True, False])
def test_key_blocks_against_the_mask(causal, window):
    if window is not None and not causal:
        return
    for length, rows, block in [
        (1, 64, 64),
        (7, 64, 128),
        (100, 64, 64),
        (300, 64, 128),
        (300, 128, 64),
        (400, 128, 192),
    ]:
        t, s = np.arange(length)[:, None], np.arange(-(-length // block) * block)[None, :]
        seen = (s < length) & (s <= t if causal else s >= 0) & (s > t - (window or length))
        for first in range(0, length, rows):
            found = key_blocks(first, rows, length, block, causal=causal, window=window)
            blocks = functools.partial(
                key_blocks, rows=rows, length=length, block=block, causal=causal, window=window
            )
            traced = jax.jit(blocks)(first)
            assert tuple(map(int, traced)) == found
            start, full_start, full_stop, stop = found
            assert 0 <= start <= full_start <= full_stop <= stop
            mine = seen[first : first + rows].reshape(-1, seen.shape[1] // block, block)
            assert [j for j in range(mine.shape[1]) if mine[:, j].any()] == list(range(start, stop))
            full = [j for j in range(mine.shape[1]) if mine[:, j].all()]
            # The queries past the end, which are not there, may cost one block its fullness.
            assert set(range(full_start, full_stop)) <= set(full)
            if first + rows <= length:
                assert full == list(range(full_start, full_stop))


@pytest.mark.parametrize(
    "heads, costs, blocks",
    [(768, [9.0, 8.0, 6.0, 5.0, 3.0, 2.0], 132), (3, [2.0], 7), (5, [3.0, 1.0], 2)],
)
def test_schedule_gives_each_piece_once_and_equal_shares(heads, costs, blocks):
    table = schedule(heads, costs, blocks)
    pieces = [list(row[1 : 1 + row[0]]) for row in table]
    assert sorted(piece for row in pieces for piece in row) == list(range(heads * len(costs)))
    assert table.shape[1] > 1 + table[:, 0].max()
    loads = [sum(costs[piece % len(costs)] for piece in row) for row in pieces]
    assert max(loads) - min(loads) <= max(costs)
    if heads == 768:
        assert max(loads) <= 1.02 * sum(costs) * heads / blocks
        # At any time the blocks are at work on neighbouring heads.
        middle = [row[len(row) // 2] // len(costs) for row in pieces]
        assert max(middle) - min(middle) < 150


def test_few_heads_are_under_way_together():
    """Of 96 heads of 4,096 keys, in blocks of 128 on an H200: their dQ in fp32, 2 MB each, has to
    fit into its L2 cache of 60 MB."""
    costs = [2.0 * (32 - block) + 1 for block in range(32)]
    work = []
    for row in schedule(96, costs, 132):
        begins = 0.0
        for piece in row[1 : 1 + row[0]]:
            work.append((begins, begins + costs[piece % 32], piece // 32))
            begins = work[-1][1]
    for now in np.linspace(0, max(ends for _, ends, _ in work), 100, endpoint=False):
        assert len({head for begins, ends, head in work if begins <= now < ends}) <= 20


def test_tiles_that_cannot_be_compiled_say_why():
    assert why_not_tiles(Tiles(), 64) is None
    for change, head_dim, reason in [
        ({"block_q": 96}, 64, "block_q is 64 or 128"),
        ({"block_kv": 80}, 64, "block_kv is a multiple of 64"),
        ({"warpgroups": 4}, 64, "1 to 3 warpgroups"),
        ({"warpgroups": 1}, 64, "ping_pong needs at least two warpgroups"),
        ({"stages": 1}, 64, "two stages"),
        ({"stages": 8}, 64, "shared memory"),
        ({"block_q": 128, "warpgroups": 2, "stages": 2, "q_slots": 1}, 64, "registers"),
        ({"block_kv": 256, "stages": 2}, 64, "registers"),
    ]:
        assert reason in why_not_tiles(dataclasses.replace(Tiles(), **change), head_dim)
    with pytest.raises(ValueError, match="cannot be used with head_dim=64: shared memory"):
        run(inputs(1, 64, 1), Tiles(stages=8))


def test_tiles_are_those_of_the_head_dimension_and_mask(monkeypatch):
    full = EVERYWHERE | {"causal": False, "tiles": {"stages": 2}}
    monkeypatch.setattr(mosaic_forward, "_choices", lambda: {"forward": [full, EVERYWHERE]})
    assert mosaic_forward.tiles("forward", 64, False) == {"stages": 2}
    assert mosaic_forward.tiles("forward", 64, True) == EVERYWHERE["tiles"]
    with pytest.raises(ValueError, match="no forward tiles for head_dim=128 causal=True"):
        mosaic_forward.tiles("forward", 128, True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_default_tiles_can_be_compiled(head_dim, causal):
    assert why_not_tiles(mosaic_forward.default_tiles(head_dim, causal), head_dim) is None


# ------------------------------------------------------------------------------- in the interpreter


@pytest.mark.parametrize(
    "time, dtype", [(1, jnp.float16), (7, jnp.bfloat16), (128, jnp.float16), (257, jnp.bfloat16)]
)
def test_lengths(mosaic_on_cpu, time, dtype):
    check(*inputs(1, time, 1, dtype=dtype), SMALL)


def test_more_work_than_blocks(mosaic_on_cpu):
    check(*inputs(2, 130, 3), SMALL)


def test_grouped_heads(mosaic_on_cpu):
    check(*inputs(2, 100, 4, 2, dtype=jnp.bfloat16), SMALL)


def test_packed_is_the_same(mosaic_on_cpu):
    apart = check(*inputs(2, 100, 2), SMALL)
    packed = check(*inputs(2, 100, 2), SMALL, packed=True)
    assert all((one == other).all() for one, other in zip(apart, packed, strict=True))


@pytest.mark.parametrize("time", [64, 130])
def test_full(mosaic_on_cpu, time):
    check(*inputs(1, time, 2), SMALL, causal=False)


@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_window(mosaic_on_cpu, window):
    check(*inputs(1, 200, 1), SMALL, window=window)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2])
def test_scale(mosaic_on_cpu, scale):
    check(*inputs(1, 70, 1), SMALL, scale=scale)


def test_head_dim_128(mosaic_on_cpu):
    check(*inputs(1, 130, 1, head_dim=128), dataclasses.replace(SMALL, stages=3))


@pytest.mark.parametrize(
    "tiles, mask",
    [
        (Tiles(), {}),
        (Tiles(), {"window": 90}),
        (Tiles(warpgroups=1, block_kv=64, stages=2, q_slots=1, ping_pong=False), {}),
        (
            Tiles(warpgroups=2, block_kv=64, stages=3, q_slots=1, overlap=False, ping_pong=False),
            {"window": 90},
        ),
        (Tiles(stages=2, overlap=False), {}),
        (Tiles(warpgroups=2, block_kv=192, stages=2, ping_pong=False), {}),
        (Tiles(block_q=128, warpgroups=2, block_kv=64, stages=2, q_slots=1), {}),
        (Tiles(block_q=128, warpgroups=2, block_kv=64, stages=2, q_slots=1), {"window": 90}),
    ],
    ids=str,
)
def test_tiles(mosaic_on_cpu, tiles, mask):
    assert why_not_tiles(tiles, 64) is None
    check(*inputs(1, 330, 1), tiles, **mask)


def test_public_functions(mosaic_on_cpu, monkeypatch):
    monkeypatch.setattr(mosaic_forward, "_choices", lambda: {"forward": [EVERYWHERE]})
    q, k, v = inputs(1, 100, 2)
    ours = flash_attention(q, k, v, implementation="mosaic", return_lse=True)
    packed = flash_attention_qkv(
        jnp.stack((q, k, v), axis=2), implementation="mosaic", return_lse=True
    )
    assert all((one == other).all() for one, other in zip(ours, packed, strict=True))
    for found, theirs, exact in zip(
        ours, plain(q, k, v), reference(q, k, v, return_lse=True), strict=True
    ):
        assert_within_twice(found, theirs, exact)


# ------------------------------------------------------------------------------ lowered for an H200


def lowered(
    batch,
    time,
    heads,
    head_dim,
    *,
    key_heads=None,
    packed=True,
    dtype=jnp.bfloat16,
    tiles=None,
    **mask,
):
    shapes = [(batch, time, n, head_dim) for n in (heads, key_heads or heads, key_heads or heads)]
    shapes = [(batch, time, 3, heads, head_dim)] if packed else shapes
    operands = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    assert "mosaic_gpu" in lower_for_h200(lambda *x: run(x, tiles, **mask), *operands)


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 256}], ids=str)
@pytest.mark.parametrize(
    "shape", [(64, 1024, 12, 64), (4, 4096, 16, 128), (2, 1001, 25, 64)], ids=str
)
def test_lowers_for_an_h200(shape, mask):
    """Each shape and each mask are packed once, at least, and once not."""
    lowered(*shape, packed=(shape[0] == 4) == bool(mask), **mask)


def test_grouped_heads_and_tiny_lengths_lower_for_an_h200():
    lowered(2, 1000, 8, 64, key_heads=2, packed=False, dtype=jnp.float16)
    for time in (1, 7, 8, 9):
        lowered(1, time, 2, 64)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_options_lower_for_an_h200(head_dim, overlap, ping_pong):
    for sizes in [(64, 3, 128), (64, 2, 64), (64, 2, 192), (128, 2, 64), (128, 1, 128)]:
        tiles = Tiles(*sizes, stages=2, q_slots=1, overlap=overlap, ping_pong=ping_pong)
        if why_not_tiles(tiles, head_dim) is None:
            lowered(2, 1024, 2, head_dim, tiles=tiles)


# ----------------------------------------------------------------------------------------- on a GPU


def poisoned(f, operands):
    """f's results where the outputs held NaN before: memory that the allocator gives again."""
    shapes = jax.eval_shape(f, operands)
    jax.block_until_ready([jnp.full(o.shape, jnp.nan, o.dtype) for o in shapes for _ in range(2)])
    return jax.block_until_ready(f(operands))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, dtype", [(64, jnp.bfloat16), (128, jnp.float16)])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 256}], ids=str)
@pytest.mark.parametrize("time", [1, 100, 1000, 1024, 4096])
def test_on_a_gpu(time, mask, head_dim, dtype):
    q, k, v = inputs(2, time, 4, head_dim=head_dim, dtype=dtype)
    theirs, exact = plain_and_exact(q, k, v, **mask)
    f = jax.jit(functools.partial(run, **mask))
    for operands in [(q, k, v), (jnp.stack((q, k, v), axis=2),)]:
        first, again = poisoned(f, operands), poisoned(f, operands)
        for name, found, repeated, plain_one, exact_one in zip(
            ("out", "lse"), first, again, theirs, exact, strict=True
        ):
            assert (found == repeated).all(), f"{name}: two runs differ"
            for norm in (rms, max_abs):
                assert_within_twice(found, plain_one, exact_one, norm=norm, name=name)


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [1, 3])
def test_grouped_heads_on_a_gpu(key_heads):
    q, k, v = inputs(3, 1000, 12, key_heads, dtype=jnp.float16)
    found = poisoned(jax.jit(run), (q, k, v))
    for ours, theirs, exact in zip(found, *plain_and_exact(q, k, v), strict=True):
        assert_within_twice(ours, theirs, exact)


@pytest.mark.gpu
def test_gpt2_on_a_gpu():
    """B = 16 at GPT-2's shapes: thousands of pieces of work for each launch, a hundred launches,
    one result."""
    q, k, v = inputs(16, 1024, 12, dtype=jnp.bfloat16)
    packed = (jnp.stack((q, k, v), axis=2),)
    f = jax.jit(run)
    first = f(packed)
    for found, theirs, exact in zip(first, *plain_and_exact(q, k, v), strict=True):
        assert_within_twice(found, theirs, exact)
    for _ in range(100):
        assert all((one == other).all() for one, other in zip(first, f(packed), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_option_on_a_gpu(head_dim):
    q, k, v = inputs(2, 700, 3, head_dim=head_dim, dtype=jnp.bfloat16)
    theirs, exact = plain_and_exact(q, k, v)
    options = [
        (2, 1, True, True),
        (3, 2, True, False),
        (2, 1, False, True),
        (3, 1, False, False),
    ]
    sizes = [
        (64, 3, 128),
        (64, 2, 128),
        (64, 2, 64),
        (64, 2, 192),
        (128, 2, 64),
        (128, 1, 128),
        (64, 1, 128),
    ]
    for i, size in enumerate(sizes):
        # Two of the options with each size, each of them with several sizes.
        for stages, q_slots, overlap, ping_pong in options[i % 2 :: 2]:
            tiles = Tiles(*size, stages, q_slots, overlap, ping_pong)
            if why_not_tiles(tiles, head_dim) is None:
                found = jax.jit(functools.partial(run, tiles=tiles))((q, k, v))
                for ours, plain_one, exact_one in zip(found, theirs, exact, strict=True):
                    assert_within_twice(ours, plain_one, exact_one, name=str(tiles))
