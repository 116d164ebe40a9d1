"""Datasets of runs: find by name, prepare the default corpus, check before training."""

import dataclasses
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data.atomic import is_partial
from gptjax.data.fineweb import ALL_SHARDS
from gptjax.data.manifest import (
    MANIFEST,
    DatasetError,
    MaskInfo,
    ShardInfo,
    read_manifest,
    sample,
)
from gptjax.data.masks import Mask, mask_path
from gptjax.data.prepare import prepare_stdlib
from gptjax.data.shards import Shard, shard_error, token_offset
from gptjax.data.tokenizers import TOKENIZERS, VOCABULARIES, choose_tokenizer, model_options
from gptjax.terminal import printable
from gptjax.user_folders import data_folder

_FINEWEB, _FINEWEB_SHARD_TOKENS = "fineweb10B", 100_000_000
_CHECK_THREADS = 8  # a sample is 32 reads, which wait for the disk or the network
_MANY_EPOCHS = 8
# Descriptions of the sections of a fingerprint.
_UNITS = {
    "train": "training tokens",
    "val": "validation tokens",
    "samples": "SHA-256 of a sample",
    "sha256": f"SHA-256 in {MANIFEST}",
}
# The last split in a file name decides, because the name of a dataset may contain the name of a
# split. The file names of llm.c's smallest datasets have no number.
_SHARD_NAME = re.compile(r".*_(train|val)(_.*)?\.bin", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Shards on disk, in name order.

    Attributes:
        name: name of the folder, such as `stdlib_gpt2` for the dataset `auto`.
        path: the folder.
        train: training shards, at least one.
        val: validation shards, at least one.
        tokenizer: name of the tokenizer; "unknown" for ids of another tokenizer (`Inputs.find`).
        note: message for the user, or None.
        listed: descriptions in dataset.json, by file name.
        masked: whether each shard has a loss mask.
    """

    name: str
    path: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    tokenizer: str
    note: str | None = None
    listed: dict[str, ShardInfo] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    masked: bool = False
    # Token count and sample of each shard, and sample of its mask, from the first `validate` or
    # `fingerprint`.
    _seen: dict[Path, tuple[int, str, str | None]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def train_tokens(self) -> int:
        """Number of tokens in the training split."""
        return sum(Shard(path).size for path in self.train)

    @property
    def val_tokens(self) -> int:
        """Number of tokens in the validation split."""
        return sum(Shard(path).size for path in self.val)

    @property
    def counted_train_tokens(self) -> int | None:
        """Number of training tokens that count as targets; None if dataset.json does not say."""
        masks = [info.mask for path in self.train if (info := self.listed.get(path.name))]
        if len(masks) < len(self.train) or None in masks:
            return None
        return sum(mask.counted for mask in masks if mask is not None)

    def find_eot(self) -> int | None:
        """Return the end-of-text id if a training shard contains the id, else None.

        The shards are read up to the first end-of-text token.
        """
        if self.tokenizer not in VOCABULARIES:
            return None
        eot = VOCABULARIES[self.tokenizer][1]
        found = any(
            (tokens == eot).any() for path in self.train for _, tokens in Shard(path).chunks()
        )
        return eot if found else None

    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON-serializable fingerprint of the data, for checkpoints.

        Equal data have equal fingerprints. The files are read only once, in `validate` or here.
        """
        paths = (*self.train, *self.val)
        for path in paths:
            if path not in self._seen:
                shard = Shard(path)
                mask = sample(Mask.of(shard)) if self.masked else None
                self._seen[path] = shard.size, sample(shard), mask
        listed = {
            path.name: self.listed[path.name].sha256 for path in paths if path.name in self.listed
        }
        return {
            "tokenizer": self.tokenizer,
            "train": {path.name: self._seen[path][0] for path in self.train},
            "val": {path.name: self._seen[path][0] for path in self.val},
            "samples": {path.name: self._seen[path][1] for path in paths}
            | {mask_path(path).name: mask for path in paths if (mask := self._seen[path][2])},
            "sha256": {name: digest for name, digest in listed.items() if digest is not None},
        }

    def differences(self, saved: Any) -> list[str]:
        """Compare this dataset with the fingerprint in a checkpoint.

        Args:
            saved: any JSON value.

        Returns:
            A sentence for each shard that differs, at most 10; empty if the data are the same.
        """
        now, saved = self.fingerprint(), saved if isinstance(saved, dict) else {}
        lines: dict[str, str] = {}
        if saved.get("tokenizer") != now["tokenizer"]:
            tokenizers = f"expected {saved.get('tokenizer')!r:.60}, found {now['tokenizer']!r}"
            lines["tokenizer"] = tokenizers
        for section in ("train", "val", "samples", "sha256"):
            before, here = saved.get(section, {}), now[section]
            if not isinstance(before, dict):
                lines[section] = f"expected a list of shards, found {type(before).__name__}"
                continue
            # Older checkpoints have no digests. Only listed shards have digests of whole files.
            both = section == "sha256" or section not in saved
            names = before.keys() & here.keys() if both else before.keys() | here.keys()
            for name in sorted(names):
                found, expected = here.get(name), before.get(name)
                if found != expected:  # a shard with another token count has another digest too
                    text = f"expected {_UNITS[section]} {expected!r:.70}, found {found!r}"
                    lines.setdefault(name, text)
        texts = [printable(f"{name}: {text}") for name, text in lines.items()]
        return [*texts[:9], f"and {len(texts) - 9} more"] if len(texts) > 10 else texts

    def validate(self, vocab_size: int, sequence_length: int) -> None:
        """Check every shard before training starts.

        A shard in dataset.json must have the listed token count and sample. A sample covers 1 MiB
        of a large shard, or a shard of up to 32 MiB completely. The listed largest id is not
        verified. A shard that is not listed is read completely. Loss masks have samples, too.

        Raises:
            ShardError: a bad header or length, a shard or mask that differs from dataset.json, a
                shard without a mask in a dataset with masks, fewer than sequence_length + 1 tokens,
                or an id that is not below vocab_size.
        """
        paths = (*self.train, *self.val)
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:

            def check(path):
                info = self.listed.get(path.name)
                return _check(path, info, self.masked, vocab_size, sequence_length)

            self._seen.update(zip(paths, pool.map(check, paths), strict=True))


def _check(
    path: Path, info: ShardInfo | None, masked: bool, vocab_size: int, sequence_length: int
) -> tuple[int, str, str | None]:
    """Return token count and sample of a shard, and the sample of its mask.

    Raises:
        ShardError: see `Dataset.validate`.
    """
    shard = Shard(path)
    sampled, mask = sample(shard), sample(Mask.of(shard)) if masked else None
    if info is not None:
        compare(path, info, tokens=shard.size, sample=sampled)
        if masked:
            compare(mask_path(path), info.mask, sample=mask)
    if shard.size < sequence_length + 1:
        raise shard_error(
            path,
            8,
            expected=f"at least {sequence_length + 1} tokens "
            f"(one window of sequence length {sequence_length})",
            found=f"{shard.size}",
            do="train with a shorter sequence, or prepare more text "
            "or longer shards (--shard-tokens)",
        )
    if info is None or info.max_token >= vocab_size:
        scan_ids(shard, vocab_size)
    return shard.size, sampled, mask


def compare(path: Path, listed: ShardInfo | MaskInfo | None, **found: Any) -> None:
    """Raise ShardError if a file differs from its description in dataset.json.

    Args:
        path: a shard or a mask.
        listed: the description.
        found: fields of the description, as they are in the file.
    """
    for name, value in found.items():
        expected = getattr(listed, name, None)
        unknown = expected is None and listed is not None
        if expected != value and not unknown:
            raise shard_error(
                path,
                8 if name == "tokens" else 0,
                expected=f"{name} {expected}, as {MANIFEST} lists",
                found=f"{value}",
                do="the file was changed or damaged: restore it, or prepare the dataset again; "
                f"`python -m gptjax.data check {path.parent}` reads all shards completely",
            )


def scan_ids(shard: Shard, vocab_size: int) -> None:
    """Raise ShardError if an id of the shard is not below `vocab_size`."""
    for begin, tokens in shard.chunks():
        check_ids(shard.path, begin, tokens, vocab_size)


def check_ids(path: Path, begin: int, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise ShardError if an id in `tokens` is not below `vocab_size`.

    Args:
        path: the shard, for the message.
        begin: index in the shard of the first of `tokens`.
        tokens: uint16 of shape (count,).
        vocab_size: exclusive upper bound of the ids.
    """
    if tokens.max() < vocab_size:
        return
    bad = int(np.argmax(tokens >= vocab_size))
    raise shard_error(
        path,
        token_offset(begin + bad),
        expected=f"ids below the model's vocabulary of {vocab_size}",
        found=f"id {tokens[bad]} (token {begin + bad})",
        do="the shard was made with another tokenizer or is damaged: "
        "set the model's vocab_size to the tokenizer's, or prepare the shard again with `python -m "
        "gptjax.data`",
    )


def find_dataset(dataset: str, data_dir: Path, tokenizer: str = "auto") -> Dataset:
    """Find the dataset of a run.

    Args:
        dataset: "auto" (FineWeb if prepared and the tokenizer is not "byte", else "stdlib"),
            "stdlib", "stdlib_gpt2" or "stdlib_byte" (prepared now if necessary), the name of a
            prepared dataset in `data_dir` with or without the tokenizer's suffix, or the path of a
            folder with `*_train_*.bin` and `*_val_*.bin`.
        data_dir: folder of the prepared datasets.
        tokenizer: "auto" accepts any tokenizer; a name must match the dataset's tokenizer.

    Raises:
        DatasetError: the dataset is not prepared, incomplete, or was made with another tokenizer.
        TokenizerUnavailable: "stdlib" must be prepared with "gpt2", whose files are not available.
    """
    try:
        return _find(dataset, data_dir, tokenizer)
    except OSError as error:
        raise DatasetError(
            f"dataset {dataset!r} in {data_dir}: expected files and folders that can be read and "
            f"written, found {error}; correct that, or choose another --dataset or --data-dir"
        ) from error


def _find(dataset: str, data_dir: Path, tokenizer: str) -> Dataset:
    if not dataset:
        raise DatasetError(
            "expected a dataset (auto, stdlib, a prepared name or a folder), found an empty name"
        )
    if tokenizer not in ("auto", *TOKENIZERS):
        raise DatasetError(
            f"unknown tokenizer {tokenizer!r}; choose one of auto, {', '.join(TOKENIZERS)}"
        )
    if dataset == "auto":
        has_fineweb = (data_dir / _FINEWEB / MANIFEST).exists() and tokenizer != "byte"
        dataset = _FINEWEB if has_fineweb else "stdlib"

    note = None
    if dataset in (f"stdlib_{name}" for name in TOKENIZERS):
        dataset, tokenizer = dataset.split("_")
    folder = _named_folder(dataset, data_dir, tokenizer)
    if dataset == "stdlib" and (
        folder is None or folder.name == "stdlib_byte" and tokenizer == "auto"
    ):
        # The BPE files may have become available after the byte dataset was prepared. Otherwise,
        # repeat the note.
        chosen, note = choose_tokenizer(tokenizer)
        folder = data_dir / f"stdlib_{chosen.name}"
        if not (folder / MANIFEST).exists():
            prepare_stdlib(data_dir, chosen.name)
    if folder is None:
        raise DatasetError(_not_prepared(dataset, data_dir, tokenizer))
    return open_folder(folder, tokenizer, note)


def _named_folder(dataset: str, data_dir: Path, tokenizer: str) -> Path | None:
    """Return the folder of a name or path, or None if it does not exist."""
    if dataset != Path(dataset).name:  # a path, such as `.` or `corpora/mine`
        return Path(dataset) if Path(dataset).is_dir() else None
    suffixes = TOKENIZERS if tokenizer == "auto" else (tokenizer,)
    candidates = [data_dir / dataset, *(data_dir / f"{dataset}_{suffix}" for suffix in suffixes)]
    if dataset != "stdlib":  # a reserved name, even if the working directory has such a folder
        candidates.append(Path(dataset))
    return next((folder for folder in candidates if folder.is_dir()), None)


def open_folder(folder: Path, tokenizer: str = "auto", note: str | None = None) -> Dataset:
    """Return the dataset in `folder`. Raises the errors of `find_dataset`, and OSError."""
    if is_partial(folder):
        raise DatasetError(
            f"{folder}: expected a dataset, found one that is being prepared or was interrupted; "
            "wait for it, or run its `python -m gptjax.data` command again"
        )
    names = sorted(os.listdir(folder))
    splits = {name: match[1] for name in names if (match := _SHARD_NAME.fullmatch(name))}
    train, val = (
        tuple(folder / name for name in splits if splits[name] == split)
        for split in ("train", "val")
    )
    if not train or not val:
        missing = " and ".join(
            f"*_{split}_*.bin" for split, shards in (("train", train), ("val", val)) if not shards
        )
        raise DatasetError(
            f"{folder}: expected token shards *_train_*.bin and *_val_*.bin, found no {missing}; "
            "make a dataset with `python -m gptjax.data` (--help lists the kinds)"
        )
    manifest, paths = read_manifest(folder), (*train, *val)
    listed, made_with = ({}, "gpt2") if manifest is None else (manifest.shards, manifest.tokenizer)
    if lost := sorted(listed.keys() - {path.name for path in paths}):
        raise DatasetError(
            f"{folder}: expected the {len(listed)} shards that {MANIFEST} lists, found "
            f"{', '.join(lost[:5])} missing; remove the folder and prepare it again with `python "
            "-m gptjax.data`"
        )
    if tokenizer not in ("auto", made_with):
        raise DatasetError(
            f"{folder}: expected shards made with tokenizer {tokenizer!r}, found {made_with!r}; "
            f"train with {model_options(made_with)}, or prepare the text again with "
            f"--tokenizer {tokenizer} and another --name"
        )
    notes = [note] if note else []
    extra = [path.name for path in paths if path.name not in listed]
    if manifest is None:
        notes.append(
            f"{folder} has no {MANIFEST}: assuming GPT-2 BPE, the tokenizer of llm.c's and "
            "modded-nanogpt's shards"
        )
    elif extra:
        notes.append(
            f"{folder} has {len(extra)} shards that {MANIFEST} does not list ({extra[0]}): "
            "they are used as they are"
        )
    masked = any(info.mask for info in listed.values()) or any(
        mask_path(path).name in names for path in paths
    )
    note = printable("\n".join(notes)) or None
    return Dataset(folder.name, folder, train, val, made_with, note, listed, masked)


def few_tokens_note(dataset: Dataset, epochs: float, data_dir: Path) -> str | None:
    """Return a warning if a run repeats its training tokens more than a few times, else None.

    Args:
        dataset: the training data.
        epochs: number of passes of the run over the training split.
        data_dir: folder of prepared datasets, for the command in the warning.
    """
    if epochs <= _MANY_EPOCHS:
        return None
    shards = min(ALL_SHARDS, math.ceil(epochs * dataset.train_tokens / _FINEWEB_SHARD_TOKENS))
    where = "" if data_dir == data_folder() else f" --data-dir {data_dir}"
    return printable(
        f"WARNING: {epochs:,.0f} EPOCHS. The run reads the {dataset.train_tokens:,} training "
        f"tokens of {dataset.name} {epochs:,.0f} times, so the model memorizes them. Prepare more "
        f"data first: python -m gptjax.data fineweb10B --shards {shards}{where}"
    )


def _not_prepared(dataset: str, data_dir: Path, tokenizer: str) -> str:
    prepared = sorted(path.parent.name for path in data_dir.glob(f"[!.]*/{MANIFEST}"))
    kind, _, suffix = dataset.rpartition("_")
    kind, chosen = (kind, suffix) if suffix in TOKENIZERS else (dataset, tokenizer)
    if kind == _FINEWEB:
        command = kind
    elif kind in ("stdlib", "tinyshakespeare"):
        command = f"{kind} --tokenizer {chosen}"
    else:
        command = f"text PATH... --name {Path(dataset).name} --tokenizer {tokenizer}"
    return (
        f"dataset {dataset!r} is not prepared: expected a folder {data_dir / dataset} or "
        f"{dataset}, found {'only ' + ', '.join(prepared) if prepared else 'nothing'} prepared in "
        f"{data_dir}; prepare it with: python -m gptjax.data {command} --data-dir {data_dir}"
    )
