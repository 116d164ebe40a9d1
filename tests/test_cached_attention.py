"""pallas_kernels.cached_attention against its definition in fp64, by the 2× rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import on_gpu
from reference.attention import exact_attention
from rule_tools import refused, run_reference

from pallas_kernels import cached_attention

B, S, H, K, D = 3, 37, 8, 2, 24
BF16, DTYPES = jnp.bfloat16, [jnp.float32, jnp.float16]
SINKS = np.linspace(-2, 3, H, dtype=np.float32)
OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks_H": SINKS},
    "all": {"window": 20, "softcap": 3.0, "sinks_H": SINKS, "scale": -0.3},
}


def inputs(dtype, t, lengths=(2, 20, S), *, shape=(B, S, H, K, D)):
    """Queries, caches and lengths. The first sequence has fewer keys than 5 queries."""
    b, s, h, k, d = shape
    rng = np.random.default_rng(t)
    sizes = (b, t, h, d), (b, s, k, d), (b, s, k, d)
    arrays = [jnp.asarray(2 * rng.standard_normal(size), dtype) for size in sizes]
    return *arrays, jnp.asarray(lengths, jnp.int32)


def defined(q, k, v, lengths, *, window=None, **options):
    """Return O in fp64, from the equations."""
    after_BT1 = np.asarray(lengths)[:, None, None] - np.arange(q.shape[1])[::-1][None, :, None]
    key = np.arange(k.shape[1])
    seen = (key < after_BT1) & (key >= (0 if window is None else after_BT1 - window))
    return exact_attention(q, k, v, seen, **options)[0]


def run(implementation, *args, sinks_H=None, **options):
    sinks_H = None if sinks_H is None else jnp.asarray(sinks_H)
    return cached_attention(*args, sinks_H=sinks_H, implementation=implementation, **options)


@pytest.fixture
def small_tiles(request, monkeypatch):
    """On a CPU, tiles of 16 rows and 16 keys: five queries have two tiles, the keys three parts."""
    from pallas_kernels.cached_attention import triton

    if "gpu" not in request.keywords:
        request.getfixturevalue("triton_on_cpu")
        monkeypatch.setattr(triton, "TILE_BYTES", 1)


LARGER = {"window": 1000, "sinks_H": np.linspace(-2, 3, 2 * H, dtype=np.float32)}
ON_GPU = {
    name: {key: LARGER.get(key, x) for key, x in options.items()}
    for name, options in OPTIONS.items()
}
LENGTHS = (2, 4096, 1, 777, 2048, 3000, 100, 4095)


@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize(
    "dtype, name", [*itertools.product(DTYPES, OPTIONS), *on_gpu(*((BF16, x) for x in OPTIONS))]
)
def test_triton(dtype, t, name, small_tiles, request):
    """The kernel does not read the keys and values after the valid ones."""
    args, options = inputs(dtype, t), OPTIONS[name]
    if "gpu" in request.keywords:
        shape = (8, 4096, 2 * H, 2 * K, 128)
        args, options = inputs(dtype, t, LENGTHS, shape=shape), ON_GPU[name]
    q, *caches, lengths = args
    valid = (np.arange(caches[0].shape[1]) < np.asarray(lengths)[:, None])[:, :, None, None]
    unread = [jnp.where(valid, x, jnp.nan) for x in caches]
    found = jax.jit(functools.partial(run, "triton", **options))(q, *unread, lengths)
    plain = run_reference(functools.partial(run, "xla", precision="highest", **options), *args)
    exact = defined(*args, **options)
    assert found.dtype == dtype
    for norm in (rms, max_abs):
        assert_within_twice(found, plain, exact, norm=norm, name="O")
    if t == 5:
        assert not np.asarray(found)[0, :3].any()  # no key


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_plain_jax(implementation, t, options):
    """Scores of up to 20 have rounding errors of 1e-6."""
    args, options = inputs(jnp.float32, t), OPTIONS[options]
    found = run(implementation, *args, precision="highest", **options)
    np.testing.assert_allclose(found, defined(*args, **options), rtol=0, atol=1e-5)


def test_vmap(small_tiles):
    """Over the batch, and over sinks too, which a launch shares."""
    pairs = [inputs(jnp.float32, t) for t in (5, 5)]
    stacked = [jnp.stack(pair) for pair in zip(*pairs, strict=True)]
    sinks = jnp.stack([jnp.asarray(SINKS), jnp.asarray(SINKS) + 1])
    call = lambda *args: run("triton", *args[:4], sinks_H=args[4])
    for axis, of in ((None, lambda i: sinks[0]), (0, lambda i: sinks[i])):
        found = jax.vmap(call, (0, 0, 0, 0, axis))(*stacked, sinks if axis == 0 else sinks[0])
        for i, args in enumerate(pairs):
            expected = run("xla", *args, sinks_H=of(i), precision="highest")
            np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-5)


def test_refusals(triton_on_cpu):
    q, k, v, lengths = inputs(jnp.float32, 5)
    of_q = lambda q: run("triton", q, k, v, lengths).sum()
    with pytest.raises(NotImplementedError, match="cached_attention: .* has no derivative; pass"):
        jax.grad(of_q)(q)
    message = "implementation 'triton' supports at most 16 queries of a sequence, not 20"
    with pytest.raises(ValueError, match=message):
        run("triton", jnp.concatenate([q] * 4, 1), k, v, lengths)
    for wrong, message in (
        ((q[:, :, :3], k, v, lengths), r"multiple of key heads.*\(3, 5, 3"),
        ((q, k, v[:, 1:], lengths), "expected q of shape .batch, time, heads"),
        ((q, k, v[..., 1:], lengths), "expected k and v of one shape"),
        ((q, k, v, lengths.astype(jnp.float32)), "lengths .batch,. in integers, got"),
        ((q.astype(jnp.bfloat16), k, v, lengths), "one dtype for q, k, v, got bfloat16, float32"),
    ):
        refused(cached_attention, *wrong, match=f"cached_attention: .*{message}")
    refused(cached_attention, q, k, v, lengths, window=0, match="a window of at least 1, got 0")
    refused(cached_attention, q, k, v, lengths, softcap=0.0, match="a positive softcap, got 0.0")
    sinks = {"sinks_H": jnp.ones(K)}
    refused(cached_attention, q, k, v, lengths, **sinks, match=r"shape \(8,\), got \(2,\)")
