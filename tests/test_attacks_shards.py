"""Damaged datasets are refused, or read correctly.

Each trial copies a small dataset with digests and changes one file: bits, length, zeroed blocks,
another file in its place, a directory, FIFO or link, or a field of dataset.json. The dataset is
then found, validated, and every window of both splits is loaded. test_shards.py has wrong headers,
test_dataset.py has files that are no dataset.json, and test_loader.py changes shards that are read.

Outcomes: `refused` (a DataError), `same tokens` (the windows are those of the undamaged dataset).
Failures: `silent wrong` (other windows), `crash` (another exception), `hang`, `control characters`
(in the error).
"""

import json
import random
import shutil
from pathlib import Path

import numpy as np
from attack_tools import counted, damage, flip_bits, judged, not_a_file, resize, zero_block

from gptjax.data import DataError, Loader, Options, corpora, find_dataset, prepare_corpus
from gptjax.data import fixed_batches as fixed

LENGTH, BATCH, VOCABULARY = 32, 4, 257


def make(folder: Path, rng: random.Random) -> Path:
    """Prepare a dataset with several shards in both splits."""
    text = folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number:02d}.txt").write_text("".join(rng.choices("abcdefgh \n", k=400)))
    options = Options(folder, "original", "byte", val_fraction=0.3, shard_tokens=4000)
    return prepare_corpus("text", corpora.text([text]), options, log=str)


def read(folder: Path) -> list[np.ndarray]:
    """All windows of one epoch and of the validation split, by the path of a training run."""
    dataset = find_dataset(str(folder), folder.parent, "auto")
    dataset.validate(VOCABULARY, LENGTH)
    how = {"sequence_length": LENGTH, "vocab_size": VOCABULARY}
    with Loader(dataset.train, batch=BATCH, seed=0, **how) as loader:
        train = [next(loader) for _ in range(loader.windows_per_epoch // BATCH)]
    val = fixed(dataset.val, batch=1, count=10**6, **how)
    return [np.stack([batch.inputs, batch.targets]) for batch in train + val]


def random_tokens(content: bytes, rng: random.Random) -> bytes:
    """Tokens that are in the vocabulary."""
    tokens = rng.choices(range(VOCABULARY), k=(len(content) - 1024) // 2)
    return content[:1024] + np.array(tokens, "<u2").tobytes()


VALUES = (None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "", "x", "\x1b[2J", "gpt2")


def json_field(content: bytes, rng: random.Random) -> bytes:
    """Another value for one field of dataset.json, the field removed, or a strange name."""
    fields = json.loads(content)
    shards = fields["shards"]
    where = rng.choice((fields, *(2 * (shards[rng.choice(sorted(shards))],)), shards))
    name = rng.choice(sorted(where))
    if where is shards:
        strange = (f"../{name}", "/etc/passwd", "", "..", "\x1b[31m", "a\0b", "ü" * 300)
        where[rng.choice(strange)] = where.pop(name)
    elif rng.random() < 0.15:
        del where[name]
    else:
        where[name] = rng.choice((*VALUES, [], {}, [[]], "1"))
    return json.dumps(fields).encode()


ANY_FILE = (flip_bits, resize, resize, zero_block, *(3 * (not_a_file,)))
SHARD = (*ANY_FILE, flip_bits, flip_bits, random_tokens)
MANIFEST = (*ANY_FILE, *(3 * (json_field,)))


def compare(found: list[np.ndarray], expected: list[np.ndarray]) -> str:
    same = len(found) == len(expected) and all(map(np.array_equal, found, expected))
    return "same tokens" if same else "silent wrong"


def test_damaged_datasets_are_refused(tmp_path):
    rng, rows = random.Random(0), []
    original, folder = make(tmp_path, rng), tmp_path / "trial"
    expected = read(original)
    for _ in range(50):
        shutil.copytree(original, folder)
        in_json = rng.random() < 0.3
        path = folder / "dataset.json" if in_json else rng.choice(sorted(folder.glob("*.bin")))
        damage(path, change := rng.choice(MANIFEST if in_json else SHARD), rng)
        outcome, message = judged(lambda: compare(read(folder), expected), DataError)
        attack = f"{path.suffix}: {change.__name__}"
        rows.append({"attack": attack, "outcome": outcome, "said": message})
        shutil.rmtree(folder)
    found = counted(rows, {"refused", "same tokens"})
    assert len(found) == 2 and found["refused"] > 35
