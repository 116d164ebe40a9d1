"""Checkpoints: exact, kept as asked, refused when they do not fit, intact when a save fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptjax import optim, sharding
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.checkpoint import CheckpointError, Checkpoints
from gptjax.training.step import init_state

CONFIG = GPT2Config(vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=11, n_head=2, n_embd=8)


def state_and_shape(devices=1, config=CONFIG):
    mesh = sharding.replicated(sharding.data_mesh(jax.devices("cpu")[:devices]))
    state = jax.device_put(init_state(config, optim.adamw(1e-3), 0), mesh)
    state = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state)
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh), state)


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
    # n_layer is above 10, so that an order of block names as text would show.
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(back), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b), path
        assert len(b.sharding.device_set) == devices
    meta = checkpoints.meta(7)
    assert meta["config"] == {"a": 1} and meta["text"] == "ü" and meta["versions"]["jax"] == jax.__version__
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
    with pytest.raises(CheckpointError, match=r"does not fit this run:(.|\n)*\(8,\).*this run needs.*\(16,\)"):
        checkpoints.restore(7, like)
    _, like = state_and_shape()
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), like)
    with pytest.raises(CheckpointError, match=r"float32.*this run needs.*bfloat16"):
        checkpoints.restore(7, half)
    with pytest.raises(CheckpointError, match=r"nothing"):
        checkpoints.restore(7, {"other": like.step})
    checkpoints.close()


def test_a_truncated_checkpoint_is_named_with_what_to_do(saved):
    folder, state = saved
    checkpoints = Checkpoints(folder, keep_last=3)
    checkpoints.save(9, state, {})
    checkpoints.wait()
    checkpoints.close()
    files = [p for p in (folder / "9" / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:10])
    checkpoints = Checkpoints(folder)
    with pytest.raises(CheckpointError, match=r"cannot read .*9.*delete that folder to go on from step 7"):
        checkpoints.restore(9, state_and_shape()[1])
    assert np.array_equal(checkpoints.restore(7, state_and_shape()[1]).step, state.step)
    checkpoints.close()


def test_a_foreign_checkpoint_is_refused(saved):
    folder, _ = saved
    meta = folder / "7" / "meta" / "metadata"
    meta.write_text('{"format": "somebody else"}')
    checkpoints = Checkpoints(folder)
    with pytest.raises(CheckpointError, match=r"expected 'gptjax checkpoint 1', found 'somebody else'"):
        checkpoints.meta(7)
    meta.write_text("not json")
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoints.meta(7)
    checkpoints.close()


def test_what_a_killed_save_left_is_not_a_checkpoint_and_is_removed(saved):
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


@pytest.mark.parametrize("between", ["", """ [tensorstore_spec='{"driver":"ocdbt","open":true}']"""])
def test_a_failed_save_is_told_in_the_systems_words(tmp_path, monkeypatch, between):
    # TensorStore's message has the second form when the array that fails is one whose file it was just opening.
    failed = ValueError(
        f"OUT_OF_RANGE: Failed to write 4287 bytes to file 10: File too large{between} [os_error_code='27']"
    )

    def save(*_, **__):
        raise failed

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints._manager, "save", save)
    with pytest.raises(CheckpointError, match="failed: File too large; there is no complete checkpoint yet"):
        checkpoints.save(1, {}, {})


def test_an_unusable_folder_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints")
