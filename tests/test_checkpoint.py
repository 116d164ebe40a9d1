"""Checkpoints: exact, verified, deleted by the options, refused if damaged or unsuitable."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saved_run_tools import restored

from gptjax import optim, parallel
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.checkpoint import Checkpoints, NotFiniteError
from gptjax.training.step import init_state
from gptjax.weights import CheckpointError, DamagedError
from gptjax.weights.checkpoint_files import checksum, read_meta, steps

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=11, n_head=2, n_embd=8
)


@functools.cache
def state_and_shape(devices=1, config=CONFIG):
    """Return a state in which no two arrays are the same, and its shapes and shardings."""
    sharding = parallel.replicated(parallel.data_mesh(jax.devices("cpu")[:devices]))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: init_state(config, optim.adamw(1e-3), 0)),
    )
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.uniform(0, 100, x.shape).astype(x.dtype), like)
    return jax.device_put(state, sharding), like


def save(folder, states, **options):
    """Save states by step, and wait for the files."""
    checkpoints = Checkpoints(folder, **options)
    for step, state in states.items():
        checkpoints.save(step, state, {"config": {"a": 1}, "text": "ü"})
    checkpoints.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoint of step 7."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, {7: state_and_shape()[0]})
    return folder


@pytest.mark.parametrize("devices", [1, 2])
def test_comes_back_bit_for_bit_on_any_number_of_devices(saved, devices):
    back, state = restored(saved, 7, state_and_shape(devices)[1]), state_and_shape()[0]
    # n_layer > 10: sorting block names as strings would change the order.
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(back), strict=True
    ):
        assert a.dtype == b.dtype and np.array_equal(a, b), path
        assert len(b.sharding.device_set) == devices
    meta = read_meta(saved / "7")
    assert (meta["config"], meta["text"]) == ({"a": 1}, "ü")
    assert meta["versions"]["jax"] == jax.__version__


def test_keeps_the_last_and_every(tmp_path):
    states = {step: {"x": jnp.full(3, step)} for step in range(5, 50, 5)}
    save(tmp_path, states, keep_last=2, keep_every=20)
    assert steps(tmp_path) == [45, 40, 20]


def test_a_state_of_another_shape_dtype_or_name_is_refused(saved):
    _, wide = state_and_shape(config=GPT2Config(**{**vars(CONFIG), "n_embd": 16}))
    _, like = state_and_shape()
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), like
    )
    for other, says in (
        (wide, r"does not fit this run:(.|\n)*float32\[8\].*this run needs float32\[16\]"),
        (half, r"float32.*this run needs.*bfloat16"),
        ({"other": like.step}, r"nothing"),
    ):
        with pytest.raises(CheckpointError, match=says):
            restored(saved, 7, other)


def test_a_changed_number_in_the_metadata_is_found(tmp_path):
    save(tmp_path, {7: {"x": jnp.ones(3)}})
    path = tmp_path / "7" / "meta" / "metadata"
    before = path.read_text()
    without_step = json.loads(before)
    del without_step["step"], without_step["checksum"]
    changed = {
        before.replace('"a": 1', '"a": 2'): "the checksum of its metadata is wrong",
        before.replace('"step": 7', '"step": 8'): "the checksum of its metadata is wrong",
        before.replace("checkpoint 3", "checkpoint 2"): "the checksum of its metadata is wrong",
        json.dumps(without_step | {"checksum": checksum(without_step)}): "saved as step None",
        json.dumps(without_step | {"step": 7}): "the checksum of its metadata is wrong",
        **{text: "7 is damaged" for text in ("not json", "[1]", "[" * 100_000)},
    }
    for text, reason in changed.items():
        assert text != before
        path.write_text(text)
        with pytest.raises(DamagedError, match=reason):
            read_meta(tmp_path / "7")
    path.write_text('{"format": "gptjax checkpoint 1"}')
    says = "expected 'gptjax checkpoint 3', found 'gptjax checkpoint 1'. Commit f85193a reads"
    with pytest.raises(CheckpointError, match=says):
        read_meta(tmp_path / "7")


def test_a_state_that_is_not_finite_is_never_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3), "n": jnp.zeros(2, jnp.int32)}, {})
    for bad in (jnp.nan, jnp.inf):
        with pytest.raises(NotFiniteError, match="step 2: NaN or infinity in x"):
            checkpoints.save(2, {"x": jnp.ones(3).at[1].set(bad), "n": jnp.zeros(2, jnp.int32)}, {})
    checkpoints.close()
    assert steps(tmp_path) == [1]


def test_every_file_is_durable_before_an_older_checkpoint_goes(tmp_path, monkeypatch):
    order, real_fsync = [], os.fsync

    def fsync(descriptor):
        order.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, {"x": jnp.ones(3)}, {})
    checkpoints.wait()
    monkeypatch.setattr(os, "fsync", fsync)
    delete = checkpoints._manager._checkpoint_deleter.delete_steps

    def watch(steps):
        order.append(("deleted", list(steps)))
        delete(steps)

    monkeypatch.setattr(checkpoints._manager._checkpoint_deleter, "delete_steps", watch)
    checkpoints.save(2, {"x": jnp.zeros(3)}, {})
    checkpoints.wait()
    deleted = order.index(("deleted", [1]))
    before = [name for name in order[:deleted] if isinstance(name, str)]
    files = {str(p.relative_to(tmp_path / "2")) for p in (tmp_path / "2").rglob("*")}
    temporary = [name for name in before if "orbax-checkpoint-tmp" in name]
    synchronized = {name.partition("checkpoint-tmp/")[2] for name in temporary}
    assert {name for name in files if "commit_success" not in name} <= synchronized
    assert str(tmp_path / "2" / "commit_success.txt") in before
    # The rename itself, in the folder that holds the checkpoints.
    assert before.index(str(tmp_path)) > max(
        i for i, name in enumerate(before) if name in temporary
    )
    checkpoints.close()


def test_the_files_of_a_killed_save_are_not_a_checkpoint_and_are_removed(tmp_path):
    left = tmp_path / "8.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "half").write_text("")
    assert steps(tmp_path) == []
    save(tmp_path, {9: {"x": jnp.zeros(3)}})
    assert not left.exists() and steps(tmp_path) == [9]


@pytest.mark.parametrize(
    "between", ["", """ [tensorstore_spec='{"driver":"ocdbt","open":true}']"""]
)
def test_a_failed_save_has_the_text_of_the_system_error(tmp_path, monkeypatch, between):
    # TensorStore's message has the second form if the error occurs while a file is opened.
    failed = f"OUT_OF_RANGE: Failed to write 4287 bytes to file 10: File too large{between} "

    def save(*_, **__):
        raise ValueError(f"{failed}[os_error_code='27']")

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", save)
    says = "failed: File too large; there is no complete checkpoint yet"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.save(1, {}, {})


def test_an_unusable_folder_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    # Orbax would interpret such a path as a pattern without matches and save no array, silently.
    pattern = r"choose a path without \*, \? and \["
    for name, says in {"file/x": "cannot use .*file", "x[b]y": pattern, "a*": pattern}.items():
        with pytest.raises(CheckpointError, match=says):
            Checkpoints(tmp_path / name)
