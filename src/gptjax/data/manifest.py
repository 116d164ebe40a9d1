"""Manifest of a dataset: `dataset.json` describes the tokenizer, the source and every shard.

    {"format": 2, "tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256,
     "source": "...",
     "shards": {"NAME_train_000001.bin": {"tokens": 100000000, "max_token": 50256,
                                          "sha256": "...", "sample": "..."}},
     "options": {"val_fraction": 0.05, "seed": 0, "shard_tokens": 100000000}}

gptjax writes the manifest last, so a folder with a manifest is complete. In format 1, which gptjax
reads only, shards have no digests. In format 3, each shard has a loss mask:

     "shards": {"NAME_train_000001.bin": {…, "mask": {"counted": 2000000,
                                                      "sha256": "...", "sample": "..."}}}

A tokenizer.json is in the same folder. Its name in the manifest depends on its content.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from gptjax.data.shards import HEADER_BYTES, MASK_SUFFIX, DataError, Shard, mask_path
from gptjax.data.tokenizers import TOKENIZERS, facts, is_name
from gptjax.files import read_regular, write_atomically

MANIFEST = "dataset.json"

type Files = dict[str, dict[str, Any]]  # descriptions of shards and masks, by file name


class DatasetError(DataError, ValueError):
    """A dataset that is missing, incomplete, damaged or unsuitable."""


def describe(path: Path) -> dict[str, Any]:
    """Return the description of a shard or of a loss mask, which is read completely (1.4 GB/s).

    Keys:
        tokens: number of tokens.
        max_token: largest id.
        counted: in place of both for a mask: number of tokens that count as targets.
        sha256: digest of the complete file, as `sha256sum` prints it.
        sample: digest of parts of the file, see `Shard.sample`.
    """
    shard, largest, counted = Shard(path), 0, 0
    digest = hashlib.sha256(shard.read_bytes(0, HEADER_BYTES))
    for _, tokens in shard.chunks():
        digest.update(tokens)
        largest, counted = max(largest, int(tokens.max())), counted + int((tokens != 0).sum())
    shared = {"sha256": digest.hexdigest(), "sample": shard.sample()}
    if path.suffix == MASK_SUFFIX:
        return {"counted": counted} | shared
    return {"tokens": shard.size, "max_token": largest} | shared


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of dataset.json.

    Attributes:
        tokenizer: name of the tokenizer.
        vocab_size: number of its ids.
        eot: its end-of-text id.
        source: description of the text's origin.
        files: description of each shard and each loss mask, by file name.
        options: options of the preparation that determine the shards. Empty for downloaded tokens
            and for datasets of earlier versions.
    """

    tokenizer: str
    vocab_size: int
    eot: int
    source: str
    files: Files
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write dataset.json atomically."""
        shards = {}
        for name, info in self.files.items():
            mask = self.files.get(mask_path(Path(name)).name)
            if not name.endswith(MASK_SUFFIX):
                shards[name] = info | ({"mask": mask} if mask else {})
        fields = {
            "format": 3 if len(self.files) > len(shards) else 2,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "source": self.source,
            "shards": shards,
        } | ({"options": self.options} if self.options else {})
        write_atomically(folder / MANIFEST, (json.dumps(fields, indent=1) + "\n").encode())


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of `folder`, or None if there is none.

    Raises:
        DatasetError: the file exists and cannot be read or parsed.
    """
    path = folder / MANIFEST
    try:
        fields = json.loads(read_regular(path))
        made_with = fields["tokenizer"]
        if fields["format"] not in (1, 2, 3) or not is_name(made_with):
            raise ValueError(f"format {fields['format']!r}, tokenizer {made_with!r}")
        known = TOKENIZERS.get(made_with)
        about = (
            facts(known) if known else (made_with, int(fields["vocab_size"]), int(fields["eot"]))
        )
        files = {}
        for name, info in fields["shards"].items():
            files[name] = info | {"max_token": int(info["max_token"])}
            if "mask" in info:
                files[mask_path(Path(name)).name] = dict(files[name].pop("mask"))
        options = dict(fields.get("options") or {})
        return Manifest(*about, fields["source"], files, options)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged file can have any content
        raise DatasetError(
            f"{path}: expected a description of shards, format 1 to 3, found "
            f"{type(error).__name__}: {str(error)[:300]}; restore the file, or remove this folder "
            "and prepare it again with `python -m gptjax.data`"
        ) from error
