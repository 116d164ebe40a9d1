"""gptjax.data.Loader: windows, their order, positions, several processes, and the errors."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from dataset_tools import tokens_of
from hypothesis import given, settings

from gptjax.data import Loader, ShardError, fixed_batches, write_shard
from gptjax.data.loader import Windows

VOCAB = 65536


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


def test_a_batch_has_int32_inputs_and_targets(stream):
    with make(stream, batch=6, process_count=3, process_index=1) as loader:
        batch = next(loader)
    assert batch.inputs.dtype == batch.targets.dtype == np.int32 and batch.segments is None
    assert batch.inputs.shape == batch.targets.shape == (2, 4)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 4),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_each_epoch_covers_every_window_exactly_once(sizes, batch, seed):
    with tempfile.TemporaryDirectory() as folder:
        paths = write_stream(folder, sizes)
        count = (sum(sizes) - 1) // 4
        steps = -(-3 * count // batch)
        numbers = window_numbers(take(make(paths, batch=batch, seed=seed), steps))[: 3 * count]
    for epoch in numbers.reshape(3, count):
        assert sorted(epoch) == list(range(count))


@given(
    skipped=st.integers(0, 40),
    batch=st.sampled_from([1, 2, 6]),
    odd=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_a_start_equals_skipping(skipped, batch, odd, seed):
    """Also across epochs, and from a position that is not a multiple of the batch."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_stream(folder, [30, 11, 60])
        whole = take(make(paths, batch=batch, seed=seed), skipped + 8).reshape(-1, 5)
        with make(paths, batch=batch, seed=seed) as before:
            for _ in range(skipped):
                next(before)
            position = before.position
        resumed = make(paths, batch=batch, seed=seed, start=position + odd)
        got = take(resumed, 4).reshape(-1, 5)
    assert position == skipped * batch
    np.testing.assert_array_equal(got, whole[position + odd :][: len(got)])


@given(
    processes=st.sampled_from([2, 3, 4]),
    rows=st.integers(1, 3),
    start=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_the_parts_of_the_processes_are_the_batches_of_one(processes, rows, start, seed):
    with tempfile.TemporaryDirectory() as folder:
        paths = write_stream(folder, [30, 11, 60])
        options = {"batch": processes * rows, "seed": seed, "start": start}
        whole = take(make(paths, **options), 4)
        parts = [
            take(make(paths, process_index=index, process_count=processes, **options), 4)
            for index in range(processes)
        ]
    # Row r of a batch belongs to process r % P: merged, every row appears exactly once.
    np.testing.assert_array_equal(np.stack(parts, axis=2).reshape(whole.shape), whole)


def epochs(paths, seed, count=3):
    return window_numbers(take(make(paths, batch=25, seed=seed), count)).reshape(count, 25).tolist()


def test_the_order_is_shuffled_and_another_in_each_epoch_and_for_each_seed(stream):
    orders = [order for seed in (0, 1, 2) for order in epochs(stream, seed)]
    assert len({tuple(order) for order in orders}) == 9  # neighbouring seeds share no epoch either
    assert list(range(25)) not in orders
    assert epochs(stream, 1) == epochs(stream, 1)


def test_neighbouring_windows_do_not_stay_neighbours(tmp_path):
    """Almost none of 1000 windows is followed by its successor in the text."""
    numbers = window_numbers(take(make(write_stream(tmp_path, [4001]), batch=1000), 1))
    assert (np.diff(numbers) == 1).sum() < 10


def test_position_counts_returned_and_not_prefetched_batches(stream):
    with make(stream, start=7, batch=6, process_count=2) as loader:
        assert loader.position == 7
        next(loader)
        time.sleep(0.2)  # the threads are steps ahead by now
        assert loader.position == 13
        next(loader)
        assert loader.position == 19


def test_a_dataset_smaller_than_a_batch_repeats(tmp_path):
    numbers = window_numbers(take(make(write_stream(tmp_path, [13]), batch=8), 3))
    assert np.bincount(numbers).tolist() == [8, 8, 8]
    one = window_numbers(take(make(write_stream(tmp_path, [5]), batch=2), 2))
    assert one.tolist() == [0, 0, 0, 0]


def test_a_far_start_is_as_fast_as_a_near_one(stream):
    begin = time.monotonic()
    take(make(stream, start=10**12), 1)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"batch": 3, "process_count": 2},
            "that 2 processes can share equally, found 3; use a multiple of 2",
        ),
        ({"batch": 0}, "expected a batch .* found 0"),
        (
            {"process_index": 2, "process_count": 2},
            "expected process_index in 0..process_count-1, found 2 of 2",
        ),
        ({"start": -1}, r"expected start .* in 0..2\*\*53-1, found -1"),
        ({"start": 2**70}, f"found {2**70}"),
        ({"start": True}, "found True"),
        ({"seed": -1}, r"expected a seed in 0..4294967295, found -1"),
        ({"sequence_length": 0}, "expected a sequence_length of at least 1, found 0"),
        (
            {"sequence_length": 101},
            r"count_train_000001.bin and the shards after it: expected at least 102 tokens .* "
            r"found 101",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(stream, options, says):
    with pytest.raises(ValueError, match=says):
        make(stream, **options)


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="expected at least one shard, found none"):
        make([])


def test_a_token_outside_the_vocabulary_is_an_error_with_its_offset_and_ends_the_loader(stream):
    tokens = np.arange(30, 41, dtype=np.uint16)
    tokens[6] = 60000
    write_shard(stream[1], tokens)
    loader = make(stream, batch=25, vocab_size=50257)
    says = (
        r"count_train_000002.bin: at byte 1036: expected ids below .* 50257, "
        r"found id 60000 \(token 6\); .*tokenizer"
    )
    with pytest.raises(ShardError, match=says):
        next(loader)
    assert loader.position == 0
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize("offset", [0, 30])
def test_a_shard_truncated_while_it_is_used_is_an_error_of_the_next_batch(stream, offset):
    loader = make(stream, batch=25)
    next(loader)
    os.truncate(stream[2], 1024 + offset)
    with pytest.raises(
        ShardError,
        match=rf"count_train_000003.bin: at byte \d+: .* found a file of {1024 + offset} bytes",
    ):
        for _ in range(100):  # some batches were made before
            next(loader)
    with pytest.raises(
        ShardError, match=f"count_train_000003.bin: at byte {1024 + offset}: expected 1144 bytes"
    ):
        fixed(stream)


def test_a_shard_that_is_opened_again_must_be_the_same(stream, monkeypatch):
    """With more shards than open files, a shard that was closed must not have changed."""
    monkeypatch.setattr("gptjax.data.loader._OPEN_SHARDS", 1)
    os.utime(stream[0], ns=(0, 0))
    windows = Windows(stream, 4)
    assert [tokens_of(windows[i]).tolist() for i in (0, 24)] == [[0, 1, 2, 3, 4], [*range(96, 101)]]
    write_shard(stream[0], np.zeros(30, dtype=np.uint16))
    with pytest.raises(
        ShardError, match="count_train_000001.bin: .*found a file of 1084 bytes that was written to"
    ):
        windows[0]


def test_a_shard_that_is_replaced_while_it_is_open_stays_as_it_was(stream):
    windows = Windows(stream, 4)
    before = tokens_of(windows[0]).tolist()
    write_shard(stream[0], np.zeros(30, dtype=np.uint16))
    assert tokens_of(windows[0]).tolist() == before


def test_close_ends_the_threads(stream):
    before = set(threading.enumerate())
    loader = make(stream)
    next(loader)
    mine = set(threading.enumerate()) - before
    assert mine
    loader.close()
    for thread in mine:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in mine)


def test_the_data_package_starts_without_jax():
    code = (
        "import sys, gptjax.data, gptjax.data.__main__; "
        "sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    )
    import gptjax

    source = str(Path(gptjax.__file__).parents[1])
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False
        ).returncode
        == 0
    )


def fixed(paths, **options):
    options = {"sequence_length": 4, "batch": 4, "count": 3} | options
    return [tokens_of(batch) for batch in fixed_batches(paths, **options)]


def test_fixed_batches_are_spread_evenly_over_the_split_and_always_the_same(stream):
    batches = fixed(stream)
    numbers = window_numbers(batches)
    assert [batch.shape for batch in batches] == [(4, 5)] * 3 and batches[0].dtype == np.int32
    assert numbers.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    np.testing.assert_array_equal(fixed(stream), batches)


def test_fixed_batches_are_fewer_in_a_small_split_and_never_repeat_a_window(stream):
    numbers = window_numbers(fixed(stream, count=100))
    assert numbers.size == 24 and len(set(numbers.tolist())) == 24


def test_fixed_batches_of_the_processes_are_those_of_one(stream):
    parts = [fixed(stream, process_index=index, process_count=2) for index in (0, 1)]
    np.testing.assert_array_equal(np.stack(parts, axis=2).reshape(3, 4, 5), fixed(stream))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"batch": 28},
            "does not fill one batch: expected at least 28 windows .* found 25 .*; a validation "
            "batch of 25 would fit",
        ),
        ({"batch": 28, "process_count": 2}, "a validation batch of 24 would fit"),
        (
            {"batch": 50, "process_count": 50},
            "prepare more text or validate with shorter sequences",
        ),
        ({"count": 0}, "expected count of at least 1 batch, found 0"),
        ({"batch": 3, "process_count": 2}, "found 3; use a multiple of 2"),
        ({"sequence_length": 200}, "expected at least 201 tokens"),
        (
            {"vocab_size": 50},
            r"count_train_000003.bin: at byte 1042: expected ids below .* 50, found id 50",
        ),
    ],
)
def test_fixed_batches_refuse(stream, options, says):
    with pytest.raises(ValueError, match=says):
        fixed(stream, **options)
