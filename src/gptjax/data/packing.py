"""Packing of documents into windows. A window begins with a document; long documents are cut.

A document begins with the end-of-text token (EOT) and ends before the next, or at the end of the
last shard. In the order of the shards, documents are cut to `max_document_length` tokens and
appended until the T + 1 tokens of a window are full. The end of the window cuts its last document,
and the next document begins the next window.

Three parts are not read: the rest of a cut document, tokens before the first EOT, and documents at
the end that do not fill a window. The last token of a document predicts the EOT of the next
document in the window, even if the document was cut.

modded-nanogpt packs the documents of a shard in the same way ("align_to_bos" in train_gpt.py).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gptjax.data.shards import Shard, ShardError

Stamp = tuple[int, int]

_THREADS = 8  # to read shards; each thread needs about 50 MB


@dataclasses.dataclass(frozen=True)
class Packing:
    """Documents of the windows.

    Attributes:
        eot: id that begins each document.
        max_document_length: number of tokens of a document that are read, at least 1. None: windows
            are contiguous text, and documents are only told apart.
    """

    eot: int
    max_document_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_document_length is not None and self.max_document_length < 1:
            raise ValueError(
                "expected a max_document_length of at least 1 token, found "
                f"{self.max_document_length}"
            )


class PackedSpans:
    """Spans of tokens in each window of packed documents.

    Args:
        bounds: position of the first token of each document, in ascending order, then the end of
            the last document; int64 of shape (documents + 1,).
        max_document_length: see `Packing`.
        window: T + 1, tokens of a window.
    """

    def __init__(self, bounds: np.ndarray, max_document_length: int, window: int) -> None:
        self._bounds, self._max_length, self._window = bounds, max_document_length, window
        # Documents before i have ends[i] tokens, and a window that begins with document i ends in
        # document following[i] − 1.
        ends = np.zeros_like(bounds)
        np.cumsum(np.minimum(np.diff(bounds), max_document_length), out=ends[1:])
        self._following = memoryview(np.searchsorted(ends, ends + window))
        self._firsts = self.firsts(0, len(bounds))

    def firsts(self, first: int, windows: int) -> list[int]:
        """Return the first document of each window from document `first` on, then one more.

        Args:
            windows: largest number of windows.
        """
        firsts = []
        while first < len(self._bounds) and len(firsts) <= windows:
            firsts.append(first)
            first = self._following[first]
        return firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> Iterator[tuple[int, int]]:
        """Return begin and end of each span of window `index`. A cut document ends a span."""
        return self.spans(*self._firsts[index : index + 2])

    def spans(self, first: int, after: int) -> Iterator[tuple[int, int]]:
        """Return begin and end of each span of the window of documents first … after − 1."""
        bounds = self._bounds[first : after + 1]
        begins, ends = bounds[:-1], np.minimum(bounds[1:], bounds[:-1] + self._max_length)
        ends[-1] -= (ends - begins).sum() - self._window
        new = np.flatnonzero(begins[1:] != ends[:-1])
        return zip(
            begins[[0, *new + 1]].tolist(), ends[[*new, len(ends) - 1]].tolist(), strict=True
        )


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a run that reads its data in order.

    Attributes:
        sequence_length: T.
        batch: windows of a step, over all processes.
        steps: number of steps.
        packing: None for contiguous windows.
    """

    sequence_length: int
    batch: int
    steps: int
    packing: Packing | None


class SequentialSpans:
    """Spans of tokens in each window of the last of several stretches of packed documents.

    A step reads the documents that follow those of the step before, from one shard. The documents
    at the end of a shard that do not fill a step are left out, as in modded-nanogpt.

    Args:
        shards: the `bounds` of the documents of each shard.
        stretches: all stretches of the run up to the one that is read.

    Raises:
        ShardError: the shards end before the last stretch.
    """

    def __init__(self, shards: Sequence[np.ndarray], stretches: Sequence[Stretch]) -> None:
        shard, first = 0, 0  # of the next window
        for stretch in stretches:
            self._windows: list[tuple[PackedSpans, int, int]] = []
            spans = None
            for step in range(stretch.steps):
                while True:
                    if shard == len(shards):
                        raise ShardError(
                            "expected training shards for all steps of the run, which reads them "
                            f"once, found their end at step {step} of {stretch.steps} with batches "
                            f"of {stretch.batch} × {stretch.sequence_length} tokens; train for "
                            "fewer steps, prepare more shards, or choose --data-order shuffled"
                        )
                    if spans is None:
                        length = stretch.packing.max_document_length
                        spans = PackedSpans(shards[shard], length, stretch.sequence_length + 1)
                    firsts = spans.firsts(first, stretch.batch)
                    if len(firsts) > stretch.batch:
                        break
                    shard, first, spans = shard + 1, 0, None
                self._windows += [(spans, *pair) for pair in itertools.pairwise(firsts)]
                first = firsts[-1]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Iterator[tuple[int, int]]:
        """See `PackedSpans`."""
        spans, first, after = self._windows[index]
        return spans.spans(first, after)


def split_by_shard(bounds: np.ndarray, begins: Sequence[int]) -> list[np.ndarray]:
    """Return the `bounds` of the documents that begin in each shard, cut at the shard's end.

    Args:
        bounds: of all shards.
        begins: position of each shard's first token, then the number of tokens.
    """
    cuts = np.searchsorted(bounds[:-1], begins)
    return [
        np.append(bounds[i:j], end)
        for (i, j), end in zip(itertools.pairwise(cuts), begins[1:], strict=True)
    ]


@functools.lru_cache(1)  # the stages of a run read the same shards
def document_bounds(paths: tuple[Path, ...], stamps: tuple[Stamp, ...], eot: int) -> np.ndarray:
    """Return the `bounds` of `PackedSpans`; the shards are read completely.

    Args:
        paths: the shards, which are one sequence of tokens.
        stamps: `Shard.stamp` of each.
        eot: id that begins each document.

    Raises:
        ShardError: no token is `eot`, or a shard has changed.
    """

    def find(path: Path, stamp: Stamp) -> tuple[int, np.ndarray]:
        shard = Shard(path, stamp)
        found = [np.flatnonzero(tokens == eot) + begin for begin, tokens in shard.chunks()]
        return shard.size, np.concatenate(found)

    with ThreadPoolExecutor(_THREADS) as pool:
        sizes, found = zip(*pool.map(find, paths, stamps), strict=True)
    begins = [0, *itertools.accumulate(sizes)]
    parts = [begin + at for begin, at in zip(begins[:-1], found, strict=True)]
    bounds = np.concatenate([*parts, begins[-1:]])
    if len(bounds) == 1:
        raise ShardError(
            f"{paths[0]}{' and the shards after it' if len(paths) > 1 else ''}: expected documents "
            f"that begin with the end-of-text token {eot}, found no such token; train without "
            "max_document_length, or prepare the text again with `python -m gptjax.data`"
        )
    bounds.setflags(write=False)
    return bounds
