"""Write dataset folders for the tests of gptjax.data.dataset."""

import hashlib
import json

import numpy as np

from gptjax.data import write_shard

KINDS = {"byte": {"vocab_size": 257, "eot": 256}, "gpt2": {"vocab_size": 50257, "eot": 50256}}


def tokens_of(batch):
    """Return the T + 1 tokens of each sequence of a batch without ignored targets."""
    np.testing.assert_array_equal(batch.inputs[..., 1:], batch.targets[..., :-1])
    return np.concatenate([batch.inputs, batch.targets[..., -1:]], axis=-1)


def make_folder(
    folder, *, tokenizer="byte", train=(100, 60), val=(50,), manifest=True, version=2, **extra
):
    """Write a dataset folder with the given shard sizes, without gptjax's writer."""
    folder.mkdir(parents=True)
    shards = {}
    for split, first, sizes in (("train", 1, train), ("val", 0, val)):
        for number, size in enumerate(sizes, start=first):
            file = f"some_{split}_{number:06d}.bin"
            write_shard(folder / file, np.arange(size, dtype=np.uint16) % 200)
            shards[file] = {"tokens": size, "max_token": min(size - 1, 199)}
            if version == 2:
                digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
                shards[file] |= {"sha256": digest, "sample": digest}
    said = {
        "format": version,
        "tokenizer": tokenizer,
        **KINDS[tokenizer],
        "source": "test",
        "shards": shards,
    }
    if manifest:
        (folder / "dataset.json").write_text(json.dumps(said | extra))
    return folder
