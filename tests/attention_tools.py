"""Inputs, the textbook, and the check by the 2× rule for the tests of
pallas_kernels.flash_attention. Shapes are (B, T, H, K, D)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from comparison_tools import assert_within_twice, max_abs, rms
from reference.attention import at_once, textbook
from rule_tools import in_fp64, with_gradients

from pallas_kernels import _dispatch, flash_attention, flash_attention_qkv
from pallas_kernels.attention import reference

NAMES = ("out", "lse", "dq", "dk", "dv")


def inputs(shape, dtype, seed=0):
    """q, k, v; directions for the gradients of the output and of L. Scores have a standard
    deviation of 2: weights are far from uniform."""
    b, t, h, k, d = shape
    rng = np.random.default_rng(seed)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal(sizes), dtype)
    q, k, v, dout = draw(b, t, h, d), draw(b, t, k, d), draw(b, t, k, d), draw(b, t, h, d)
    dlse = jnp.asarray(rng.standard_normal((b, h, t)), jnp.float32)
    return (q * jnp.asarray(2, dtype), k, v), (dout, dlse)


def square(b, t, h, k, d):
    """The shape (B, T, S, H, K, D, E) of attention of as many keys as queries."""
    return b, t, t, h, k, d, d


def set_tiles(monkeypatch, m, n):
    """Blocks so small that a few rows make several of them."""
    from pallas_kernels.attention import triton

    tile = {"M": m, "N": n, "num_warps": 4, "num_stages": 2}
    entry = {"precision": "ieee", **dict.fromkeys(("forward", "dkv", "dq"), tile)}
    monkeypatch.setattr(triton, "tuning", lambda *_: entry)
    monkeypatch.setattr(triton, "ROWS_TOGETHER", 100)


def segments(shape, number, seed=0):
    """Random segment ids, sorted where the seed is even; as an argument of the calls below."""
    ids = np.random.default_rng(seed).integers(0, number, shape[:2]).astype(np.int32)
    if seed % 2 == 0:
        ids.sort(axis=1)
    return {"segment_ids": ids}


def seen(shape, *, causal=True, window=None, segment_ids=None, key_range=None, query_start=None):
    """B·T·S: whether query t sees key s, from the definition."""
    b, t, s = shape[:3]
    start = s - t if query_start is None else query_start
    position, key = np.arange(t)[:, None] + start, np.arange(s)[None]
    left, right = window if isinstance(window, tuple) else ((window or s + t + 99) - 1, None)
    mask = np.broadcast_to((key <= position) | (not causal), (b, t, s)).copy()
    if window is not None:
        mask &= (left is None) | (key >= position - (left or 0))
        mask &= (right is None) | (key <= position + (right or 0))
    if isinstance(segment_ids, tuple):
        mask &= segment_ids[0][:, :, None] == segment_ids[1][:, None]
    elif segment_ids is not None:
        run = np.cumsum(np.diff(segment_ids, axis=1, prepend=0) != 0, axis=1)
        mask &= run[:, :, None] == run[:, None]
    if key_range is not None:
        mask &= (key_range[0][:, :, None] <= key) & (key <= key_range[1][:, :, None])
    return mask


def of_mask(q, k, v, *, scale=None, multiply=None, **mask):
    """The textbook, of a mask's options."""
    visible = seen((*q.shape[:2], k.shape[1]), **mask)
    return textbook(q, k, v, visible, scale=scale, multiply=multiply)


@jax.custom_vjp
def tf32_matmul(a, b):
    """Of TF32's numbers. XLA multiplies small arrays as they are, also where it has TF32."""
    return jnp.matmul(_to_tf32(a), _to_tf32(b), precision="highest")


def _to_tf32(x):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x1000)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def _tf32_backward(saved, dy):
    a, b = saved
    return tf32_matmul(dy, b.swapaxes(-1, -2)), tf32_matmul(a.swapaxes(-1, -2), dy)


tf32_matmul.defvjp(lambda a, b: (tf32_matmul(a, b), (a, b)), _tf32_backward)


def results(f, args, directions):
    """out, lse, dq, dk and dv of a function that returns out and lse."""
    out, gradients = with_gradients(f)(args, directions)
    return (*out, *gradients)


def plain_and_exact(args, directions, *, multiply=None, segment_ids=None, **mask):
    """The five results of the textbook and of the definition.

    On a GPU one sequence after another: the scores of many would fill a GPU that other tests use.
    """

    def of(i):
        how = mask | ({} if segment_ids is None else {"segment_ids": segment_ids[i]})
        plain = functools.partial(of_mask, multiply=multiply, **how)
        exact = functools.partial(reference, return_lse=True, **how)
        parts = jax.tree.map(lambda x: x[i], (args, directions))
        return at_once(functools.partial(results, plain))(*parts), in_fp64(
            functools.partial(results, exact), *parts
        )

    batch = len(args[0])
    many = batch > 1 and _dispatch.platform() == "gpu"
    parts = [of(np.s_[i : i + 1]) for i in range(batch)] if many else [of(np.s_[:])]
    join = lambda *x: np.concatenate([np.asarray(y, np.float64) for y in x])
    return [[join(*x) for x in zip(*which, strict=True)] for which in zip(*parts, strict=True)]


def compare(found, plain, exact, names=NAMES, norms=(rms, max_abs)):
    for name, ours, theirs, true in zip(names, found, plain, exact, strict=True):
        for norm in norms:
            assert_within_twice(ours, theirs, true, norm=norm, name=name)


def call(back_end, *, packed=False, **how):
    """A function of q, k and v that returns O and L."""
    how = {"return_lse": True, "implementation": back_end, **how}

    def f(q, k, v):
        if packed:
            return flash_attention_qkv(jnp.stack([q, k, v], 2), **how)
        return flash_attention(q, k, v, **how)

    return f


def check(
    back_end,
    shape,
    dtype,
    *,
    multiply=None,
    seed=0,
    norms=(rms, max_abs),
    lse=True,
    arrays=None,
    **how,
):
    """Output, L and the gradients of a public function by the 2× rule. Return them.

    Args:
        lse: whether L is returned; a back end may not have it.
        arrays: q, k and v, and directions, in place of those of `inputs`.
    """
    args, directions = arrays or inputs(shape, dtype, seed)
    if not lse:
        directions = directions[0], jnp.zeros_like(directions[1])
    options = {k: jnp.asarray(x) if k == "segment_ids" else x for k, x in how.items()}
    f = call(back_end, **{"precision": "highest", "return_lse": lse, **options})
    with_lse = f if lse else lambda *qkv: (f(*qkv), directions[1])
    # Not while matmuls of XLA are in progress: they and Mosaic's interpreter can wait for each
    # other's threads.
    args, directions = jax.block_until_ready((args, directions))
    found = jax.block_until_ready(jax.jit(functools.partial(results, with_lse))(args, directions))
    assert [x.dtype for x in found] == [dtype, jnp.float32, dtype, dtype, dtype]
    mask = {k: how[k] for k in ("causal", "scale", "window", "segment_ids") if k in how}
    plain, exact = plain_and_exact(args, directions, multiply=multiply, **mask)
    if not lse:
        plain, exact = ([x[0], directions[1], *x[2:]] for x in (plain, exact))
    compare(found, plain, exact, norms=norms)
    return found
