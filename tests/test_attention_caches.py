"""KVCache with windows, sinks and soft caps equals attention without a cache, of which
test_attention_options.py has the definition; attention_pattern equals its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_tools import seen
from reference.attention import exact_weights

from gptjax.models.layers import KVCache, attention_pattern
from pallas_kernels import flash_attention as attention

B, T, H, K, D = 2, 13, 4, 2, 8
SINKS = jnp.array([-2.0, 0.0, 1.0, 3.0])
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "sinks": {"sinks_H": SINKS},
    "softcap": {"softcap": 2.0},
    "all": {"window": 4, "sinks_H": SINKS, "softcap": 2.0, "scale": 0.3},
}


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


def qkv():
    keys, heads = jax.random.split(jax.random.key(0), 3), (H, K, K)
    return [2 * jax.random.normal(key, (B, T, n, D)) for key, n in zip(keys, heads, strict=True)]


def in_cache(q, k, v, parts=(0, 5, 6, 13), **options):
    cache = KVCache.empty((B, T + 3, K, D), k.dtype)
    sliced = [[x[:, a:b] for x in (q, k, v)] for a, b in zip(parts, parts[1:], strict=False)]
    return jnp.concatenate([cache.attend(*part, **options) for part in sliced], axis=1)


def test_the_cache_equals_the_pass_without_a_cache(options):
    q, k, v = qkv()
    whole = attention(q, k, v, precision="highest", **options)
    cached = jax.jit(lambda *qkv: in_cache(*qkv, precision="highest", **options))
    np.testing.assert_allclose(cached(q, k, v), whole, rtol=0, atol=2e-6)
    prompt = KVCache.of_prompt()
    first = prompt.attend(q[:, :9], k[:, :9], v[:, :9], precision="highest", **options)
    cache = prompt.extended(T, jnp.full((B,), 9))
    rest = cache.attend(q[:, 9:], k[:, 9:], v[:, 9:], precision="highest", **options)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), whole, rtol=0, atol=2e-6)


def test_the_pattern_is_the_definition(options):
    q, k, _ = qkv()
    found = attention_pattern(q, k, **options)
    rest = {name: x for name, x in options.items() if name != "window"}
    visible = seen((B, T, T), window=options.get("window"))
    np.testing.assert_allclose(found, exact_weights(q, k, visible, **rest)[0], rtol=0, atol=1e-6)
