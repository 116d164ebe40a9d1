"""train.py's errors and their messages."""

import dataclasses
import errno
import fcntl
import os
import socket
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import command_line, run, steps_kept, train_py

import gptjax
from gptjax import cli, data
from gptjax.config import ConfigError
from gptjax.data import DatasetError, write_shard
from gptjax.models.gpt2 import GPT2Config
from gptjax.models.layers import KVCache
from gptjax.training import compilation, errors
from gptjax.training.lock import LockedError, locked
from gptjax.weights import CheckpointError


def test_errors_are_a_sentence_and_a_non_zero_exit(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    command = command_line(config, tmp_path, "--batch-tokens", "1000")[2:]
    with pytest.raises(SystemExit) as ended:
        errors.run(lambda: run(cli.from_command_line(command)))
    error = capsys.readouterr().err
    assert ended.value.code == 1 and "Traceback" not in error
    assert error.startswith("error: --batch-tokens 1000 is not a multiple of")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dataset": "fineweb10B"}, DatasetError, r"not prepared.*python -m gptjax\.data fineweb"),
        ({"resume": "must"}, ConfigError, "--resume must: there is no checkpoint"),
        (
            {"model": GPT2Config(n_layer=1, n_head=1, n_embd=8, block_size=32, attention="cudnn")},
            ConfigError,
            "cudnn.*NVIDIA",
        ),
    ],
)
def test_a_mistake_is_found_before_anything_is_computed(config, changes, error, says):
    with pytest.raises(error, match=says):
        run(dataclasses.replace(config, **changes))


def test_a_run_that_cannot_be_resumed_is_refused(config, tmp_path):
    config = dataclasses.replace(config, max_steps=6, sample_every=0, val_every=0)
    run(config)
    other = tmp_path / "other"
    other.mkdir()
    for split, tokens in (("train_000001", 9000), ("val_000000", 3000)):
        write_shard(other / f"words_{split}.bin", np.arange(tokens, dtype=np.uint16) % 250)
    for changes, says in (
        ({"resume": "never"}, "--resume never: .*already has a checkpoint of step 6; choose anot"),
        (
            {"seed": 5},
            r"(?s)begun with another config:.*--seed: the checkpoint has 0, now 5.*--nam",
        ),
        (
            {"max_steps": 7},
            "--max-steps 7: the checkpoint's cosine .* step 6; add --resume with_ch",
        ),
        ({"dataset": str(other)}, "was trained on other data"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(dataclasses.replace(config, **changes))


def test_own_shards_of_another_tokenizer_train_without_texts(config, tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 2048, 20_000)
    (tmp_path / "own").mkdir()
    for split in ("train", "val"):
        write_shard(tmp_path / "own" / f"own_{split}_000000.bin", tokens)
    model = dataclasses.replace(config.model, vocab_size=2048, padded_vocab_size=2048)
    own = dataclasses.replace(config, dataset=str(tmp_path / "own"), model=model, max_steps=1)
    says = (
        "own: the model has 2,048 ids, and the tokenizer gpt2 has 50,257, which is assumed .* no "
        "dataset.json; set --model.vocab-size 50257, .* without texts: --sample-every 0 --eval"
    )
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=says):
        patch.setattr(train_py.devices, "reserve_memory", lambda _: pytest.fail("reserved"))
        run(own)
    assert not own.run_dir.exists()
    code, text = run(dataclasses.replace(own, sample_every=0))
    assert code == 0 and "20,000 tokens (unknown)" in text and "the tokenizer is unknown" in text
    assert gptjax.load(own.run_dir).tokenizer is None


def test_a_second_process_is_refused(config):
    says = f"run is in use by another process .pid {os.getpid()} on {socket.gethostname()}"
    with locked(config.run_dir, pytest.fail), pytest.raises(LockedError, match=says):
        run(config)
    with locked(config.run_dir, pytest.fail):  # released
        pass


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    notes = []
    with locked(tmp_path, notes.append):
        assert "file system without locks" in notes[0]


def test_what_does_not_fit_is_refused_before_it_is_allocated(config, monkeypatch):
    monkeypatch.setattr(compilation, "available_bytes", lambda device: 500_000)
    monkeypatch.setattr(data, "Loader", lambda *a, **k: pytest.fail("went on"))
    with pytest.raises(ConfigError, match=r"--micro-batch 4 needs .* GiB on each device"):
        run(config)


def test_an_error_in_the_first_sample_loses_no_step(config, monkeypatch):
    """A model of the user may generate for the first time after hours of training."""

    def fail(*_):
        KVCache.of_prompt().extended(8, jnp.zeros(1, jnp.int32))

    monkeypatch.setattr(train_py.Evaluations, "sample", fail)
    config = dataclasses.replace(config, max_steps=6, sample_every=6, checkpoint_every=6)
    with pytest.raises(TypeError, match=r"hidden\(tokens, cache\) to call cache\[i\].attend"):
        run(config)
    assert steps_kept(config) == [6]


def test_a_last_checkpoint_that_cannot_be_read_is_an_error(config, monkeypatch):
    close = train_py.Checkpoints.close

    def close_and_lose(self):
        close(self)
        for file in (self.folder / "2").glob("state/**/d/*"):
            file.unlink()

    monkeypatch.setattr(train_py.Checkpoints, "close", close_and_lose)
    with pytest.raises(CheckpointError, match="2 is damaged: No such file"):
        run(dataclasses.replace(config, max_steps=2, val_every=0, sample_every=0))
