"""Texts to prepare, and the contents of the prepared shards."""

import numpy as np

from gptjax.data import Options, corpora, open_shard, prepare_corpus

EOT = 256  # of the byte tokenizer


def write_texts(folder):
    """Write forty files of about a kilobyte. Return the folder and the contents by name."""
    folder.mkdir()
    contents = {
        f"{number:02d}.txt": f"document {number}\n" + "line ü\n" * (100 + number)
        for number in range(40)
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder, list(contents.values())


def tokens_of(folder, split):
    return np.concatenate([open_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))])


def documents_of(folder, *splits):
    """Return the texts in the shards; each must be preceded by an EOT."""
    texts = []
    for split in splits:
        tokens = tokens_of(folder, split)
        assert tokens[0] == EOT
        parts = np.split(tokens, np.flatnonzero(tokens == EOT))[1:]
        texts += [part[1:].astype(np.uint8).tobytes().decode() for part in parts]
    return texts


def prepare_texts(folder, data_dir, log=print, **options):
    options = Options(**({"data_dir": data_dir, "tokenizer": "byte"} | options))
    return prepare_corpus("mine", corpora.text([folder]), options, log=log)
