"""Activations with their derivatives, in fp32."""

import jax.numpy as jnp

# gelu(u) = u·σ(v) and v = GELU_1·u + GELU_3·u³.
GELU_1 = 2 * (2 / jnp.pi) ** 0.5
GELU_3 = 0.044715 * GELU_1


def gelu(u):
    """Return gelu(u) = u·σ and gelu'(u) = σ + u·σ·(1 − σ)·v' with σ = σ(v), in fp32."""
    u2 = u * u
    sigma = 0.5 * jnp.tanh(u * (u2 * (GELU_3 / 2) + GELU_1 / 2)) + 0.5
    y = u * sigma
    return y, (y - y * sigma) * (u2 * (3 * GELU_3) + GELU_1) + sigma


def relu_squared(u):
    """Return relu(u)² and its derivative."""
    r = jnp.maximum(u, 0)
    return r * r, 2 * r


ACTIVATIONS = {"gelu": gelu, "relu_squared": relu_squared}
