"""Generation compared with full forward passes, for any model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gptjax import generate

forward = nnx.jit(lambda model, tokens_BT: model(tokens_BT))


@nnx.jit
def advance(model, cache, tokens_BT):
    """Hidden states of tokens that continue the cached sequence, and the cache with them."""
    return model.hidden(tokens_BT, cache), cache


def cached_logits(model, tokens_BT, chunks):
    """Logits of every position, fed to the cache a chunk at a time."""
    cache, start, logits = model.init_cache(*tokens_BT.shape), 0, []
    for size in chunks:
        x_BTC, cache = advance(model, cache, tokens_BT[:, start : start + size])
        logits.append(model.logits(x_BTC))
        start += size
    assert start == tokens_BT.shape[1] == int(cache[0].length_B[0])
    return np.asarray(jnp.concatenate(logits, axis=1), np.float32)


def check_cache(model, tokens_BT, chunks):
    """Check that cached logits are those of one forward pass, which depends on the tokens."""
    full = np.asarray(forward(model, tokens_BT))
    assert full.std() > 0.5
    np.testing.assert_allclose(cached_logits(model, tokens_BT, chunks), full, rtol=0, atol=3e-5)


def greedy(model, prompt_BT, new):
    """Generate the likeliest tokens; check that they are those of one forward pass."""
    how = {"max_new_tokens": new, "temperature": 0.0, "key": jax.random.key(0)}
    out_BT, prompt = generate(model, prompt_BT, **how), prompt_BT.shape[1]
    assert out_BT.dtype == jnp.int32 and out_BT.shape == (len(prompt_BT), prompt + new)
    np.testing.assert_array_equal(out_BT[:, :prompt], prompt_BT)
    likeliest_BT = forward(model, out_BT).argmax(axis=-1)
    np.testing.assert_array_equal(out_BT[:, prompt:], likeliest_BT[:, prompt - 1 : -1])
    return out_BT
