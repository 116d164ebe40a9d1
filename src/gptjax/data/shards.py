"""llm.c's format of token shards, which modded-nanogpt reads too.

    bytes 0 .. 1023     256 little-endian int32: magic 20240520, version 1, token count, then zeros
    bytes 1024 ..       the tokens, little-endian uint16

`Shard` reads by position, `open_shard` maps a file into memory, and `write_shard` writes a file
atomically. A bad file raises `ShardError`, whose message names the file, the byte, what was
expected, what was found, and what to do.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from gptjax.data.errors import DataError
from gptjax.files import open_regular, write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024  # 256 int32
TOKEN_BYTES = 2
MAX_TOKENS = 2**31 - 1  # the count is an int32

_LLAMA3_MAGIC = 20240801  # llm.c's shards of uint32 tokens, for vocabularies above 65536
_PREPARE_AGAIN = "prepare the shard again, for example with `python -m gptjax.data`"
_CHUNK_TOKENS = 1 << 24  # 32 MB


class ShardError(DataError, ValueError):
    """A token shard that cannot be read, written or trained on."""


def shard_error(
    path: str | os.PathLike, offset: int, *, expected: str, found: str, do: str = _PREPARE_AGAIN
) -> ShardError:
    """Return an error with file and offset, the expected and the found value, and what to do."""
    return ShardError(
        f"{os.fspath(path)}: at byte {offset}: expected {expected}, found {found}; {do}"
    )


def token_offset(index: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Return the offset in the file of token `index`, in bytes."""
    return HEADER_BYTES + token_bytes * index


class Shard:
    """Tokens of a shard, read by position.

    Training does not use a memory map: reading the map of a truncated file ends the process with
    SIGBUS. A subclass reads a file of the same layout with another magic number and dtype.

    Attributes:
        path: the file.
        size: number of tokens.
        stamp: length in bytes and modification time of the file. A read raises ShardError if either
            has changed.
    """

    magic: ClassVar[int] = MAGIC
    dtype: ClassVar[np.dtype] = np.dtype("<u2")
    description: ClassVar[str] = "a token shard of llm.c's"

    def __init__(self, path: str | os.PathLike, stamp: tuple[int, int] | None = None) -> None:
        """Open a shard and check its header.

        Args:
            path: the file.
            stamp: `stamp` of an earlier Shard of this file, if the file must be unchanged.

        Raises:
            ShardError: the file is missing, is not a shard, has no tokens, or its length is not
                the one in the header.
        """
        self.path, self._descriptor = Path(path), -1
        try:
            self._descriptor = open_regular(self.path)
            status = os.fstat(self._descriptor)
            head = os.pread(self._descriptor, HEADER_BYTES, 0)
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise _unreadable(self.path, 0, error) from error
        self.size = _token_count(type(self), self.path, head, status.st_size)
        self.stamp = stamp or (status.st_size, status.st_mtime_ns)

    def __del__(self, close=os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)

    def read(self, begin: int, count: int) -> np.ndarray:
        """Read tokens begin .. begin + count - 1, read-only uint16 of shape (count,).

        Raises:
            ShardError: the file cannot be read, or has changed since it was opened.
        """
        width = self.dtype.itemsize
        content = self.read_bytes(token_offset(begin, width), width * count)
        return np.frombuffer(content, dtype=self.dtype)

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all tokens in order: the index of the first token of a chunk, and the chunk."""
        for begin in range(0, self.size, _CHUNK_TOKENS):
            yield begin, self.read(begin, min(_CHUNK_TOKENS, self.size - begin))

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Read bytes offset .. offset + count - 1 of the file. Raise the errors of `read`."""
        try:
            content = os.pread(self._descriptor, count, offset)
            while len(content) < count:  # a read returns at most 2 GiB
                more = os.pread(self._descriptor, count - len(content), offset + len(content))
                if not more:
                    break
                content += more
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise _unreadable(self.path, offset, error) from error
        if len(content) == count and (status.st_size, status.st_mtime_ns) == self.stamp:
            return content
        raise shard_error(
            self.path,
            offset,
            expected=f"the file of {self.stamp[0]} bytes that was opened, unchanged",
            found=f"a file of {status.st_size} bytes that was written to since",
            do="nothing may write to a shard that is in use: restore it, "
            "then run the same command again",
        )


def open_shard(path: str | os.PathLike) -> np.ndarray:
    """Map the tokens of a shard into memory.

    Returns:
        A read-only memory-mapped uint16 array of shape (tokens,). Only the header has been read.
        Reading the array after the file was truncated ends the process with SIGBUS; `Shard` raises
        an error instead.

    Raises:
        ShardError: the file is missing, is not a shard, has no tokens, or its length is not the one
            in the header.
    """
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(Shard(path).size,))


def _unreadable(path: Path, offset: int, error: OSError | ValueError) -> ShardError:
    reason = error.strerror if isinstance(error, OSError) else None
    return shard_error(path, offset, expected="a readable shard", found=reason or str(error))


def _token_count(kind: type[Shard], path: Path, head: bytes, size: int) -> int:
    """Check the header of a file of `size` bytes and return the number of tokens."""
    fields = np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    magic, version, count = (int(field) for field in fields[:3])
    end = token_offset(count, kind.dtype.itemsize)
    unused = 3 + int(np.argmax(fields[3:] != 0))
    llama = " (llm.c's shards of uint32 tokens)" if magic == _LLAMA3_MAGIC else ""
    wrong = "cut short" if size < end else "too long"
    checks = (
        (len(head), HEADER_BYTES, len(head), f"a header of {HEADER_BYTES} bytes", f"{size} bytes"),
        (magic, kind.magic, 0, f"magic {kind.magic} ({kind.description})", f"{magic}{llama}"),
        (version, VERSION, 4, f"version {VERSION}", f"version {version}"),
        (max(count, 0), count or 1, 8, "a token count above 0", f"{count}"),
        (fields[unused], 0, 4 * unused, "0 in the unused header fields", f"{fields[unused]}"),
        (
            *(size, end, min(size, end), f"{end} bytes for the {count} tokens of the header"),
            f"a file of {size} bytes ({wrong})",
        ),
    )
    for value, right, offset, expected, found in checks:
        if value != right:
            raise shard_error(path, offset, expected=expected, found=found)
    return count


def write_shard(path: str | os.PathLike, tokens: np.ndarray) -> None:
    """Write a shard atomically: `path` stays unchanged until the new file is on disk.

    Args:
        path: the file to create or replace.
        tokens: at least one integer, of shape (tokens,), each in 0..65535.

    Raises:
        ShardError: no tokens, not a one-dimensional array of integers, or an id outside uint16.
        OSError: writing failed (disk full, read-only). No temporary file is left.
    """
    path = Path(path)
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        raise ShardError(f"{path}: not written: expected at least one token, found none")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ShardError(
            f"{path}: not written: expected integers of shape (tokens,), found {tokens.dtype} of "
            f"shape {tokens.shape}"
        )
    if tokens.size > MAX_TOKENS:
        raise ShardError(
            f"{path}: not written: expected at most {MAX_TOKENS} tokens (the header's int32), "
            f"found {tokens.size}; split them over several shards"
        )
    if tokens.dtype != np.uint16:
        bad = np.flatnonzero((tokens < 0) | (tokens > 65535))
        if bad.size:
            raise ShardError(
                f"{path}: not written: expected ids in 0..65535 (uint16), found {tokens[bad[0]]} "
                f"at token {bad[0]}"
            )

    write_atomically(path, header(MAGIC, tokens.size), tokens.astype("<u2", copy=False))


def header(magic: int, count: int) -> np.ndarray:
    """Return the header of a file of `count` tokens, int32 of shape (256,)."""
    fields = np.zeros(256, dtype="<i4")
    fields[:3] = magic, VERSION, count
    return fields
