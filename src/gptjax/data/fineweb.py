"""FineWeb 10B, tokenized with GPT-2's BPE: 103 training shards and a validation shard.

A shard has 100 M tokens. The shards are downloaded one by one from the Hugging Face dataset
repository that modded-nanogpt uses. Complete shards are not downloaded again, so an interrupted
download resumes with the shard at which it stopped.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gptjax.data.manifest import Manifest, describe, read_manifest
from gptjax.data.prepare import PrepareError, preparing
from gptjax.data.shards import ShardError
from gptjax.data.tokenizers import GPT2Tokenizer, facts
from gptjax.terminal import print_line

REPOSITORY = "kjj0/fineweb10B-gpt2"
ALL_SHARDS = 103


def prepare_fineweb(
    data_dir: str | os.PathLike,
    *,
    shards: int = 10,
    name: str = "fineweb10B",
    log: Callable[[str], object] = print_line,
) -> Path:
    """Download the validation shard and the first `shards` training shards.

    Returns:
        The dataset's folder.

    Raises:
        PrepareError: `shards` not in 1..103, huggingface_hub is not installed, a download failed,
            or the name is not a plain one. Complete shards are kept for the next attempt.
        ShardError: a downloaded shard is damaged.
    """
    if not 1 <= shards <= ALL_SHARDS:
        raise PrepareError(f"expected shards in 1..{ALL_SHARDS}, found {shards}")
    try:
        import huggingface_hub
    except ImportError as error:
        raise PrepareError(
            "fineweb10B needs huggingface_hub, found none; pip install 'gptjax[hub]'"
        ) from error

    wanted = [
        "fineweb_val_000000.bin",
        *(f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1)),
    ]
    with preparing(data_dir, name, log) as (final, partial):
        # A new dataset appears when it is complete. More shards join an existing one.
        folder = final if final.exists() else partial
        folder.mkdir(exist_ok=True)
        before = read_manifest(folder)
        files = before.files if before else {}
        for number, file in enumerate(wanted, start=1):
            try:
                info = describe(folder / file)
                if (sha256 := files.get(file, {}).get("sha256")) not in (None, info["sha256"]):
                    raise ShardError(f"{file}: expected sha256 {sha256}")
                log(f"{number}/{len(wanted)} {file}: already there")
            except ShardError:  # missing, incomplete or damaged
                log(f"{number}/{len(wanted)} {file}: downloading from {REPOSITORY}")
                (folder / file).unlink(missing_ok=True)
                _download(huggingface_hub, file, folder)
                info = describe(folder / file)
            files[file] = info
        about = (*facts(GPT2Tokenizer), f"{REPOSITORY} on the Hugging Face Hub")
        Manifest(*about, files).write(folder)
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub's metadata
        if folder != final:
            os.replace(folder, final)
    log(f"{final}: {shards} training shards and 1 validation shard")
    return final


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
