"""FineWeb 10B, already tokenised with GPT-2's BPE: 103 training shards and a validation shard of
100 M tokens each.

Downloaded shard by shard from the Hugging Face dataset repository that modded-nanogpt uses. Shards
that are there and whole are never fetched again, so an interrupted download goes on where it
stopped.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gptjax.data.atomic import PrepareError, commit, dataset_folder, locked, partial_folder
from gptjax.data.manifest import Manifest, ShardInfo, read_manifest, sample
from gptjax.data.shards import Shard, ShardError

REPOSITORY = "kjj0/fineweb10B-gpt2"
ALL_SHARDS = 103
_GPT2_VOCABULARY, _GPT2_EOT = 50257, 50256


def prepare_fineweb(
    data_dir: str | os.PathLike,
    *,
    shards: int = 10,
    name: str = "fineweb10B",
    log: Callable[[str], object] = print,
) -> Path:
    """Download the validation shard and the first `shards` training shards; returns the dataset's
    folder.

    Raises:
        PrepareError: `shards` not in 1..103, huggingface_hub is not installed, a download failed,
            or what came is no good shard. Whole shards stay for the next attempt.
    """
    if not 1 <= shards <= ALL_SHARDS:
        raise PrepareError(f"expected shards in 1..{ALL_SHARDS}, found {shards}")
    try:
        import huggingface_hub
    except ImportError as error:
        raise PrepareError(
            "fineweb10B needs huggingface_hub, found none; pip install 'gptjax[hub]'"
        ) from error

    final = dataset_folder(data_dir, name)
    wanted = [
        "fineweb_val_000000.bin",
        *(f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1)),
    ]
    with locked(final, log):
        before = read_manifest(final)
        known = before.shards if before else {}
        partial = partial_folder(final)
        fetched = 0
        for number, file in enumerate(wanted, start=1):
            where = f"{number}/{len(wanted)} {file}"
            # A shard is in the dataset already, or an interrupted run left it in the partial
            # folder.
            if (info := _info(final / file, known)) or (info := _info(partial / file, {})):
                log(f"{where}: already there ({info.tokens:,} tokens)")
            else:
                log(f"{where}: downloading from {REPOSITORY}")
                partial.mkdir(exist_ok=True)
                (partial / file).unlink(missing_ok=True)
                _download(huggingface_hub, file, partial)
                info = _info(partial / file, {}, must=True)
                fetched += 1
            known = known | {file: info}

        source = f"{REPOSITORY} on the Hugging Face Hub"
        manifest = Manifest("gpt2", _GPT2_VOCABULARY, _GPT2_EOT, source, None, known)
        if partial.exists():
            # huggingface_hub's notes on its downloads
            shutil.rmtree(partial / ".cache", ignore_errors=True)
        if not final.exists():
            manifest.write(partial)
            commit(partial, final)
        else:
            # Each file is whole and joins a dataset that is complete without it.
            for file in sorted(partial.glob("*.bin")) if partial.exists() else []:
                os.replace(file, final / file.name)
            manifest.write(final)
            shutil.rmtree(partial, ignore_errors=True)
    log(
        f"{final}: {len(wanted) - 1} training shards and 1 validation shard, {fetched} of them "
        "downloaded now"
    )
    return final


def _info(path: Path, known: dict[str, ShardInfo], must: bool = False) -> ShardInfo | None:
    """Describe a whole shard, or return None if it is missing or damaged; with `must` that is an
    error.

    Args:
        path: the file.
        known: shards of dataset.json. A shard whose sample differs from the listed one is damaged.
    """
    try:
        shard = Shard(path)
        info = known.get(path.name)
        if info is None or info.sample is None:
            return ShardInfo.of(shard)
        return info if info.sample == sample(shard) else None
    except ShardError as error:
        if must:
            raise PrepareError(
                f"the download is not a good shard: {error}. Run the same command again"
            ) from error
        return None


def _download(huggingface_hub, file: str, folder: Path) -> None:
    try:
        huggingface_hub.hf_hub_download(REPOSITORY, file, repo_type="dataset", local_dir=folder)
    # the hub, its HTTP client and the disk each have their own families of errors
    except Exception as error:
        raise PrepareError(
            f"{file}: could not download it from {REPOSITORY} ({type(error).__name__}: "
            f"{str(error)[:300]}); "
            "run the same command again to go on from here, "
            "or take a corpus that needs no network: `python -m gptjax.data stdlib`"
        ) from error
