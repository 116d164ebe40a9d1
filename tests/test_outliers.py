"""The sliding window against NumPy over the same values."""

import jax
import jax.numpy as jnp
import numpy as np

from gptjax.training.outliers import WINDOW, OutlierWindow, observe


def run(values):
    window, scores = OutlierWindow.empty(), []
    step = jax.jit(observe)
    for value in values:
        window, z = step(window, jnp.float32(value))
        scores.append(float(z))
    return window, scores


def test_scores_are_those_of_the_last_window_values():
    values = np.random.default_rng(0).normal(3.0, 0.5, WINDOW + 60).astype(np.float32)
    _, scores = run(values)
    assert scores[: WINDOW - 1] == [0.0] * (WINDOW - 1)
    for i in range(WINDOW - 1, len(values)):
        last = values[i - WINDOW + 1 : i + 1].astype(np.float64)
        np.testing.assert_allclose(
            scores[i], (values[i] - last.mean()) / last.std(), rtol=1e-4, atol=1e-4
        )


def test_a_spike_stands_out_and_a_constant_does_not():
    _, scores = run([2.0 + 0.01 * (i % 7) for i in range(WINDOW)] + [9.0])
    assert scores[-1] > 10
    _, scores = run([2.0] * (WINDOW + 5))
    assert scores[-1] == 0.0


def test_a_value_that_is_not_finite_leaves_the_window_as_it_was():
    window, _ = run(range(WINDOW))
    after, z = observe(window, jnp.float32(jnp.nan))
    assert bool((after.values == window.values).all()) and int(after.count) == int(window.count)
    assert not float(z) > 3
