"""Low-precision parameters: the two halves are an fp32 number, bit for bit; stochastic rounding is
right on average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernel_tools import OPTIMIZED

from gptjax.optim.low_precision import (
    join,
    round_stochastically,
    split,
    view,
    whole,
    with_mantissa,
    with_stochastic_rounding,
)

# optax.apply_updates adds an fp32 step to a bf16 parameter, which strict promotion refuses.
pytestmark = pytest.mark.usefixtures("optax_promotion")


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def kept(x):
    """The fp32 numbers that two halves keep: a tie that rounds towards zero moves by one bit."""
    return (bits(x) - (bits(x) & 0x1FFFF == 0x8000)).view(np.float32)


def test_split_and_join_are_inverse_for_every_pattern_of_bits():
    """Every upper half, with the lower halves around a tie and some others."""
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *np.random.default_rng(0).integers(0, 2**16, 10)]
    high = np.arange(2**16, dtype=np.uint32) << 16
    x = (high[:, None] | np.array(low, np.uint32)).ravel().view(np.float32)
    x = x[np.isfinite(x)]
    view, low = split(jnp.asarray(x))
    np.testing.assert_array_equal(bits(join(view, low)), bits(kept(x)))
    np.testing.assert_array_equal(view, jnp.asarray(x).astype(jnp.bfloat16))
    np.testing.assert_array_equal(join(view, low).astype(jnp.bfloat16), view)


NANS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF, 0x7FC00000]


def test_every_nan_stays_nan():
    """0x7FFFFFFF is the result of arithmetic on NVIDIA GPUs."""
    x = jax.lax.bitcast_convert_type(jnp.array(NANS, jnp.uint32), jnp.float32)
    view, low = split(x)
    assert jnp.isnan(view).all() and jnp.isnan(join(view, low)).all()
    seed = jnp.array(0)
    assert jnp.isnan(round_stochastically(x, seed)).all()


def test_a_thousand_steps_equal_those_of_an_fp32_master_bit_for_bit():
    """The gradients are those at the view, for both."""
    rng = np.random.default_rng(0)
    master = {
        "w": jnp.asarray(rng.standard_normal((12, 20)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal(7), jnp.float32),
    }
    inner = optax.adamw(1e-3, weight_decay=0.1)
    tx = with_mantissa(inner)

    def grads_at(views, noise):
        return jax.tree.map(lambda v, n: v.astype(jnp.float32) * 0.1 + n, views, noise)

    # LLVM joins the same multiplications and additions on both sides.
    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def run(master):
        def step(carry, key):
            params, state, master, master_state = carry
            noise = jax.tree.map(lambda p: jax.random.normal(key, p.shape), master)
            updates, state = tx.update(grads_at(params, noise), state, params)
            params = optax.apply_updates(params, updates)
            updates, master_state = inner.update(
                grads_at(view(master), noise), master_state, master
            )
            return (params, state, optax.apply_updates(master, updates), master_state), None

        carry = (view(master), tx.init(master), master, inner.init(master))
        return jax.lax.scan(step, carry, jax.random.split(jax.random.key(0), 1000))[0]

    params, state, last, _ = run(master)
    assert not np.array_equal(last["w"], master["w"])
    for name, p in whole(params, state).items():
        # A tie moves by one bit; there are a few in a quarter of a million values.
        np.testing.assert_array_max_ulp(np.asarray(p), np.asarray(last[name]), maxulp=8)
        np.testing.assert_array_equal(params[name], view(last)[name])


def test_whatever_the_step_the_views_land_where_the_low_halves_belong():
    """Steps of any size beside the parameter's, and those that take it to almost nothing."""
    rng = np.random.default_rng(0)
    fall, near = 2.0 ** np.arange(-40, 4)[:, None], 2.0 ** -np.arange(25)[:, None]
    w = rng.standard_normal((44 + 25, 1000)) * 2.0 ** rng.integers(-20, 20, (44 + 25, 1000))
    w = kept(w.astype(np.float32))
    u = np.concatenate([fall, 0 * near]) * w * rng.standard_normal(w.shape)
    u[44:] = -w[44:] * (1 + near * rng.standard_normal(w[44:].shape))
    u = u.astype(np.float32)
    tx = with_mantissa(optax.sgd(-1.0))
    params, state = view(jnp.asarray(w)), tx.init(jnp.asarray(w))
    steps, state = tx.update(jnp.asarray(u), state, params)
    params = optax.apply_updates(params, steps)
    found, wanted = np.asarray(whole(params, state)), kept(w + u)
    # Views that cross zero by a hair are off by a hair.
    freak = np.abs(wanted) < 2.0**-15 * np.abs(w)
    np.testing.assert_array_equal(bits(found)[~freak], bits(wanted)[~freak])
    assert (np.abs(found - wanted) <= 2.0**-22 * np.abs(w)).all()


def test_stochastic_rounding_is_right_on_average_and_lands_on_neighbours():
    tx = with_stochastic_rounding(optax.sgd(1.0))
    sign = jnp.array([[1.0], [-1.0]])
    params = sign.astype(jnp.bfloat16) + jnp.zeros((2, 40_000), jnp.bfloat16)
    # bf16's numbers above 1 are 2⁻⁷ apart, and those below 1 half of that.
    step = 0.3 * 2**-7
    grads = jnp.full(params.shape, -step)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    found = np.asarray(optax.apply_updates(params, updates), np.float64)
    for row, low, gap in zip(found, (1, -1), (2**-7, 2**-8), strict=True):
        assert {*row.tolist()} == {low, low + gap}
        # Five standard deviations of a mean of 40,000.
        up = step / gap
        assert abs(row.mean() - low - step) < 5 * gap * (up * (1 - up)) ** 0.5 / 200
    again, _ = tx.update(grads, state, params)
    assert not np.array_equal(again > 0, updates > 0)  # other chances in the next step


def test_errors():
    with pytest.raises(
        ValueError, match="with_mantissa: expected float32 or bfloat16, got float16 in block.w"
    ):
        with_mantissa(optax.sgd(1.0)).init({"block": {"w": jnp.ones(3, jnp.float16)}})
    for wrap in (with_mantissa, with_stochastic_rounding):
        tx, params = wrap(optax.sgd(1.0)), {"w": jnp.ones(3)}
        with pytest.raises(
            ValueError, match=f"{wrap.__name__}: expected bfloat16 parameters, got float32 in w"
        ):
            tx.update(params, tx.init(params), params)
        with pytest.raises(ValueError, match=f"{wrap.__name__} needs the parameters"):
            tx.update(params, tx.init(params))
