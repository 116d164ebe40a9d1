"""Tokenizers: GPT-2's BPE if its files are available, UTF-8 bytes, and any `tokenizer.json`.

`get_tokenizer("gpt2")` needs two public files (1.5 MB), which tiktoken downloads once and caches.
It raises `TokenizerUnavailable` within seconds if neither the cache nor the network has the files.
`choose_tokenizer("auto")` then returns the byte tokenizer and a note for the user.

A `tokenizer.json` stays beside the shards, in the folder of a run and in an exported folder. The
file tokenizer_config.json in the same folder names the end-of-text token, as in Hugging Face's
folders.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from gptjax.data.shards import NARROW_IDS, DataError
from gptjax.files import read_regular, write_atomically

EOT_TEXT = "<|endoftext|>"
TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# Files of a tokenizer.json that are copied with it.
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, "chat_template.jinja")
BYTES = 256
# Names of the end-of-text token in published tokenizers.
_EOT_TEXTS = {EOT_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>"}
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_JSON_NAME = "json-"
# Names of tokenizer.json files that have the tokens of GPT-2 and of bytes, by digest.
_KNOWN = {"a57a62dc": "gpt2", "c2c32773": "byte"}

# The BPE files load in 0.2 s from the cache and in 1 to 2 s from the network. tiktoken's download
# has no timeout: behind a firewall that drops packets, the download would hang for minutes.
_LOAD_SECONDS = 15.0


class TokenizerUnavailable(DataError, RuntimeError):
    """The files of a tokenizer are neither cached nor downloadable, or its package is missing."""


class TokenizerError(DataError, ValueError):
    """A tokenizer of an unknown name, or a tokenizer.json that cannot be used."""


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of a tokenizer. The methods are thread-safe.

    Attributes:
        name: "gpt2", "byte", or the name of a tokenizer.json: equal names mean equal ids.
        vocab_size: number of ids.
        eot: end-of-text id, which precedes each document.
        prefix: ids between the end-of-text id and the text of a document, and before a prompt.
    """

    name: str
    vocab_size: int
    eot: int
    prefix: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text` without `prefix`, of shape (tokens,).

        The dtype is uint16, or uint32 for more than 65,536 ids.

        `<|endoftext|>` in the text is encoded as plain text.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 are replaced by U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        ...


class TableTokenizer(Tokenizer):
    """A tokenizer that decodes each id by itself, with a table.

    Attributes:
        special: special tokens and their ids.
        token_bytes: bytes of each id; of a special token, its text.
    """

    special: dict[str, int]
    token_bytes: list[bytes]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def byte_lengths(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each id, int32 of shape (vocab_size,); 0 for special
        tokens."""
        lengths = np.array([*map(len, self.token_bytes)], np.int32)
        lengths[[*self.special.values(), self.eot]] = 0
        return lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        content = b"".join(self.token_bytes[i] for i in _checked(ids, self))
        return content.decode(errors="replace")


class ByteTokenizer(TableTokenizer):
    """UTF-8 bytes, and id 256 for the end of a text. This tokenizer needs no files."""

    name, vocab_size, eot = "byte", 257, 256
    special: ClassVar = {EOT_TEXT: eot}
    token_bytes: ClassVar = [*(bytes([byte]) for byte in range(BYTES)), EOT_TEXT.encode()]

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_valid(text).encode(), np.uint8).astype(np.uint16)


class GPT2Tokenizer(TableTokenizer):
    """GPT-2's byte-level BPE from tiktoken."""

    name, vocab_size, eot = "gpt2", 50257, 50256
    special: ClassVar = {EOT_TEXT: eot}

    def __init__(self) -> None:
        self._bpe = _load_tiktoken("gpt2")

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        return [*map(self._bpe.decode_single_token_bytes, range(self.vocab_size))]

    def encode(self, text: str) -> np.ndarray:
        # Before tiktoken 0.11, encode_to_numpy encoded `<|endoftext|>` as the special token.
        return np.array(self._bpe.encode_ordinary(text), dtype=np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text, from a thread for each CPU core."""
        ids = self._bpe.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)
        return [np.array(each, dtype=np.uint16) for each in ids]


class JsonTokenizer(TableTokenizer):
    """A `tokenizer.json`: a byte-level BPE, or a tokenizer of SentencePiece's kind.

    Special tokens in a text are encoded as plain text, and have no bytes in `byte_lengths`.

    Args:
        path: the file, or a folder that contains it.
        eot: end-of-text token. None: eos_token of tokenizer_config.json, or the only special token
            with a usual name.

    Attributes:
        fields: content of the file.
        config: content of tokenizer_config.json, with the end-of-text token.
        ids: id of each token.

    Raises:
        TokenizerError: the file cannot be used, or the end-of-text token is not known.
        TokenizerUnavailable: the package tokenizers is not installed.
    """

    def __init__(self, path: str | os.PathLike, eot: str | None = None) -> None:
        tokenizers, file = _package(path), _json_file(path)
        self._file, self._content = file, read_regular(file)
        self.fields, self.ids, self.name = _parse(file, self._content)
        try:
            self._bpe = tokenizers.Tokenizer.from_buffer(self._content)
            self._bpe.no_truncation()
            self._bpe.no_padding()
            started = self._bpe.encode("a")
        except Exception as error:  # the package raises plain Exceptions
            raise TokenizerError(f"{file}: {error}") from error
        added = {token["content"]: token for token in self.fields["added_tokens"]}
        self.special = {text: self.ids[text] for text in added if added[text]["special"]}
        self.vocab_size = max(self.ids.values()) + 1
        config = file.with_name(TOKENIZER_CONFIG)
        self.config = _object(config, read_regular(config)) if config.exists() else {}
        self.config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        self.config["eos_token"] = self._end_of_text(eot)
        self.eot = self.ids[self.config["eos_token"]]
        self._dtype = np.uint16 if self.vocab_size <= NARROW_IDS else np.uint32
        self.token_bytes = self._table(added)
        before = itertools.takewhile(lambda i: started.sequence_ids[i] is None, range(len(started)))
        self.prefix = tuple(started.ids[i] for i in before if started.ids[i] != self.eot)
        self._bpe.encode_special_tokens = True

    def _end_of_text(self, given: str | None) -> str:
        named = given or self.config.get("eos_token")
        named = named["content"] if isinstance(named, dict) else named
        usual = [*self.special] if len(self.special) == 1 else _EOT_TEXTS & {*self.special}
        found = [text for text in ([named] if named else usual) if text in self.ids]
        if len(found) == 1:
            return found[0]
        raise TokenizerError(
            f"{self._file}: expected one end-of-text token, found "
            f"{f'no token {named!r}' if named else ' and '.join(sorted(usual)) or 'none'}; choose "
            f"one with --eot, such as one of {', '.join([*self.special][:8])}"
        )

    def _table(self, added: dict[str, Any]) -> list[bytes]:
        """Return the bytes of each id: decoding is then independent of the neighbouring tokens."""
        kinds, table = {*_types(self.fields.get("decoder"))}, [b""] * self.vocab_size
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
            raise TokenizerError(
                f"{self._file}: expected a decoder of bytes (ByteLevel, Metaspace or "
                f"ByteFallback), found {', '.join(sorted(kinds)) or 'none'}"
            )
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        for text, id in self.ids.items():
            if text in added:
                table[id] = text.encode()
            elif "ByteLevel" in kinds and {*text} <= byte_of.keys():
                table[id] = bytes(byte_of[character] for character in text)
            elif "ByteFallback" in kinds and _BYTE.fullmatch(text):
                table[id] = bytes([int(text[3:5], 16)])
            else:
                table[id] = text.replace("\u2581", " ").encode()
        return table

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text. RAYON_NUM_THREADS sets the number of threads."""
        texts = [_valid(text) for text in texts]
        found = self._bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self._dtype) for each in found]

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer to a folder, each atomically."""
        config = json.dumps(self.config, ensure_ascii=False, indent=1) + "\n"
        copy_tokenizer(self._file.parent, folder)
        write_atomically(folder / TOKENIZER_JSON, self._content)
        write_atomically(folder / TOKENIZER_CONFIG, config.encode())


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> JsonTokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokenizer, and write its tokenizer.json.

    Args:
        texts: read once.
        vocab_size: number of ids, at least 257; a small text has fewer.
        path: the file, which must not exist.

    Raises:
        TokenizerError: vocab_size is out of range, or `path` exists or is not a .json file.
        TokenizerUnavailable: the package tokenizers is not installed.
    """
    if vocab_size <= BYTES:
        raise TokenizerError(f"expected a vocab-size of at least {BYTES + 1}, found {vocab_size}")
    if path.exists() or path.suffix != ".json":
        raise TokenizerError(f"{path}: expected the name of a new .json file")
    tokenizers = _package(path)
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TEXT],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(map(_valid, texts), trainer)
    write_atomically(path, bpe.to_str(pretty=True).encode())
    return JsonTokenizer(path)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer.json from folder to folder."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            write_atomically(folder / name, read_regular(source / name))


def name_in(folder: Path) -> str | None:
    """Return the name of the tokenizer.json in a folder, or None without one.

    The name is "gpt2" or "byte" for files with their tokens.

    Raises:
        TokenizerError: the file cannot be used.
    """
    file = folder / TOKENIZER_JSON
    return _parse(file, read_regular(file))[2] if file.exists() else None


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the character that stands for each byte in GPT-2's files.

    Printable characters of Latin-1 stand for themselves; other characters are shifted to U+0100 and
    up.
    """
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    itself |= set(range(ord("®"), ord("ÿ") + 1))
    shifted = iter(range(BYTES, 2 * BYTES))
    return tuple(chr(byte) if byte in itself else chr(next(shifted)) for byte in range(BYTES))


type AnyTokenizer = GPT2Tokenizer | ByteTokenizer | JsonTokenizer


TOKENIZERS = {"gpt2": GPT2Tokenizer, "byte": ByteTokenizer}
"""Tokenizers by name. The classes have `vocab_size` and `eot`, also without GPT-2's files."""


def facts(tokenizer: Tokenizer | type[Tokenizer]) -> tuple[str, int, int]:
    """Return the name, the number of ids and the end-of-text id."""
    return tokenizer.name, tokenizer.vocab_size, tokenizer.eot


def model_options(ids: int) -> str:
    """Return the options of train.py for a model of this number of ids, padded to 128."""
    padded = -(-ids // 128) * 128
    return f"--model.vocab-size {ids} --model.padded-vocab-size {padded}"


def is_name(name: object) -> bool:
    """Return whether `name` is the name of a tokenizer, such as gpt2 or json-1a2b3c4d."""
    return isinstance(name, str) and (name in TOKENIZERS or name.startswith(_JSON_NAME))


def get_tokenizer(name: str | os.PathLike, *, eot: str | None = None) -> AnyTokenizer:
    """Return the tokenizer "gpt2" or "byte", or of a `tokenizer.json`.

    Args:
        name: "gpt2", "byte", or the path of a tokenizer.json or of a folder that contains one.
        eot: end-of-text token of a tokenizer.json that does not name it.

    Raises:
        TokenizerError: unknown name, or a file that cannot be used; a ValueError.
        TokenizerUnavailable: the files of "gpt2" are neither cached nor downloadable, or the
            package tokenizers is not installed.
    """
    if name in TOKENIZERS:
        if eot is not None:
            raise TokenizerError(f"the tokenizer {name} has an end-of-text token; leave out --eot")
        return TOKENIZERS[name]()
    if not _json_file(name).is_file():
        raise TokenizerError(
            f"unknown tokenizer {os.fspath(name)!r}; choose one of {', '.join(TOKENIZERS)}, or the "
            "path of a tokenizer.json"
        )
    return JsonTokenizer(name, eot)


def choose_tokenizer(choice: str, eot: str | None = None) -> tuple[AnyTokenizer, str | None]:
    """Return the tokenizer `choice`, and a note for the user or None.

    "auto" is gpt2 if available, else byte with a note. Raises the errors of `get_tokenizer`.
    """
    if choice != "auto":
        return get_tokenizer(choice, eot=eot), None
    try:
        return get_tokenizer("gpt2"), None
    except TokenizerUnavailable as error:
        return get_tokenizer("byte"), (
            "NOTE: using the BYTE tokenizer (257 ids), because GPT-2's is not available. Losses "
            f"are per byte, not comparable with GPT-2's. {error}"
        )


def _valid(text: str) -> str:
    """Replace lone surrogates, which JSON allows, as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _package(path: str | os.PathLike) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerUnavailable(
            f"{path}: a tokenizer.json needs the package tokenizers, found none; pip install "
            "'gptjax[tokenizers]'"
        ) from error
    return tokenizers


def _json_file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path / TOKENIZER_JSON if path.is_dir() else path


def _object(file: Path, content: bytes) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError, RecursionError) as error:
        raise TokenizerError(f"{file}: expected a JSON object, found {error}") from error


def _parse(file: Path, content: bytes) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return the content of a tokenizer.json, the id of each token, and the tokenizer's name.

    The name depends on tokens, ids and merges, not on their serialization.
    """
    fields = _object(file, content)
    try:
        ids, merges = fields["model"]["vocab"], fields["model"].get("merges") or []
        if isinstance(ids, list):  # Unigram: pairs of token and score
            ids = {token: id for id, (token, _) in enumerate(ids)}
        ids = ids | {token["content"]: token["id"] for token in fields["added_tokens"]}
        pairs = [each if isinstance(each, str) else " ".join(each) for each in merges]
        named = json.dumps([sorted(ids.items()), pairs]).encode()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerError(
            f"{file}: expected a tokenizer.json of Hugging Face, found {type(error).__name__}: "
            f"{error}"
        ) from error
    digest = hashlib.sha256(named).hexdigest()[:8]
    return fields, ids, _KNOWN.get(digest, _JSON_NAME + digest)


def _types(part: dict[str, Any] | None) -> Iterator[str]:
    """Yield the type of a part of a tokenizer.json, and of the parts of a sequence."""
    if part:
        yield part["type"]
        for inner in part.get("decoders") or part.get("pretokenizers") or []:
            yield from _types(inner)


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
