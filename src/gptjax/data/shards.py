"""llm.c's format of token shards, which modded-nanogpt reads too, and loss masks.

    bytes 0 .. 1023     256 little-endian int32: magic 20240520, version 1, token count, then zeros
    bytes 1024 ..       the tokens, little-endian uint16

For vocabularies of more than 65,536 ids, llm.c's Llama form has the magic 20240801, the version 7
and uint32 tokens.

The loss mask of the shard NAME.bin is the file NAME.mask in the same folder. A mask has the same
layout with the magic number 20261122 and one byte per token: 1 if the token counts as a target of
the loss, 0 if not (a token of a prompt). A dataset has masks for all shards, or none.

`Shard` reads by position, `open_shard` maps a file into memory, and `write_shard` writes a file
atomically. A bad file raises `ShardError`.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gptjax.files import check_regular, write_atomically
from gptjax.terminal import UserError

HEADER_BYTES = 1024  # 256 int32
MAX_TOKENS = 2**31 - 1  # the count is an int32
MASK_SUFFIX = ".mask"
NARROW_IDS = 1 << 16  # ids of the largest vocabulary whose shards are uint16

_PREPARE_AGAIN = "prepare the shard again, for example with `python -m gptjax.data`"
_CHUNK_TOKENS = 1 << 24  # 32 MB

# A sample covers a file of up to 32 MiB completely, and 1 MiB of a larger file: the check at the
# start of a run reads 100 MB of 100 shards of 200 MB.
_SAMPLE_WHOLE = 1 << 25
_SAMPLE_BLOCKS, _SAMPLE_BLOCK_BYTES = 32, 1 << 15


class DataError(UserError):
    """Data that is missing, damaged or unsuitable.

    Base class of CorpusError, DatasetError, PrepareError, ShardError, TokenizerError and
    TokenizerUnavailable.
    """


class ShardError(DataError, ValueError):
    """A token shard or a loss mask that cannot be read, written or trained on."""


def shard_error(
    path: Path, offset: int, *, expected: str, found: str, do: str = _PREPARE_AGAIN
) -> ShardError:
    """Return an error with file and offset, the expected and the found value, and what to do."""
    return ShardError(f"{path}: at byte {offset}: expected {expected}, found {found}; {do}")


def mask_path(shard: Path) -> Path:
    """Return the path of a shard's loss mask."""
    return shard.with_suffix(MASK_SUFFIX)


class _Form(NamedTuple):
    magic: int
    version: int
    dtype: np.dtype


_NARROW = _Form(20240520, 1, np.dtype("<u2"))
_WIDE = _Form(20240801, 7, np.dtype("<u4"))
_MASK = _Form(20261122, 1, np.dtype("u1"))


def _form(path: Path, wide: bool) -> _Form:
    """Return the form of a file; `wide` for tokens in uint32."""
    return _MASK if path.suffix == MASK_SUFFIX else _WIDE if wide else _NARROW


class Shard:
    """Tokens of a shard or values of a loss mask, read by position.

    Training does not use a memory map: reading the map of a truncated file ends the process with
    SIGBUS.

    Attributes:
        path: the file.
        size: number of tokens.
        dtype: uint16 or uint32, or uint8 of a mask.
        stamp: length in bytes and modification time. A read raises ShardError if they have changed.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Open a file and check its header.

        Raises:
            ShardError: the file is missing, has another format or no tokens, or its length is not
                the one in the header.
        """
        self.path, self._descriptor = Path(path), -1
        try:
            check_regular(self.path)
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise shard_error(
                self.path, 0, expected="a readable shard", found=error.strerror or str(error)
            ) from error
        self.stamp = self._status()
        head = os.pread(self._descriptor, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
        fields = np.frombuffer(head, "<i4")[:3].tolist()
        magic, version, self.dtype = _form(self.path, wide=fields[0] == _WIDE.magic)
        count = (self.stamp[0] - HEADER_BYTES) / self.dtype.itemsize
        tokens = count if count > 0 else "above 0"
        expected = {"magic": magic, "version": version, "token count": tokens}
        for index, (name, right) in enumerate(expected.items()):
            if fields[index] != right:
                raise shard_error(
                    self.path,
                    4 * index,
                    expected=f"{name} {right}",
                    found=f"{fields[index]} in a file of {self.stamp[0]} bytes",
                )
        self.size = int(count)

    def __del__(self, close=os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)

    def _status(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def offset(self, index: int) -> int:
        """Return the offset in the file of token `index`, in bytes."""
        return HEADER_BYTES + self.dtype.itemsize * index

    def read(self, begin: int, count: int) -> np.ndarray:
        """Read tokens begin .. begin + count - 1, read-only, of shape (count,).

        Raises:
            ShardError: the file has changed since it was opened.
        """
        content = self.read_bytes(self.offset(begin), self.dtype.itemsize * count)
        return np.frombuffer(content, self.dtype)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all tokens in order: the index of the first token of a chunk, and the chunk."""
        for begin in range(0, self.size, _CHUNK_TOKENS):
            yield begin, self.read(begin, min(_CHUNK_TOKENS, self.size - begin))

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Read bytes offset .. offset + count - 1 of the file. Raise the errors of `read`."""
        content, status = os.pread(self._descriptor, count, offset), self._status()
        if len(content) == count and status == self.stamp:
            return content
        raise shard_error(
            self.path,
            offset,
            expected=f"the file of {self.stamp[0]} bytes that was opened, unchanged",
            found=f"a file of {status[0]} bytes that was written to since",
            do="restore it, then run the same command again",
        )

    def sample(self) -> str:
        """Return the SHA-256 of evenly spaced blocks of the file, or of a small file."""
        size, block = self.stamp[0], _SAMPLE_BLOCK_BYTES
        if size <= _SAMPLE_WHOLE:
            return hashlib.sha256(self.read_bytes(0, size)).hexdigest()
        digest = hashlib.sha256()
        for number in range(_SAMPLE_BLOCKS):  # the first and the last bytes are included
            digest.update(self.read_bytes((size - block) * number // (_SAMPLE_BLOCKS - 1), block))
        return digest.hexdigest()

    def check_ids(self, begin: int, tokens: np.ndarray, vocab_size: int) -> None:
        """Raise ShardError if one of the `tokens` from index `begin` on is not below vocab_size."""
        if tokens.max() < vocab_size:
            return
        bad = int(np.argmax(tokens >= vocab_size))
        raise shard_error(
            self.path,
            self.offset(begin + bad),
            expected=f"ids below the model's vocabulary of {vocab_size}",
            found=f"id {tokens[bad]} (token {begin + bad})",
            do="the shard was made with another tokenizer or is damaged: set the model's "
            f"vocab_size to the tokenizer's, or {_PREPARE_AGAIN}",
        )


def open_shard(path: str | os.PathLike) -> np.ndarray:
    """Map the tokens of a shard into memory.

    Returns:
        A read-only memory-mapped array of shape (tokens,), uint16 or uint32. Only the header has
        been read.

    Raises:
        ShardError: see `Shard`.
    """
    shard = Shard(path)
    return np.memmap(path, shard.dtype, mode="r", offset=HEADER_BYTES, shape=(shard.size,))


def write_shard(
    path: str | os.PathLike, tokens: np.ndarray, *, vocab_size: int = NARROW_IDS
) -> None:
    """Write a shard atomically: `path` stays unchanged until the new file is on disk.

    Args:
        path: the file to create or replace; a loss mask if it ends in `.mask`.
        tokens: at least one integer, of shape (tokens,), each in 0..65535, or in 0..2**31-1 if
            vocab_size is larger than 65,536.
        vocab_size: number of ids of the tokenizer, which decides between uint16 and uint32.

    Raises:
        ShardError: no tokens, not a one-dimensional array of integers, or an id out of range.
        OSError: writing failed (disk full, read-only). No temporary file is left.
    """
    path, tokens = Path(path), np.asarray(tokens)
    magic, version, dtype = _form(path, wide=vocab_size > NARROW_IDS)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not 0 < tokens.size <= MAX_TOKENS:
        raise ShardError(
            f"{path}: not written: expected 1 to {MAX_TOKENS} integers of shape (tokens,), found "
            f"{tokens.dtype} of shape {tokens.shape}"
        )
    most = min(np.iinfo(dtype).max, np.iinfo(np.int32).max)  # batches are int32
    if bad := [int(x) for x in (tokens.min(), tokens.max()) if not 0 <= x <= most]:
        raise ShardError(f"{path}: not written: expected ids in 0..{most}, found {bad[0]}")
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, version, tokens.size
    write_atomically(path, header, tokens.astype(dtype, copy=False))
