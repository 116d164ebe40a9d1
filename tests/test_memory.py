"""Memory of an executable and of a device."""

import jax
import jax.numpy as jnp

from gptjax.training.memory import available_bytes, needed_bytes


def compiled_for(n: int) -> jax.stages.Compiled:
    x = jax.ShapeDtypeStruct((n, 1024), jnp.float32)
    return jax.jit(lambda x: jnp.sort(x, axis=0) @ jnp.ones((1024, 8))).lower(x).compile()


def test_counts_arguments_results_and_temporaries():
    small, large = needed_bytes(compiled_for(64)), needed_bytes(compiled_for(512))
    assert small >= 64 * 1024 * 4 and 6 * small < large < 10 * small


def test_a_donated_argument_counts_once():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    donated, kept = (
        needed_bytes(jax.jit(lambda x: x + 1, donate_argnums=d).lower(x).compile())
        for d in ((0,), ())
    )
    assert kept - donated == 1024 * 1024 * 4


def test_available_is_plausible():
    assert available_bytes(jax.devices("cpu")[0]) > 2**30
