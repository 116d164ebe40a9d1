"""Manifest of a dataset: `dataset.json` describes the tokenizer, the source and every shard.

    {"format": 2, "tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256,
     "source": "...", "source_digest": "...",
     "shards": {"NAME_train_000001.bin": {"tokens": 100000000, "max_token": 50256,
                                          "sha256": "...", "sample": "..."}},
     "options": {"val_fraction": 0.05, "seed": 0, "shard_tokens": 100000000}}

gptjax writes the manifest last, so a folder with a manifest is complete. In format 1, which gptjax
reads only, shards have no digests. In format 3, each shard has a loss mask (`gptjax.data.masks`):

     "shards": {"NAME_train_000001.bin": {…, "mask": {"counted": 2000000,
                                                      "sha256": "...", "sample": "..."}}}
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data.errors import DataError
from gptjax.data.masks import Mask
from gptjax.data.shards import HEADER_BYTES, MAX_TOKENS, Shard
from gptjax.data.tokenizers import VOCABULARIES
from gptjax.files import open_regular, write_atomically

MANIFEST = "dataset.json"
FORMAT, MASK_FORMAT = 2, 3
_MAX_BYTES = 1 << 26  # maximum size of dataset.json, which has about 250 bytes per shard

# A sample covers a file of up to 32 MiB completely, and 1 MiB of a larger file: the check at the
# start of a run reads 100 MB of 100 shards of 200 MB.
_SAMPLE_WHOLE = 1 << 25
_SAMPLE_BLOCKS, _SAMPLE_BLOCK_BYTES = 32, 1 << 15


class DatasetError(DataError, ValueError):
    """A dataset that is missing, incomplete, damaged or unsuitable."""


def sample(shard: Shard) -> str:
    """Return the SHA-256 of evenly spaced blocks of a shard's file.

    The first and the last bytes are included. A file of up to 32 MiB is hashed completely.
    """
    size, block = shard.stamp[0], _SAMPLE_BLOCK_BYTES
    if size <= _SAMPLE_WHOLE:
        return hashlib.sha256(shard.read_bytes(0, size)).hexdigest()
    digest = hashlib.sha256()
    for number in range(_SAMPLE_BLOCKS):
        digest.update(shard.read_bytes((size - block) * number // (_SAMPLE_BLOCKS - 1), block))
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class MaskInfo:
    """Description of a shard's loss mask.

    Attributes:
        counted: number of tokens that count as targets.
        sha256, sample: see `ShardInfo`.
    """

    counted: int
    sha256: str
    sample: str

    @classmethod
    def from_mask(cls, mask: Mask) -> "MaskInfo":
        """Return the description of a mask, which is read completely."""
        digest, counted = hashlib.sha256(mask.read_bytes(0, HEADER_BYTES)), 0
        for _, counts in mask.chunks():
            digest.update(counts)
            counted += int(np.count_nonzero(counts))
        return cls(counted, digest.hexdigest(), sample(mask))


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Description of a shard.

    Attributes:
        tokens: number of tokens.
        max_token: largest id.
        sha256: digest of the complete file, as `sha256sum` prints it; None if unknown.
        sample: digest of parts of the file, see `sample`; None if unknown.
        mask: description of the shard's loss mask; None if the dataset has none.
    """

    tokens: int
    max_token: int
    sha256: str | None = None
    sample: str | None = None
    mask: MaskInfo | None = None

    @classmethod
    def from_shard(cls, shard: Shard) -> "ShardInfo":
        """Return the description of a shard, which is read completely (1.4 GB/s)."""
        digest, largest = hashlib.sha256(shard.read_bytes(0, HEADER_BYTES)), 0
        for _, tokens in shard.chunks():
            digest.update(tokens)
            largest = max(largest, int(tokens.max()))
        return cls(shard.size, largest, digest.hexdigest(), sample(shard))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of dataset.json.

    Attributes:
        tokenizer: name of the tokenizer.
        vocab_size: number of ids.
        eot: id before each document.
        source: description of the text's origin.
        source_digest: digest of the documents (`corpora.digest`). None for downloaded tokens.
        shards: description of each shard, by file name.
        options: options of the preparation that determine the shards. Empty for downloaded tokens
            and for datasets of earlier versions.
    """

    tokenizer: str
    vocab_size: int
    eot: int
    source: str
    source_digest: str | None
    shards: dict[str, ShardInfo]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write dataset.json atomically."""
        fields = dataclasses.asdict(self)
        masked = any(info.mask is not None for info in self.shards.values())
        if not masked:
            for info in fields["shards"].values():
                del info["mask"]
        if not self.options:
            del fields["options"]
        version = MASK_FORMAT if masked else FORMAT
        text = json.dumps({"format": version, **fields}, indent=1) + "\n"
        write_atomically(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None if there is none.

    Raises:
        DatasetError: the file exists and cannot be read or parsed.
    """
    path = folder / MANIFEST
    try:
        with open(open_regular(path), "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return _parse(json.loads(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise DatasetError(
            f"{path}: expected a description of shards, format 1 to {MASK_FORMAT}, found "
            f"{type(error).__name__}: {reason[:300]}; restore the file, or remove this folder and "
            "prepare it again with `python -m gptjax.data`"
        ) from error


def _parse(fields: Any) -> Manifest:
    """Return the manifest in a JSON object.

    Raises:
        ValueError: a field is missing, of a wrong type or out of range.
    """
    fields = _object(fields, "the file")
    version = _integer(fields, "format", 1, MASK_FORMAT)
    tokenizer = _text(fields, "tokenizer")
    if tokenizer not in VOCABULARIES:
        raise ValueError(f"tokenizer {tokenizer!r:.60}; known are {', '.join(VOCABULARIES)}")
    vocab_size, eot = VOCABULARIES[tokenizer]

    def shard(name: str, fields: Any) -> ShardInfo:
        fields = _object(fields, f"shard {name!r:.60}")
        tokens = _integer(fields, "tokens", 1, MAX_TOKENS)
        largest, mask = _integer(fields, "max_token", 0, vocab_size - 1), None
        if version == MASK_FORMAT:
            found = _object(fields.get("mask"), "mask")
            mask = MaskInfo(_integer(found, "counted", 0, tokens), *_digests(found))
        return ShardInfo(
            tokens, largest, *(_digests(fields) if version > 1 else (None, None)), mask
        )

    return Manifest(
        tokenizer=tokenizer,
        vocab_size=_integer(fields, "vocab_size", vocab_size, vocab_size),
        eot=_integer(fields, "eot", eot, eot),
        source=_text(fields, "source"),
        source_digest=fields.get("source_digest") and _digest(fields, "source_digest"),
        shards={
            name: shard(name, info)
            for name, info in _object(fields.get("shards"), "shards").items()
        },
        options=_object(fields.get("options") or {}, "options"),
    )


def _object(value: Any, what: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} instead of an object for {what}")
    return value


def _integer(fields: dict, name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:  # a bool is an int
        allowed = str(low) if low == high else f"an integer in {low}..{high}"
        raise ValueError(f"{name} {value!r:.60} instead of {allowed}")
    return value


def _text(fields: dict, name: str) -> str:
    if not isinstance(fields.get(name), str):
        raise ValueError(f"{name} {fields.get(name)!r:.60} instead of a text")
    return fields[name]


def _digest(fields: dict, name: str) -> str:
    value = _text(fields, name)
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise ValueError(f"{name} {value!r:.80} instead of 64 hexadecimal digits")
    return value


def _digests(fields: dict) -> tuple[str, str]:
    return _digest(fields, "sha256"), _digest(fields, "sample")
