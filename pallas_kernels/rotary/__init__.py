"""Rotary position embedding: split a packed projection, normalize and rotate queries and keys.

Each head of D channels, with E angles φ_i per token (Su et al., "RoFormer", 2021):

    x̂ = x / √(mean(x²) + eps)                   where eps is given; else x̂ = x
    y_a = x̂_a cos φ_i − x̂_b sin φ_i             a, b the channels of pair i
    y_b = x̂_b cos φ_i + x̂_a sin φ_i
    y_c = x̂_c                                   c ≥ 2·E

    g_a = dy_a cos φ_i + dy_b sin φ_i           and so on: the rotation by −φ
    dx = r · (g − x̂ · mean(g · x̂))              r = 1 / √(mean(x²) + eps)

Values are copied. The two layouts of pairs:

    adjacent: channels 2i and 2i + 1 (RoFormer, modded-nanogpt)
    halves: channels i and E + i (GPT-NeoX, Llama)

Shapes: B batch, T time, H heads of queries, G of keys and of values, O = (H + 2·G)·D packed
channels, D channels of a head, E ≤ D/2 angles. A row is one head of one token.

Arithmetic is fp32; results are rounded once. With `eps`, the backward pass reads the packed
projection again. The forward pass saves no other array.

Back ends:
    triton: one kernel per pass. NVIDIA GPUs from Ampere on; D, E and D − 2·E are powers of two (or
        0). Differentiable once, in reverse mode.
    xla: plain JAX; any device.
    reference: the definition in fp32. Any device.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float

Implementation = Literal["auto", "triton", "xla", "reference"]
Pairs = Literal["adjacent", "halves"]


@dataclasses.dataclass(frozen=True)
class RotaryFacts:
    """Properties of a call on which the choice of a back end depends."""

    head_dim: int
    angles: int


def _why_not_triton(call: RotaryFacts) -> str | None:
    rest = call.head_dim - 2 * call.angles
    if any(size & (size - 1) for size in (call.head_dim, call.angles, rest)):
        return (
            "supports a head_dim, a number of angles and a number of channels without angle that "
            f"are powers of two, not {call.head_dim}, {call.angles} and {rest}"
        )
    return _dispatch.why_not_triton()


_dispatch.register(
    "rotary_qkv",
    back_ends=[BackEnd("triton", _why_not_triton, custom=True, rule=True), XLA, REFERENCE],
    facts=RotaryFacts,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call: the parameters of `rotary_qkv`."""

    heads: int
    key_heads: int
    pairs: str = "adjacent"
    eps: float | None = None
    pair_heads: bool = False

    @property
    def packed_heads(self) -> int:
        return self.heads + 2 * self.key_heads


def rotary_qkv(
    qkv: Float[Array, "B T O"],
    cos: Float[Array, "#B _ E"],
    sin: Float[Array, "#B _ E"],
    *,
    heads: int,
    key_heads: int | None = None,
    pairs: Pairs = "adjacent",
    eps: float | None = None,
    pair_heads: bool = False,
    implementation: Implementation | str = "auto",
) -> tuple[Float[Array, "B _ _ D"], Float[Array, "B _ _ D"], Float[Array, "B _ _ D"]]:
    """Return queries (B, T, H, D), keys and values (B, T, G, D) of a packed projection.

    Args:
        qkv: fp32, bf16 or fp16: the heads of the queries, then of the keys, then of the values.
        cos, sin: cosine and sine of each angle at each time of the results, fp32, without gradient.
        heads: H.
        key_heads: G; H if None.
        pairs: channels that rotate together.
        eps: added to the mean squares. None: queries and keys are not normalized.
        pair_heads: view the results as 2·T times of half as many heads (modded-nanogpt): head h of
            token t is head h mod H/2 at time 2t + ⌊h / (H/2)⌋, so that heads h and h + H/2 attend
            to each other. It is rotated by the angles of time 2t + (h mod 2).
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Raises:
        ValueError: wrong shapes or dtypes, or the named back end cannot run this call.
    """
    options = Options(heads, heads if key_heads is None else key_heads, pairs, eps, pair_heads)
    head_dim = _check(qkv, cos, sin, options)
    facts = {"head_dim": head_dim, "angles": cos.shape[-1]}
    backend = _dispatch.select("rotary_qkv", implementation, arrays=(qkv, cos, sin), **facts)
    if backend == "triton":
        return _calls.differentiable("rotary_qkv", _triton, qkv, cos, sin, options)
    results = reference(qkv, cos, sin, options)
    return jax.tree.map(lambda x: x.astype(qkv.dtype), results)


def reference(qkv_BTO, cos_BTE, sin_BTE, options: Options):
    """Compute the definition in fp32. Return fp32."""
    e, split, adjacent = cos_BTE.shape[-1], 1 + options.pair_heads, options.pairs == "adjacent"
    axis, pairs = (-1, (e, 2)) if adjacent else (-2, (2, e))
    (n, t, o), h, g = qkv_BTO.shape, options.heads, options.key_heads
    d = o // options.packed_heads
    # Even heads have the angles of time 2t with `pair_heads`, and odd heads those of 2t + 1.
    angles = (cos_BTE.shape[0], t, 1, split, e)
    cos, sin = (jax.lax.stop_gradient(x).reshape(angles) for x in (cos_BTE, sin_BTE))

    def rotated(x):
        if options.eps is not None:
            x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + options.eps)
        x = x.reshape(n, t, x.shape[2] // split, split, d)
        a, b = jnp.unstack(x[..., : 2 * e].reshape(*x.shape[:-1], *pairs), axis=axis)
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
        return jnp.concatenate([turned.reshape(*x.shape[:-1], 2 * e), x[..., 2 * e :]], axis=-1)

    heads = qkv_BTO.reshape(n, t, h + 2 * g, d).astype(jnp.float32)
    q, k, v = rotated(heads[:, :, :h]), rotated(heads[:, :, h : h + g]), heads[:, :, h + g :]
    return tuple(
        x.reshape(n, split * t, count // split, d) for x, count in ((q, h), (k, g), (v, g))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _triton(qkv_BTO, cos_BTE, sin_BTE, options: Options):
    return _forward(qkv_BTO, cos_BTE, sin_BTE, options)[0]


def _forward(qkv_BTO, cos_BTE, sin_BTE, options: Options):
    from pallas_kernels.rotary import triton

    launch = functools.partial(triton.forward, options=options)
    angles = _angles(cos_BTE)
    rule = Rule(f"b t o, {angles} -> b s q d, b s k d, b s k d", over="b")
    results = _calls.looped("rotary_qkv", launch, rule=rule)(qkv_BTO, cos_BTE, sin_BTE)
    return results, (None if options.eps is None else qkv_BTO, cos_BTE, sin_BTE)


def _backward(options: Options, saved, gradients):
    from pallas_kernels.rotary import triton

    qkv_BTO, cos_BTE, sin_BTE = saved
    launch = functools.partial(triton.backward, options=options)
    rule = Rule(f"b s q d, b s k d, b s k d, {_angles(cos_BTE)}, b t o -> b t o", over="b")
    launch = _calls.looped("rotary_qkv", launch, rule=rule)
    (dqkv_BTO,) = launch(*gradients, cos_BTE, sin_BTE, qkv_BTO)
    return dqkv_BTO, jnp.zeros_like(cos_BTE), jnp.zeros_like(sin_BTE)


_triton.defvjp(_forward, _backward)


def _angles(cos_BTE) -> str:
    """Return the axes of cos and sin for a `Rule`."""
    return "one s e, one s e" if cos_BTE.shape[0] == 1 else "b s e, b s e"


def _check(qkv, cos, sin, options: Options) -> int:
    """Check shapes and dtypes; return D."""
    packed, split = options.packed_heads, 1 + options.pair_heads
    if (
        not qkv.ndim == cos.ndim == sin.ndim == 3
        or min(options.heads, options.key_heads) < 1
        or options.heads % split
        or options.key_heads % split
        or qkv.shape[2] % packed
        or not 1 <= cos.shape[2] <= qkv.shape[2] // packed // 2
        or cos.shape != sin.shape
        or cos.shape[0] not in (1, qkv.shape[0])
        or cos.shape[1] != qkv.shape[1] * split
    ):
        raise ValueError(
            f"rotary_qkv: expected qkv (B, T, O) with O a multiple of H + 2·G = {packed} heads, "
            "even numbers of heads with pair_heads; with E at most D/2 and T of the results, cos "
            f"and sin (B or 1, T, E), got {qkv.shape}, {cos.shape}, {sin.shape}"
        )
    if qkv.dtype not in _dispatch.DTYPES or {cos.dtype, sin.dtype} != {jnp.dtype(jnp.float32)}:
        raise ValueError(
            "rotary_qkv: expected qkv in float32, bfloat16 or float16, cos and sin in float32, got "
            f"{qkv.dtype}, {cos.dtype}, {sin.dtype}"
        )
    known = options.pairs in ("adjacent", "halves")
    if not known or (options.eps is not None and not options.eps > 0):
        raise ValueError(
            "rotary_qkv: expected pairs 'adjacent' or 'halves' and eps > 0 or None, got "
            f"{options.pairs!r} and {options.eps}"
        )
    return qkv.shape[2] // packed


# ----------------------------------------------------------------------------------------- examples


def _example(rows: int, dtype, d: int, e: int, options: Options):
    length = 512 if rows % 512 == 0 else rows
    packed = (rows // length, length, options.packed_heads * d)
    angle = jax.ShapeDtypeStruct((1, length * (1 + options.pair_heads), e), jnp.float32)
    arrays = (jax.ShapeDtypeStruct(packed, dtype), angle, angle)
    call = functools.partial(rotary_qkv, **vars(options))
    return _dispatch.Example(call, functools.partial(reference, options=options), arrays)


@_dispatch.example("rotary_qkv")
def _speedrun_example(rows, dtype):
    """The speedrun's paired heads: half of the channels rotate, with a norm."""
    return _example(rows, dtype, 128, 32, Options(6, 6, eps=1e-6, pair_heads=True))


@_dispatch.example("rotary_qkv")
def _llama_example(rows, dtype):
    """Grouped queries of Llama 3.2 1B."""
    return _example(rows, dtype, 64, 32, Options(32, 8, pairs="halves"))
