"""A transformer block in plain JAX with a table of logical axes, as in MaxText and Levanter.

python examples/sharded/plain_jax.py
"""

import jax
import jax.numpy as jnp
import optax
from training import MESH, C, D, F, H, V, mean_loss, train

from pallas_kernels import flash_attention, mlp, rms_norm

SIZES = {"vocab": V, "embed": C, "qkv": 3, "heads": H, "head": D, "hidden": F}
# Rules: the mesh axis of each logical axis. The other axes are not sharded.
RULES = {"batch": "data", "vocab": "model", "heads": "model", "hidden": "model"}
PARAMS = {
    "embedding": ("vocab", "embed"),
    "qkv": ("qkv", "embed", "heads", "head"),
    "out": ("heads", "head", "embed"),
    "up": ("embed", "hidden"),
    "bias": ("hidden",),
    "down": ("hidden", "embed"),
}


def spec(*names):
    return jax.P(*(RULES.get(name) for name in names))


def init(key):
    zeros = {name: jnp.zeros([SIZES[axis] for axis in axes]) for name, axes in PARAMS.items()}
    return optax.tree.scale(0.05, optax.tree.random_like(key, zeros))


def loss(params, tokens_BT):
    x_BTC = params["embedding"][tokens_BT[:, :-1]]
    x_BTC = jax.lax.with_sharding_constraint(x_BTC, spec("batch", "time", "embed"))
    q, k, v = jnp.einsum("btc,zchd->zbthd", rms_norm(x_BTC), params["qkv"])
    y_BTC = jnp.einsum("bthd,hdc->btc", flash_attention(q, k, v), params["out"])
    y_BTC, x_BTC = rms_norm(y_BTC, residual=x_BTC)
    x_BTC += mlp(y_BTC, params["up"], params["bias"], params["down"])
    x_NC, targets_N = x_BTC.reshape(-1, C), tokens_BT[:, 1:].reshape(-1)
    return mean_loss(x_NC, params["embedding"], targets_N)


def step(state, tokens_BT):
    params, moments = state
    value, gradients = jax.value_and_grad(loss)(params, tokens_BT)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


optimizer = optax.adamw(3e-3)
with jax.set_mesh(MESH):
    specs = {name: spec(*axes) for name, axes in PARAMS.items()}
    params = jax.jit(init, out_shardings=specs)(jax.random.key(0))
    state = params, optimizer.init(params)
    specs = jax.tree.map(lambda x: x.sharding, state)
    train(jax.jit(step, in_shardings=(specs, spec("batch")), out_shardings=(specs, spec())), state)
