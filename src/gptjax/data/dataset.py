"""Which shards a run trains on: found by name, prepared on the spot if they are the embedded ones, checked up front."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data.folders import is_partial
from gptjax.data.prepare import prepare_stdlib
from gptjax.data.shards import open_shard, shard_error, token_offset
from gptjax.data.sidecar import SIDECAR, DatasetError, read_sidecar
from gptjax.data.tokenizers import TOKENIZERS, choose_tokenizer

_FINEWEB = "fineweb10B"
_SCAN_TOKENS = 1 << 24  # at a time, so that a scan needs 32 MB whatever the shard


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Shards on disk, in name order.

    Attributes:
        name: what the user asked for, made definite (`auto` becomes `stdlib_gpt2`, say).
        path: the folder.
        train, val: the shards of each split, at least one each.
        tokenizer: what made them.
        note: something the user should be told, or None.
    """

    name: str
    path: Path
    train: tuple[Path, ...]
    val: tuple[Path, ...]
    tokenizer: str
    note: str | None = None

    @property
    def train_tokens(self) -> int:
        return sum(open_shard(path).size for path in self.train)

    @property
    def val_tokens(self) -> int:
        return sum(open_shard(path).size for path in self.val)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint remembers of its data; JSON gives back an equal dict. Two runs on the same data agree."""
        return {
            "tokenizer": self.tokenizer,
            "train": {path.name: int(open_shard(path).size) for path in self.train},
            "val": {path.name: int(open_shard(path).size) for path in self.val},
        }

    def validate(self, vocab_size: int, sequence_length: int) -> None:
        """Look at every shard before the run starts rather than in its third hour.

        A shard that dataset.json lists with the same token count is taken at its word about its largest id; any other
        is read from end to end.

        Raises:
            ShardError: a bad header or length, fewer than sequence_length + 1 tokens, or an id that is not below
                vocab_size.
        """
        sidecar = read_sidecar(self.path)
        listed = sidecar.shards if sidecar else {}
        for path in (*self.train, *self.val):
            tokens = open_shard(path)
            if tokens.size < sequence_length + 1:
                raise shard_error(
                    path,
                    8,
                    expected=f"at least {sequence_length + 1} tokens (one window of sequence length {sequence_length})",
                    found=f"{tokens.size}",
                    do="train with a shorter sequence, or prepare more text or longer shards (--shard-tokens)",
                )
            info = listed.get(path.name)
            if info is None or info.tokens != tokens.size or info.max_token >= vocab_size:
                _scan(path, tokens, vocab_size)


def _scan(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    for begin in range(0, tokens.size, _SCAN_TOKENS):
        check_ids(path, begin, tokens[begin : begin + _SCAN_TOKENS], vocab_size)


def check_ids(path: Path, begin: int, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise ShardError if one of `tokens` (uint16, they start at token `begin` of `path`) is not below `vocab_size`."""
    if tokens.max() < vocab_size:
        return
    bad = int(np.argmax(tokens >= vocab_size))
    raise shard_error(
        path,
        token_offset(begin + bad),
        expected=f"ids below the model's vocabulary of {vocab_size}",
        found=f"id {tokens[bad]} (token {begin + bad})",
        do="the shard was made with another tokenizer or is damaged: set the model's vocab_size to the tokenizer's, "
        "or make the shard again with `python -m gptjax.data`",
    )


def find_dataset(dataset: str, data_dir: Path, tokenizer: str = "auto") -> Dataset:
    """The dataset that a configuration means.

    Args:
        dataset: "auto" (FineWeb where it has been prepared and the tokenizer allows it, else "stdlib"), "stdlib"
            (prepared on the spot if it is not there), the name of a prepared dataset in `data_dir` with or without its
            tokenizer's suffix, or the path of a folder with `*_train_*.bin` and `*_val_*.bin`.
        data_dir: where prepared datasets lie.
        tokenizer: "auto" takes what the dataset has; a name must be what made the shards.

    Raises:
        DatasetError: not prepared, incomplete, or made with another tokenizer.
        TokenizerUnavailable: "stdlib" has to be prepared with "gpt2", and its files cannot be had.
    """
    if not dataset:
        raise DatasetError("expected a dataset (auto, stdlib, a prepared name or a folder), found an empty name")
    if tokenizer not in ("auto", *TOKENIZERS):
        raise DatasetError(f"unknown tokenizer {tokenizer!r}; choose one of auto, {', '.join(TOKENIZERS)}")
    if dataset == "auto":
        has_fineweb = (data_dir / _FINEWEB / SIDECAR).exists() and tokenizer != "byte"
        dataset = _FINEWEB if has_fineweb else "stdlib"

    note = None
    folder = _named_folder(dataset, data_dir, tokenizer)
    if dataset == "stdlib" and (folder is None or folder.name == "stdlib_byte" and tokenizer == "auto"):
        # BPE may have become available since the bytes were prepared; where it has not, the note says so every time.
        chosen, note = choose_tokenizer(tokenizer)
        folder = data_dir / f"stdlib_{chosen.name}"
        if not (folder / SIDECAR).exists():
            prepare_stdlib(data_dir, chosen.name)
    if folder is None:
        raise DatasetError(_not_prepared(dataset, data_dir, tokenizer))
    return _open_folder(folder, tokenizer, note)


def _named_folder(dataset: str, data_dir: Path, tokenizer: str) -> Path | None:
    """The folder that a name or a path means, or None where there is none."""
    if dataset != Path(dataset).name:  # a path, such as `.` or `corpora/mine`
        return Path(dataset) if Path(dataset).is_dir() else None
    suffixes = TOKENIZERS if tokenizer == "auto" else (tokenizer,)
    candidates = [data_dir / dataset, *(data_dir / f"{dataset}_{suffix}" for suffix in suffixes)]
    if dataset != "stdlib":  # a name of ours, whatever lies in the current directory
        candidates.append(Path(dataset))
    return next((folder for folder in candidates if folder.is_dir()), None)


def _open_folder(folder: Path, tokenizer: str, note: str | None) -> Dataset:
    if is_partial(folder):
        raise DatasetError(
            f"{folder}: expected a dataset, found one that is being prepared or was interrupted; wait for it, "
            "or run its `python -m gptjax.data` command again"
        )
    # llm.c's smallest datasets have no number in their names.
    train, val = (
        tuple(sorted({*folder.glob(f"*_{split}_*.bin"), *folder.glob(f"*_{split}.bin")})) for split in ("train", "val")
    )
    if not train or not val:
        missing = " and ".join(f"*_{split}_*.bin" for split, shards in (("train", train), ("val", val)) if not shards)
        raise DatasetError(
            f"{folder}: expected token shards *_train_*.bin and *_val_*.bin, found no {missing}; "
            "make a dataset with `python -m gptjax.data` (--help lists the kinds)"
        )
    sidecar = read_sidecar(folder)
    if sidecar is None:
        made_with = "gpt2"
        said = f"{folder} has no {SIDECAR}: its shards are taken to be GPT-2 BPE, as llm.c's and modded-nanogpt's are"
        note = f"{note}\n{said}" if note else said
    else:
        made_with = sidecar.tokenizer
        lost = sorted(set(sidecar.shards) - {path.name for path in (*train, *val)})
        if lost:
            raise DatasetError(
                f"{folder}: expected the {len(sidecar.shards)} shards that {SIDECAR} lists, "
                f"found {', '.join(lost[:5])} missing; "
                "remove the folder and prepare it again with `python -m gptjax.data`"
            )
    if tokenizer not in ("auto", made_with):
        raise DatasetError(
            f"{folder}: expected shards made with tokenizer {tokenizer!r}, found {made_with!r}; "
            f"ask for tokenizer 'auto' or {made_with!r}, or prepare the text again with --tokenizer {tokenizer}"
        )
    return Dataset(folder.name, folder, train, val, made_with, note)


def _not_prepared(dataset: str, data_dir: Path, tokenizer: str) -> str:
    prepared = sorted(path.parent.name for path in data_dir.glob(f"[!.]*/{SIDECAR}"))
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
        command = f"text PATH... --name {Path(dataset).name} --tokenizer {tokenizer} --data-dir {data_dir}"
    return (
        f"dataset {dataset!r} is not prepared: expected a folder {data_dir / dataset} or {dataset}, "
        f"found {'only ' + ', '.join(prepared) if prepared else 'nothing'} prepared in {data_dir}; "
        f"prepare it with: python -m gptjax.data {command}"
    )
