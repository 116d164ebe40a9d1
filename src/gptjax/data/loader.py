"""Batches of token windows, with one integer as the loader's complete state.

The shards, in the given order, are one sequence of N tokens. Window i holds the T + 1 tokens
[i*T, i*T + T]: the first T are inputs, the last T are targets. Adjacent windows share one token, so
every token except the first is a target once. There are W = (N - 1) // T windows; the last
(N - 1) % T tokens are not used. With a `Packing`, the W training windows hold packed documents
(`gptjax.data.packing`), and no token is in two windows. Validation windows are always contiguous.

An epoch is a permutation of the W windows, and every epoch has another permutation. Step s of a run
reads the windows at positions start + s*B .. start + (s+1)*B - 1 of the sequence of epochs, where B
is the global batch. Process p of P reads every P-th of these windows, beginning with window p. The
order does not depend on the number of processes, and the number of windows consumed so far is
sufficient to resume.

A window becomes a `Batch` of inputs and targets. Targets that a loss mask excludes
(`gptjax.data.shards`) are `IGNORED`. With a `Packing`, the batch has the documents of the inputs.

With `sequential` stretches, nothing is shuffled or repeated: the windows of the last stretch are
read in order, after those of the earlier stretches.

Axes: B windows of a batch in one process, T tokens of a sequence.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax.data.packing import PackedSpans, Packing, Stretch, document_begins
from gptjax.data.shards import Shard, ShardError, mask_path

# Number of prefetched batches, and of threads that read batches.
_PREFETCH_BATCHES = 8
_PREFETCH_THREADS = 4

# Maximum number of open files, below the usual limit of 1,024 for a process.
_OPEN_FILES = 128

# Target without a loss and without a gradient, such as a token of a prompt.
IGNORED = -1


class Batch(NamedTuple):
    """Sequences with a target for each token. All arrays are int32 and have one shape.

    Attributes:
        inputs: ids.
        targets: the token that follows each input, or `IGNORED`.
        segments: documents of the inputs: a document is a run of equal numbers, and attention does
            not cross documents. None: each sequence is one document.
    """

    inputs: Any
    targets: Any
    segments: Any = None

    @classmethod
    def of(cls, tokens: Any, eot: int | None = None) -> "Batch":
        """Return the batch of sequences of T + 1 tokens, without ignored targets.

        Args:
            tokens: integers of shape (..., T + 1), in NumPy or JAX.
            eot: id that begins each document, for `segments`. Tokens before the first EOT of a
                sequence are the rest of a document. The last token of a document predicts the EOT
                of the next document.
        """
        inputs = tokens[..., :-1]
        segments = None if eot is None else (inputs == eot).cumsum(axis=-1, dtype=np.int32)
        return cls(inputs, tokens[..., 1:], segments)


class Windows:
    """The windows of a list of shards, as a sequence of `Batch`es with arrays of shape (T,).

    If a shard has a loss mask, all shards must have one.

    Args:
        shards: files of a split, in order.
        sequence_length: T.
        vocab_size: exclusive upper bound of the ids; None not to check them.
        packing: documents of the windows; None for contiguous windows without documents.
        sequential: stretches of a run that reads its data in order. The windows are those of the
            last one, whose sequence length and packing are the arguments above.

    Raises:
        ShardError: a shard or a mask is bad, or the shards do not hold the windows.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        sequence_length: int,
        vocab_size: int | None = None,
        packing: Packing | None = None,
        sequential: Sequence[Stretch] = (),
    ) -> None:
        self._paths = paths = [Path(shard) for shard in shards]
        # A file is closed when neither the cache nor a thread holds the Shard.
        self._open = functools.lru_cache(_OPEN_FILES)(Shard)
        sizes = [self._open(path).size for path in paths]
        where = f"{paths[0]}{' and the shards after it' if paths[1:] else ''}"
        self._masked = any(mask_path(path).exists() for path in paths)
        if self._masked and sizes != [self._open(mask_path(path)).size for path in paths]:
            raise ShardError(f"{where}: expected loss masks with the token counts of the shards")
        self._eot = None if packing is None else packing.eot
        # position of each shard's first token in the sequence, then the number of tokens
        self._begins = [0, *itertools.accumulate(sizes)]
        self._length, self._vocab_size, self._first = sequence_length, vocab_size, 0
        self._packed: PackedSpans | None = None
        tokens, needed, found = self._begins[-1], sequence_length + 1, str(self._begins[-1])
        if packing is not None and (most := packing.max_document_length) is not None:
            shards = tuple((path, path.stat().st_mtime_ns) for path in paths)
            documents = document_begins(shards, packing.eot)
            self._packed = PackedSpans(documents, self._begins, needed, most, sequential)
            self._count, found = len(self._packed), f"fewer in documents cut to {most}"
        else:
            self._count = (tokens - 1) // sequence_length
            if sequential:
                *earlier, own = sequential
                self._first = sum(s.steps * s.batch * s.sequence_length for s in earlier)
                self._count = own.steps * own.batch
                needed = self._first + self._count * sequence_length + 1
        if not self._count or needed > tokens:
            raise ShardError(
                f"{where}: expected at least {needed} tokens for windows of sequence length "
                f"{sequence_length}, found {found}; train with a shorter sequence or for "
                "fewer steps, or prepare more text"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        """Return window `index`.

        Raises:
            ShardError: an id is not below vocab_size, or a shard's file has changed.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"expected a window in 0..{self._count - 1}, found {index}")
        begin = self._first + int(index) * self._length
        spans = self._packed[index] if self._packed else [(begin, begin + self._length + 1)]
        parts = [part for span in spans for part in self._read(*span)]
        window, counts = map(np.concatenate, zip(*parts, strict=True))
        batch = Batch.of(window.astype(np.int32), self._eot)
        if not self._masked:
            return batch
        return batch._replace(targets=np.where(counts[1:], batch.targets, np.int32(IGNORED)))

    def _read(self, begin: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tokens begin .. end - 1 of the sequence of shards, and their loss mask.

        Without masks, the tokens take its place.
        """
        shard = bisect.bisect_right(self._begins, begin) - 1
        while begin < end:  # one iteration for each shard that the tokens cover
            path, at = self._paths[shard], begin - self._begins[shard]
            count = min(end, self._begins[shard + 1]) - begin
            tokens = self._open(path).read(at, count)
            if self._vocab_size is not None:
                self._open(path).check_ids(at, tokens, self._vocab_size)
            yield tokens, self._open(mask_path(path)).read(at, count) if self._masked else tokens
            begin, shard = begin + count, shard + 1


class Loader:
    """Infinite iterator over the training batches.

    The arrays of a `Batch` have the shape (batch / process_count, sequence_length).

    Args:
        shards: files of the training split, in order.
        sequence_length: T, tokens in a row of the model's input.
        batch: windows in a step, over all processes.
        seed: seed of the shuffle, in 0..2**32-1.
        process_index: index of this process, which loads 1 / process_count of each batch.
        process_count: number of processes.
        start: windows that the run has consumed so far, over all processes: `position` of the
            previous loader.
        vocab_size: exclusive upper bound of the ids.
        order: index of a sequence of permutations; each index selects another sequence.
        packing: documents of the windows; None for contiguous windows without documents.
        sequential: stretches of a run that reads its data in order, see `Windows`. `start` then
            counts the windows of the last stretch. Without stretches, windows are shuffled.

    Raises:
        ValueError: the arguments do not fit together.
        ShardError: a shard or a mask is bad, or the shards hold no window; from `next()`: an id is
            not below vocab_size, or a shard's file was truncated or written to.
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
        order: int = 0,
        packing: Packing | None = None,
        sequential: Sequence[Stretch] = (),
    ) -> None:
        import grain  # imports JAX, which `python -m gptjax.data` does not need

        rows = _rows_of_a_process(batch, process_index, process_count)
        windows = Windows(shards, sequence_length, vocab_size, packing, sequential)
        self.windows_per_epoch = len(windows)
        self._start, self._batch, self._steps = start, batch, 0

        epochs = grain.MapDataset.source(windows)
        if not sequential:
            # grain shuffles epoch e with seed + e: consecutive seeds would share all epochs but
            # one. Hash the seed first.
            key = (order,) if order else ()
            hashed = np.random.SeedSequence(seed, spawn_key=key).generate_state(1)
            epochs = epochs.shuffle(int(hashed[0])).repeat()
        mine = epochs[start:][process_index::process_count]
        batches = mine.batch(rows, drop_remainder=True, batch_fn=_stacked)
        options = grain.ReadOptions(
            num_threads=_PREFETCH_THREADS, prefetch_buffer_size=_PREFETCH_BATCHES
        )
        self._iterator = iter(batches.to_iter_dataset(options))

    @property
    def position(self) -> int:
        """Number of windows that all processes have consumed so far, without prefetched windows.

        A resumed run passes the position as `start`.
        """
        return self._start + self._steps * self._batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator)
        self._steps += 1
        return batch

    def close(self) -> None:
        """End the threads. A later `next()` raises an error.

        Called automatically when the loader is garbage-collected.
        """
        self._iterator.close()

    # Not `Self`: jaxtyping's hook checks single functions, in which beartype does not know it.
    def __enter__(self) -> "Loader":
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
    eot: int | None = None,
    first: bool = False,
) -> list[Batch]:
    """Return the validation set: `count` batches of windows spaced evenly over the split.

    Every call returns the same batches. The windows are contiguous, even if the run packs its
    training documents.

    Args:
        batch: windows of a batch, over all processes.
        count: maximum number of batches; a small split has fewer.
        eot: id that begins each document, for the segments of the batches; None for no segments.
        first: take the first windows of the split instead.

    Returns:
        At least one `Batch`, whose arrays have the shape (batch / process_count, sequence_length).

    Raises:
        ValueError: the arguments do not fit together, or the split does not fill one batch.
        ShardError: a shard is bad, or an id is not below vocab_size.
    """
    _rows_of_a_process(batch, process_index, process_count)
    packing = None if eot is None else Packing(eot)
    windows = Windows(shards, sequence_length, vocab_size, packing)
    count = min(count, len(windows) // batch)
    if count < 1:
        raise ValueError(
            f"expected at least {batch} windows of sequence length {sequence_length} for a batch "
            f"of validation, found {len(windows)} in {shards[0]} and the shards after it"
        )
    chosen = np.arange(count * batch)
    if not first:  # strictly increasing: no window twice
        chosen = chosen * len(windows) // (count * batch)
    mine = chosen.reshape(count, batch)[:, process_index::process_count]
    return [_stacked([windows[int(index)] for index in row]) for row in mine]


def _stacked(windows: Any) -> Batch:
    # Not Sequence[Batch]: the check of types in the tests draws a random item, in Grain's threads,
    # and Hypothesis refuses a test during which another thread draws.
    parts = zip(*windows, strict=True)
    return Batch(*(None if part[0] is None else np.stack(part) for part in parts))


def _rows_of_a_process(batch: int, process_index: int, process_count: int) -> int:
    if not 0 <= process_index < process_count or batch < 1 or batch % process_count:
        raise ValueError(
            f"expected a batch that {process_count} processes can share equally, found {batch} "
            f"windows for process {process_index}"
        )
    return batch // process_count
