"""Datasets of prompts and answers: their loss masks on disk, and windows of tokens with a mask."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from prepare_tools import EOT, tokens_of

from gptjax.config import Config, ConfigError
from gptjax.data import (
    DatasetError,
    Loader,
    ShardError,
    check_dataset,
    find_dataset,
    fixed_batches,
    open_shard,
    write_shard,
)
from gptjax.data.__main__ import main
from gptjax.data.shards import Shard
from gptjax.parallel import data_mesh
from gptjax.training.inputs import Inputs

PAIRS = [(f"What is {i} + {i}?" * (1 + i % 3), f"{i + i}, ä.") for i in range(40)]


def prepare(folder, *more, pairs=PAIRS):
    """Run the command; return its exit code and the dataset's folder."""
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps({"q": q, "a": a, "n": 1}) + "\n" for q, a in pairs))
    fields = ["--prompt-field", "q", "--answer-field", "a"]
    options = [*fields, "--name", "qa", "--tokenizer", "byte", "--data-dir", str(folder)]
    return main(["jsonl", str(file), *options, *more]), folder / "qa"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    code, made = prepare(tmp_path_factory.mktemp("pairs"), "--shard-tokens", "400")
    assert code == 0
    return made


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "qa")


def stream(folder, split):
    """Return the tokens of a split, those that do not count as −1 − t."""
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    counts = np.concatenate([open_shard(path.with_suffix(".mask")) for path in paths])
    tokens = tokens_of(folder, split).astype(np.int32)
    return np.where(counts == 1, tokens, -1 - tokens)


def test_answers_and_their_ends_count(prepared):
    """Each document is EOT, prompt, newline, answer; all of them come back."""
    found = []
    for split in ("train", "val"):
        tokens = stream(prepared, split)
        for document in np.split(tokens, np.flatnonzero(tokens == EOT))[1:]:
            prompt, answer = document[document < 0], document[document >= 0]
            np.testing.assert_array_equal(document, [EOT, *prompt, *answer[1:]])
            found.append(tuple(bytes(x.tolist()).decode() for x in (~prompt, answer[1:])))
    assert sorted(found) == sorted((q + "\n", a) for q, a in PAIRS)


def test_the_manifest_describes_the_masks(prepared):
    said = json.loads((prepared / "dataset.json").read_text())
    dataset = find_dataset(str(prepared), prepared.parent)
    assert said["format"] == 3 and len(dataset.train) > 2 and dataset.masked
    assert dataset.counted_train_tokens == (stream(prepared, "train") >= 0).sum()
    assert not check_dataset(prepared, log=lambda line: None)
    dataset.validate(257, 16)


def test_windows_have_the_mask(prepared):
    """Over the boundaries of shards; a resumed loader continues bit for bit."""
    dataset = find_dataset(str(prepared), prepared.parent)
    tokens, length = stream(prepared, "train"), 16
    inputs, targets = np.maximum(tokens, ~tokens)[:-1], np.maximum(tokens, -1)[1:]
    expected = {
        np.concatenate([inputs[i : i + length], targets[i : i + length]]).tobytes()
        for i in range(0, tokens.size - length, length)
    }
    how = {"sequence_length": length, "batch": 5, "seed": 3, "vocab_size": 257}
    with Loader(dataset.train, **how) as loader:
        epoch = [next(loader) for _ in range(loader.windows_per_epoch // 5)]
        position, after = loader.position, next(loader)
    inputs, targets, _ = map(np.concatenate, zip(*([*b[:2], [0]] for b in epoch), strict=True))
    rows = np.concatenate([inputs, targets], axis=1)
    assert {row.tobytes() for row in rows} <= expected and (targets == -1).any()
    with Loader(dataset.train, **how, start=position) as loader:
        np.testing.assert_array_equal(next(loader)[:2], after[:2])
    val = {"sequence_length": 8, "batch": 2, "count": 3}
    (first, *_) = fixed_batches(dataset.val, **val)
    tokens = stream(prepared, "val")[:9]
    np.testing.assert_array_equal(first.inputs[0], np.maximum(tokens, ~tokens)[:-1])
    np.testing.assert_array_equal(first.targets[0], np.maximum(tokens, -1)[1:])


def test_damaged_and_missing_masks_are_refused(copy):
    path = sorted(copy.glob("*_train_*.mask"))[1]
    content = path.read_bytes()
    for damaged, message in (
        (content[:-1] + bytes([1 - content[-1]]), "at byte 0: expected sample .*, as dataset.json"),
        (content[:-1], "at byte 8: expected token count"),
        (path.with_suffix(".bin").read_bytes(), "at byte 0: expected magic 20261122, found 202405"),
        (content[:8] + b"\7\0\0\0" + content[12:1031], "expected loss masks with the token counts"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match=message):
            find_dataset(str(copy), copy.parent).validate(257, 16)
        assert len(check_dataset(copy, log=str)) == 1
    path.unlink()
    with pytest.raises(DatasetError, match=f"files that dataset.json lists, found {path.name} mis"):
        find_dataset(str(copy), copy.parent)
    (copy / "dataset.json").unlink()  # of the masks of a dataset, none may be missing
    dataset = find_dataset(str(copy), copy.parent)
    with pytest.raises(ShardError, match=f"{path.name}: .* expected a readable shard, found No"):
        dataset.validate(50257, 16)


def test_resuming_with_another_mask_is_refused(prepared, copy):
    before = find_dataset(str(prepared), prepared.parent).fingerprint()
    assert json.loads(json.dumps(before)) == before
    dataset = find_dataset(str(copy), copy.parent)
    assert not dataset.differences(before)
    name = dataset.val[0].with_suffix(".mask")
    write_shard(name, np.ones(Shard(dataset.val[0]).size, np.uint8))
    (line,) = find_dataset(str(copy), copy.parent).differences(before)
    assert line.startswith(f"{name.name}, SHA-256 of a sample: expected")


def test_validation_batches_weigh_their_targets(prepared):
    mesh = data_mesh(jax.devices("cpu")[:2])
    config = Config(sequence_length=8, val_tokens=64, batch_tokens=16, micro_batch=1)
    dataset = find_dataset(str(prepared), prepared.parent)
    inputs = Inputs(config, dataset, None, mesh, 2)
    batches = inputs.val_batches()
    weights = inputs.val_weights(batches)
    assert weights.tolist() == [(np.asarray(batch.targets) >= 0).sum() for batch in batches]
    assert len(set(weights.tolist())) > 1
    with pytest.raises(ConfigError, match="found prompts only"):
        inputs.val_weights([batch._replace(targets=0 * batch.targets - 1) for batch in batches])


@pytest.mark.parametrize(
    "pairs, more, message",
    [
        (PAIRS, ["--answer-field", "n"], "field 'n' .option --answer-field., found int"),
        (PAIRS, ["--prompt-field", "x"], "in the field 'x' .option --prompt-field.,"),
        ([*PAIRS, ("q", "")], [], "line 41: expected a text in 'a', found an empty one"),
        (PAIRS[:1], [], "training and for validation, found none for val"),
    ],
)
def test_bad_pairs_are_refused(tmp_path, capsys, pairs, more, message):
    code, made = prepare(tmp_path, *more, pairs=pairs)
    error = capsys.readouterr().err
    assert code == 1 and error.startswith("error: ") and not made.exists()
    assert re.search(message, error)
