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


def make_folder(folder, *, tokenizer="byte", train=(100, 60), val=(50,), manifest=True, **extra):
    """Write a dataset folder with the given shard sizes, without gptjax's writer."""
    folder.mkdir(parents=True)
    shards = {}
    for split, first, sizes in (("train", 1, train), ("val", 0, val)):
        for number, size in enumerate(sizes, start=first):
            file = f"some_{split}_{number:06d}.bin"
            write_shard(folder / file, np.arange(size, dtype=np.uint16) % 200)
            digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
            shards[file] = {"tokens": size, "max_token": min(size - 1, 199)}
            shards[file] |= {"sha256": digest, "sample": digest}
    content = {"format": 2, "tokenizer": tokenizer, **KINDS[tokenizer], "source": "test"}
    if manifest:
        content |= {"source_digest": "0" * 64, "shards": shards, **extra}
        (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def edit_manifest(folder, change):
    """Apply a function to the content of dataset.json, or merge a dictionary."""
    content = json.loads((folder / "dataset.json").read_text())
    content = change(content) or content if callable(change) else content | change
    (folder / "dataset.json").write_text(json.dumps(content))
