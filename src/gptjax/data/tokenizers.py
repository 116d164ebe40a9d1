"""Tokenizers: GPT-2's BPE if its files are available, and UTF-8 bytes.

`get_tokenizer("gpt2")` needs two public files (1.5 MB), which tiktoken downloads once and caches.
It raises `TokenizerUnavailable` within seconds if neither the cache nor the network has the files.
`choose_tokenizer("auto")` then returns the byte tokenizer and a note for the user.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from gptjax.data.shards import DataError

EOT_TEXT = "<|endoftext|>"
TOKENIZERS = ("gpt2", "byte")
type TokenizerChoice = Literal["auto", "gpt2", "byte"]

# The BPE files load in 0.2 s from the cache and in 1 to 2 s from the network. tiktoken's download
# has no timeout: behind a firewall that drops packets, the download would hang for minutes.
_LOAD_SECONDS = 15.0


class TokenizerUnavailable(DataError, RuntimeError):
    """The BPE files of a tokenizer are neither cached nor downloadable."""


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer. The methods are thread-safe.

    Attributes:
        name: "gpt2" or "byte".
        vocab_size: number of ids.
        eot: end-of-text id, which precedes each document.
    """

    name: str
    vocab_size: int
    eot: int

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text`, uint16 of shape (tokens,).

        `<|endoftext|>` in the text is encoded as plain text.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 are replaced by U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        ...


class ByteTokenizer:
    """UTF-8 bytes, and id 256 for the end of a text. This tokenizer needs no files."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> np.ndarray:
        try:
            content = text.encode()
        except UnicodeEncodeError:  # JSON allows lone surrogates; replace them as tiktoken does
            content = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        return np.frombuffer(content, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str], *, workers: int = 8) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def byte_lengths(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each id, int32 of shape (vocab_size,); 0 for EOT."""
        return np.array([1] * 256 + [0], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        eot = EOT_TEXT.encode()
        content = b"".join(eot if i == self.eot else bytes([i]) for i in _checked(ids, self))
        return content.decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-level BPE from tiktoken."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        self._bpe = _load_tiktoken("gpt2")

    def encode(self, text: str) -> np.ndarray:
        # Before tiktoken 0.11, encode_to_numpy encoded `<|endoftext|>` as the special token.
        return np.array(self._bpe.encode_ordinary(text), dtype=np.uint16)

    def encode_batch(self, texts: Sequence[str], *, workers: int = 8) -> list[np.ndarray]:
        """Return `encode` of each text, from `workers` threads."""
        ids = self._bpe.encode_ordinary_batch(list(texts), num_threads=workers)
        return [np.array(each, dtype=np.uint16) for each in ids]

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each id except EOT, in the order of the ids."""
        return [self._bpe.decode_single_token_bytes(id) for id in range(self.eot)]

    def byte_lengths(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each id, int32 of shape (vocab_size,); 0 for EOT."""
        return np.array([*map(len, self.token_bytes()), 0], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._bpe.decode(_checked(ids, self).tolist(), errors="replace")


# Number of ids and end-of-text id of each tokenizer, without loading GPT-2's files.
VOCABULARIES = {kind.name: (kind.vocab_size, kind.eot) for kind in (GPT2Tokenizer, ByteTokenizer)}


def model_options(name: str) -> str:
    """Return the options of train.py for a model of the ids of a tokenizer, padded to 128."""
    ids = VOCABULARIES[name][0]
    padded = -(-ids // 128) * 128
    return f"--model.vocab-size {ids} --model.padded-vocab-size {padded}"


def get_tokenizer(name: str) -> GPT2Tokenizer | ByteTokenizer:
    """Return the tokenizer "gpt2" or "byte".

    Raises:
        ValueError: unknown name.
        TokenizerUnavailable: the files of "gpt2" are neither cached nor downloadable.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}; choose one of {', '.join(TOKENIZERS)}")
    return GPT2Tokenizer() if name == "gpt2" else ByteTokenizer()


def choose_tokenizer(choice: str) -> tuple[GPT2Tokenizer | ByteTokenizer, str | None]:
    """Return the tokenizer `choice`, and a note for the user or None.

    "auto" is gpt2 if available, else byte with a note. Raises the errors of `get_tokenizer`.
    """
    if choice != "auto":
        return get_tokenizer(choice), None
    try:
        return get_tokenizer("gpt2"), None
    except TokenizerUnavailable as error:
        return get_tokenizer("byte"), (
            "NOTE: using the BYTE tokenizer (257 ids), because GPT-2's is not available. Losses "
            f"are per byte, not comparable with GPT-2's. {error}"
        )


def _checked(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return `ids` as an int64 array of shape (tokens,) after a check of the range."""
    array = np.asarray(ids, np.int64)
    if array.ndim != 1:
        raise ValueError(f"expected token ids of shape (tokens,), found shape {array.shape}")
    bad = np.flatnonzero((array < 0) | (array >= tokenizer.vocab_size))
    if bad.size:
        raise ValueError(
            f"expected ids in 0..{tokenizer.vocab_size - 1} (tokenizer {tokenizer.name!r}), found "
            f"{array[bad[0]]} at position {bad[0]}"
        )
    return array


def _load_tiktoken(name: str):
    """Return tiktoken's encoding, or raise TokenizerUnavailable after at most `_LOAD_SECONDS`."""
    answer: Future = Future()

    def load() -> None:
        try:
            import tiktoken

            answer.set_result(tiktoken.get_encoding(name))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    try:
        return answer.result(_LOAD_SECONDS)
    # tiktoken, the HTTP client and the disk raise errors without a common base class.
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:120]}"
        if not answer.done():
            reason = f"no answer from the network within {_LOAD_SECONDS:g} s"
        raise TokenizerUnavailable(
            f"tokenizer {name!r} needs its BPE files, which are not in tiktoken's cache and could "
            f"not be downloaded ({reason}). What to do: run once on a machine with a network with "
            "TIKTOKEN_CACHE_DIR=FOLDER, copy the folder here and set TIKTOKEN_CACHE_DIR to it; or "
            "use bytes: `--tokenizer byte`"
        ) from error
