"""python -m gptjax.data check: intact and damaged datasets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gptjax
from gptjax import data
from gptjax.data import Options, check_dataset, corpora, prepare_corpus, write_shard
from gptjax.data import manifest as manifest_module
from gptjax.data.__main__ import main

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(gptjax.__file__).parents[1])}


@pytest.fixture
def small_samples(monkeypatch):
    """Sample only the first and last 8 bytes, so that most of a file is not sampled."""
    monkeypatch.setattr(manifest_module, "_SAMPLE_WHOLE", 0)
    monkeypatch.setattr(manifest_module, "_SAMPLE_BLOCKS", 2)
    monkeypatch.setattr(manifest_module, "_SAMPLE_BLOCK_BYTES", 8)


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * 40)
    options = Options(data_dir=tmp_path / "data", tokenizer="byte", shard_tokens=3000)
    return prepare_corpus("mine", corpora.text([tmp_path / "*.txt"]), options, log=str)


def test_an_intact_dataset_has_a_line_for_each_shard(folder, capsys):
    assert main(["check", str(folder)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names = [
        path.name for split in ("train", "val") for path in sorted(folder.glob(f"*_{split}_*.bin"))
    ]
    assert len(lines) == len(names) == 4 and last == f"{folder}: all shards are intact"
    for number, (line, name) in enumerate(zip(lines, names, strict=True), start=1):
        assert line.startswith(f"{number}/{len(names)} {name}: ") and line.endswith(
            "as dataset.json lists"
        )


def test_each_shard_of_a_name_with_a_split_is_read_once(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * 40)
    options = Options(data_dir=tmp_path / "data", tokenizer="byte", name="a_train_and_val_set")
    folder = prepare_corpus("text", corpora.text([tmp_path / "*.txt"]), options, log=str)
    assert main(["check", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [
        "a_train_and_val_set_train_000001.bin:",
        "a_train_and_val_set_val_000000.bin:",
    ]


def flip(path, byte):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: flip(path, 1500),
            "expected sha256 .*, as dataset.json lists, found",
        ),
        (lambda path: path.unlink() or path.mkdir(), "found a directory instead of a regular file"),
        (lambda path: os.truncate(path, 1500), "cut short"),
        (
            lambda path: write_shard(path, np.zeros(7, np.uint16)),
            "expected tokens .*, as dataset.json lists, found 7",
        ),
        (lambda path: flip(path, 0), "expected magic"),
    ],
)
def test_every_damaged_shard_is_named_and_the_others_are_still_checked(
    small_samples, folder, capsys, damage, says
):
    first, second = sorted(folder.glob("*_train_*.bin"))[:2]
    for path in (first, second):
        damage(path)
    assert main(["check", str(folder)]) == 1
    out, error = capsys.readouterr()
    assert (
        out.count("DAMAGED") == 2
        and out.count("as dataset.json lists") == len(out.splitlines()) - 2
    )
    assert f"error: {folder}: 2 damaged shards:" in error
    for path in (first, second):
        assert (
            any(path.name in line for line in error.splitlines()) and says.split(".*")[0] in error
        )


def test_without_dataset_json_headers_and_ids_are_checked(tmp_path):
    for name in ("a_train_1.bin", "a_val_1.bin"):
        write_shard(tmp_path / name, np.full(9, 50256, dtype=np.uint16))
    lines = []
    assert check_dataset(tmp_path, log=lines.append) == []
    assert "has no dataset.json" in lines[0] and lines[1].endswith("no digest to compare with")
    write_shard(tmp_path / "a_val_1.bin", np.full(9, 50257, dtype=np.uint16))
    (problem,) = check_dataset(tmp_path, log=str)
    assert (
        "a_val_1.bin: at byte 1024: expected ids below the model's vocabulary of 50257, found id "
        "50257" in problem
    )


def test_a_folder_without_a_dataset_is_an_error(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none")]) == 1
    assert (
        "none: expected the folder of a prepared dataset, found no folder"
        in capsys.readouterr().err
    )


def test_every_error_of_the_data_package_is_a_data_error():
    errors = [
        getattr(data, name) for name in data.__all__ if name.endswith(("Error", "Unavailable"))
    ]
    assert len(errors) == 6 and all(issubclass(error, data.DataError) for error in errors)
    assert issubclass(data.TokenizerUnavailable, RuntimeError)
    for error in (data.ShardError, data.DatasetError, data.PrepareError, data.CorpusError):
        assert issubclass(error, ValueError)
        assert str(error("a\x1b[31m\n")) == "a\ufffd[31m\n"


@pytest.mark.parametrize("arguments", [["--help"], ["check"]])
def test_an_output_that_nobody_reads_ends_the_command_without_a_traceback(folder, arguments):
    arguments = [*arguments, *([str(folder)] if arguments == ["check"] else [])]
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gptjax.data", *arguments]
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# The command line with a preparation that hangs before its first shard.
HANGS = """
import runpy, sys, time
from gptjax.data import prepare
def write_shard(path, tokens):
    print("hanging", flush=True)
    time.sleep(60)
prepare.write_shard = write_shard
sys.argv[0] = "gptjax.data"
runpy.run_module("gptjax.data", run_name="__main__")
"""


def test_sigterm_leaves_no_partial_dataset(folder, tmp_path):
    command = [
        "text",
        str(tmp_path / "*.txt"),
        "--name",
        "other",
        "--data-dir",
        str(tmp_path / "data"),
    ]
    command = [sys.executable, "-c", HANGS, *command, "--tokenizer", "byte"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        assert process.stdout.readline() == b"hanging\n"
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (143, b"interrupted; no partial dataset is left\n")
    assert [path for path in (tmp_path / "data").iterdir() if path.is_dir()] == [folder]
