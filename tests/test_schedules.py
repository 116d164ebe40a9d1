"""Schedules against their formulas."""

import math

import numpy as np
import pytest

from gptjax.optim import SCHEDULES, NorMuonConfig, schedule

PEAK, WARMUP, TOTAL, FINAL = 6e-4, 10, 110, 0.1


def wanted(name: str, step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    progress = min((step - WARMUP) / (TOTAL - WARMUP), 1)
    if name == "cosine":
        return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * progress)) / 2)
    if name == "linear":
        return PEAK * (1 - (1 - FINAL) * progress)
    if name == "wsd":
        begin = 0.8 * TOTAL
        done = min(max(step - begin, 0) / (TOTAL - begin), 1)
        return PEAK * (FINAL + (1 - FINAL) * (1 - math.sqrt(done)))
    if name == "powercool":
        left = (TOTAL - step) / (0.82 * TOTAL)
        return PEAK * (FINAL + (1 - FINAL) * min(1, max(0, left) ** 1.2))
    return PEAK


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step(name):
    of = schedule(name, peak=PEAK, warmup_steps=WARMUP, total_steps=TOTAL, final_fraction=FINAL)
    steps = np.arange(TOTAL + 20)
    np.testing.assert_allclose(of(steps), [wanted(name, n) for n in steps], rtol=1e-5, atol=1e-10)
    zero = schedule(name, peak=1.0, warmup_steps=3, total_steps=50)
    end = pytest.approx(1.0 if name == "constant" else 0.0, abs=1e-7)
    assert float(zero(50)) == end and float(zero(1000)) == end


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "powercool"])
def test_a_cooldown_between_constants(name):
    """As in modded-nanogpt's record: the peak to step 580, 0.15 of it from 1450."""
    how = {"warmup_steps": 0, "total_steps": 1490, "final_fraction": 0.15}
    of = schedule(name, peak=2.0, **how, cooldown_steps=870, final_steps=40)
    assert [float(of(step)) for step in (0, 300, 580)] == [2.0] * 3
    shape = {"cosine": 0.5, "linear": 0.5, "wsd": 1 - math.sqrt(0.5), "powercool": 0.5**1.2}[name]
    assert float(of(580 + 435)) == pytest.approx(2 * (0.15 + 0.85 * shape), rel=1e-6)
    assert float(of(581)) < 2 and float(of(1449)) > 0.3
    assert [float(of(step)) for step in (1450, 1489)] == pytest.approx([0.3] * 2, rel=1e-6)
    with pytest.raises(ValueError, match="9 steps of warm-up, 982 of cooldown and 10 final ones"):
        schedule(
            name, peak=1.0, warmup_steps=9, total_steps=1000, cooldown_steps=982, final_steps=10
        )


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("wsd", {"warmup_steps": 900}),
        ("cosine", {"warmup_steps": 900, "final_steps": 200}),
        ("linear", {"warmup_steps": 0, "final_steps": 1001}),
    ],
)
def test_a_cooldown_that_begins_during_the_warm_up_is_refused(name, steps):
    with pytest.raises(ValueError, match=f"expected {steps['warmup_steps']} steps of warm-up"):
        schedule(name, peak=1.0, total_steps=1000, **steps)
    # A short trial of a long schedule.
    trial = schedule("cosine", peak=1.0, total_steps=10, warmup_steps=100)
    assert float(trial(9)) == pytest.approx(0.1)


def test_powercool_of_matrices_and_adamw_begins_as_in_the_record():
    """modded-nanogpt's record: lr = min(lr₀, k·(2,900 − step)^1.2)."""
    own = {"learning_rate": 0.01, "matrix_learning_rate": 0.0375, "warmup_steps": 0}
    own |= {"powercool_start": 1487 / 2900, "matrix_powercool_start": 514 / 2900}
    rates = NorMuonConfig(schedule="powercool", **own).schedules(2900)
    for name, k in (("learning_rate", 1.6589351e-6), ("matrix_learning_rate", 3.31695345e-6)):
        steps = np.arange(2900)
        wanted = np.minimum(own[name], k * (2900.0 - steps) ** 1.2)
        np.testing.assert_allclose(rates[name](steps), wanted, rtol=2e-3)


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown schedule 'cos'.*cosine.*linear.*constant.*wsd"):
        schedule("cos", peak=1.0, warmup_steps=0, total_steps=1)
