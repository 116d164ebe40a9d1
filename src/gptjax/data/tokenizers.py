"""Text to token ids and back: GPT-2's BPE where it can be had, bytes everywhere.

`get_tokenizer("gpt2")` needs two public files (1.5 MB) that tiktoken downloads once and keeps.
Where they cannot be had it raises `TokenizerUnavailable` within seconds; `choose_tokenizer("auto")`
then takes bytes and says so in a note that its caller has to show.
"""

import threading
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from gptjax.data.errors import DataError

EOT_TEXT = "<|endoftext|>"
TOKENIZERS = ("gpt2", "byte")
type TokenizerChoice = Literal["auto", "gpt2", "byte"]

# Getting the BPE files takes 0.2 s from the cache and a second or two from the network. tiktoken's
# download has no timeout of its own, and behind a firewall that drops packets it would hang for
# minutes.
_LOAD_SECONDS = 15.0


class TokenizerUnavailable(DataError, RuntimeError):
    """The BPE files of a tokenizer are neither cached nor to be had from the network."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of gptjax knows of a tokenizer. Instances may be used from several threads at
    once."""

    name: str
    vocab_size: int
    eot: int  # the id that stands before each document

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint16 of shape (tokens,). `<|endoftext|>` in it is text like any
        other."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. ValueError for an id not in
        the vocabulary."""
        ...


class ByteTokenizer:
    """UTF-8 bytes, and 256 for the end of a text. Needs no files."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_without_surrogates(text).encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = _checked(ids, self)
        documents = np.split(ids, np.flatnonzero(ids == self.eot))
        # Every piece but the first starts with the EOT at which it was split off.
        texts = [documents[0], *(piece[1:] for piece in documents[1:])]
        return EOT_TEXT.join(
            text.astype(np.uint8).tobytes().decode(errors="replace") for text in texts
        )


class GPT2Tokenizer:
    """GPT-2's byte-level BPE, through tiktoken."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        self._bpe = _load_tiktoken("gpt2")

    def encode(self, text: str) -> np.ndarray:
        # encode_ordinary and not encode_to_numpy: before tiktoken 0.11 the latter took
        # `<|endoftext|>` for the token.
        return np.array(self._bpe.encode_ordinary(_without_surrogates(text)), dtype=np.uint16)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._bpe.decode(_checked(ids, self).tolist(), errors="replace")


# Number of ids and end-of-text id by tokenizer: known without loading GPT-2's files.
VOCABULARIES = {kind.name: (kind.vocab_size, kind.eot) for kind in (GPT2Tokenizer, ByteTokenizer)}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called "gpt2" or "byte".

    Raises:
        ValueError: unknown name.
        TokenizerUnavailable: "gpt2", and its files are neither cached nor to be had from the
            network.
    """
    if name == "gpt2":
        return GPT2Tokenizer()
    if name == "byte":
        return ByteTokenizer()
    raise ValueError(f"unknown tokenizer {name!r}; choose one of {', '.join(TOKENIZERS)}")


def choose_tokenizer(choice: str) -> tuple[Tokenizer, str | None]:
    """`get_tokenizer`, where "auto" means gpt2 if it can be had and bytes otherwise.

    Returns:
        The tokenizer, and a note to print whenever it is not the one that was hoped for (else
        None).
    """
    if choice not in ("auto", *TOKENIZERS):
        raise ValueError(
            f"unknown tokenizer {choice!r}; choose one of auto, {', '.join(TOKENIZERS)}"
        )
    if choice != "auto":
        return get_tokenizer(choice), None
    try:
        return get_tokenizer("gpt2"), None
    except TokenizerUnavailable as error:
        return get_tokenizer("byte"), (
            "NOTE: using the BYTE tokenizer (257 ids), because GPT-2's cannot be had here. Losses "
            "are per byte, "
            f"not comparable with GPT-2's. {error}"
        )


def _without_surrogates(text: str) -> str:
    """`text` with lone surrogates, which JSON allows and UTF-8 does not, replaced by U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _checked(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """`ids` as an int64 array of shape (tokens,), all inside the vocabulary."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"expected token ids of shape (tokens,), found {array.dtype} of shape {array.shape}"
        )
    bad = np.flatnonzero((array < 0) | (array >= tokenizer.vocab_size))
    if bad.size:
        raise ValueError(
            f"expected ids in 0..{tokenizer.vocab_size - 1} (tokenizer {tokenizer.name!r}), found "
            f"{array[bad[0]]} at "
            f"position {bad[0]}; logits of a padded vocabulary must be cut to "
            f"{tokenizer.vocab_size} before sampling"
        )
    return array.astype(np.int64)


# One attempt at a time; a hung one is left behind as a daemon, and later calls do not wait for it
# again.
_attempt: threading.Thread | None = None


def _load_tiktoken(name: str):
    """tiktoken's encoding, or TokenizerUnavailable after at most `_LOAD_SECONDS`."""
    global _attempt
    result: list = []

    def load() -> None:
        try:
            import tiktoken

            result.append(tiktoken.get_encoding(name))
        except Exception as error:  # noqa: BLE001 (another thread's error: raised below)
            result.append(error)

    cause: Exception | None = None
    if _attempt is not None and _attempt.is_alive():
        reason = "an earlier download of the BPE files still hangs"
    else:
        _attempt = threading.Thread(target=load, daemon=True, name="gptjax-tiktoken")
        _attempt.start()
        _attempt.join(_LOAD_SECONDS)
        if not result:
            reason = f"no answer from the network within {_LOAD_SECONDS:g} s"
        elif isinstance(result[0], Exception):
            cause = result[0]
            reason = f"{type(cause).__name__}: {str(cause)[:120]}"
        else:
            return result[0]
    raise TokenizerUnavailable(
        f"tokenizer {name!r} needs its BPE files, which are not in tiktoken's cache and could not "
        "be downloaded "
        f"({reason}). What to do: run once on a machine with a network with "
        "TIKTOKEN_CACHE_DIR=FOLDER, copy the "
        "folder here and set TIKTOKEN_CACHE_DIR to it; or take bytes with `--tokenizer byte`"
    ) from cause
