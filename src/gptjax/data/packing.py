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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gptjax.data.shards import Shard, ShardError

Stamp = tuple[int, int]

_THREADS = 8  # to read shards; each thread needs about 50 MB


@dataclasses.dataclass(frozen=True)
class Packing:
    """Options of packing.

    Attributes:
        eot: id that begins each document.
        max_document_length: number of tokens of a document that are read, at least 1.
    """

    eot: int
    max_document_length: int

    def __post_init__(self) -> None:
        if self.max_document_length < 1:
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
        following = memoryview(np.searchsorted(ends, ends + window))
        first, firsts = 0, []
        while first < len(bounds):
            firsts.append(first)
            first = following[first]
        self._firsts = np.array(firsts)  # first document of each window, then one more

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> Iterator[tuple[int, int]]:
        """Return begin and end of each span of window `index`. A cut document ends a span."""
        first, after = self._firsts[index : index + 2]
        bounds = self._bounds[first : after + 1]
        begins, ends = bounds[:-1], np.minimum(bounds[1:], bounds[:-1] + self._max_length)
        ends[-1] -= (ends - begins).sum() - self._window
        new = np.flatnonzero(begins[1:] != ends[:-1])
        return zip(
            begins[[0, *new + 1]].tolist(), ends[[*new, len(ends) - 1]].tolist(), strict=True
        )


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
