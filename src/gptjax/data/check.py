"""Complete check of a prepared dataset: every byte of every shard."""

import os
from collections.abc import Callable
from pathlib import Path

from gptjax.data.dataset import check_listed, check_mask, open_folder, scan_ids
from gptjax.data.manifest import MANIFEST, DatasetError, MaskInfo, ShardInfo
from gptjax.data.masks import Mask
from gptjax.data.shards import Shard, ShardError, shard_error
from gptjax.data.tokenizers import VOCABULARIES
from gptjax.terminal import printable


def check_dataset(folder: str | os.PathLike, *, log: Callable[[str], object] = print) -> list[str]:
    """Read every shard of a dataset completely and compare it with dataset.json.

    The check covers headers, lengths, ids below the tokenizer's vocabulary size, loss masks, and
    the digests in dataset.json.

    Args:
        folder: the dataset's folder.
        log: called with a line for each shard.

    Returns:
        A sentence for each damaged shard; empty if the dataset is intact.

    Raises:
        DatasetError: the folder is not a dataset, or is an incomplete dataset.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DatasetError(f"{folder}: expected the folder of a prepared dataset, found no folder")
    dataset = open_folder(folder)
    if dataset.note:
        log(dataset.note)
    problems, paths = [], (*dataset.train, *dataset.val)
    for number, path in enumerate(paths, start=1):
        try:
            listed = dataset.listed.get(path.name)
            result = _check(path, listed, VOCABULARIES[dataset.tokenizer][0])
            if dataset.masked:
                result += "; " + _check_mask(path, listed)
        except ShardError as error:
            problems.append(str(error))
            result = "DAMAGED"
        log(printable(f"{number}/{len(paths)} {path.name}: {result}"))
    return problems


def _check(path: Path, listed: ShardInfo | None, vocab_size: int) -> str:
    """Return a description of an intact shard. Raise ShardError if the shard is damaged."""
    shard = Shard(path)
    info = ShardInfo.from_shard(shard)
    if listed is not None:
        check_listed(shard, listed, info.sample)
        if listed.sha256 not in (None, info.sha256):
            raise shard_error(
                path,
                0,
                expected=f"a file of SHA-256 {listed.sha256}, as {MANIFEST} lists",
                found=info.sha256,
                do="the shard was changed or damaged: restore it, or prepare the dataset again",
            )
    if info.max_token >= vocab_size:
        scan_ids(shard, vocab_size)
    known = listed is not None and listed.sha256 is not None
    verdict = f"as {MANIFEST} lists" if known else "no digest to compare with"
    return (
        f"{shard.size:,} tokens, ids up to {info.max_token}, SHA-256 {info.sha256:.12}…, {verdict}"
    )


def _check_mask(path: Path, listed: ShardInfo | None) -> str:
    """Return a description of a shard's intact mask. Raise ShardError if the mask is damaged."""
    check_mask(path, listed)
    mask = Mask.of(Shard(path))
    info = MaskInfo.from_mask(mask)
    if listed is not None and listed.mask != info:
        raise shard_error(
            mask.path,
            0,
            expected=f"a file of SHA-256 {listed.mask and listed.mask.sha256}, as {MANIFEST} lists",
            found=info.sha256,
            do="the mask was changed or damaged: restore it, or prepare the dataset again",
        )
    return f"loss on {info.counted:,} tokens"
