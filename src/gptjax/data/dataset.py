"""Datasets of runs: find by name, prepare the default corpus, check before training."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gptjax.data.loader import Windows
from gptjax.data.manifest import MANIFEST, DatasetError, Files, describe, read_manifest
from gptjax.data.prepare import prepare_stdlib
from gptjax.data.shards import Shard, ShardError, mask_path, shard_error
from gptjax.data.tokenizers import (
    TOKENIZER_JSON,
    TOKENIZERS,
    AnyTokenizer,
    GPT2Tokenizer,
    JsonTokenizer,
    choose_tokenizer,
    copy_tokenizer,
    facts,
    get_tokenizer,
    model_options,
    name_in,
)
from gptjax.terminal import print_line, printable

_FINEWEB = "fineweb10B"
_CHECK_THREADS = 8  # a sample is 32 reads, which wait for the disk or the network
# Sections of a fingerprint that describe files.
_SECTIONS = {
    "train": "training tokens",
    "val": "validation tokens",
    "samples": "SHA-256 of a sample",
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
        vocab_size: number of ids of the tokenizer; 0 if it is unknown.
        eot: end-of-text id of the tokenizer; None if it is unknown.
        note: message for the user, or None.
        listed: descriptions of shards and masks in dataset.json, by file name.
        masked: whether each shard has a loss mask.
    """

    name: str
    path: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    tokenizer: str
    vocab_size: int
    eot: int | None
    note: str | None = None
    listed: Files = dataclasses.field(default_factory=dict, compare=False, repr=False)
    masked: bool = False

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
        masks = [self.listed.get(mask_path(path).name) for path in self.train]
        return None if None in masks else sum(mask["counted"] for mask in masks if mask)

    @property
    def files(self) -> list[Path]:
        """All shards, then their loss masks."""
        shards = [*self.train, *self.val]
        return shards + [mask_path(path) for path in shards if self.masked]

    @functools.cached_property
    def _contents(self) -> dict[Path, tuple[int, str]]:
        """Token count and sample of each file. The files are read only once."""

        def read(path: Path) -> tuple[int, str]:
            shard = Shard(path)
            return shard.size, shard.sample()

        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            return dict(zip(self.files, pool.map(read, self.files), strict=True))

    def find_eot(self) -> int | None:
        """Return the end-of-text id if a training shard contains the id, else None.

        The shards are read up to the first end-of-text token.
        """
        if self.eot is None:
            return None
        found = any(
            (tokens == self.eot).any() for path in self.train for _, tokens in Shard(path).chunks()
        )
        return self.eot if found else None

    def load_tokenizer(self) -> AnyTokenizer:
        """Return the tokenizer.

        Raises:
            DatasetError: the tokenizer is unknown, or its tokenizer.json is missing or changed.
            TokenizerUnavailable: the errors of `get_tokenizer`.
        """
        if self.tokenizer in TOKENIZERS:
            return get_tokenizer(self.tokenizer)
        if (found := name_in(self.path)) != self.tokenizer:
            raise DatasetError(
                f"{self.path / TOKENIZER_JSON}: expected the tokenizer {self.tokenizer}, found "
                f"{'no file' if found is None else found}; restore the file, or prepare the "
                "dataset again"
            )
        return get_tokenizer(self.path)

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the files of the tokenizer to a folder; GPT-2's and bytes have none."""
        if self.tokenizer not in TOKENIZERS:
            copy_tokenizer(self.path, folder)

    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON-serializable fingerprint of the data, for checkpoints.

        Equal data have equal fingerprints.
        """
        return {
            "tokenizer": self.tokenizer,
            "train": {path.name: self._contents[path][0] for path in self.train},
            "val": {path.name: self._contents[path][0] for path in self.val},
            "samples": {path.name: sample for path, (_, sample) in self._contents.items()},
        }

    def differences(self, saved: dict[str, Any] | None) -> list[str]:
        """Compare this dataset with the fingerprint in a checkpoint.

        Returns:
            A sentence for each difference, at most 10; empty if the data are the same.
        """

        def flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
            return {"tokenizer": fingerprint.get("tokenizer")} | {
                f"{file}, {fact}": value
                for section, fact in _SECTIONS.items()
                for file, value in fingerprint.get(section, {}).items()
            }

        before, now = flat(saved or {}), flat(self.fingerprint())
        lines = [
            f"{name}: expected {before.get(name)}, found {now.get(name)}"
            for name in sorted(before | now)
            if before.get(name) != now.get(name)
        ]
        return [*lines[:9], f"and {len(lines) - 9} more"] if len(lines) > 10 else lines

    def validate(self, vocab_size: int, sequence_length: int) -> None:
        """Check every shard before training starts.

        A file in dataset.json must have the listed sample, which covers a small file completely. A
        shard that is not listed is read completely.

        Raises:
            ShardError: a bad header or length, a shard or mask that differs from dataset.json, a
                split without a window of sequence_length + 1 tokens, or an id that is not below
                vocab_size.
        """
        for split in (self.train, self.val):
            Windows(split, sequence_length)
        for path, (_, sample) in self._contents.items():
            _compare(path, self.listed, "sample", sample)
        shards = [*self.train, *self.val]
        most = [self.listed.get(path.name, {}).get("max_token", vocab_size) for path in shards]
        wide = [path for path, largest in zip(shards, most, strict=True) if largest >= vocab_size]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            list(pool.map(_check_ids, wide, [vocab_size] * len(wide)))


def _compare(path: Path, listed: Files, digest: str, found: str) -> None:
    """Raise ShardError if a digest of a file is not the listed one."""
    expected = listed.get(path.name, {}).get(digest, found)
    if expected != found:
        raise shard_error(
            path,
            0,
            expected=f"{digest} {expected}, as {MANIFEST} lists",
            found=found,
            do="the file was changed or damaged: restore it, or prepare the dataset again; "
            f"`python -m gptjax.data check {path.parent}` reads all shards completely",
        )


def _check_ids(path: Path, vocab_size: int) -> None:
    shard = Shard(path)
    for begin, tokens in shard.chunks():
        shard.check_ids(begin, tokens, vocab_size)


def check_dataset(
    folder: str | os.PathLike, *, log: Callable[[str], object] = print_line
) -> list[str]:
    """Read every shard and loss mask completely and compare its digest with dataset.json.

    Args:
        folder: the dataset's folder.
        log: called with a line for each file.

    Returns:
        A sentence for each damaged file; empty if the dataset is intact.

    Raises:
        DatasetError: the folder is not a dataset, or is an incomplete dataset.
    """
    dataset, problems = open_folder(Path(folder)), []
    if dataset.note:
        log(dataset.note)
    for number, path in enumerate(dataset.files, start=1):
        try:
            info = describe(path)
            _compare(path, dataset.listed, "sha256", info["sha256"])
            if info.get("max_token", 0) >= (ids := dataset.vocab_size or 1 << 31):
                _check_ids(path, ids)
            said = f"as {MANIFEST} lists" if path.name in dataset.listed else "not listed"
        except ShardError as error:
            problems.append(str(error))
            said = "DAMAGED"
        log(f"{number}/{len(dataset.files)} {path.name}: {said}")
    return problems


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
    if dataset == "auto":
        has_fineweb = (data_dir / _FINEWEB / MANIFEST).exists() and tokenizer != "byte"
        dataset = _FINEWEB if has_fineweb else "stdlib"

    if dataset in (f"stdlib_{name}" for name in TOKENIZERS):
        dataset, tokenizer = dataset.split("_")
    if dataset == "stdlib":  # a reserved name, even if the current folder has such a folder
        if tokenizer not in ("auto", *TOKENIZERS):
            raise DatasetError(
                f"expected a dataset that was prepared with the tokenizer {tokenizer}, found "
                f"{dataset}; name it with --dataset"
            )
        note, folder = None, data_dir / "stdlib_gpt2"
        if tokenizer == "byte" or not (folder / MANIFEST).exists():
            chosen, note = choose_tokenizer(tokenizer)
            folder = data_dir / f"stdlib_{chosen.name}"
            if not (folder / MANIFEST).exists():
                prepare_stdlib(data_dir, chosen.name)
        return open_folder(folder, tokenizer, note)
    candidates = [Path(dataset)]
    if dataset == Path(dataset).name:  # not a path, such as `.` or `corpora/mine`
        suffixes = TOKENIZERS if tokenizer == "auto" else (tokenizer,)
        names = [dataset, *(f"{dataset}_{suffix}" for suffix in suffixes)]
        candidates = [*(data_dir / name for name in names), Path(dataset)]
    for folder in candidates:
        if folder.is_dir():
            return open_folder(folder, tokenizer)
    raise DatasetError(_not_prepared(dataset, data_dir, tokenizer))


def open_folder(folder: Path, tokenizer: str = "auto", note: str | None = None) -> Dataset:
    """Return the dataset in `folder`. Raises the errors of `find_dataset`, and OSError."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    splits = {name: match[1] for name in names if (match := _SHARD_NAME.fullmatch(name))}
    train, val = (
        tuple(folder / name for name in splits if splits[name] == split)
        for split in ("train", "val")
    )
    if not train or not val:
        raise DatasetError(
            f"{folder}: expected token shards *_train_*.bin and *_val_*.bin, found {len(train)} "
            f"for training and {len(val)} for validation; make a dataset with `python -m "
            "gptjax.data` (--help lists the kinds)"
        )
    manifest = read_manifest(folder)
    listed = {} if manifest is None else manifest.files
    made_with, ids, eot = _tokenizer(folder, manifest, train[0])
    if lost := sorted(listed.keys() - {*names}):
        raise DatasetError(
            f"{folder}: expected the {len(listed)} files that {MANIFEST} lists, found "
            f"{', '.join(lost[:5])} missing; remove the folder and prepare it again with `python "
            "-m gptjax.data`"
        )
    if tokenizer not in ("auto", made_with):
        raise DatasetError(
            f"{folder}: expected shards made with tokenizer {tokenizer!r}, found {made_with!r}; "
            f"train with {model_options(ids)}, or prepare the text again with "
            f"--tokenizer {tokenizer} and another --name"
        )
    masked = any(mask_path(path).name in names for path in (*train, *val))
    about = (made_with, ids, eot)
    dataset = Dataset(folder.name, folder, train, val, *about, note, listed, masked)
    notes = [note] if note else []
    extra = [path.name for path in dataset.files if path.name not in listed]
    if manifest is None:
        assumed = {
            "gpt2": "assuming GPT-2 BPE, the tokenizer of llm.c's and modded-nanogpt's shards",
            "unknown": f"the tokenizer of uint32 ids is unknown; copy its {TOKENIZER_JSON} there",
        }
        said = assumed.get(made_with, f"assuming the tokenizer of its {TOKENIZER_JSON}")
        notes.append(f"{folder} has no {MANIFEST}: {said}")
    elif extra:
        notes.append(
            f"{folder} has {len(extra)} files that {MANIFEST} does not list ({extra[0]}): "
            "they are used as they are"
        )
    return dataclasses.replace(dataset, note=printable("\n".join(notes)) or None)


def _tokenizer(folder: Path, manifest: Any, shard: Path) -> tuple[str, int, int | None]:
    """Return name, number of ids and end-of-text id of a dataset's tokenizer."""
    if manifest is not None:
        return manifest.tokenizer, manifest.vocab_size, manifest.eot
    if (folder / TOKENIZER_JSON).exists():
        return facts(JsonTokenizer(folder))
    wide = Shard(shard).dtype.itemsize > 2
    return ("unknown", 0, None) if wide else facts(GPT2Tokenizer)


def _not_prepared(dataset: str, data_dir: Path, tokenizer: str) -> str:
    prepared = sorted(path.parent.name for path in data_dir.glob(f"[!.]*/{MANIFEST}"))
    kind, _, suffix = dataset.rpartition("_")
    kind, tokenizer = (kind, suffix) if suffix in TOKENIZERS else (dataset, tokenizer)
    command = kind if kind == _FINEWEB else f"{kind} --tokenizer {tokenizer}"
    if kind not in (_FINEWEB, "tinyshakespeare"):
        command = f"text PATH... --name {Path(dataset).name} --tokenizer {tokenizer}"
    return (
        f"dataset {dataset!r} is not prepared: expected a folder {data_dir / dataset} or "
        f"{dataset}, found {'only ' + ', '.join(prepared) if prepared else 'nothing'} prepared in "
        f"{data_dir}; prepare it with: python -m gptjax.data {command} --data-dir {data_dir}"
    )
