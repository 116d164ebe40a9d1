"""Complete check of a prepared dataset: every byte of every shard."""

import os
from collections.abc import Callable
from pathlib import Path

from gptjax.data.dataset import compare, open_folder, scan_ids
from gptjax.data.manifest import MANIFEST, DatasetError, MaskInfo, ShardInfo
from gptjax.data.masks import Mask, mask_path
from gptjax.data.shards import Shard, ShardError
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
            result = _check(path, listed, dataset.masked, VOCABULARIES[dataset.tokenizer][0])
        except ShardError as error:
            problems.append(str(error))
            result = "DAMAGED"
        log(printable(f"{number}/{len(paths)} {path.name}: {result}"))
    return problems


def _check(path: Path, listed: ShardInfo | None, masked: bool, vocab_size: int) -> str:
    """Return a description of an intact shard. Raise ShardError if the shard is damaged."""
    shard = Shard(path)
    info = ShardInfo.from_shard(shard)
    if listed is not None:
        compare(path, listed, tokens=info.tokens, sha256=info.sha256)
    if info.max_token >= vocab_size:
        scan_ids(shard, vocab_size)
    verdict = "no digest to compare with" if listed is None else f"as {MANIFEST} lists"
    text = f"{shard.size:,} tokens, ids up to {info.max_token}, SHA-256 {info.sha256:.12}…"
    if masked:
        mask = MaskInfo.from_mask(Mask.of(shard))
        if listed is not None:
            compare(mask_path(path), listed.mask, sha256=mask.sha256)
        text += f", loss on {mask.counted:,} tokens"
    return f"{text}, {verdict}"
