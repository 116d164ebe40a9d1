"""Preparation of a dataset from a corpus.

The corpus is split by document, tokenized in parallel and written to shards in a temporary folder,
which is renamed when the dataset is complete.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax.data import corpora
from gptjax.data.atomic import PrepareError, dataset_folder, locked, staged
from gptjax.data.corpora import Corpus, Pair
from gptjax.data.manifest import MANIFEST, Manifest, MaskInfo, ShardInfo, read_manifest
from gptjax.data.masks import Mask, mask_path, write_mask
from gptjax.data.shards import MAX_TOKENS, Shard, write_shard
from gptjax.data.tokenizers import Tokenizer, choose_tokenizer
from gptjax.terminal import printable
from gptjax.user_folders import data_folder

TRAIN, VAL = 0, 1
_SPLIT_NAMES = ("train", "val")
# as in llm.c: NAME_train_000001.bin, NAME_val_000000.bin
_FIRST_NUMBER = (1, 0)

# Documents are cut into pieces of about this many characters, which the threads tokenize. A cut is
# made only after a newline between two characters that are not white space. GPT-2's BPE never
# merges across such a newline, so the tokens equal the tokens of the complete document.
_PIECE_CHARACTERS = 1 << 20
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of preparation, for every corpus.

    Attributes:
        data_dir: folder of the datasets.
        name: the dataset's folder in data_dir. None: CORPUS_TOKENIZER, such as `stdlib_byte`.
        tokenizer: "auto", "gpt2" or "byte".
        val_fraction: approximate fraction of the bytes in the validation split.
        shard_tokens: tokens in a shard. The last shard of a split holds 0.5 to 1.5 times as many,
            so that no shard is too short to train on.
        workers: tokenizing threads. None: one for each CPU core.
        seed: seed of the choice of validation documents.
        overwrite: prepare again if the dataset exists.

    Raises:
        PrepareError: an option is out of range.
    """

    data_dir: str | os.PathLike = dataclasses.field(default_factory=data_folder)
    name: str | None = None
    tokenizer: str = "auto"
    val_fraction: float = 0.05
    shard_tokens: int = 100_000_000
    workers: int | None = None
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise PrepareError(
                f"expected a val-fraction between 0 and 1, found {self.val_fraction}"
            )
        if not 2 <= self.shard_tokens <= MAX_TOKENS // 2:
            raise PrepareError(
                f"expected shard-tokens in 2..{MAX_TOKENS // 2}, found {self.shard_tokens}"
            )
        if self.workers is not None and self.workers < 1:
            raise PrepareError(f"expected workers of at least 1, found {self.workers}")
        if self.seed < 0:
            raise PrepareError(f"expected a seed of at least 0, found {self.seed}")

    def recorded(self) -> dict[str, Any]:
        """Return the options in dataset.json. Together with the text, they determine the shards."""
        return {name: getattr(self, name) for name in ("val_fraction", "seed", "shard_tokens")}


def prepare_stdlib(
    data_dir: str | os.PathLike,
    tokenizer: str = "auto",
    *,
    name: str | None = None,
    val_fraction: float = 0.05,
    overwrite: bool = False,
    log: Callable[[str], object] = print,
) -> Path:
    """Prepare Python's standard library unless already prepared; return the dataset's folder."""
    options = Options(
        data_dir=data_dir,
        name=name,
        tokenizer=tokenizer,
        val_fraction=val_fraction,
        overwrite=overwrite,
    )
    return prepare_corpus("stdlib", corpora.stdlib(), options, log=log)


def prepare_corpus(
    corpus_name: str, corpus: Corpus, options: Options, *, log: Callable[[str], object] = print
) -> Path:
    """Prepare a dataset from a corpus unless already prepared.

    Args:
        corpus_name: first part of the default name of the dataset, CORPUS_TOKENIZER.
        corpus: the documents.
        options: tokenizer, split and shards.
        log: called with each message for the user.

    Returns:
        The dataset's folder, with shards and dataset.json.

    Raises:
        PrepareError: the folder holds something else, or a split would be empty.
        CorpusError: the text cannot be downloaded or read.
        TokenizerUnavailable: the files of tokenizer "gpt2" are not available.
    """
    tokenizer, note = choose_tokenizer(options.tokenizer)
    if note:
        log(note)
    name = f"{corpus_name}_{tokenizer.name}" if options.name is None else options.name
    final = dataset_folder(options.data_dir, name)
    with locked(final, log):
        if final.exists() and (ready := _already_prepared(final, corpus, tokenizer, options)):
            log(printable(ready))
            return final
        start = time.perf_counter()
        with staged(final) as partial:
            digest = hashlib.sha256()
            hashed = dataclasses.replace(
                corpus, documents=lambda: corpora.hashed(corpus.documents(), digest)
            )
            train, val = _write_shards(partial, final.name, hashed, tokenizer, options, log)
            kind = tokenizer.name, tokenizer.vocab_size, tokenizer.eot
            content = corpus.source, digest.hexdigest(), train | val, options.recorded()
            Manifest(*kind, *content).write(partial)
    log(
        printable(
            f"{final}: {corpus.source}, tokenizer {tokenizer.name}: {_summary(train)} for "
            f"training, {_summary(val)} for validation ({time.perf_counter() - start:.1f} s)"
        )
    )
    return final


def _summary(shards: dict[str, ShardInfo]) -> str:
    tokens = sum(info.tokens for info in shards.values())
    counted = [info.mask.counted for info in shards.values() if info.mask is not None]
    loss = f" (loss on {sum(counted):,})" if counted else ""
    return f"{tokens:,} tokens{loss} in {len(shards)} {'shard' if len(shards) == 1 else 'shards'}"


def _already_prepared(
    final: Path, corpus: Corpus, tokenizer: Tokenizer, options: Options
) -> str | None:
    """Return a message if `final` is the requested dataset, None with `overwrite`.

    Raises:
        PrepareError: the folder holds something else, or the text or the options have changed
            since.
    """
    manifest = read_manifest(final)
    if manifest is None:
        raise PrepareError(
            f"{final} exists and was not made by gptjax (no {MANIFEST}); choose another --name"
        )
    if options.overwrite:
        return None
    if (manifest.source, manifest.tokenizer) != (corpus.source, tokenizer.name):
        raise PrepareError(
            f"{final} holds something else: expected {corpus.source!r} with tokenizer "
            f"{tokenizer.name}, found {manifest.source!r} with {manifest.tokenizer}; choose "
            "another --name, or replace it with --overwrite"
        )
    recorded, found = options.recorded(), manifest.options
    if changed := [name for name in recorded if found.get(name, recorded[name]) != recorded[name]]:
        raise PrepareError(
            f"{final} was prepared with other options: expected {_flags(recorded, changed)}, found "
            f"{_flags(found, changed)}; replace the dataset with --overwrite, or choose another "
            "--name"
        )
    if manifest.source_digest is None:
        return (
            f"{final} is already prepared, but {MANIFEST} has no digest of the text; "
            "--overwrite makes it again"
        )
    if manifest.source_digest != (corpus.digest or corpora.digest(corpus.documents())):
        raise PrepareError(
            f"{final} was prepared from other text: expected the earlier documents of "
            f"{corpus.source!r}, found changed ones; replace the dataset with --overwrite, or "
            "choose another --name"
        )
    return f"{final} is already prepared from the same text; --overwrite makes it again"


def _flags(values: dict[str, Any], names: list[str]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {values[name]!r:.60}" for name in names)


def choose_validation(sizes: np.ndarray, val_fraction: float, seed: int) -> np.ndarray:
    """Choose validation documents of about `val_fraction` of the bytes.

    Documents are visited in a random order that depends only on `seed` and the number of documents.
    A document is chosen if its size fits in the remaining validation bytes. If the result has less
    than half of the wanted bytes (few or long documents), the smallest remaining document is chosen
    too. Each split has at least one document.

    Args:
        sizes: size of each document in bytes, int64 of shape (documents,), at least two documents.
        val_fraction: wanted fraction of the bytes.
        seed: seed of the order.

    Returns:
        bool of shape (documents,), True for validation.
    """
    is_val = np.zeros(sizes.size, dtype=bool)
    wanted = left = val_fraction * int(sizes.sum())
    for index in np.random.default_rng(seed).permutation(sizes.size):
        if sizes[index] <= left:
            is_val[index] = True
            left -= int(sizes[index])
    if left > wanted / 2:
        is_val[np.flatnonzero(~is_val)[sizes[~is_val].argmin()]] = True
    if is_val.all():
        is_val[sizes.argmax()] = False
    return is_val


def _split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """Split one document into training text and validation text.

    The cut follows a newline if this changes the size of neither text by more than half.
    """
    wanted = max(1, min(round(len(text) * (1 - val_fraction)), len(text) - 1))
    near = min(wanted, len(text) - wanted) // 2
    before = text.rfind("\n", wanted - near - 1, wanted) + 1
    cut = before or text.find("\n", wanted, wanted + near) + 1 or wanted
    return text[:cut], text[cut:]


@dataclasses.dataclass(frozen=True)
class _Piece:
    text: str
    split: int
    first: bool  # first piece of a document: preceded by EOT
    bytes: int  # for the progress bar
    counts: bool = True  # not a prompt


def _pieces(corpus: Corpus, sizes: np.ndarray, options: Options) -> Iterator[_Piece]:
    """Yield the corpus in order, long documents in several pieces."""
    # The digest of the text includes byte order marks, as in earlier versions. The tokens do not.
    texts = (
        text.removeprefix("\ufeff") if isinstance(text, str) else text
        for text in corpus.documents()
    )
    if sizes.size == 1 and corpus.masked:
        raise PrepareError(
            f"nothing prepared: expected at least two pairs in {corpus.source!r}, one for training "
            "and one for validation, found one; add more pairs"
        )
    if np.count_nonzero(sizes) == 1:
        texts = itertools.chain.from_iterable(
            _split_text(text, options.val_fraction)
            for text in texts
            if text and isinstance(text, str)
        )
        sizes, splits = np.repeat(sizes[sizes > 0] // 2, 2), np.array([False, True])
    else:
        splits = choose_validation(sizes, options.val_fraction, options.seed)
    for text, size, is_val in itertools.zip_longest(texts, sizes, splits):
        if text is None or size is None:
            raise PrepareError(
                f"nothing prepared: expected {splits.size} documents in {corpus.source!r} as at "
                "the start, found another number: the text changed during preparation; run the "
                "same command again"
            )
        split, size = VAL if is_val else TRAIN, int(size)
        if isinstance(text, Pair):
            # Tokenize each text separately, because sampling tokenizes the prompt without the
            # answer.
            yield _Piece(text.prompt, split, True, 0, counts=False)
            yield _Piece(text.answer, split, False, size)
            continue
        begin = 0
        while begin < len(text):
            cut = _CUT.search(text, begin + _PIECE_CHARACTERS)
            end = cut.end() if cut else len(text)
            yield _Piece(text[begin:end], split, begin == 0, size * (end - begin) // len(text))
            begin = end


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Group small pieces, so that a task is large enough for a thread."""
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _PIECE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Tokens(NamedTuple):
    tokens: np.ndarray  # uint16
    counts: np.ndarray | None  # uint8, 1 for a target of the loss; None for a corpus without pairs


def _encode(
    tokenizer: Tokenizer, masked: bool, batch: list[_Piece]
) -> tuple[_Tokens, _Tokens, int]:
    """Return the tokens of each split, and the size of the batch in bytes."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    masks: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    for piece in batch:
        tokens = tokenizer.encode(piece.text)
        parts[piece.split].extend([eot] * piece.first + [tokens])
        if masked:
            # An EOT counts, because it ends the previous answer.
            masks[piece.split].append(np.ones(int(piece.first), np.uint8))
            masks[piece.split].append(np.full(tokens.size, piece.counts, np.uint8))
    train, val = (
        _Tokens(
            np.concatenate([np.zeros(0, np.uint16), *part]),
            np.concatenate([np.zeros(0, np.uint8), *mask]) if masked else None,
        )
        for part, mask in zip(parts, masks, strict=True)
    )
    return train, val, sum(piece.bytes for piece in batch)


def _in_order[Item, Result](
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterator[Item], ahead: int
) -> Iterator[Result]:
    """Map with at most `ahead` items in memory; Executor.map would read the complete corpus."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _SplitWriter:
    """Buffer the tokens of a split and write complete shards.

    The buffer holds 1.5 shards, and one shard is written when the buffer is full: at least half a
    shard remains for the last one.
    """

    def __init__(
        self, folder: Path, name: str, split: int, shard_tokens: int, masked: bool = False
    ) -> None:
        self.shards: dict[str, ShardInfo] = {}
        self._folder, self._name, self._split, self._shard_tokens = (
            folder,
            name,
            split,
            shard_tokens,
        )
        self._buffer = np.empty(shard_tokens + shard_tokens // 2, dtype=np.uint16)
        self._counts = np.empty(self._buffer.size, dtype=np.uint8) if masked else None
        self._used = 0

    def add(self, tokens: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Append tokens and write shards when the buffer is full."""
        done = 0
        while done < tokens.size:
            if self._used == self._buffer.size:
                self._write(self._shard_tokens)
            taken = min(tokens.size - done, self._buffer.size - self._used)
            into, of = slice(self._used, self._used + taken), slice(done, done + taken)
            self._buffer[into] = tokens[of]
            if self._counts is not None and counts is not None:
                self._counts[into] = counts[of]
            self._used += taken
            done += taken

    def finish(self) -> dict[str, ShardInfo]:
        """Write the last shard and return the description of every shard, by file name."""
        if self._used:
            self._write(self._used)
        return self.shards

    def _write(self, count: int) -> None:
        number = _FIRST_NUMBER[self._split] + len(self.shards)
        file = f"{self._name}_{_SPLIT_NAMES[self._split]}_{number:06d}.bin"
        path, rest = self._folder / file, self._used - count
        write_shard(path, self._buffer[:count])
        info = ShardInfo.from_shard(Shard(path))
        self._buffer[:rest] = self._buffer[count : self._used]
        if self._counts is not None:
            write_mask(mask_path(path), self._counts[:count])
            info = dataclasses.replace(info, mask=MaskInfo.from_mask(Mask.of(Shard(path))))
            self._counts[:rest] = self._counts[count : self._used]
        self.shards[file], self._used = info, rest


def _write_shards(
    folder: Path,
    name: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    options: Options,
    log: Callable[[str], object],
) -> tuple[dict[str, ShardInfo], dict[str, ShardInfo]]:
    """Tokenize the corpus into `folder` and return the training and the validation shards."""
    sizes = corpus.measure()
    workers = options.workers or os.cpu_count() or 1
    masked = corpus.masked
    writers = [
        _SplitWriter(folder, name, split, options.shard_tokens, masked) for split in (TRAIN, VAL)
    ]
    # Threads instead of processes: tiktoken releases the GIL (1.6 times as fast with two threads on
    # two cores), and a caller's script needs no `if __name__ == "__main__"`.
    pool = ThreadPoolExecutor(workers, thread_name_prefix="gptjax-tokenize")
    try:
        with _progress(f"tokenizing {name}", int(sizes.sum()), log) as advance:
            batches = _batches(_pieces(corpus, sizes, options))
            for train, val, done in _in_order(
                pool, lambda batch: _encode(tokenizer, masked, batch), batches, 2 * workers
            ):
                writers[TRAIN].add(*train)
                writers[VAL].add(*val)
                advance(done)
    finally:
        pool.shutdown(cancel_futures=True)
    train, val = (writer.finish() for writer in writers)
    if not train or not val:
        raise PrepareError(
            f"nothing prepared: expected text for training and for validation, found none for "
            f"{'validation' if train else 'training'} in {corpus.source!r}; add more text or "
            "another --val-fraction"
        )
    return train, val


@contextlib.contextmanager
def _progress(
    what: str, total: int, log: Callable[[str], object]
) -> Iterator[Callable[[int], None]]:
    """Yield a function of the number of new bytes, which reports progress.

    Show a bar on a terminal; otherwise, log a line every ten seconds.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, advance=done)
        return

    logged, total_done = time.monotonic(), 0

    def advance(done: int) -> None:
        nonlocal logged, total_done
        total_done += done
        if time.monotonic() - logged >= 10:
            logged = time.monotonic()
            log(f"{what}: {total_done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    yield advance
