"""A transformer block in flax.linen, whose parameters have the metadata of `nn.with_partitioning`.

python examples/sharded/linen_block.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from training import MESH, TOKENS_BT, C, D, F, H, V, mean_loss, train

from pallas_kernels import flash_attention, mlp, rms_norm


class Block(nn.Module):
    """The mean loss of a batch."""

    def weight(self, name, shape, *axes):
        init = nn.with_partitioning(nn.initializers.normal(0.05), axes)
        return self.param(name, init, shape)

    @nn.compact
    def __call__(self, tokens_BT):
        embedding_VC = self.weight("embedding", (V, C), "model", None)
        qkv_3CHD = self.weight("qkv", (3, C, H, D), None, None, "model", None)
        out_HDC = self.weight("out", (H, D, C), "model", None, None)
        up_CF = self.weight("up", (C, F), None, "model")
        bias_F = self.weight("bias", (F,), "model")
        down_FC = self.weight("down", (F, C), "model", None)

        x_BTC = embedding_VC[tokens_BT[:, :-1]]
        q, k, v = jnp.einsum("btc,zchd->zbthd", rms_norm(x_BTC), qkv_3CHD)
        y_BTC = jnp.einsum("bthd,hdc->btc", flash_attention(q, k, v), out_HDC)
        y_BTC, x_BTC = rms_norm(y_BTC, residual=x_BTC)
        x_BTC += mlp(y_BTC, up_CF, bias_F, down_FC)
        x_NC, targets_N = x_BTC.reshape(-1, C), tokens_BT[:, 1:].reshape(-1)
        return mean_loss(x_NC, embedding_VC, targets_N)


@jax.jit
def step(state, tokens_BT):
    params, moments = state
    tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, jax.P("data"))
    loss, gradients = jax.value_and_grad(model.apply)(params, tokens_BT)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def init(key):
    return model.init(key, TOKENS_BT)


model, optimizer = Block(), optax.adamw(3e-3)
with jax.set_mesh(MESH):
    key = jax.random.key(0)
    shardings = nn.get_sharding(jax.eval_shape(init, key), MESH)
    params = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=shardings)(key)
    train(step, (params, optimizer.init(params)))
