"""gptjax.data.Loader: windows, their order, positions, several processes, and the errors."""

import os
import tempfile
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from dataset_tools import tokens_of
from hypothesis import given, settings

from gptjax.data import Loader, ShardError, Windows, fixed_batches, write_shard

VOCAB = 65536
# The first epoch of 25 windows with seed 0 in all versions: a resumed run depends on it.
ORDER = [18, 8, 16, 7, 20, 13, 24, 0, 19, 17, 10, 9, 21, 15, 3, 2, 11, 6, 12, 14, 4, 23, 22, 5, 1]


def write_stream(folder, sizes):
    """Write shards with consecutive tokens, so that a window's tokens name its position."""
    paths, begin = [], 0
    for number, size in enumerate(sizes, start=1):
        paths.append(Path(folder) / f"count_train_{number:06d}.bin")
        write_shard(paths[-1], np.arange(begin, begin + size, dtype=np.uint16))
        begin += size
    return paths


def make(paths, **options):
    return Loader(
        paths, **({"sequence_length": 4, "batch": 2, "seed": 0, "vocab_size": VOCAB} | options)
    )


def take(loader, steps):
    with loader:
        return np.stack([tokens_of(next(loader)) for _ in range(steps)])


def window_numbers(batches, length=4):
    """Return the index of each row's window.

    Every row must be T + 1 consecutive tokens from a multiple of T.
    """
    rows = np.asarray(batches).reshape(-1, length + 1)
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(length + 1))
    assert not (rows[:, 0] % length).any()
    return rows[:, 0] // length


@pytest.fixture
def stream(tmp_path):
    # 101 tokens: 25 windows of 4, several across a boundary
    return write_stream(tmp_path, [30, 11, 60])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The shards of `stream`, which no test changes."""
    return write_stream(tmp_path_factory.mktemp("stream"), [30, 11, 60])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 4),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_each_epoch_covers_every_window_exactly_once(sizes, batch, seed):
    with tempfile.TemporaryDirectory() as folder:
        paths = write_stream(folder, sizes)
        count = (sum(sizes) - 1) // 4
        steps = -(-3 * count // batch)
        numbers = window_numbers(take(make(paths, batch=batch, seed=seed), steps))[: 3 * count]
    for epoch in numbers.reshape(3, count):
        assert sorted(epoch) == list(range(count))


@pytest.mark.parametrize(
    ("skipped", "batch", "odd", "seed"), [(0, 1, 0, 0), (3, 2, 1, 1), (13, 6, 3, 3), (25, 1, 0, 7)]
)
def test_a_start_equals_skipping(shared, skipped, batch, odd, seed):
    """Also across epochs, and from a position that is not a multiple of the batch."""
    whole = take(make(shared, batch=batch, seed=seed), skipped + 8).reshape(-1, 5)
    start = skipped * batch + odd
    got = take(make(shared, batch=batch, seed=seed, start=start), 4).reshape(-1, 5)
    np.testing.assert_array_equal(got, whole[start:][: len(got)])


@pytest.mark.parametrize(
    ("processes", "rows", "start", "seed"), [(2, 3, 7, 1), (3, 2, 24, 2), (4, 3, 33, 1000)]
)
def test_the_parts_of_the_processes_are_the_batches_of_one(shared, processes, rows, start, seed):
    options = {"batch": processes * rows, "seed": seed, "start": start}
    whole = take(make(shared, **options), 4)
    parts = [
        take(make(shared, process_index=index, process_count=processes, **options), 4)
        for index in range(processes)
    ]
    # Row r of a batch belongs to process r % P: merged, every row appears exactly once.
    np.testing.assert_array_equal(np.stack(parts, axis=2).reshape(whole.shape), whole)


def epochs(paths, seed, count=3, **how):
    batches = take(make(paths, batch=25, seed=seed, **how), count)
    return window_numbers(batches).reshape(count, 25).tolist()


def test_the_order_is_shuffled_and_another_in_each_epoch_and_for_each_seed(shared):
    orders = [order for seed in (0, 1, 2) for order in epochs(shared, seed)]
    assert len({tuple(order) for order in orders}) == 9  # neighbouring seeds share no epoch either
    assert list(range(25)) not in orders
    assert epochs(shared, 1) == epochs(shared, 1) != epochs(shared, 1, order=1)
    assert orders[0] == ORDER
    # Almost no window is followed by its successor in the text.
    assert (np.diff(orders, axis=1) == 1).sum() < 30


def test_position_counts_returned_and_not_prefetched_batches(shared):
    with make(shared, start=7, batch=6, process_count=2) as loader:
        for position in (7, 13, 19):
            assert loader.position == position
            batch = next(loader)
            time.sleep(0.1)  # the threads are steps ahead by now
    assert batch.inputs.dtype == batch.targets.dtype == np.int32 and batch.segments is None
    assert batch.inputs.shape == batch.targets.shape == (3, 4)


def test_a_dataset_smaller_than_a_batch_repeats(tmp_path):
    numbers = window_numbers(take(make(write_stream(tmp_path, [13]), batch=8), 3))
    assert np.bincount(numbers).tolist() == [8, 8, 8]


def test_a_far_start_is_as_fast_as_a_near_one(shared):
    begin = time.monotonic()
    take(make(shared, start=10**12), 1)
    assert time.monotonic() - begin < 5


def test_a_token_outside_the_vocabulary_is_an_error_with_its_offset(stream):
    tokens = np.arange(30, 41, dtype=np.uint16)
    tokens[6] = 60000
    write_shard(stream[1], tokens)
    says = (
        r"count_train_000002.bin: at byte 1036: expected ids below .* 50257, "
        r"found id 60000 \(token 6\); .*tokenizer"
    )
    with make(stream, batch=25, vocab_size=50257) as loader:
        with pytest.raises(ShardError, match=says):
            next(loader)
        assert loader.position == 0
    with pytest.raises(ShardError, match=says):
        fixed(stream, vocab_size=50257, count=6)


@pytest.mark.parametrize("offset", [0, 30])
def test_a_shard_truncated_while_it_is_used_is_an_error_of_the_next_batch(stream, offset):
    loader = make(stream, batch=25)
    next(loader)
    os.truncate(stream[2], 1024 + offset)
    says = rf"count_train_000003.bin: at byte \d+: .* found a file of {1024 + offset} bytes"
    with loader, pytest.raises(ShardError, match=says):
        for _ in range(100):  # some batches were made before
            next(loader)


def test_many_shards_need_few_open_files_and_a_replaced_one_stays_as_it_was(stream, monkeypatch):
    windows = Windows(stream, 4)
    before = tokens_of(windows[0]).tolist()
    write_shard(stream[0], np.zeros(30, dtype=np.uint16))
    assert tokens_of(windows[0]).tolist() == before
    monkeypatch.setattr("gptjax.data.loader._OPEN_FILES", 1)
    windows = Windows(stream, 4)
    assert [tokens_of(windows[i])[-1] for i in (0, 24, 0)] == [0, 100, 0]


def test_close_ends_the_threads(shared):
    before = set(threading.enumerate())
    loader = make(shared)
    next(loader)
    mine = set(threading.enumerate()) - before
    loader.close()
    for thread in mine:
        thread.join(timeout=5)
    assert mine and not any(thread.is_alive() for thread in mine)


def fixed(paths, **options):
    options = {"sequence_length": 4, "batch": 4, "count": 3} | options
    return [tokens_of(batch) for batch in fixed_batches(paths, **options)]


def test_fixed_batches_are_spread_evenly_over_the_split_and_always_the_same(shared):
    batches = fixed(shared)
    assert [batch.shape for batch in batches] == [(4, 5)] * 3 and batches[0].dtype == np.int32
    assert window_numbers(batches).tolist() == [*range(0, 24, 2)]
    np.testing.assert_array_equal(fixed(shared), batches)
    # Fewer in a small split, and no window twice.
    assert len({*window_numbers(fixed(shared, count=100)).tolist()}) == 24
    parts = [fixed(shared, process_index=index, process_count=2) for index in (0, 1)]
    np.testing.assert_array_equal(np.stack(parts, axis=2).reshape(3, 4, 5), batches)


SHARE = "expected a batch that 2 processes can share equally, found {} windows for process {}"
TOO_SHORT = "000001.bin and the shards after it: expected at least 102 tokens .* found 101"


@pytest.mark.parametrize(
    ("call", "options", "says"),
    [
        (make, {"batch": 3, "process_count": 2}, SHARE.format(3, 0)),
        (make, {"process_index": 2, "process_count": 2}, SHARE.format(2, 2)),
        (make, {"batch": 0}, "expected a batch .* found 0"),
        (make, {"sequence_length": 101}, TOO_SHORT),
        (fixed, {"batch": 28}, "expected at least 28 windows .* found 25 in "),
        (fixed, {"batch": 3, "process_count": 2}, SHARE.format(3, 0)),
        (fixed, {"sequence_length": 101}, TOO_SHORT),
    ],
)
def test_numbers_that_do_not_fit_are_refused(shared, call, options, says):
    with pytest.raises(ValueError, match=says):
        call(shared, **options)
