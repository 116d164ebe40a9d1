"""Tests of chapter 6."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ch03_block.solution import init
from ch05_adamw.solution import init_adam, train_step
from tiny import CONFIG, read_documents

from gptjax.data import Loader, get_tokenizer, write_shard


def test_encode(chapter):
    np.testing.assert_array_equal(chapter.encode(["ab", "é"]), [256, 97, 98, 256, 0xC3, 0xA9])
    assert chapter.encode(["a"]).dtype == np.int32


def test_encode_is_gptjaxs_byte_tokenizer(chapter):
    tokenizer, documents = get_tokenizer("byte"), read_documents()
    expected = [part for text in documents for part in ([tokenizer.eot], tokenizer.encode(text))]
    np.testing.assert_array_equal(chapter.encode(documents), np.concatenate(expected))


def test_every_token_but_the_first_is_a_target_once(chapter):
    tokens_N = np.arange(101)
    windows = [chapter.window(tokens_N, i, 20) for i in range(chapter.count_windows(tokens_N, 20))]
    np.testing.assert_array_equal(np.concatenate([w[1:] for w in windows]), tokens_N[1:])


def test_the_rest_of_the_tokens_fills_no_window(chapter):
    assert [chapter.count_windows(np.zeros(n), 20) for n in (20, 21, 40, 41)] == [0, 1, 1, 2]


def test_an_epoch_is_a_permutation_and_the_next_is_another(chapter):
    first, second = chapter.order(0, 0, 50), chapter.order(0, 1, 50)
    np.testing.assert_array_equal(np.sort(first), np.arange(50))
    np.testing.assert_array_equal(np.sort(second), np.arange(50))
    assert (first != second).any() and (first != np.arange(50)).any()
    np.testing.assert_array_equal(chapter.order(0, 0, 50), first)


def test_seeds_do_not_share_epochs(chapter):
    assert (chapter.order(0, 1, 50) != chapter.order(1, 0, 50)).any()


def test_batches_read_every_window_once_in_an_epoch(chapter):
    tokens_N = np.arange(101)  # 10 windows of 10 tokens: three batches of 4 end in the next epoch
    batches = [chapter.batch(tokens_N, step, 4, 10, seed=3) for step in range(5)]
    firsts = np.concatenate(batches)[:, 0]
    np.testing.assert_array_equal(np.sort(firsts[:10]), np.arange(0, 100, 10))
    np.testing.assert_array_equal(np.sort(firsts[10:]), np.arange(0, 100, 10))


def test_batches_have_the_order_of_the_seed_and_the_epoch(chapter):
    # Window w begins with token 10·w. The first five steps are two epochs.
    steps = [chapter.batch(np.arange(101), step, 4, 10, seed=3) for step in range(5)]
    windows = np.concatenate(steps)[:, 0] // 10
    for epoch in (0, 1):
        expected, name = chapter.order(3, epoch, 10), f"epoch {epoch}"
        np.testing.assert_array_equal(windows[10 * epoch :][:10], expected, err_msg=name)


def test_an_epoch_has_the_windows_of_gptjaxs_loader(chapter):
    tokens_N = chapter.encode(read_documents())
    count = chapter.count_windows(tokens_N, 32)
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "train.bin"
        write_shard(shard, tokens_N.astype(np.uint16))
        with Loader([shard], sequence_length=32, batch=count, seed=0, vocab_size=257) as loader:
            inputs, targets, _ = next(loader)
    theirs = {row.tobytes() for row in np.concatenate([inputs, targets[:, -1:]], axis=1)}
    assert {row.tobytes() for row in chapter.batch(tokens_N, 0, count, 32, seed=0)} == theirs


def test_training_on_shuffled_windows(chapter):
    tokens_N = chapter.encode(read_documents())
    params = jax.jit(init, static_argnums=1)(jax.random.key(0), CONFIG)
    state, losses = init_adam(params), []
    step = jax.jit(train_step, static_argnums=3)
    for i in range(150):
        windows_BT1 = jnp.asarray(chapter.batch(tokens_N, i, 8, CONFIG.block_size, seed=0))
        params, state, loss = step(params, state, windows_BT1, CONFIG.n_head, 1e-2)
        losses.append(float(loss))
    print("losses of every 30th step:", np.round(losses[::30], 2))
    assert np.mean(losses[-5:]) < 2.5
