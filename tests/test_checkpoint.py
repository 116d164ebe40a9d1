"""Checkpoints: exact, verified, deleted by the options, refused if damaged or unsuitable."""

import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptjax import optim, parallel
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.checkpoint import CheckpointError, Checkpoints, DamagedError, NotFiniteError
from gptjax.training.step import init_state
from gptjax.weights.checkpoint_files import checksum, read_meta, verify

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=11, n_head=2, n_embd=8
)


@functools.cache
def state_and_shape(devices=1, config=CONFIG):
    mesh = parallel.replicated(parallel.data_mesh(jax.devices("cpu")[:devices]))
    state = jax.device_put(init_state(config, optim.adamw(1e-3), 0), mesh)
    state = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state)
    return state, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh), state
    )


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoint of step 7 in it, and its state."""
    state, _ = state_and_shape()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, state, {"config": {"a": 1}, "text": "ü"})
    checkpoints.wait()
    checkpoints.close()
    return tmp_path, state


@pytest.mark.parametrize("devices", [1, 2])
def test_comes_back_bit_for_bit_on_any_number_of_devices(saved, devices):
    folder, state = saved
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_step() == 7
    back = checkpoints.restore(7, state_and_shape(devices)[1])
    # n_layer > 10: sorting block names as strings would change the order.
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(back), strict=True
    ):
        assert a.dtype == b.dtype and np.array_equal(a, b), path
        assert len(b.sharding.device_set) == devices
    meta = checkpoints.meta(7)
    assert (
        meta["config"] == {"a": 1}
        and meta["text"] == "ü"
        and meta["versions"]["jax"] == jax.__version__
    )
    checkpoints.close()


def test_keeps_the_last_and_every(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=20)
    for step in range(5, 50, 5):
        checkpoints.save(step, {"x": jnp.full(3, step)}, {})
    checkpoints.wait()
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [20, 40, 45]
    checkpoints.close()


def test_a_state_of_another_shape_dtype_or_name_is_refused(saved):
    folder, _ = saved
    checkpoints = Checkpoints(folder)
    _, like = state_and_shape(config=GPT2Config(**{**vars(CONFIG), "n_embd": 16}))
    with pytest.raises(
        CheckpointError,
        match=r"does not fit this run:(.|\n)*float32\[8\].*this run needs float32\[16\]",
    ):
        checkpoints.restore(7, like)
    _, like = state_and_shape()
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), like
    )
    with pytest.raises(CheckpointError, match=r"float32.*this run needs.*bfloat16"):
        checkpoints.restore(7, half)
    with pytest.raises(CheckpointError, match=r"nothing"):
        checkpoints.restore(7, {"other": like.step})
    checkpoints.close()


def two_steps(folder, state):
    """The checkpoints of steps 7 and 9."""
    checkpoints = Checkpoints(folder, keep_last=3)
    checkpoints.save(9, jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state), {})
    checkpoints.wait()
    checkpoints.close()


def test_a_truncated_checkpoint_is_refused(saved):
    folder, state = saved
    two_steps(folder, state)
    files = [p for p in (folder / "9" / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:10])
    checkpoints, like = Checkpoints(folder), state_and_shape()[1]
    with pytest.raises(DamagedError, match="9 is damaged"):
        checkpoints.restore(9, like)
    assert np.array_equal(checkpoints.restore(7, like).step, state.step)
    checkpoints.close()


def swap(folder, a="7", b="9"):
    (folder / a).rename(folder / "x")
    (folder / b).rename(folder / a)
    (folder / "x").rename(folder / b)


def replace_state(folder):
    shutil.rmtree(folder / "9" / "state")
    shutil.copytree(folder / "7" / "state", folder / "9" / "state")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap, "saved as step 7"),
        (lambda folder: (folder / "9").rename(folder / "11"), "saved as step 9"),
        (replace_state, "No such file"),
    ],
    ids=["two folders swapped", "a folder renamed", "the state of another step"],
)
def test_a_state_is_restored_under_its_own_step_alone(saved, change, reason):
    folder, state = saved
    two_steps(folder, state)
    change(folder)
    checkpoints = Checkpoints(folder)
    with pytest.raises(DamagedError, match=reason):
        checkpoints.restore(checkpoints.latest_step(), state_and_shape()[1])
    checkpoints.close()


def test_a_changed_number_in_the_metadata_is_found(saved):
    folder, _ = saved
    meta = folder / "7" / "meta" / "metadata"
    before = meta.read_text()
    for old, new in (
        ('"a": 1', '"a": 2'),
        ('"step": 7', '"step": 8'),
        ("gptjax checkpoint 3", "gptjax checkpoint 2"),
    ):
        assert old in before
        meta.write_text(before.replace(old, new))
        checkpoints = Checkpoints(folder)
        with pytest.raises(DamagedError, match="the checksum of its metadata is wrong"):
            checkpoints.meta(7)
        checkpoints.close()


def test_metadata_without_a_step_is_damaged(saved):
    folder, _ = saved
    path = folder / "7" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    del meta["step"]
    path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))
    with pytest.raises(DamagedError, match="7 is damaged: its metadata has no step"):
        read_meta(folder / "7")


@pytest.mark.parametrize(
    "name", ["_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA", "state/manifest.ocdbt"]
)
def test_a_fifo_in_a_checkpoint_is_refused(saved, name):
    folder, _ = saved
    os.mkfifo(folder / "9")  # not a checkpoint
    (folder / "7" / name).unlink()
    os.mkfifo(folder / "7" / name)
    says = f"7 is damaged: expected a regular file as {name}, found a FIFO, a socket or a device"
    with pytest.raises(DamagedError, match=says):
        verify(folder / "7")
    if name.startswith("_"):  # Orbax reads this file at once
        with pytest.raises(DamagedError, match=says):
            Checkpoints(folder)
        return
    checkpoints = Checkpoints(folder)
    with pytest.raises(DamagedError, match=says):
        checkpoints.restore(7, state_and_shape()[1])
    checkpoints.close()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, bad):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3), "n": jnp.zeros(2, jnp.int32)}, {})
    with pytest.raises(NotFiniteError, match="step 2: NaN or infinity in x"):
        checkpoints.save(2, {"x": jnp.ones(3).at[1].set(bad), "n": jnp.zeros(2, jnp.int32)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    checkpoints.close()


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


def test_a_foreign_checkpoint_is_refused(saved):
    folder, _ = saved
    meta = folder / "7" / "meta" / "metadata"
    checkpoints = Checkpoints(folder)
    meta.write_text('{"format": "gptjax checkpoint 1"}')
    says = "expected 'gptjax checkpoint 3', found 'gptjax checkpoint 1'. Commit f85193a reads"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.meta(7)
    for text in ("not json", "[1]", "[" * 100_000):
        meta.write_text(text)
        with pytest.raises(DamagedError, match="7 is damaged"):
            checkpoints.meta(7)
    checkpoints.close()


def test_the_files_of_a_killed_save_are_not_a_checkpoint_and_are_removed(saved):
    folder, _ = saved
    left = folder / "8.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "half").write_text("")
    checkpoints = Checkpoints(folder, keep_last=2)
    assert checkpoints.latest_step() == 7
    checkpoints.save(9, {"x": jnp.zeros(3)}, {})
    checkpoints.wait()
    assert not left.exists() and checkpoints.latest_step() == 9
    checkpoints.close()


@pytest.mark.parametrize(
    "between", ["", """ [tensorstore_spec='{"driver":"ocdbt","open":true}']"""]
)
def test_a_failed_save_has_the_text_of_the_system_error(tmp_path, monkeypatch, between):
    # TensorStore's message has the second form if the error occurs while a file is opened.
    failed = ValueError(
        f"OUT_OF_RANGE: Failed to write 4287 bytes to file 10: File too large{between} "
        "[os_error_code='27']"
    )

    def save(*_, **__):
        raise failed

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", save)
    with pytest.raises(
        CheckpointError, match="failed: File too large; there is no complete checkpoint yet"
    ):
        checkpoints.save(1, {}, {})


def test_an_unusable_folder_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints")


@pytest.mark.parametrize("name", ["x[b]y", "a*", "b?"])
def test_a_path_that_orbax_would_take_for_a_pattern_is_refused(tmp_path, name):
    # Orbax would interpret the path as a pattern without matches and save no array, silently.
    with pytest.raises(CheckpointError, match=r"choose a path without \*, \? and \["):
        Checkpoints(tmp_path / name)
