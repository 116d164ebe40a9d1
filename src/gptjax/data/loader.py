"""Batches of token windows in a global order that one integer describes.

The shards, in the order given, are one stream of N tokens. Window i is tokens [i*T, i*T + T], T + 1
of them: the first T are inputs, the last T targets, and neighbours share one token, so every token
but the first is a target once. There are W = (N - 1) // T windows; fewer than T tokens at the very
end are never used.

The order is epoch after epoch of the W windows, each epoch shuffled anew. Step s of a run takes the
windows at places start + s*B .. start + (s+1)*B - 1 of that order, B being the global batch;
process p of P takes every P-th of them, from the p-th on. So the order does not know how many
processes there are, and the number of windows consumed so far is all that a resume needs.

Axes: B windows of a process's part of a batch, T + 1 tokens of a window.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gptjax.data.dataset import check_ids
from gptjax.data.shards import Shard, ShardError

# Batches that are made ahead of the step that wants them, and the threads that make them.
_PREFETCH_BATCHES = 8
_PREFETCH_THREADS = 4

# Files that are open at a time: below the usual limit of 1,024 for a process, whatever the number
# of shards.
_OPEN_SHARDS = 128
_MAX_START = 2**53  # windows: no run is longer, and JSON keeps the number exactly


class Windows:
    """Random access to the windows of a list of shards: `len(windows)`, `windows[i]` -> int32 of
    shape (T + 1,)."""

    def __init__(
        self, shards: Sequence[Path], sequence_length: int, vocab_size: int | None = None
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"expected a sequence_length of at least 1, found {sequence_length}")
        if not shards:
            raise ValueError("expected at least one shard, found none")
        self._paths = paths = list(shards)
        sizes, stamps = zip(
            *((shard.size, shard.stamp) for shard in map(Shard, paths)), strict=True
        )
        # A file is closed when its Shard is in neither the cache nor a thread.
        self._open = functools.lru_cache(_OPEN_SHARDS)(
            lambda number: Shard(paths[number], stamps[number])
        )
        self._begins = [0, *itertools.accumulate(sizes)]  # in the stream, and its end
        self._length, self._vocab_size = sequence_length, vocab_size
        tokens = self._begins[-1]
        if tokens < sequence_length + 1:
            raise ShardError(
                f"{self._paths[0]}{' and the shards after it' if len(self._paths) > 1 else ''}: "
                "expected at least "
                f"{sequence_length + 1} tokens (one window of sequence length {sequence_length}), "
                f"found {tokens}; "
                "train with a shorter sequence or prepare more text"
            )
        self._count = (tokens - 1) // sequence_length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        """Raises ShardError if an id is not below the vocabulary's size, or a shard's file has
        changed."""
        if not 0 <= index < self._count:
            raise IndexError(f"expected a window in 0..{self._count - 1}, found {index}")
        window = np.empty(self._length + 1, dtype=np.int32)
        filled = 0
        at = int(index) * self._length
        shard = bisect.bisect_right(self._begins, at) - 1
        while filled < window.size:  # once, or once more for each shard boundary inside the window
            begin = at + filled - self._begins[shard]
            count = min(window.size - filled, self._begins[shard + 1] - at - filled)
            part = self._open(shard).read(begin, count)
            if self._vocab_size is not None:
                check_ids(self._paths[shard], begin, part, self._vocab_size)
            window[filled : filled + part.size] = part
            filled += part.size
            shard += 1
        return window


class Loader:
    """The training batches: an endless iterator of int32 arrays of shape (batch / process_count,
    sequence_length + 1).

    Args:
        shards: the training split's files, in order.
        sequence_length: T, tokens in a row of the model's input.
        batch: windows a step over all processes.
        seed: of the shuffle, in 0..2**32-1.
        process_index, process_count: which part of each batch this process loads.
        start: windows that the run has consumed before, over all processes; `position` of the
            loader before.
        vocab_size: ids must be below it.

    Raises:
        ValueError: the numbers do not fit together.
        ShardError: a shard is bad, or all of them together hold no window; from `next()`: an id is
            not below vocab_size, or a shard's file was truncated or written to since the loader was
            made.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        sequence_length: int,
        batch: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        start: int = 0,
        vocab_size: int,
    ) -> None:
        import grain  # imports JAX, which `python -m gptjax.data` must not wait for

        rows = _rows_of_a_process(batch, process_index, process_count)
        if type(start) is not int or not 0 <= start < _MAX_START:
            raise ValueError(
                "expected start (windows consumed so far) as an integer in 0..2**53-1, found "
                f"{start}"
            )
        if not 0 <= seed < 2**32:
            raise ValueError(f"expected a seed in 0..{2**32 - 1}, found {seed}")
        windows = Windows(shards, sequence_length, vocab_size)
        self.windows_per_epoch = len(windows)
        self._start, self._batch, self._steps = start, batch, 0

        # grain shuffles epoch e with seed + e, so neighbouring seeds would share all but one epoch:
        # spread them first.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        order = grain.MapDataset.source(windows).shuffle(spread).repeat()
        mine = order[start:][process_index::process_count]
        batches = mine.batch(rows, drop_remainder=True, batch_fn=np.stack)
        self._iterator = iter(
            batches.to_iter_dataset(
                grain.ReadOptions(
                    num_threads=_PREFETCH_THREADS, prefetch_buffer_size=_PREFETCH_BATCHES
                )
            )
        )

    @property
    def position(self) -> int:
        """Windows consumed by the whole run so far: those of `next()`, not those prefetched. A
        resume's `start`."""
        return self._start + self._steps * self._batch

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        try:
            batch = next(self._iterator)
        except BaseException:
            # or a caller that caught the error would go on with the batch after the bad one
            self.close()
            raise
        self._steps += 1
        return batch

    def close(self) -> None:
        """End the threads; `next()` is an error from here on. Done by itself when the loader is no
        longer used."""
        self._iterator.close()

    def __enter__(self) -> "Loader":  # noqa: PYI034 (the tests' type checker knows Self only in whole classes)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fixed_batches(
    shards: Sequence[Path],
    *,
    sequence_length: int,
    batch: int,
    count: int,
    process_index: int = 0,
    process_count: int = 1,
    vocab_size: int | None = None,
) -> list[np.ndarray]:
    """The validation set: `count` batches of windows spread evenly over the split, the same at
    every call.

    Args:
        batch: windows of a batch over all processes.
        count: batches wanted; fewer come when the split is smaller.

    Returns:
        int32 arrays of shape (batch / process_count, sequence_length + 1), at least one.

    Raises:
        ValueError: the numbers do not fit together, or the split does not fill one batch.
        ShardError: a shard is bad, or an id is not below vocab_size where that is given.
    """
    _rows_of_a_process(batch, process_index, process_count)
    if count < 1:
        raise ValueError(f"expected count of at least 1 batch, found {count}")
    windows = Windows(shards, sequence_length, vocab_size)
    count = min(count, len(windows) // batch)
    if not count:
        fits = len(windows) // process_count * process_count
        raise ValueError(
            f"the validation split does not fill one batch: expected at least {batch} windows of "
            "sequence length "
            f"{sequence_length}, found {len(windows)} in {shards[0]}"
            f"{' and the shards after it' if len(shards) > 1 else ''}; "
            + (
                f"a validation batch of {fits} would fit"
                if fits
                else "prepare more text or validate with shorter sequences"
            )
        )
    # strictly increasing: no window twice
    chosen = np.arange(count * batch) * len(windows) // (count * batch)
    mine = chosen.reshape(count, batch)[:, process_index::process_count]
    return [np.stack([windows[int(index)] for index in row]) for row in mine]


def _rows_of_a_process(batch: int, process_index: int, process_count: int) -> int:
    if process_count < 1 or not 0 <= process_index < process_count:
        raise ValueError(
            f"expected process_index in 0..process_count-1, found {process_index} of "
            f"{process_count}"
        )
    if batch < 1 or batch % process_count:
        raise ValueError(
            f"expected a batch (windows a step over all processes) that {process_count} processes "
            "can share equally, "
            f"found {batch}; take a multiple of {process_count}"
        )
    return batch // process_count
