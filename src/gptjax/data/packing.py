"""Packing of documents into windows. A window begins with a document; long documents are cut.

A document begins with the end-of-text token (EOT) and ends before the next, or at the end of the
last shard. In the order of the shards, documents are cut to `max_document_length` tokens and
appended until the T + 1 tokens of a window are full. The end of the window cuts its last document,
and the next document begins the next window.

Three parts are not read: the rest of a cut document, tokens before the first EOT, and documents at
the end that do not fill a window. The last token of a document predicts the EOT of the next
document in the window, even if the document was cut.

In a run that reads its data in order, documents end with their shard, and a step reads documents
of one shard: those at its end that do not fill a step are left out. modded-nanogpt packs documents
in the same way ("align_to_bos" in train_gpt.py).

Axes: D documents, W windows.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gptjax.data.shards import Shard, ShardError

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


class PackedSpans:
    """Spans of tokens in each window of packed documents.

    Args:
        begins_D: position of the first token of each document, ascending int64.
        shards: position of the first token of each shard, then the number of tokens.
        window: T + 1, tokens of a window.
        max_document_length: see `Packing`.
        sequential: stretches of a run that reads its data in order, see `Windows`.

    Raises:
        ShardError: the shards end before the last stretch.
    """

    def __init__(
        self,
        begins_D: np.ndarray,
        shards: Sequence[int],
        window: int,
        max_document_length: int,
        sequential: Sequence[Stretch] = (),
    ) -> None:
        self._begins_D, self._window = begins_D, window
        ends_D = np.append(begins_D[1:], shards[-1])
        if not sequential:
            following = self._cut(ends_D, window, max_document_length)
            firsts = _firsts(following, 0, len(begins_D), len(begins_D))
            self._windows_W2 = np.stack([firsts[:-1], firsts[1:]], axis=1)
            return
        counts = np.searchsorted(begins_D, shards[1:]).tolist()  # documents up to each shard's end
        ends_D = np.minimum(ends_D, np.repeat(shards[1:], np.diff(counts, prepend=0)))
        shard, first = 0, 0  # of the next window
        for stretch in sequential:
            most = stretch.packing.max_document_length
            following, windows = self._cut(ends_D, stretch.sequence_length + 1, most), []
            for step in range(stretch.steps):
                while True:
                    if shard == len(counts):
                        raise ShardError(
                            "expected training shards for all steps of the run, which reads them "
                            f"once, found their end at step {step} of {stretch.steps} with batches "
                            f"of {stretch.batch} × {stretch.sequence_length} tokens; train for "
                            "fewer steps, prepare more shards, or choose --data-order shuffled"
                        )
                    firsts = _firsts(following, first, counts[shard], stretch.batch)
                    if len(firsts) > stretch.batch:
                        break
                    shard, first = shard + 1, counts[shard]
                windows += itertools.pairwise(firsts)
                first = firsts[-1]
            self._windows_W2 = np.array(windows)

    def _cut(self, ends_D: np.ndarray, window: int, max_document_length: int) -> memoryview:
        """Cut the documents. Return the document after each window that begins with document i."""
        self._ends_D = np.minimum(ends_D, self._begins_D + max_document_length)
        sums = np.append(0, np.cumsum(self._ends_D - self._begins_D))
        return memoryview(np.searchsorted(sums, sums + window))

    def __len__(self) -> int:
        return len(self._windows_W2)

    def __getitem__(self, index: int) -> Iterator[tuple[int, int]]:
        """Return begin and end of each span of window `index`. A cut document ends a span."""
        documents = slice(*self._windows_W2[index])
        begins, ends = self._begins_D[documents], self._ends_D[documents].copy()
        ends[-1] -= (ends - begins).sum() - self._window
        new = np.flatnonzero(begins[1:] != ends[:-1])
        return zip(
            begins[[0, *new + 1]].tolist(), ends[[*new, len(ends) - 1]].tolist(), strict=True
        )


def _firsts(following: memoryview, first: int, end: int, windows: int) -> list[int]:
    """Return the first document of each window from document `first` on, then one more.

    Args:
        following: first document after the window that begins with each document.
        end: the windows' documents are below it.
        windows: largest number of windows.
    """
    firsts = []
    while first <= end and len(firsts) <= windows:
        firsts.append(first)
        first = following[first]
    return firsts


@functools.lru_cache(1)  # the stages of a run read the same shards
def document_begins(shards: tuple[tuple[Path, int], ...], eot: int) -> np.ndarray:
    """Return the `begins_D` of `PackedSpans`; the shards are read completely.

    Args:
        shards: path and modification time of each shard.
        eot: id that begins each document.

    Raises:
        ShardError: no token is `eot`.
    """

    def find(item: tuple[Path, int]) -> tuple[int, np.ndarray]:
        shard = Shard(item[0])
        found = [np.flatnonzero(tokens == eot) + begin for begin, tokens in shard.chunks()]
        return shard.size, np.concatenate(found)

    with ThreadPoolExecutor(_THREADS) as pool:
        sizes, found = zip(*pool.map(find, shards), strict=True)
    begins_D = np.concatenate(found) + np.repeat(np.cumsum([0, *sizes[:-1]]), [*map(len, found)])
    if not len(begins_D):
        raise ShardError(
            f"{shards[0][0]}{' and the shards after it' if shards[1:] else ''}: expected "
            f"documents that begin with the end-of-text token {eot}, found no such token; train "
            "without max_document_length, or prepare the text again with `python -m gptjax.data`"
        )
    begins_D.setflags(write=False)
    return begins_D
