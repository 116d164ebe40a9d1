"""A transformer block in flax.nnx, whose parameters have the metadata `out_sharding`.

python examples/sharded/nnx_block.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from training import MESH, C, D, F, H, V, mean_loss, train

from pallas_kernels import flash_attention, mlp, rms_norm


class Block(nnx.Module):
    def __init__(self, rngs):
        def weight(shape, *axes):
            return nnx.Param(0.05 * jax.random.normal(rngs.params(), shape), out_sharding=axes)

        self.embedding_VC = weight((V, C), "model", None)
        self.qkv_3CHD = weight((3, C, H, D), None, None, "model", None)
        self.out_HDC = weight((H, D, C), "model", None, None)
        self.up_CF = weight((C, F), None, "model")
        self.bias_F = weight((F,), "model")
        self.down_FC = weight((F, C), "model", None)

    def __call__(self, tokens_BT):
        x_BTC = self.embedding_VC[tokens_BT]
        q, k, v = jnp.einsum("btc,zchd->zbthd", rms_norm(x_BTC), self.qkv_3CHD[...])
        y_BTC = jnp.einsum("bthd,hdc->btc", flash_attention(q, k, v), self.out_HDC[...])
        y_BTC, x_BTC = rms_norm(y_BTC, residual=x_BTC)
        return x_BTC + mlp(y_BTC, self.up_CF[...], self.bias_F[...], self.down_FC[...])


@nnx.value_and_grad
def loss(model, tokens_BT):
    x_NC, targets_N = model(tokens_BT[:, :-1]).reshape(-1, C), tokens_BT[:, 1:].reshape(-1)
    return mean_loss(x_NC, model.embedding_VC[...], targets_N)


@nnx.jit
def step(state, tokens_BT):
    model, optimizer = state
    tokens_BT = jax.lax.with_sharding_constraint(tokens_BT, jax.P("data"))
    value, gradients = loss(model, tokens_BT)
    optimizer.update(model, gradients)
    return state, value


with jax.set_mesh(MESH):
    model = nnx.jit(lambda: Block(nnx.Rngs(0)))()
    train(step, (model, nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)))
