"""Packed documents in the Mosaic kernels of flash attention: bounds, work items, results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import forget_races, h200, lower_for_h200
from reference.attention import at_once
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import flash_attention, flash_attention_qkv
from pallas_kernels.attention import mosaic_backward, mosaic_forward
from pallas_kernels.attention.documents import document_bounds, padded, schedule_by_cost

# One token; ends before, at and after the edges of tiles of 64; several inside of one tile.
EDGES = (1, 62, 1, 64, 65, 7, 56, 8)
# Two whole tiles and a little more; the others begin there.
OTHERS = (136, 64, 64)
LENGTH = sum(EDGES)
TILES = {
    "forward": mosaic_forward.Tiles(block_kv=64, stages=2, warpgroups=2, q_slots=1),
    "whole heads": mosaic_backward.Tiles(whole_heads=True),
    "split heads": mosaic_backward.Tiles(whole_heads=False),
}


def ids_of(*sequences):
    """Segment ids of sequences with documents of these lengths. Ids decrease, and return."""
    return np.stack([np.repeat(-np.arange(len(x)) % 3, x) for x in sequences]).astype(np.int32)


def visible(ids, *, causal=True, window=None):
    """B·T·S: whether query t sees key s, from the definition."""
    run = np.cumsum(np.diff(ids, axis=1, prepend=0) != 0, axis=1)
    t, s = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])[None]
    seen = (s <= t) & (s > t - (window or ids.shape[1])) if causal else s >= 0
    return seen & (run[:, :, None] == run[:, None, :])


# -------------------------------------------------------------------------------------- on the host


@pytest.mark.parametrize("window", [None, 1, 50])
def test_bounds(window):
    ids = ids_of(EDGES, OTHERS, [1] * LENGTH, [LENGTH])
    bounds = document_bounds(ids, window=window)
    seen = visible(ids, window=window)
    np.testing.assert_array_equal(bounds.first_BT, seen.argmax(2))
    np.testing.assert_array_equal(bounds.last_BT, LENGTH - 1 - seen[:, ::-1].argmax(1))
    # Equal rows of an id that is its own successor in the next sequence are not one document.
    np.testing.assert_array_equal(document_bounds(ids[:, :1]).last_BT, 0)


@pytest.mark.parametrize("implementation", ["xla", "reference", "mosaic", "triton"])
def test_x64_changes_no_bit(implementation):
    """Kernels are traced only, forward and backward."""
    q = jax.random.normal(jax.random.key(0), (2, LENGTH, 2, 64), jnp.bfloat16)
    ids = jnp.asarray(ids_of(EDGES, OTHERS))
    f = functools.partial(flash_attention, segment_ids=ids, implementation=implementation)
    gradient = jax.jit(jax.grad(lambda q: f(q, q, q).astype(jnp.float32).sum()))
    if implementation in ("mosaic", "triton"):
        with jax.enable_x64(True), h200():
            gradient.trace(q)
        return
    expected = gradient(q)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(gradient(q), expected)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 50), (False, None)])
def test_tiles_outside_are_skipped_and_tiles_inside_are_not_masked(causal, window):
    ids = ids_of(EDGES, OTHERS)
    bounds = padded(document_bounds(ids, window=window))
    seen = visible(ids, causal=causal, window=window)
    seen = np.pad(seen, [(0, 0), (0, -LENGTH % 128), (0, -LENGTH % 128)])
    for rows, block in [(64, 64), (64, 128), (128, 64)]:
        blocks = functools.partial(
            mosaic_forward.key_blocks_of_documents,
            rows=rows, length=LENGTH, block=block, causal=causal,
        )  # fmt: skip
        for b, first in np.ndindex(2, LENGTH):
            if first % rows:
                continue
            top, bottom = (tuple(x[b, t] for x in bounds) for t in (first, first + rows - 1))
            found = blocks(jnp.int32(first), top=top, bottom=bottom)
            start, full_start, full_stop, stop = map(int, found)
            mine = seen[b, first : min(first + rows, LENGTH)].reshape(-1, 384 // block, block)
            assert np.flatnonzero(mine.any((0, 2))).tolist() == list(range(start, stop))
            full = np.flatnonzero(mine.all((0, 2))).tolist()
            # With rows that are out of bounds a full block may be masked.
            ours = list(range(full_start, full_stop))
            assert ours == full or (first + rows > LENGTH and set(ours) <= set(full))
    for queries in (64, 128):
        for b, j in np.ndindex(2, 3):
            ends = bounds.first_BT[b, j * 128], bounds.last_BT[b, j * 128 + 127]
            sizes = {"length": LENGTH, "queries": queries, "causal": causal, "window": None}
            found = mosaic_backward.blocks_of_queries(j, *ends, **sizes)
            mine = seen[b, :, j * 128 : (j + 1) * 128].reshape(384 // queries, queries, 128)
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


def inputs(head_dim=64, heads=2, key_heads=1, batch=2, time=LENGTH, dtype=jnp.float16, seed=0):
    """q, k, v, and a direction for the gradient. Scores have a standard deviation of 2."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, time, n, head_dim) for n in (heads, key_heads, key_heads, heads)]
    q, k, v, direction = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q * jnp.asarray(2, dtype), k, v, direction


def textbook(q, k, v, direction, seen):
    """O, L and the gradients in the inputs' dtype; the softmax alone is fp32."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scale = jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
        scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale
        scores = scores.astype(jnp.float32)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        out = jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")
        return out, jax.nn.logsumexp(scores, axis=-1)

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return out, lse, *pull((direction, jnp.zeros_like(lse)))


TEXTBOOK = at_once(textbook)


@functools.cache
def kernel(name, causal):
    module = mosaic_forward.forward if name == "forward" else mosaic_backward.backward
    how = {"causal": causal, "window": None, "deterministic": False, "true_fp32": False}
    return jax.jit(
        lambda operands, *args: module(
            operands, *args, **how, scale=operands[0].shape[-1] ** -0.5, tiles=TILES[name]
        )
    )


def run(name, args, bounds, *, causal=True, out=None, lse=None):
    """Results of a kernel. Not while matmuls of XLA are in progress: they and the interpreter can
    wait for each other's threads."""
    *operands, direction = args
    rest = () if name == "forward" else (lse, direction, out, None)
    args = jax.block_until_ready((tuple(operands), bounds, *rest))
    results = jax.block_until_ready(kernel(name, causal)(*args))
    if name == "split heads":
        forget_races()
    return results


def exact_and_plain(args, ids, **mask):
    seen = visible(ids, **mask)
    exact = TEXTBOOK(*(x.astype(jnp.float32) for x in args), seen)
    return exact, TEXTBOOK(*args, seen)


def check(name, args, ids, *, causal=True, window=None):
    """Results of a kernel by the 2× rule. Returns them."""
    bounds = document_bounds(ids, window=window)
    exact, theirs = exact_and_plain(args, ids, causal=causal, window=window)
    saved = {"out": exact[0].astype(args[0].dtype), "lse": exact[1]}
    ours = run(name, args, bounds, causal=causal, **saved)
    part = slice(0, 2) if name == "forward" else slice(2, 5)
    for found, plain, true in zip(ours, theirs[part], exact[part], strict=True):
        for norm in (rms, max_abs):
            assert_within_twice(found, plain, true, norm=norm, name=name)
    return ours


@pytest.mark.parametrize("name", ["forward", "whole heads"])
@pytest.mark.parametrize(
    "documents, window",
    [((EDGES, OTHERS), 50), (([LENGTH], [1] * LENGTH), None)],
    ids=["window", "one document and tokens alone"],
)
def test_against_the_definition(mosaic_on_cpu, name, documents, window):
    check(name, inputs(), ids_of(*documents), window=window)


@pytest.mark.parametrize(
    "name, causal", [("forward", False), ("whole heads", False), ("split heads", True)]
)
def test_head_dimension_128(mosaic_on_cpu, name, causal):
    args = inputs(head_dim=128, heads=1, batch=1, time=200)
    check(name, args, ids_of([1, 70, 129]), causal=causal)


@pytest.mark.parametrize("name", ["forward", "whole heads"])
def test_documents_do_not_see_each_other(mosaic_on_cpu, name):
    """Results outside of a document are the same bits, whatever its tokens are."""
    ids = ids_of(EDGES, OTHERS)
    document = np.zeros(ids.shape, bool)
    document[0, 128:193] = True
    document[1, :136] = True
    args = inputs()
    changed = [jnp.where(document[..., None, None], -x / x.dtype.type(2), x) for x in args]
    results = [check(name, one, ids) for one in (args, changed)]
    for before, after in zip(*results, strict=True):
        if before.shape[1] != LENGTH:  # L
            before, after = (jnp.moveaxis(x, 2, 1) for x in (before, after))
        np.testing.assert_array_equal(before[~document], after[~document])
        assert (np.asarray(before[document]) != np.asarray(after[document])).mean() > 0.4


# ------------------------------------------------------------------------------ lowered for an H200


@pytest.mark.parametrize(
    "shape, window", [((64, 1024, 3, 12, 64), None), ((1, 49152, 3, 6, 128), 1408)], ids=str
)
def test_lowers_for_an_h200(shape, window):
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
    # batch, time, heads, key heads, head dimension, mask
    (2, 2048, 6, 6, 128, {"window": 384}),
    (4, 2048, 6, 6, 64, {}),
    (2, 2001, 6, 2, 64, {"window": 128}),
    (2, 2000, 4, 1, 128, {"causal": False}),
    (2, 2048, 6, 6, 64, {"causal": False}),
    (1, 49152, 6, 6, 128, {"window": 1408}),
    (1, 49152, 12, 12, 64, {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_on_a_gpu(case):
    """Output and gradients of whole documents, by the 2× rule. Split heads and whole heads."""
    batch, time, heads, key_heads, head_dim, mask = case
    lengths = [lengths_of_documents(time, time // 2 if b % 2 else 2048, b) for b in range(batch)]
    ids = ids_of(*lengths)
    sizes = {"batch": batch, "time": time, "dtype": jnp.bfloat16}
    args = inputs(head_dim, heads, key_heads, **sizes)

    def gradients(q, k, v, direction, ids, deterministic):
        options = {"segment_ids": ids, "deterministic": deterministic, "implementation": "mosaic"}
        f = functools.partial(flash_attention, return_lse=True, **options, **mask)
        (out, lse), pull = jax.vjp(f, q, k, v)
        return out, lse, *pull((direction, jnp.zeros_like(lse)))

    run = jax.jit(gradients, static_argnums=5)
    whole, again, split = (run(*args, ids, deterministic) for deterministic in (True, True, False))
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    jax.tree.map(np.testing.assert_array_equal, whole[:2], split[:2])
    for b in {0, batch - 1}:
        for part in slices(ids[b]) if time > 4096 else [slice(0, time)]:
            exact, theirs = exact_and_plain(
                [x[b : b + 1, part] for x in args], ids[b : b + 1, part], **mask
            )
            for ours in (whole, split):
                for name, found, plain, true in zip(
                    ("out", "lse", "dq", "dk", "dv"), ours, theirs, exact, strict=True
                ):
                    mine = found[b : b + 1, :, part] if name == "lse" else found[b : b + 1, part]
                    for norm in (rms, max_abs):
                        assert_within_twice(mine, plain, true, norm=norm, name=name)
