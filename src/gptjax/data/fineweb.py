"""FineWeb 10B, tokenized with GPT-2's BPE: 103 training shards and a validation shard.

A shard has 100 M tokens. The shards are downloaded one by one from the Hugging Face dataset
repository that modded-nanogpt uses. Complete shards are not downloaded again, so an interrupted
download resumes with the shard at which it stopped.
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
    """Download the validation shard and the first `shards` training shards.

    Returns:
        The dataset's folder.

    Raises:
        PrepareError: `shards` not in 1..103, huggingface_hub is not installed, a download failed,
            or a downloaded shard is damaged. Complete shards are kept for the next attempt.
    """
    if not 1 <= shards <= ALL_SHARDS:
        raise PrepareError(f"expected shards in 1..{ALL_SHARDS}, found {shards}")
    try:
        import huggingface_hub
    except ImportError as error:
        raise PrepareError(
            "fineweb10B needs huggingface_hub, found none; pip install -e '.[hub]'"
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
            # A shard may be in the dataset, or in the partial folder of an interrupted run.
            info = _info(final / file, known.get(file)) or _info(partial / file)
            if info is not None:
                log(f"{where}: already there ({info.tokens:,} tokens)")
            else:
                log(f"{where}: downloading from {REPOSITORY}")
                partial.mkdir(exist_ok=True)
                (partial / file).unlink(missing_ok=True)
                _download(huggingface_hub, file, partial)
                info = _info(partial / file, must=True)
                fetched += 1
            known = known | {file: info}

        source = f"{REPOSITORY} on the Hugging Face Hub"
        manifest = Manifest("gpt2", _GPT2_VOCABULARY, _GPT2_EOT, source, None, known)
        if partial.exists():
            # huggingface_hub's metadata of the downloads
            shutil.rmtree(partial / ".cache", ignore_errors=True)
        if not final.exists():
            manifest.write(partial)
            commit(partial, final)
        else:
            # Each file is complete, and the existing dataset is complete without the new files.
            for file in sorted(partial.glob("*.bin")) if partial.exists() else []:
                os.replace(file, final / file.name)
            manifest.write(final)
            shutil.rmtree(partial, ignore_errors=True)
    log(
        f"{final}: {len(wanted) - 1} training shards and 1 validation shard, {fetched} of them "
        "downloaded now"
    )
    return final


def _info(path: Path, listed: ShardInfo | None = None, must: bool = False) -> ShardInfo | None:
    """Return the description of a complete shard, or None if the shard is missing or damaged.

    Args:
        listed: description in dataset.json. A shard is damaged if its sample differs.
        must: raise PrepareError instead of returning None.
    """
    try:
        shard = Shard(path)
        if listed is None or listed.sample is None:
            return ShardInfo.from_shard(shard)
        return listed if listed.sample == sample(shard) else None
    except ShardError as error:
        if must:
            raise PrepareError(
                f"the downloaded shard is damaged: {error}. Run the same command again"
            ) from error
        return None


def _download(huggingface_hub, file: str, folder: Path) -> None:
    try:
        huggingface_hub.hf_hub_download(REPOSITORY, file, repo_type="dataset", local_dir=folder)
    # The hub, the HTTP client and the disk raise errors without a common base class.
    except Exception as error:
        raise PrepareError(
            f"{file}: could not download it from {REPOSITORY} ({type(error).__name__}: "
            f"{str(error)[:300]}); run the same command again to resume, or use a corpus "
            "that needs no network: `python -m gptjax.data stdlib`"
        ) from error
