"""Smoke test of an installed wheel: a model learns, samples, and survives a round trip through
Hugging Face's format."""

import importlib.resources
import tempfile

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gptjax
import gptjax.optim
import pallas_kernels

print(
    f"gptjax {gptjax.__version__} from {gptjax.__file__}, jax {jax.__version__}, flax "
    f"{flax.__version__}"
)

config = gptjax.GPT2Config(
    vocab_size=100, padded_vocab_size=128, block_size=16, n_layer=2, n_head=2, n_embd=32
)
model = gptjax.GPT2(config, rngs=nnx.Rngs(0))
graphdef, params = nnx.split(model, nnx.Param)
tokens = jax.random.randint(jax.random.key(0), (4, 17), 0, config.vocab_size)
tx = gptjax.optim.adamw(1e-2)


@jax.jit
def step(params, opt_state):
    def loss(params):
        return gptjax.loss_fn(nnx.merge(graphdef, params), tokens[:, :-1], tokens[:, 1:])

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


opt_state, losses = tx.init(params), []
for _ in range(20):
    params, opt_state, value = step(params, opt_state)
    losses.append(float(value))
assert abs(losses[0] - np.log(100)) < 0.5 and losses[-1] < 0.7 * losses[0], losses

model = nnx.merge(graphdef, params)
continued = gptjax.generate(
    model, tokens[:, :3], max_new_tokens=5, temperature=0.0, key=jax.random.key(0)
)
assert continued.shape == (4, 8) and bool((continued < 100).all())

with tempfile.TemporaryDirectory() as folder:
    gptjax.save_hf(model, folder)
    again = gptjax.load_hf(folder)
np.testing.assert_array_equal(again(tokens[:, :-1]), model(tokens[:, :-1]))

q = jnp.ones((1, 4, 2, 8))
assert pallas_kernels.flash_attention(q, q, q).shape == q.shape
assert pallas_kernels.flash_attention_qkv(jnp.ones((1, 4, 3, 2, 8))).shape == q.shape
# Every kernel, without a GPU and without Triton: XLA stands in, and a named kernel says what is
# missing.
x, w, b = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.zeros(8)
for name, args in {
    "flash_attention": (q, q, q),
    "softmax": (x,),
    "fused_classifier": (x, jnp.zeros(4, jnp.int32)),
    "linear_cross_entropy": (x, w, jnp.zeros(4, jnp.int32)),
    "layer_norm": (x, b, b),
    "rms_norm": (x,),
    "linear_gelu": (x, w, b),
    "linear_relu_squared": (x, w),
    "xxt": (x,),
    "xtx": (x,),
    "transpose_copy": (x,),
    "transpose_add": (w, w),
}.items():
    kernel = getattr(pallas_kernels, name)
    jax.block_until_ready(kernel(*args))
    try:
        kernel(*args, implementation="mosaic")
    except ValueError as error:
        assert name in str(error) or "linear_gelu" in str(error), error
    else:
        raise AssertionError(f"{name} ran a Mosaic kernel on a CPU")

# The tiles of attention's Triton kernels are data beside them.
tiles = importlib.resources.files("pallas_kernels.attention").joinpath("triton_tiles.json")
assert tiles.is_file()
orthogonal = gptjax.optim.polar_express(jax.random.normal(jax.random.key(0), (8, 16)))
assert float(jnp.abs(orthogonal @ orthogonal.T - jnp.eye(8)).max()) < 0.5
print(f"smoke test passed: loss {losses[0]:.3f} → {losses[-1]:.3f}")
