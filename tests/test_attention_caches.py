"""Attention with windows, sinks and soft caps equals its definition, with or without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def qkv(dtype=jnp.float32):
    keys, heads = jax.random.split(jax.random.key(0), 3), (H, K, K)
    return [
        (2 * jax.random.normal(key, (B, T, n, D))).astype(dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def defined(q, k, v, segments=None, *, window=None, sinks_H=None, softcap=None, scale=None):
    """Return P and O, in fp64, one query and one head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    pattern, out = np.zeros((B, H, T, T)), np.zeros((B, T, H, D))
    for b, h, t in np.ndindex(B, H, T):
        first = 0 if window is None else max(0, t + 1 - window)
        while segments is not None and len(set(segments[b, first : t + 1])) > 1:
            first += 1
        scores = k[b, first : t + 1, h // (H // K)] @ q[b, t, h] * (scale or D**-0.5)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        sink = 0 if sinks_H is None else np.exp(np.float64(sinks_H[h]))
        p = np.exp(scores) / (np.exp(scores).sum() + sink)
        pattern[b, h, t, first : t + 1] = p
        out[b, t, h] = p @ v[b, first : t + 1, h // (H // K)]
    return pattern, out


def in_cache(q, k, v, parts=(0, 5, 6, 13), **options):
    cache = KVCache.empty((B, T + 3, K, D), k.dtype)
    sliced = [[x[:, a:b] for x in (q, k, v)] for a, b in zip(parts, parts[1:], strict=False)]
    return jnp.concatenate([cache.attend(*part, **options) for part in sliced], axis=1)


@pytest.mark.parametrize("segmented", [False, True])
def test_attention_is_its_definition(options, segmented):
    segments = np.repeat([[7, 3, 7, 1]], B, 0).repeat([2, 5, 1, 5], 1) if segmented else None
    _, expected = defined(*qkv(), segments, **options)
    ids = None if segments is None else jnp.asarray(segments)
    y = attention(*qkv(), segment_ids=ids, precision="highest", **options)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6)


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


def test_bf16_is_within_twice_the_error_of_plain_attention(options):
    _, expected = defined(*qkv(), **options)
    exact = {name: x for name, x in options.items() if name != "sinks_H"}
    _, plain = defined(*qkv(), **exact)
    error = np.abs(np.float64(attention(*qkv(jnp.bfloat16), **exact)) - plain).max()
    for y in (attention(*qkv(jnp.bfloat16), **options), in_cache(*qkv(jnp.bfloat16), **options)):
        assert y.dtype == jnp.bfloat16
        assert np.abs(np.float64(y) - expected).max() < 2 * error + 1e-6


def test_gradients_are_those_of_the_cache(options):
    """The cache computes in plain JAX, which JAX differentiates, sinks included."""
    args = qkv()
    sinks = {k: x for k, x in options.items() if k == "sinks_H"}
    options = {k: x for k, x in options.items() if k not in sinks} | {"precision": "highest"}

    def gradients(f):
        loss = lambda args, sinks: jnp.sin(f(*args, **options, **sinks)).sum()
        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(args, sinks))

    for got, want in zip(gradients(attention), gradients(in_cache), strict=True):
        assert np.abs(want).max() > 1e-2
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_the_pattern_is_the_definition(options):
    q, k, v = qkv()
    expected, _ = defined(q, k, v, **options)
    np.testing.assert_allclose(
        attention_pattern(q, k, precision="highest", **options), expected, rtol=0, atol=1e-6
    )
