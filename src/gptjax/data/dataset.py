"""Datasets of runs: find by name, prepare the default corpus, check before training."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data.atomic import is_partial
from gptjax.data.fineweb import ALL_SHARDS
from gptjax.data.manifest import MANIFEST, DatasetError, Manifest, ShardInfo, read_manifest, sample
from gptjax.data.masks import Mask, mask_path
from gptjax.data.prepare import prepare_stdlib
from gptjax.data.shards import Shard, shard_error, token_offset
from gptjax.data.tokenizers import TOKENIZERS, VOCABULARIES, choose_tokenizer, model_options
from gptjax.terminal import printable
from gptjax.user_folders import data_folder

_FINEWEB, _FINEWEB_SHARD_TOKENS = "fineweb10B", 100_000_000
_CHECK_THREADS = 8  # a sample is 32 reads, which wait for the disk or the network
_MANY_EPOCHS = 8
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
            saved: any JSON value. Digests are compared if the fingerprint has digests: older
                fingerprints have names and token counts only.

        Returns:
            A sentence for each shard that differs, at most 10; empty if the data are the same.
        """
        now, saved = self.fingerprint(), saved if isinstance(saved, dict) else {}
        differ = []
        if saved.get("tokenizer") != now["tokenizer"]:
            differ.append(
                (
                    "tokenizer",
                    f"expected {saved.get('tokenizer')!r:.60}, found {now['tokenizer']!r}",
                )
            )
        for split in ("train", "val"):
            differ += _entries_that_differ(
                f"{split} shards", saved.get(split), now[split], "tokens"
            )
        if "samples" in saved:
            differ += _entries_that_differ(
                "samples", saved["samples"], now["samples"], "SHA-256 of a sample"
            )
        # only shards that both dataset.json files describe
        if isinstance(saved.get("sha256"), dict):
            both = {
                name: digest for name, digest in now["sha256"].items() if name in saved["sha256"]
            }
            before = {name: saved["sha256"][name] for name in both}
            differ += _entries_that_differ("digests", before, both, f"SHA-256 in {MANIFEST}")
        first = dict(reversed(differ))  # a shard with another token count has another digest too
        lines = [
            printable(f"{name}: {first[name]}")
            for name in dict.fromkeys(name for name, _ in differ)
        ]
        return [*lines[:9], f"and {len(lines) - 9} more"] if len(lines) > 10 else lines

    def validate(self, vocab_size: int, sequence_length: int) -> None:
        """Check every shard before training starts.

        A shard in dataset.json must have the listed token count and sample. A sample covers 1 MiB
        of a large shard, or a shard of up to 32 MiB completely. The listed largest id is not
        verified. A shard that is not listed is read completely. The loss masks of a dataset are
        checked in the same way.

        Raises:
            ShardError: a bad header or length, a shard or mask that differs from dataset.json, a
                shard without a mask in a dataset with masks, fewer than sequence_length + 1 tokens,
                or an id that is not below vocab_size.
        """
        paths = (*self.train, *self.val)
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            fits = vocab_size, sequence_length

            def check(path):
                info = self.listed.get(path.name)
                mask = check_mask(path, info) if self.masked else None
                return *_check(path, info, *fits), mask

            self._seen.update(zip(paths, pool.map(check, paths), strict=True))


def _entries_that_differ(
    what: str, saved: Any, now: dict[str, Any], unit: str
) -> Iterator[tuple[str, str]]:
    """Yield name and difference of each entry that differs."""
    if not isinstance(saved, dict):
        yield what, f"expected a list of shards in the checkpoint, found {type(saved).__name__}"
        return
    for name in sorted({*saved, *now}):
        if name not in now:
            yield name, "expected this shard, which the checkpoint was trained on, found none"
        elif name not in saved:
            yield (
                name,
                f"expected no such shard in the {what}, found one that the checkpoint was not "
                "trained on",
            )
        elif saved[name] != now[name]:
            yield name, f"expected {unit} {saved[name]!r:.70}, found {now[name]!r}"


def _check(
    path: Path, info: ShardInfo | None, vocab_size: int, sequence_length: int
) -> tuple[int, str]:
    """Return token count and sample of a shard. Raise ShardError if the shard is unsuitable."""
    shard = Shard(path)
    sampled = sample(shard)
    if info is not None:
        check_listed(shard, info, sampled)
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
    return shard.size, sampled


def check_mask(path: Path, info: ShardInfo | None) -> str:
    """Return the sample of the loss mask of the shard at `path`.

    Raises:
        ShardError: the mask is missing, or differs from dataset.json or from the shard.
    """
    mask = Mask.of(Shard(path))
    sampled = sample(mask)
    if info is not None and (info.mask is None or info.mask.sample != sampled):
        digest = f"content of digest {info.mask.sample:.12}…" if info.mask else "no loss mask"
        raise shard_error(
            mask.path,
            0,
            expected=f"{digest}, as {MANIFEST} lists",
            found=f"{sampled:.12}…",
            do="the mask was changed or damaged: restore it, or prepare the dataset again",
        )
    return sampled


def check_listed(shard: Shard, info: ShardInfo, sampled: str) -> None:
    """Raise ShardError if a shard differs from its description in dataset.json, `info`."""
    if info.tokens != shard.size:
        expected, found = f"{info.tokens} tokens", f"{shard.size}"
    elif info.sample not in (None, sampled):
        expected, found = f"content of digest {info.sample:.12}…", f"{sampled:.12}…"
    else:
        return
    raise shard_error(
        shard.path,
        8,
        expected=f"{expected}, as {MANIFEST} lists",
        found=found,
        do="the shard was changed or damaged: restore it, or prepare the dataset again; "
        f"`python -m gptjax.data check {shard.path.parent}` reads all shards completely",
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
            "stdlib" (prepared now if necessary), the name of a prepared dataset in `data_dir` with
            or without the tokenizer's suffix, or the path of a folder with `*_train_*.bin` and
            `*_val_*.bin`.
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
    manifest = read_manifest(folder)
    lost = sorted(set(manifest.shards if manifest else ()) - {path.name for path in (*train, *val)})
    if lost:
        raise DatasetError(
            f"{folder}: expected the {len(manifest.shards)} shards that {MANIFEST} lists, found "
            f"{', '.join(lost[:5])} missing; remove the folder and prepare it again with `python "
            "-m gptjax.data`"
        )
    made_with = manifest.tokenizer if manifest else "gpt2"
    if tokenizer not in ("auto", made_with):
        assumed = "" if manifest else f", which is assumed without {MANIFEST}"
        raise DatasetError(
            f"{folder}: expected shards made with tokenizer {tokenizer!r}, found {made_with!r}"
            f"{assumed}; train with {model_options(made_with)}, or prepare the text again with "
            f"--tokenizer {tokenizer} and another --name"
        )
    notes = [
        *([note] if note else []),
        *_notes(folder, manifest, [path.name for path in (*train, *val)]),
    ]
    listed = manifest.shards if manifest else {}
    masked = any(info.mask for info in listed.values()) or any(
        mask_path(path).name in names for path in (*train, *val)
    )
    note = printable("\n".join(notes)) or None
    return Dataset(folder.name, folder, train, val, made_with, note, listed, masked)


def _notes(folder: Path, manifest: Manifest | None, names: list[str]) -> Iterator[str]:
    if manifest is None:
        yield (
            f"{folder} has no {MANIFEST}: assuming GPT-2 BPE, the tokenizer of llm.c's and "
            "modded-nanogpt's shards"
        )
        return
    if any(info.sha256 is None for info in manifest.shards.values()):
        yield (
            f"{folder / MANIFEST} is of an older format without digests: a shard that was damaged "
            "before this run is not noticed; prepare the dataset again with --overwrite to list "
            "them"
        )
    if extra := [name for name in names if name not in manifest.shards]:
        yield (
            f"{folder} has {len(extra)} shards that {MANIFEST} does not list ({extra[0]}): "
            "they are used as they are"
        )


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
    if suffix in TOKENIZERS:
        chosen = suffix
    else:
        kind, chosen = dataset, tokenizer
    if kind == _FINEWEB:
        command = f"fineweb10B --data-dir {data_dir}"
    elif kind in ("stdlib", "tinyshakespeare"):
        command = f"{kind} --tokenizer {chosen} --data-dir {data_dir}"
    else:
        command = (
            f"text PATH... --name {Path(dataset).name} --tokenizer {tokenizer} --data-dir "
            f"{data_dir}"
        )
    return (
        f"dataset {dataset!r} is not prepared: expected a folder {data_dir / dataset} or "
        f"{dataset}, found {'only ' + ', '.join(prepared) if prepared else 'nothing'} prepared in "
        f"{data_dir}; prepare it with: python -m gptjax.data {command}"
    )
