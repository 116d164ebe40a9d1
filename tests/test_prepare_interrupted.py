"""Preparations that are interrupted, killed, or run twice at the same time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prepare_tools import documents_of, prepare_texts, tokens_of, write_texts

import gptjax
from gptjax.data import DatasetError, find_dataset
from gptjax.data import prepare as module
from gptjax.data.atomic import locked, staged
from gptjax.data.manifest import Manifest


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def command_options(data):
    return ["--name", "mine", "--data-dir", str(data), "--tokenizer", "byte"]


@pytest.mark.parametrize("error", [RuntimeError("disk on fire"), KeyboardInterrupt()])
def test_an_interrupted_preparation_leaves_nothing_and_an_old_dataset_as_it_was(
    texts, tmp_path, monkeypatch, error
):
    made = prepare_texts(texts[0], tmp_path / "data")
    before = tokens_of(made, "train").copy()
    real, calls = module.write_shard, []

    def breaks(path, tokens):
        calls.append(path)
        if len(calls) == 3:
            raise error
        real(path, tokens)

    monkeypatch.setattr(module, "write_shard", breaks)
    with pytest.raises(type(error)):
        prepare_texts(texts[0], tmp_path / "data", shard_tokens=5000, overwrite=True)
    with pytest.raises(type(error)):
        calls.clear()
        prepare_texts(texts[0], tmp_path / "data", shard_tokens=5000, name="fresh")
    np.testing.assert_array_equal(tokens_of(made, "train"), before)
    assert [path for path in (tmp_path / "data").iterdir() if path.is_dir()] == [made]


# The command line with a preparation that hangs after its second shard.
HANGS = """
import sys, time
from gptjax.data import prepare
real, calls = prepare.write_shard, []
def write_shard(path, tokens):
    real(path, tokens)
    calls.append(path)
    if len(calls) == 2:
        print("hanging", flush=True)
        time.sleep(60)
prepare.write_shard = write_shard
from gptjax.data.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(gptjax.__file__).parents[1])}


def test_a_preparation_killed_in_the_middle_is_never_seen_and_the_same_command_then_succeeds(
    texts, tmp_path
):
    data, (folder, contents) = tmp_path / "data", texts
    command = ["text", str(folder), *command_options(data), "--shard-tokens", "5000"]
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, *command], env=ENVIRONMENT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"hanging\n"
        process.send_signal(signal.SIGKILL)
        process.wait()

    half_made = [path for path in data.iterdir() if path.is_dir()]
    assert len(half_made) == 1 and list(
        half_made[0].glob("*.bin")
    )  # interrupted during preparation
    with pytest.raises(DatasetError, match="'mine' is not prepared"):
        find_dataset("mine", data, "auto")
    with pytest.raises(DatasetError, match="being prepared or was interrupted"):
        find_dataset(str(half_made[0]), data, "auto")

    # The same command again, twice in parallel: one process prepares, the other waits for it.
    again = [
        subprocess.Popen([sys.executable, "-m", "gptjax.data", *command], env=ENVIRONMENT)
        for _ in range(2)
    ]
    assert [process.wait(timeout=60) for process in again] == [0, 0]
    assert [path for path in data.iterdir() if path.is_dir()] == [data / "mine"]
    assert sorted(
        documents_of(data / "mine", "train") + documents_of(data / "mine", "val")
    ) == sorted(contents)
    find_dataset("mine", data, "auto").validate(257, 64)


def test_the_second_of_two_preparations_waits_for_the_first(texts, tmp_path):
    data = tmp_path / "data"
    command = ["text", str(texts[0]), *command_options(data)]
    with locked(data / "mine", print):
        second = subprocess.Popen(
            [sys.executable, "-u", "-m", "gptjax.data", *command],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        )
        assert b"waiting for another process that is preparing" in second.stdout.readline()
        prepared_by_the_first = data / "mine"
        assert not prepared_by_the_first.exists()
        with staged(prepared_by_the_first) as partial:
            Manifest("byte", 257, 256, f"text: {texts[0]}", None, {}).write(partial)
    said, _ = second.communicate(timeout=30)
    assert second.returncode == 0 and b"already prepared" in said
