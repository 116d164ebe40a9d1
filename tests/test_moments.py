"""AdamW's moments in bf16, and AdamW at every N-th step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptjax import parallel
from gptjax.optim import Group, OptimizerConfig, adamw
from gptjax.optim.adamw import matrices_and_adamw, scale_by_adam
from gptjax.optim.low_precision import round_stochastically

pytestmark = pytest.mark.usefixtures("optax_promotion")
MESH = parallel.data_mesh(jax.devices()[:1])


def gradients(steps, size=200):
    return np.random.default_rng(0).standard_normal((steps, size)).astype(np.float32)


def test_the_first_moment_is_rounded_once_after_its_use():
    """optax.scale_by_adam also rounds b1·m."""
    b1, b2, grads = np.float32(0.9), np.float32(0.95), gradients(30)
    tx, m, v = scale_by_adam(0.9, 0.95, 1e-8, jnp.bfloat16), 0 * grads[0], 0 * grads[0]
    state, update = tx.init({"w": jnp.zeros(200)}), jax.jit(tx.update)
    for step, grad in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        updates, state = update({"w": jnp.asarray(grad)}, state)
        wanted = m / (1 - b1**step) / np.sqrt(v / (1 - b2**step))
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-3, atol=1e-5)
        assert state.mu["w"].dtype == jnp.bfloat16 and state.nu["w"].dtype == jnp.float32
        # Nearly always the same neighbour: LLVM joins multiplications and additions.
        of_state = np.asarray(state.mu["w"].astype(jnp.float32))
        np.testing.assert_allclose(of_state, m.astype(jnp.bfloat16).astype(np.float32), rtol=2**-7)
        m = of_state
    assert adamw(1e-3).init(jnp.zeros(3))[1][0].mu.dtype == jnp.float32


@pytest.mark.parametrize("moments", [("bf16", "fp32"), ("fp32", "bf16")])
def test_the_dtypes_of_the_moments_are_the_configs(moments):
    dtypes = dict(zip(("first_moment_dtype", "second_moment_dtype"), moments, strict=True))
    tx, w = OptimizerConfig(**dtypes).build(total_steps=4, groups=(), mesh=MESH), jnp.ones(3)
    state = tx.update(w, tx.init(w), w)[1][1][0]
    names = {"float32": "fp32", "bfloat16": "bf16"}
    assert tuple(names[m.dtype.name] for m in (state.mu, state.nu)) == moments


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_the_second_moment_in_bf16_has_no_bias(b2):
    """With rounding to nearest, v of b2 = 0.999 would be about twice as large."""
    exact, rounded = (scale_by_adam(0.9, b2, 1e-8, None, d) for d in (None, jnp.bfloat16))
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((4000, 500)), jnp.float32)

    @jax.jit
    def last(grads):
        def update(states, grad):
            return (exact.update(grad, states[0])[1], rounded.update(grad, states[1])[1]), None

        first = exact.init(grads[0]), rounded.init(grads[0])
        return jax.lax.scan(update, first, grads)[0]

    wanted, found = (np.asarray(state.nu, np.float64) for state in last(grads))
    # Standard deviation of a sum of rounding errors, each below 2⁻⁷/√12 or so.
    deviation = 2**-7 / 12**0.5 / (1 - b2**2) ** 0.5
    errors = found / wanted - 1
    assert 0 < errors.std() < 1.5 * deviation
    assert abs(errors.mean()) < 4 * deviation / 500**0.5


def test_stochastic_rounding_by_a_hash():
    """Neighbours with the probability of the distance, independent of the last time."""
    x = jnp.full((200, 300), 1 + 0.3 * 2**-7)
    first, second = (round_stochastically([x, x], jnp.int32(n)) for n in (1, 2))
    ups = [np.asarray(y > 1) for y in (*first, *second)]
    for up in ups:
        assert up.mean() == pytest.approx(0.3, abs=5 * 0.46 / 60_000**0.5)
    both = [(a & b).mean() for a, b in itertools.combinations(ups, 2)]
    assert both == pytest.approx([0.09] * 6, abs=5 * 0.29 / 60_000**0.5)
    along = [(up[:, 1:] & up[:, :-1]).mean() for up in ups]
    across = [(up[1:] & up[:-1]).mean() for up in ups]
    assert along + across == pytest.approx([0.09] * 8, abs=5 * 0.29 / 59_000**0.5)
    odd = jnp.float32([0, 1e-45, np.inf, np.nan])
    (rounded,) = round_stochastically([odd], jnp.int32(3))
    assert rounded[0] == 0 and rounded[2] == np.inf and jnp.isnan(rounded[3])


def test_every_second_adamw_has_no_conditional():
    """On a GPU the host would wait for the predicate of a conditional."""
    tx = matrices_and_adamw([Group("w")], optax.identity(), learning_rate=1e-3, every=2)
    params = {"w": jnp.zeros(8)}
    state = tx.init(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert " conditional(" not in compiled.as_text()
