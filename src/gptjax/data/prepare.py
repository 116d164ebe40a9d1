"""Preparation of a dataset from a corpus.

The corpus is split by document, tokenized in parallel and written to shards in a temporary folder,
which is renamed when the dataset is complete.
"""

import dataclasses
import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data import corpora
from gptjax.data.atomic import PrepareError, dataset_folder, locked, staged
from gptjax.data.corpora import Corpus, Pair
from gptjax.data.manifest import MANIFEST, Manifest, MaskInfo, ShardInfo, read_manifest
from gptjax.data.masks import Mask, mask_path, write_mask
from gptjax.data.shards import MAX_TOKENS, Shard, write_shard
from gptjax.data.tokenizers import ByteTokenizer, GPT2Tokenizer, choose_tokenizer
from gptjax.terminal import printable
from gptjax.user_folders import data_folder

TRAIN, VAL = 0, 1
MOST = MAX_TOKENS // 2  # shard-tokens; the last shard is larger
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

    Raises:
        PrepareError: an option is out of range.
    """

    data_dir: str | os.PathLike = dataclasses.field(default_factory=data_folder)
    """Folder of the datasets, created if it does not exist."""
    name: str | None = None
    """Name of the dataset's folder in data-dir. None: CORPUS_TOKENIZER, such as stdlib_byte."""
    tokenizer: str = "auto"
    """gpt2 (BPE) needs a network or TIKTOKEN_CACHE_DIR; byte needs no files; auto: gpt2 if
    available, else byte with a note."""
    val_fraction: float = 0.05
    """Fraction of the text in the validation split: complete documents, or the end of a single
    document."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard. The last shard of a split holds 0.5 to 1.5 times as many."""
    workers: int | None = None
    """Tokenizing threads. None: one for each CPU core."""
    seed: int = 0
    """Seed of the choice of validation documents."""
    overwrite: bool = False
    """Prepare the dataset again if it exists."""

    def __post_init__(self) -> None:
        for name, value, right, expected in (
            ("val-fraction", self.val_fraction, 0 < self.val_fraction < 1, "between 0 and 1"),
            ("shard-tokens", self.shard_tokens, 2 <= self.shard_tokens <= MOST, f"in 2..{MOST}"),
            ("workers", self.workers, self.workers is None or self.workers >= 1, "of at least 1"),
            ("seed", self.seed, self.seed >= 0, "of at least 0"),
        ):
            if not right:
                raise PrepareError(f"expected {name} {expected}, found {value}")

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
    final: Path, corpus: Corpus, tokenizer: GPT2Tokenizer | ByteTokenizer, options: Options
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
    wanted = {"source": corpus.source, "tokenizer": tokenizer.name, **options.recorded()}
    found = {"source": manifest.source, "tokenizer": manifest.tokenizer, **manifest.options}
    found = wanted | found  # earlier versions did not record all options
    if found == wanted and manifest.source_digest is not None:
        wanted["text"] = corpus.digest or corpora.digest(corpus.documents())
        found["text"] = manifest.source_digest
    if changed := [name for name in wanted if wanted[name] != found[name]]:
        expected, is_there = (
            ", ".join(f"{name.replace('_', '-')} {values[name]!r:.200}" for name in changed)
            for values in (wanted, found)
        )
        raise PrepareError(
            f"{final} holds something else: expected {expected}, found {is_there}; choose another "
            "--name, or replace it with --overwrite"
        )
    return f"{final} is already prepared; --overwrite makes it again"


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
    bytes: int  # for the progress
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


def _batches(pieces: Iterator[_Piece], characters: int) -> Iterator[list[_Piece]]:
    """Group pieces, so that each thread has work and the corpus need not fit in memory."""
    batch, count = [], 0
    for piece in pieces:
        batch.append(piece)
        count += len(piece.text)
        if count >= characters:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Collect the tokens of a split and write complete shards.

    A shard is written when more than 1.5 shards are collected: at least half a shard remains for
    the last one.
    """

    def __init__(self, folder: Path, name: str, split: int, shard_tokens: int) -> None:
        self.shards: dict[str, ShardInfo] = {}
        self._path = str(folder / f"{name}_{_SPLIT_NAMES[split]}_{{:06d}}.bin")
        self._first, self._shard_tokens = _FIRST_NUMBER[split], shard_tokens
        self._parts: list[np.ndarray] = []
        self._used = 0

    def add(self, rows: np.ndarray) -> None:
        """Append tokens and write shards when enough are collected.

        Args:
            rows: uint16 of shape (1 or 2, tokens): tokens and, with masks, 1 for a token that
                counts for the loss.
        """
        self._parts.append(rows)
        self._used += rows.shape[1]
        count = self._shard_tokens
        if self._used > count + count // 2:
            collected = np.concatenate(self._parts, axis=1)
            while collected.shape[1] > count + count // 2:
                self._write(collected[:, :count])
                collected = collected[:, count:]
            self._parts, self._used = [collected], collected.shape[1]

    def finish(self) -> dict[str, ShardInfo]:
        """Write the last shard and return the description of every shard, by file name."""
        if self._used:
            self._write(np.concatenate(self._parts, axis=1))
        return self.shards

    def _write(self, rows: np.ndarray) -> None:
        path = Path(self._path.format(self._first + len(self.shards)))
        write_shard(path, rows[0])
        info = ShardInfo.from_shard(Shard(path))
        if len(rows) == 2:
            write_mask(mask_path(path), rows[1].astype(np.uint8))
            info = dataclasses.replace(info, mask=MaskInfo.from_mask(Mask.of(Shard(path))))
        self.shards[path.name] = info


def _write_shards(
    folder: Path,
    name: str,
    corpus: Corpus,
    tokenizer: GPT2Tokenizer | ByteTokenizer,
    options: Options,
    log: Callable[[str], object],
) -> tuple[dict[str, ShardInfo], dict[str, ShardInfo]]:
    """Tokenize the corpus into `folder` and return the training and the validation shards."""
    sizes, workers = corpus.measure(), options.workers or os.cpu_count() or 1
    writers = [_SplitWriter(folder, name, split, options.shard_tokens) for split in (TRAIN, VAL)]
    total, done, logged = int(sizes.sum()), 0, time.monotonic()

    def rows(tokens: np.ndarray, counts: bool = True) -> np.ndarray:
        mask = [np.full(tokens.size, counts, np.uint16)] if corpus.masked else []
        return np.stack([tokens, *mask])

    eot = rows(np.array([tokenizer.eot], np.uint16))  # it counts: it ends the previous answer
    pieces = _pieces(corpus, sizes, options)
    for batch in _batches(pieces, 4 * workers * _PIECE_CHARACTERS):
        parts: tuple[list[np.ndarray], ...] = ([], [])
        encoded = tokenizer.encode_batch([piece.text for piece in batch], workers=workers)
        for piece, tokens in zip(batch, encoded, strict=True):
            parts[piece.split].extend([eot] * piece.first + [rows(tokens, piece.counts)])
            done += piece.bytes
        for writer, part in zip(writers, parts, strict=True):
            if part:
                writer.add(np.concatenate(part, axis=1))
        if time.monotonic() - logged >= 10:
            logged = time.monotonic()
            log(f"tokenizing {name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
    train, val = (writer.finish() for writer in writers)
    if not train or not val:
        raise PrepareError(
            f"nothing prepared: expected text for training and for validation, found none for "
            f"{'validation' if train else 'training'} in {corpus.source!r}; add more text or "
            "another --val-fraction"
        )
    return train, val
