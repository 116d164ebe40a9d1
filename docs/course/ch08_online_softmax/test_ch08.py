"""Tests of chapter 8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ch02_attention.solution import causal_attention
from tiny import normal


def scores_and_values():
    scores_TS, v_SD = normal((5, 12), (12, 3))
    return 4 * scores_TS, v_SD


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(chapter, scores_TS, v_SD, tile):
    state = chapter.start(scores_TS.shape[0], v_SD.shape[1])
    for first in range(0, scores_TS.shape[1], tile):
        keys = slice(first, first + tile)
        state = chapter.update(state, scores_TS[:, keys], v_SD[keys])
    return chapter.finish(state)


@jax.jit
def expected(scores_TS, v_SD):
    return jax.nn.softmax(scores_TS) @ v_SD, jax.nn.logsumexp(scores_TS, axis=1)


def same(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), x, y)


def test_two_keys_by_hand(chapter):
    state = chapter.start(1, 1)
    state = chapter.update(state, jnp.array([[0.0]]), jnp.array([[10.0]]))
    state = chapter.update(state, jnp.array([[jnp.log(3.0)]]), jnp.array([[2.0]]))
    np.testing.assert_allclose(state.max_T, [np.log(3)], rtol=1e-6)
    np.testing.assert_allclose(state.sum_T, [1 + 1 / 3], rtol=1e-6)
    out_TD, lse_T = chapter.finish(state)
    np.testing.assert_allclose(out_TD, [[4.0]], rtol=1e-6)
    np.testing.assert_allclose(lse_T, [np.log(4)], rtol=1e-6)


def test_tiles_give_the_softmax_of_the_whole_row(chapter):
    scores_TS, v_SD = scores_and_values()
    for tile in (1, 5, 12):
        same(run(chapter, scores_TS, v_SD, tile), expected(scores_TS, v_SD))


def test_the_order_of_the_keys_does_not_matter(chapter):
    scores_TS, v_SD = scores_and_values()
    same(run(chapter, scores_TS[:, ::-1], v_SD[::-1], 4), expected(scores_TS, v_SD))


def test_large_scores_do_not_overflow(chapter):
    scores_TS, v_SD = scores_and_values()
    out_TD, lse_T = run(chapter, scores_TS + 1000, v_SD, 4)
    np.testing.assert_allclose(out_TD, expected(scores_TS, v_SD)[0], atol=1e-3)
    np.testing.assert_allclose(lse_T, expected(scores_TS, v_SD)[1] + 1000, rtol=1e-5)


def test_tiles_in_which_a_row_sees_no_key(chapter):
    scores_TS, v_SD = scores_and_values()
    # The first row sees no key of the first tile; the second row none of the last two.
    scores_TS = scores_TS.at[0, :4].set(-jnp.inf).at[1, 4:].set(-jnp.inf)
    same(run(chapter, scores_TS, v_SD, 4), expected(scores_TS, v_SD))


def test_tiled_attention_is_the_attention_of_chapter_2(chapter):
    q_TD, k_TD, v_TD = normal((10, 4), (10, 4), (10, 4))
    whole = causal_attention(*(x[None, :, None] for x in (q_TD, k_TD, v_TD)))[0, :, 0]
    for tile in (4, 10):
        tiled = jax.jit(chapter.tiled_attention, static_argnums=3)(q_TD, k_TD, v_TD, tile)
        np.testing.assert_allclose(tiled, whole, atol=1e-5)


def test_tiled_attention_has_the_scores_of_one_tile_at_a_time(chapter):
    arrays = normal((10, 3), (10, 3), (10, 3))
    for tile in (4, 5):
        jaxpr = str(jax.make_jaxpr(chapter.tiled_attention, static_argnums=3)(*arrays, tile))
        assert f"[10,{tile}]" in jaxpr, f"no array has 10 queries and a tile of {tile} keys"
        assert "[10,10]" not in jaxpr, "an array has all queries and all keys"
