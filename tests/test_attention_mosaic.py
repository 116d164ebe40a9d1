"""The Mosaic kernels of flash attention on Hopper, forward and backward, with and without packed
documents: on the host, in JAX's interpreter for Mosaic GPU, lowered for an H200, and on a GPU."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_tools import (
    NAMES,
    call,
    check,
    compare,
    inputs,
    plain_and_exact,
    results,
    seen,
)
from kernel_tools import forget_races, h200, lower_for_h200
from rule_tools import runs_are_equal

from pallas_kernels import _dispatch, flash_attention, flash_attention_qkv
from pallas_kernels._mosaic import schedule
from pallas_kernels.attention import (
    Options,
    mosaic_backward,
    mosaic_backward_kernel,
    mosaic_forward,
    mosaic_forward_kernel,
)
from pallas_kernels.attention.documents import document_bounds, padded, schedule_by_cost

FP16, BF16 = jnp.float16, jnp.bfloat16

# Documents. One token; ends before, at and after the edges of tiles of 64; several inside of one.
EDGES = (1, 62, 1, 64, 65, 7, 56, 8)
# Two whole tiles and a little more; the others begin there.
OTHERS = (136, 64, 64)
LENGTH = sum(EDGES)


def ids_of(*sequences):
    """Segment ids of sequences with documents of these lengths. Ids decrease, and return."""
    return np.stack([np.repeat(-np.arange(len(x)) % 3, x) for x in sequences]).astype(np.int32)


def forward_sizes(length, **options):
    return mosaic_forward_kernel.Sizes(Options(**options), length, length, 1, 1, 64, FP16, False)


# -------------------------------------------------------------------------------------- on the host


def check_key_blocks(found, mask_TS, first, length):
    """Check the blocks of keys that rows from `first` on see, and those that need no mask."""
    start, full_start, full_stop, stop = map(int, found)
    assert 0 <= start <= full_start <= full_stop <= stop
    rows, block = mosaic_forward_kernel.ROWS, mosaic_forward_kernel.KEYS
    mine = mask_TS[first : min(first + rows, length)]
    mine = mine.reshape(-1, mask_TS.shape[1] // block, block)
    assert np.flatnonzero(mine.any((0, 2))).tolist() == list(range(start, stop))
    full, ours = np.flatnonzero(mine.all((0, 2))).tolist(), list(range(full_start, full_stop))
    # With rows that are out of bounds a full block may be masked.
    assert ours == full or (first + rows > length and set(ours) <= set(full))


@pytest.mark.parametrize(
    "causal, window", [*((True, w) for w in (None, 1, 20, 64, 100, 129)), (False, None)]
)
@pytest.mark.parametrize("length", [1, 7, 64, 300, 400])
def test_key_blocks_against_the_mask(length, causal, window):
    rows, block = mosaic_forward_kernel.ROWS, mosaic_forward_kernel.KEYS
    mask = seen((1, length, length), causal=causal, window=window)[0]
    mask = np.pad(mask, [(0, 0), (0, -length % block)])
    key_blocks = forward_sizes(length, causal=causal, window=window).key_blocks
    traced = jax.jit(key_blocks)
    for first in range(0, length, rows):
        found = key_blocks(first)
        assert tuple(map(int, traced(first))) == found
        check_key_blocks(found, mask, first, length)


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
    assert max(loads) <= 1.02 * sum(costs) * heads / blocks or heads < 768


@pytest.mark.parametrize("heads, group, most", [(96, 1, 20), (16, 4, 8)])
def test_few_heads_are_under_way_together(heads, group, most):
    """Of 96 heads of 4,096 keys, in blocks of 128 on an H200: their dQ in fp32, 2 MB each, has to
    fit into its L2 cache of 60 MB. Of 16 groups of 4 heads, 10 at a time fit with q and dO."""
    costs = np.array([2.0 * group * (32 - block) + 1 for block in range(32)])
    rows = [row[1 : 1 + row[0]] for row in schedule(heads, [*costs], 132, at_once=10)]
    ends = [np.cumsum(costs[row % 32]) for row in rows]
    for now in np.linspace(0, max(end[-1] for end in ends), 100, endpoint=False):
        pairs = zip(rows, ends, strict=True)
        under_way = {row[(end <= now).sum()] // 32 for row, end in pairs if end[-1] > now}
        assert len(under_way) <= most


@pytest.mark.parametrize(
    "heads, time, whole",
    [
        (64 * 12, 1024, True),  # six rounds, 97 % busy
        (16 * 12, 4096, False),  # two rounds, 73 % busy
        (12, 1024, False),
        (60, 64, True),  # the sums are never more than the first
    ],
)
def test_which_way_dq_is_summed(heads, time, whole):
    assert mosaic_backward.whole_heads_are_faster(heads, time, 132) == whole


@pytest.mark.parametrize("window", [None, 1, 50])
def test_bounds(window):
    ids = ids_of(EDGES, OTHERS, [1] * LENGTH, [LENGTH])
    bounds = document_bounds(ids, window=window)
    mask = seen((4, LENGTH, LENGTH), segment_ids=ids, window=window)
    np.testing.assert_array_equal(bounds.first_BT, mask.argmax(2))
    np.testing.assert_array_equal(bounds.last_BT, LENGTH - 1 - mask[:, ::-1].argmax(1))
    # Equal rows of an id that is its own successor in the next sequence are not one document.
    np.testing.assert_array_equal(document_bounds(ids[:, :1]).last_BT, 0)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_documents_can_be_traced_with_x64(implementation):
    """Forward and backward."""
    q = jax.ShapeDtypeStruct((2, LENGTH, 2, 64), BF16)
    ids = jnp.asarray(ids_of(EDGES, OTHERS))
    f = functools.partial(flash_attention, segment_ids=ids, implementation=implementation)
    with jax.enable_x64(True), h200():
        jax.jit(jax.grad(lambda q: f(q, q, q).astype(jnp.float32).sum())).trace(q)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 50), (False, None)])
def test_tiles_outside_are_skipped_and_tiles_inside_are_not_masked(causal, window):
    ids = ids_of(EDGES, OTHERS)
    bounds = padded(document_bounds(ids, window=window))
    mask = seen((2, LENGTH, LENGTH), segment_ids=ids, causal=causal, window=window)
    mask = np.pad(mask, [(0, 0), (0, -LENGTH % 128), (0, -LENGTH % 128)])
    rows = mosaic_forward_kernel.ROWS
    key_blocks = forward_sizes(LENGTH, causal=causal).key_blocks
    for b, first in itertools.product(range(2), range(0, LENGTH, rows)):
        ends = tuple(tuple(x[b, t] for x in bounds) for t in (first, first + rows - 1))
        check_key_blocks(key_blocks(jnp.int32(first), ends), mask[b], first, LENGTH)
    mask = np.pad(mask, [(0, 0), (0, 128), (0, 128)])
    for head_dim, keys in mosaic_backward_kernel.KEYS.items():
        shape = (LENGTH, LENGTH, 1, 1, head_dim, FP16)
        sizes = mosaic_backward_kernel.Sizes(Options(causal=causal), *shape, True, 1)
        for b, j in np.ndindex(2, sizes.key_blocks):
            ends = bounds.first_BT[b, j * keys], bounds.last_BT[b, j * keys + keys - 1]
            found = sizes.queries_of(j, *ends)
            mine = mask[b, :, j * keys : (j + 1) * keys].reshape(-1, sizes.queries, keys)
            assert np.flatnonzero(mine.any((1, 2))).tolist() == list(range(*map(int, found)))


@pytest.mark.parametrize(
    "batch, heads, items, blocks", [(1, 6, 384, 132), (3, 2, 1, 4), (1, 1, 1, 1)]
)
def test_schedule_by_cost_has_each_item_once_in_equal_shares(batch, heads, items, blocks):
    rng = np.random.default_rng(0)
    costs = np.minimum(rng.exponential(4, (batch, items)).astype(np.int32) + 1, 12)
    schedule = jax.jit(schedule_by_cost, static_argnums=(1, 2))
    table = np.asarray(schedule(costs, heads, blocks))
    lists = [row[1 : 1 + row[0]] for row in table]
    number = batch * heads * items
    assert sorted(np.concatenate(lists)) == list(range(number))
    assert {len(x) for x in lists} <= {number // blocks, -(-number // blocks)}
    assert table.shape[1] > 1 + max(map(len, lists))
    loads = [costs[x // items // heads, x % items].sum() for x in lists]
    assert max(loads) <= 1.05 * np.mean(loads) + 1 or number < 2 * blocks


# ------------------------------------------------------------------------------- in the interpreter


@pytest.fixture
def checked(mosaic_on_cpu, monkeypatch):
    """Return `check` of the public function; dQ is summed by whole heads, or by split heads."""
    monkeypatch.setattr(mosaic_backward, "whole_heads_are_faster", lambda *sizes, **passes: False)

    def checked(shape, dtype=FP16, *, split=False, lse=False, **how):
        found = check("mosaic", shape, dtype, lse=lse, deterministic=not split, **how)
        if split:
            forget_races()
        return found

    return checked


ONE = (1, 136, 1, 1, 64)
SPLIT = {"split": True}
CASES = [
    # Less than a tile; one key more than two blocks; whole blocks and tiles.
    ((1, 1, 1, 1, 64), FP16, {}),
    ((2, 7, 1, 1, 64), BF16, {}),
    ((1, 257, 1, 1, 64), FP16, {"causal": False}),
    ((1, 257, 1, 1, 64), FP16, SPLIT),
    ((1, 384, 1, 1, 64), BF16, {}),
    ((1, 256, 1, 1, 128), FP16, {"causal": False}),
    ((2, 130, 3, 3, 64), FP16, {}),  # more work than blocks
    ((1, 264, 2, 2, 64), FP16, SPLIT | {"packed": True}),
    # Grouped heads.
    ((2, 100, 4, 2, 64), BF16, {"scale": -0.2}),
    ((2, 136, 4, 2, 64), FP16, {"lse": True}),
    ((1, 136, 4, 2, 64), FP16, SPLIT),
    ((1, 200, 2, 1, 128), BF16, SPLIT),
    ((1, 70, 1, 1, 64), FP16, {"scale": 0.0}),
    # One key; the edges in one block; tiles without a visible key; keys in the middle whose tiles
    # need no mask.
    ((1, 300, 1, 1, 128), FP16, {"window": 1}),
    ((1, 330, 1, 1, 64), FP16, {"window": 90}),
    ((1, 400, 1, 1, 64), FP16, {"window": 270}),
    ((1, 264, 1, 1, 64), FP16, SPLIT | {"window": 140}),
    ((1, 264, 1, 1, 128), FP16, {}),
]


@pytest.mark.parametrize("shape, dtype, how", CASES, ids=str)
def test_output_and_gradients(checked, shape, dtype, how):
    checked(shape, dtype, **how)


def test_a_window_of_one(checked):
    """dq and dk are zero: all that is left is what fp32 rounds, smaller than what the rule lets
    pass only for small gradients."""
    args, (dout, dlse) = inputs(ONE, FP16)
    checked(ONE, arrays=(args, (dout / FP16(16), dlse)), window=1)


@pytest.mark.parametrize("mask", [{}, {"segment_ids": ids_of([40, 60])}], ids=["", "documents"])
def test_very_negative_scores(checked, mask):
    """Far below any exponent: what lies past the end, with scores of 0, would be infinitely more
    likely than any key."""
    (q, k, v), directions = inputs((1, 100, 1, 1, 64), FP16)
    arrays = (jnp.abs(q) * FP16(8), -jnp.abs(k) * FP16(8), v), directions
    found = checked(ONE, arrays=arrays, causal=False, **mask)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


DOCUMENTS = {
    "window": ((2, LENGTH, 2, 1, 64), (EDGES, OTHERS), {"window": 50}),
    "one document and tokens alone": ((2, LENGTH, 2, 1, 64), ([LENGTH], [1] * LENGTH), {}),
    "head dimension 128": ((1, 200, 1, 1, 128), ([1, 70, 129],), {"causal": False}),
}


@pytest.mark.parametrize(
    "how, name", [*(({}, name) for name in DOCUMENTS), (SPLIT, "head dimension 128")]
)
def test_documents(checked, how, name):
    shape, documents, mask = DOCUMENTS[name]
    checked(shape, segment_ids=ids_of(*documents), **how, **mask)


def test_documents_do_not_see_each_other(checked):
    """Results outside of a document are the same bits, whatever its tokens are."""
    ids, shape = ids_of(EDGES), (1, LENGTH, 2, 1, 64)
    document = np.zeros(ids.shape, bool)
    document[0, 128:193] = True
    args, (dout, dlse) = inputs(shape, FP16)
    changed = [jnp.where(document[..., None, None], -x / FP16(2), x) for x in (*args, dout)]
    found = []
    for *qkv, direction in ((*args, dout), changed):
        found.append(checked(shape, lse=True, arrays=(qkv, (direction, dlse)), segment_ids=ids))
    for name, before, after in zip(NAMES, *found, strict=True):
        if name == "lse":
            before, after = (jnp.moveaxis(x, 2, 1) for x in (before, after))
        np.testing.assert_array_equal(before[~document], after[~document])
        assert (np.asarray(before[document]) != np.asarray(after[document])).mean() > 0.4


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    "length, head_dim, sums", [(300, 64, True), (256, 128, True), (77, 128, False)]
)
def test_lse_and_delta_of_each_query(triton_on_cpu, monkeypatch, length, head_dim, sums, with_dlse):
    """By Triton as by XLA, zeros past the end included."""
    (q, _, _), (dout, lse) = inputs((2, length, 3, 3, head_dim), FP16)
    dlse, how = lse[::-1] if with_dlse else None, {"sums": sums, "bias": with_dlse}
    make = functools.partial(mosaic_backward._lse_and_delta, lse, dout, q / FP16(2), dlse, **how)
    rows, zeros, total = make()
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: "not here")
    rows_of_xla, zeros_of_xla, total_of_xla = make()
    assert (total is None) == (total_of_xla is None) == (not with_dlse)
    if with_dlse:
        exact = np.asarray(dout, np.float64).sum((0, 1))
        for found in (total, total_of_xla):
            np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)
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


# ------------------------------------------------------------------------------ lowered for an H200


def lowered(part, shape, *, packed=True, dtype=BF16, whole_heads=None, **options):
    """Return the text of one pass, without the strings."""
    b, t, h, k, d = shape
    q, kv = (jax.ShapeDtypeStruct((b, t, n, d), dtype) for n in (h, k))
    operands = (jax.ShapeDtypeStruct((b, t, 3, h, d), dtype),) if packed else (q, kv, kv)
    lse = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    how = {"options": Options(scale=0.1, **options)}
    if part == "forward":
        text = lower_for_h200(lambda o: mosaic_forward.forward(o, None, **how), operands)
    else:
        how |= {"whole_heads": whole_heads}
        run = lambda o, *rest: mosaic_backward.backward(o, None, *rest, None, **how)
        text = lower_for_h200(run, operands, lse, q, q)
    assert text.count("custom_call @mosaic_gpu") == 1
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


LOWERED = [
    # Packed and separate; grouped heads; ragged and tiny lengths.
    ("forward", (64, 1024, 12, 12, 64), {}),
    ("forward", (4, 4096, 16, 16, 128), {}),
    ("forward", (2, 1001, 25, 25, 64), {"causal": False}),
    ("forward", (2, 1001, 3, 3, 128), {"causal": False, "packed": False}),
    ("forward", (4, 4096, 16, 16, 64), {"packed": False}),
    *(
        (part, shape, {"packed": False, "dtype": dtype, "window": 256})
        for part in ("forward", "backward")
        for shape, dtype in (((2, 1000, 8, 2, 64), FP16), ((2, 1001, 12, 4, 128), BF16))
    ),
    *(("forward", (1, time, 2, 2, 64), {}) for time in (1, 9)),
]


@pytest.mark.parametrize("part, shape, how", LOWERED, ids=str)
def test_lowers_for_an_h200(part, shape, how):
    """Mosaic raises if the shared memory does not suffice."""
    lowered(part, shape, **how)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("batch", "time"), [(64, 1024), (4, 16384)])  # whole heads, split heads
def test_backward_lowers_for_an_h200(batch, time, head_dim, causal):
    """The gradient is written where it belongs; D comes with L, and with zeros for dQ, from one
    launch."""
    text = lowered("backward", (batch, time, 12, 12, head_dim), causal=causal)
    assert "transpose" not in text and "concatenate" not in text
    assert text.count("@delta_kernel") == 1 and "dense<0.000000e+00>" not in text
    assert ("dynamic_update_slice" in text) == (batch == 4)


def test_deterministic_means_whole_heads():
    shape = (4, 4096, 12, 12, 64)
    one = lowered("backward", shape, deterministic=True)
    assert one == lowered("backward", shape, whole_heads=True) != lowered("backward", shape)


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


@pytest.mark.parametrize(
    "shape, window",
    [
        ((64, 1024, 3, 12, 64), None),
        ((1, 49152, 3, 6, 128), 1408),
        ((2, 300, 3, 2, 128), None),  # an odd number of blocks of 128 keys
    ],
    ids=str,
)
def test_documents_lower_for_an_h200(shape, window):
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)

    def loss(qkv, ids):
        options = {"window": window, "implementation": "mosaic"}
        return flash_attention_qkv(qkv, segment_ids=ids, **options).astype(jnp.float32).sum()

    assert lower_for_h200(jax.grad(loss), qkv, ids).count("custom_call @mosaic_gpu") == 2


# ----------------------------------------------------------------------------------------- on a GPU


def lengths_of_documents(time, most=2048, seed=0):
    """Lengths like those of web pages, at most `most`, that add up to `time`."""
    drawn = np.random.default_rng(seed).lognormal(6, 1, time).astype(int).clip(1, most)
    ends = np.minimum(np.cumsum(drawn), time)
    return np.diff(np.unique(ends), prepend=0)


def slices(ids, most=2048):
    """Whole documents, from one in the middle on and up to the last, of at most so many tokens."""
    edges = np.append(np.flatnonzero(np.diff(ids, prepend=ids[0] - 1)), len(ids))
    middle = int(edges[len(edges) // 2])
    yield slice(middle, int(edges[edges <= middle + most].max()))
    yield slice(int(edges[edges >= len(ids) - most].min()), len(ids))


GPU_CASES = [
    *(
        ((2, time, 4, 4, 64), dtype, mask)
        for time, dtype in ((1, FP16), (1000, BF16))
        for mask in ({}, {"causal": False}, {"window": 256})
    ),
    *(
        ((2, time, 4, 4, 128), dtype, mask)
        for time, dtype, mask in (
            (100, FP16, {}), (1000, FP16, {"causal": False}), (1024, BF16, {"window": 256}),
        )
    ),
    *(((1, 4096, 4, 4, d), BF16, {}) for d in (64, 128)),
    ((3, 1000, 12, 3, 64), FP16, {}),
    ((2, 1024, 8, 2, 128), BF16, {}),
    ((24, 1024, 12, 12, 64), BF16, {}),  # whole heads, more than two each
    # Documents
    ((2, 2048, 6, 6, 128), BF16, {"window": 384, "documents": True}),
    ((2, 2001, 6, 2, 64), BF16, {"window": 128, "documents": True}),
    ((2, 2000, 4, 1, 128), BF16, {"causal": False, "documents": True}),
    ((1, 49152, 6, 6, 128), BF16, {"window": 1408, "documents": True}),
    ((1, 49152, 12, 12, 64), BF16, {"documents": True}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype, mask", GPU_CASES, ids=str)
def test_on_a_gpu(shape, dtype, mask):
    """Whole heads, twice with equal bits, and split heads. Of long sequences, whole documents."""
    b, t, *_ = shape
    mask = dict(mask)
    if documents := mask.pop("documents", False):
        lengths = (lengths_of_documents(t, t // 2 if i % 2 else 2048, i) for i in range(b))
        mask["segment_ids"] = ids_of(*lengths)
    args, directions = inputs(shape, dtype)
    arrays = mask | {k: jnp.asarray(x) for k, x in mask.items() if k == "segment_ids"}
    packed = shape[2] == shape[3] and t % 2 == 0
    how = arrays | {"packed": packed}
    deterministic, fast = (call("mosaic", deterministic=d, **how) for d in (True, False))
    whole = runs_are_equal(functools.partial(results, deterministic), args, directions, times=2)
    split = jax.jit(functools.partial(results, fast))(args, directions)
    jax.tree.map(np.testing.assert_array_equal, whole[:2], split[:2])
    parts = slices(mask["segment_ids"][0]) if documents and t > 4096 else [slice(0, t)]
    for part in parts:
        mine = jax.tree.map(lambda x, part=part: x[:, part], (args, directions[0]))
        how = mask | {k: x[:, part] for k, x in mask.items() if k == "segment_ids"}
        expected = plain_and_exact(mine[0], (mine[1], directions[1][:, :, part]), **how)
        for found in (whole, split):
            cut = [x[:, part] for x in found]
            cut[1] = found[1][:, :, part]
            compare(cut, *expected)
