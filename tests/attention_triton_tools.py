"""Inputs, equations in fp64 and the check by the 2× rule for the tests of
pallas_kernels.flash_attention's Triton back end. Shapes are (B, T, H, K, D)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ptx_tools import to_tf32
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import flash_attention
from pallas_kernels.attention import flash_attention_qkv

NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(shape, dtype, segments=None, seed=0):
    """q, k, v, segment ids, and directions for the gradients of the output and of L; shape = (B, T,
    H, K, D).

    Scores have a standard deviation of 2: weights are far from uniform.
    """
    b, t, h, k, d = shape
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    q = normal(b, t, h, d) * jnp.asarray(2, dtype)
    ids = rng.integers(0, segments or 1, (b, t))
    if segments and seed % 2 == 0:
        ids.sort(axis=1)
    ids = jnp.asarray(ids, jnp.int32) if segments else None
    return (
        q,
        normal(b, t, k, d),
        normal(b, t, k, d),
        ids,
        normal(b, t, h, d),
        normal(b, h, t, dtype=jnp.float32),
    )


def visible(ids, t, causal, window):
    t_T1, s_1T = np.arange(t)[:, None], np.arange(t)[None, :]
    seen = np.ones((1, t, t), bool)
    if causal:
        seen = seen & (s_1T <= t_T1) & (t_T1 - s_1T < (window or t))
    if ids is not None:
        # Runs of equal ids.
        runs = np.cumsum(np.diff(np.asarray(ids), axis=1, prepend=0) != 0, axis=1)
        seen = seen & (runs[:, :, None] == runs[:, None, :])
    return seen


def equations(
    q, k, v, ids, dout, dlse, *, dtype=None, product=np.matmul, causal=True, scale=None, window=None
):
    """Output, L and the three gradients from the equations, a head at a time; in fp64.

    With a dtype they are the textbook: fp32, and every product's result rounded to the dtype.
    """
    wide = np.float64 if dtype is None else np.float32
    rounded = (lambda x: x) if dtype is None else (lambda x: x.astype(dtype).astype(np.float32))
    q, k, v, dout, dlse = (np.asarray(x).astype(wide) for x in (q, k, v, dout, dlse))
    scale = wide(q.shape[-1] ** -0.5 if scale is None else scale)
    b, t, heads, _ = q.shape
    seen = np.broadcast_to(visible(ids, t, causal, window), (b, t, t))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.zeros((b, heads, t), wide)
    for i, h in np.ndindex(b, heads):
        g = h // (heads // k.shape[2])
        scores = np.where(seen[i], scale * rounded(product(q[i, :, h], k[i, :, g].T)), -np.inf)
        highest = scores.max(-1, keepdims=True)
        lse[i, h] = highest[:, 0] + np.log(np.exp(scores - highest).sum(-1))
        weights = np.exp(scores - highest)
        weights /= weights.sum(-1, keepdims=True)
        out[i, :, h] = rounded(product(rounded(weights), v[i, :, g]))
        dweights = rounded(product(dout[i, :, h], v[i, :, g].T))
        dscores = weights * (
            dweights - (weights * dweights).sum(-1, keepdims=True) + dlse[i, h][:, None]
        )
        dscores = rounded(scale * dscores)
        dq[i, :, h] = rounded(product(dscores, k[i, :, g]))
        dk[i, :, g] = rounded(dk[i, :, g] + rounded(product(dscores.T, q[i, :, h])))
        dv[i, :, g] = rounded(dv[i, :, g] + rounded(product(rounded(weights).T, dout[i, :, h])))
    return out, lse, dq, dk, dv


def tf32_product(a, b):
    """Of TF32's numbers, without further rounding. XLA multiplies small arrays as they are, also
    where it has TF32."""
    return to_tf32(a).astype(np.float64) @ to_tf32(b).astype(np.float64)


def with_gradients(f, q, k, v, ids, dout, dlse):
    (out, lse), pull = jax.vjp(lambda q, k, v: f(q, k, v, ids), q, k, v)
    return out, lse, *pull((dout, dlse))


def attend(q, k, v, ids, **how):
    how = {"precision": "highest", **how}
    return flash_attention(
        q, k, v, segment_ids=ids, return_lse=True, implementation="triton", **how
    )


def attend_packed(q, k, v, ids, **how):
    how = {"precision": "highest", **how}
    qkv = jnp.stack([q, k, v], 2)
    return flash_attention_qkv(
        qkv, segment_ids=ids, return_lse=True, implementation="triton", **how
    )


def check(shape, dtype=jnp.float32, segments=None, seed=0, packed=False, product=np.matmul, **how):
    args, f = inputs(shape, dtype, segments, seed), attend_packed if packed else attend
    found = jax.jit(functools.partial(with_gradients, functools.partial(f, **how)))(*args)
    mask = {name: how[name] for name in ("causal", "scale", "window") if name in how}
    textbook, exact = (
        equations(*args, dtype=dtype, product=product, **mask),
        equations(*args, **mask),
    )
    for name, ours, theirs, true in zip(NAMES, found, textbook, exact, strict=True):
        assert ours.dtype == (jnp.float32 if name == "lse" else dtype)
        # The worst of a few fp32 roundings is a matter of luck.
        for norm in (rms,) if dtype == jnp.float32 else (rms, max_abs):
            assert_within_twice(ours, theirs, true, norm=norm, name=name)


def set_tiles(monkeypatch, m, n, backward="split"):
    """Blocks so small that a few rows make several of them."""
    from pallas_kernels.attention import triton

    tile = {"M": m, "N": n, "rows": 100, "num_warps": 4, "num_stages": 2}
    entry = {"backward": backward, "precision": "ieee", **dict.fromkeys(triton.PASSES, tile)}
    monkeypatch.setattr(triton, "tuning", lambda *_: entry)


def gradients(deterministic=False, **how):
    def f(q, k, v):
        out = flash_attention(q, k, v, implementation="triton", deterministic=deterministic, **how)
        return out.astype(jnp.float32).sum()

    return jax.grad(f, (0, 1, 2))


def packed_gradients(**how):
    f = lambda qkv: (
        flash_attention_qkv(qkv, implementation="triton", **how).astype(jnp.float32).sum()
    )
    return jax.grad(f)
