"""Preparation of a dataset from a corpus.

The corpus is split by document, tokenized in parallel and written to shards in a hidden sibling
folder (`data/.NAME.partial`), which is renamed at the end: a partial dataset is never visible. A
lock file (`data/.NAME.lock`) serializes the processes that request the same dataset: one process
prepares the dataset, and the other processes wait.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax.data import corpora
from gptjax.data.corpora import Corpus, Pair
from gptjax.data.manifest import MANIFEST, Files, Manifest, describe, read_manifest
from gptjax.data.shards import MAX_TOKENS, DataError, mask_path, write_shard
from gptjax.data.tokenizers import AnyTokenizer, JsonTokenizer, choose_tokenizer, facts
from gptjax.terminal import print_line
from gptjax.user_folders import data_folder

TRAIN, VAL = 0, 1
_BOM = "\ufeff"  # byte order mark

# Documents are cut into pieces of about this many characters, which the threads tokenize. A cut is
# made only after a newline between two characters that are not white space. GPT-2's BPE never
# merges across such a newline, so the tokens equal the tokens of the complete document. A
# tokenizer.json that does, or that adds a space before each text, tokenizes complete documents.
_PIECE_CHARACTERS, _PIECES_AT_ONCE = 1 << 16, 1024
_CUT = re.compile(r"(?<=\S)\n(?=\S)")
_CUT_TEXTS = ("a\nb", "1.\n2", "é)\n(É", "the\nthe")


class PrepareError(DataError, ValueError):
    """A dataset that cannot be prepared with the given options."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of preparation, for every corpus."""

    data_dir: str | os.PathLike = dataclasses.field(default_factory=data_folder)
    """Folder of the datasets, created if it does not exist."""
    name: str | None = None
    """Name of the dataset's folder in data-dir. None: CORPUS_TOKENIZER, such as stdlib_byte."""
    tokenizer: str = "auto"
    """gpt2 (BPE) needs a network or TIKTOKEN_CACHE_DIR; byte needs no files; auto: gpt2 if
    available, else byte with a note. Or the path of a tokenizer.json, or of a folder with one."""
    val_fraction: float = 0.05
    """Fraction of the text in the validation split: complete documents, or the end of a single
    document."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard. The last shard of a split holds the rest."""
    seed: int = 0
    """Seed of the choice of validation documents."""
    overwrite: bool = False
    """Prepare the dataset again if it exists."""
    eot: str | None = None
    """End-of-text token of a tokenizer.json. None: eos_token of the tokenizer_config.json beside
    it, or the only special token with a usual name."""

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
    log: Callable[[str], object] = print_line,
) -> Path:
    """Prepare Python's standard library unless already prepared; return the dataset's folder."""
    options = Options(data_dir, name, tokenizer, val_fraction, overwrite=overwrite)
    return prepare_corpus("stdlib", corpora.stdlib(), options, log=log)


def prepare_corpus(
    corpus_name: str, corpus: Corpus, options: Options, *, log: Callable[[str], object] = print_line
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
        PrepareError: an option is out of range, the folder holds something else, or a split would
            be empty.
        CorpusError: the text cannot be downloaded or read.
        TokenizerUnavailable: the files of tokenizer "gpt2" are not available.
        TokenizerError: the tokenizer.json cannot be used.
    """
    o, most = options, MAX_TOKENS
    if not (0 < o.val_fraction < 1 and 2 <= o.shard_tokens <= most and o.seed >= 0):
        raise PrepareError(
            f"expected val-fraction between 0 and 1, shard-tokens in 2..{most} and seed of at "
            f"least 0, found {o.val_fraction}, {o.shard_tokens} and {o.seed}"
        )
    tokenizer, note = choose_tokenizer(options.tokenizer, options.eot)
    if note:
        log(note)
    name = f"{corpus_name}_{tokenizer.name}" if options.name is None else options.name
    with preparing(options.data_dir, name, log) as (final, partial):
        if final.exists():
            manifest = read_manifest(final)
            if manifest is None:
                raise PrepareError(
                    f"{final} exists and was not made by gptjax (no {MANIFEST}); choose another "
                    "--name"
                )
            wanted = {"source": corpus.source, "tokenizer": tokenizer.name, "eot": tokenizer.eot}
            wanted |= options.recorded()
            found = {name: getattr(manifest, name) for name in ("source", "tokenizer", "eot")}
            found = wanted | found | manifest.options
            if not options.overwrite and wanted != found:
                raise PrepareError(
                    f"{final} holds something else: expected {wanted}, found {found}; choose "
                    "another --name, or replace it with --overwrite"
                )
            if not options.overwrite:
                log(f"{final} is already prepared; --overwrite makes it again")
                return final
        start = time.perf_counter()
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
        partial.mkdir()
        try:
            train, val = _write_shards(partial, final.name, corpus, tokenizer, options, log)
            if isinstance(tokenizer, JsonTokenizer):
                tokenizer.save(partial)
            about = (*facts(tokenizer), corpus.source)
            Manifest(*about, train | val, options.recorded()).write(partial)
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    counts = [sum(info.get("tokens", 0) for info in files.values()) for files in (train, val)]
    said = "{:,} tokens for training, {:,} for validation".format(*counts)
    said = f"{final}: {corpus.source}, tokenizer {tokenizer.name}: {said}"
    log(f"{said} ({time.perf_counter() - start:.1f} s)")
    return final


@contextlib.contextmanager
def preparing(
    data_dir: str | os.PathLike, name: str, log: Callable[[str], object]
) -> Iterator[tuple[Path, Path]]:
    """Hold the lock of a dataset. Yield its folder, and the folder in which it is prepared.

    Waits while another process holds the lock. A symbolic link to a folder is followed.

    Raises:
        PrepareError: the name is empty, hidden or a path, or has control characters.
    """
    if not name or name.startswith(".") or Path(name).name != name or not name.isprintable():
        raise PrepareError(
            "expected a plain folder name without control characters as the dataset's name, found "
            f"{name!r}; put folders in --data-dir"
        )
    final = Path(data_dir) / name
    final = final.resolve() if final.is_symlink() else final
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f".{final.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that is preparing {final}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield final, final.with_name(f".{final.name}.partial")


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


class _Piece(NamedTuple):
    text: str
    split: int
    first: bool  # first piece of a document: preceded by EOT
    counts: bool = True  # not a prompt


def _can_cut(tokenizer: AnyTokenizer) -> bool:
    """Return whether tokens end at the newlines at which documents are cut."""
    cuts = [_CUT.split(text) for text in _CUT_TEXTS]
    parts = tokenizer.encode_batch([part for a, b in cuts for part in (f"{a}\n", b)])
    return all(
        np.array_equal(whole, np.concatenate(parts[2 * i : 2 * i + 2]))
        for i, whole in enumerate(tokenizer.encode_batch(_CUT_TEXTS))
    )


def _stream_splits(val_fraction: float, seed: int) -> Iterator[int]:
    """Yield the split of each document of a stream."""
    rng, count = np.random.default_rng(seed), max(2, round(1 / val_fraction))
    while True:
        chosen = int(rng.integers(count))
        yield from (VAL if i == chosen else TRAIN for i in range(count))


def _pieces(
    corpus: Corpus, sizes: np.ndarray | None, options: Options, cuts: bool = True
) -> Iterator[_Piece]:
    """Yield the documents in order, long ones in several pieces if `cuts`."""
    splits: Iterable[int]
    if sizes is None:
        # An empty text has no tokens: no text for the validation split.
        documents = filter(None, corpus.documents())
        splits = _stream_splits(options.val_fraction, options.seed)
    elif np.count_nonzero(sizes) == 1 and not corpus.masked:
        (text,) = (text.removeprefix(_BOM) for text in corpus.documents() if text)
        cut = max(1, min(round(len(text) * (1 - options.val_fraction)), len(text) - 1))
        documents, splits = iter((text[:cut], text[cut:])), (TRAIN, VAL)
    else:
        documents = corpus.documents()
        is_val = choose_validation(sizes, options.val_fraction, options.seed)
        splits = is_val.astype(int).tolist()
    for document, split in zip(documents, splits, strict=sizes is not None):
        if isinstance(document, Pair):
            # Tokenize each text separately, because sampling tokenizes the prompt without the
            # answer.
            yield _Piece(document.prompt, split, True, counts=False)
            yield _Piece(document.answer, split, False)
            continue
        text, begin = document.removeprefix(_BOM), 0
        while begin < len(text):
            cut = _CUT.search(text, begin + _PIECE_CHARACTERS) if cuts else None
            end = cut.end() if cut else len(text)
            yield _Piece(text[begin:end], split, begin == 0)
            begin = end


class _Shards:
    """Writer of the shards of a split, as in llm.c: NAME_train_000001.bin, NAME_val_000000.bin.

    Args:
        prefix: path of the shards without their numbers.
        number: number of the first shard.
        shard_tokens: tokens in a shard; the last shard holds the rest.
        masked: whether each shard has a loss mask.
        ids: number of ids of the tokenizer.
    """

    def __init__(self, prefix: str, number: int, shard_tokens: int, masked: bool, ids: int):
        self._prefix, self._number, self._size, self._masked = prefix, number, shard_tokens, masked
        self._ids = ids
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._count, self._files = 0, {}

    def add(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Append tokens, and whether each token counts for the loss."""
        self._parts.append((tokens, counts))
        self._count += tokens.size
        while self._count >= self._size:
            self._write()

    def close(self) -> Files:
        """Write the rest. Return the descriptions of all files."""
        if self._count:
            self._write()
        if not self._files:
            raise PrepareError(
                "nothing prepared: expected text for training and for validation, found none for "
                f"{self._prefix.rpartition('_')[2]}; add more text or another --val-fraction"
            )
        return self._files

    def _write(self) -> None:
        path = Path(f"{self._prefix}_{self._number:06d}.bin")
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        for file, column in zip((path, mask_path(path))[: 1 + self._masked], columns, strict=False):
            write_shard(file, column[: self._size], vocab_size=self._ids)
            self._files[file.name] = describe(file)
        tokens, counts = (column[self._size :] for column in columns)
        self._parts, self._count, self._number = [(tokens, counts)], tokens.size, self._number + 1


def _write_shards(
    folder: Path,
    name: str,
    corpus: Corpus,
    tokenizer: AnyTokenizer,
    options: Options,
    log: Callable[[str], object],
) -> tuple[Files, Files]:
    """Tokenize a corpus to shards in `folder`. Return the training and the validation files."""
    sizes = corpus.measure and corpus.measure()
    total = "" if sizes is None else f" of {sizes.sum() / 1e6:,.0f} MB of text"
    done, logged = 0, time.monotonic()
    how = (options.shard_tokens, corpus.masked, tokenizer.vocab_size)
    train, val = (
        _Shards(f"{folder / name}_{split}", first, *how)
        for split, first in (("train", 1), ("val", 0))
    )
    pieces = _pieces(corpus, sizes, options, _can_cut(tokenizer))
    for batch in itertools.batched(pieces, _PIECES_AT_ONCE):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            if piece.first:
                begin = np.array([tokenizer.eot, *tokenizer.prefix], tokens.dtype)
                tokens = np.concatenate([begin, tokens])
            counts = np.full(tokens.size, piece.counts, np.uint8)
            counts[: int(piece.first)] = 1  # EOT ends the previous answer
            (train, val)[piece.split].add(tokens, counts)
            done += tokens.size
        if time.monotonic() - logged >= 10:
            logged = time.monotonic()
            log(f"tokenizing {name}: {done:,} tokens{total}")
    return train.close(), val.close()
