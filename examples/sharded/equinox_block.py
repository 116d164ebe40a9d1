"""A transformer block in Equinox, whose arrays `eqx.filter_shard` places on the mesh.

python examples/sharded/equinox_block.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from training import MESH, C, D, F, H, V, mean_loss, train

from pallas_kernels import flash_attention, mlp, rms_norm


class Block(eqx.Module):
    # Called with a batch: under `jax.vmap`, norms and MLPs launch a kernel for each sequence.
    embedding_VC: jax.Array
    qkv_3CHD: jax.Array
    out_HDC: jax.Array
    up_CF: jax.Array
    bias_F: jax.Array
    down_FC: jax.Array

    def __call__(self, tokens_BT):
        x_BTC = self.embedding_VC[tokens_BT]
        q, k, v = jnp.einsum("btc,zchd->zbthd", rms_norm(x_BTC), self.qkv_3CHD)
        y_BTC = jnp.einsum("bthd,hdc->btc", flash_attention(q, k, v), self.out_HDC)
        y_BTC, x_BTC = rms_norm(y_BTC, residual=x_BTC)
        return x_BTC + mlp(y_BTC, self.up_CF, self.bias_F, self.down_FC)


rows, columns, heads = jax.P("model"), jax.P(None, "model"), jax.P(None, None, "model")
SPECS = Block(rows, heads, rows, columns, rows, rows)


@eqx.filter_jit
def init(key):
    shapes = [(V, C), (3, C, H, D), (H, D, C), (C, F), (F,), (F, C)]
    weights = optax.tree.random_like(key, Block(*map(jnp.zeros, shapes)))
    return eqx.filter_shard(optax.tree.scale(0.05, weights), SPECS)


@eqx.filter_value_and_grad
def loss(model, tokens_BT):
    x_NC = model(tokens_BT[:, :-1]).reshape(-1, C)
    return mean_loss(x_NC, model.embedding_VC, tokens_BT[:, 1:].reshape(-1))


@eqx.filter_jit
def step(state, tokens_BT):
    model, moments = state
    value, gradients = loss(model, eqx.filter_shard(tokens_BT, jax.P("data")))
    updates, moments = optimizer.update(gradients, moments, model)
    return (eqx.apply_updates(model, updates), moments), value


optimizer = optax.adamw(3e-3)
with jax.set_mesh(MESH):
    model = init(jax.random.key(0))
    train(step, (model, optimizer.init(model)))
