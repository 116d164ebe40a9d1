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
from jaxtyping import Array, Float

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd

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
    back_ends=[BackEnd("triton", _why_not_triton, custom=True), XLA, REFERENCE],
    facts=RotaryFacts,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call: the parameters of `rotary_qkv`."""

    heads: int
    key_heads: int
    pairs: str
    eps: float | None
    pair_heads: bool

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
    cos_BTE, sin_BTE = jax.lax.stop_gradient((cos_BTE, sin_BTE))
    b, t, o = qkv_BTO.shape
    heads = qkv_BTO.reshape(b, t, options.packed_heads, o // options.packed_heads)
    parts = [options.heads, options.heads + options.key_heads]
    q, k, v = jnp.split(heads.astype(jnp.float32), parts, axis=2)
    if options.eps is not None:
        q, k = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + options.eps) for x in (q, k))
    rotate = functools.partial(_rotated, cos_BTE=cos_BTE, sin_BTE=sin_BTE, options=options)
    q, k = rotate(q), rotate(k)
    if options.pair_heads:
        q, k, v = (x.reshape(b, 2 * t, x.shape[2] // 2, x.shape[3]) for x in (q, k, v))
    return q, k, v


def _rotated(x_BTHD, *, cos_BTE, sin_BTE, options: Options):
    *bth, d = x_BTHD.shape
    e = cos_BTE.shape[-1]
    adjacent = options.pairs == "adjacent"
    a, b = jnp.unstack(
        x_BTHD[..., : 2 * e].reshape(*bth, *((e, 2) if adjacent else (2, e))),
        axis=-1 if adjacent else -2,
    )
    cos, sin = (_of_heads(angle, bth[2], options.pair_heads) for angle in (cos_BTE, sin_BTE))
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1 if adjacent else -2)
    return jnp.concatenate([turned.reshape(*bth, 2 * e), x_BTHD[..., 2 * e :]], axis=-1)


def _of_heads(angle_BTE, heads: int, pair_heads: bool):
    """Return the angles of each head, (B, T, 1 or H, E). Even heads of a pair have those of 2t."""
    if not pair_heads:
        return angle_BTE[:, :, None]
    b, times, e = angle_BTE.shape
    return jnp.tile(angle_BTE.reshape(b, times // 2, 2, e), (1, 1, heads // 2, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _triton(qkv_BTO, cos_BTE, sin_BTE, options: Options):
    return _forward(qkv_BTO, cos_BTE, sin_BTE, options)[0]


def _forward(qkv_BTO, cos_BTE, sin_BTE, options: Options):
    from pallas_kernels.rotary import triton

    launch = functools.partial(triton.forward, options=options)
    results = _calls.looped("rotary_qkv", launch)(qkv_BTO, cos_BTE, sin_BTE)
    return results, (None if options.eps is None else qkv_BTO, cos_BTE, sin_BTE)


def _backward(options: Options, saved, gradients):
    from pallas_kernels.rotary import triton

    qkv_BTO, cos_BTE, sin_BTE = saved
    arrays = (*gradients, cos_BTE, sin_BTE, *(() if qkv_BTO is None else (qkv_BTO,)))
    launch = functools.partial(triton.backward, options=options)
    (dqkv_BTO,) = _calls.looped("rotary_qkv", launch)(*arrays)
    return dqkv_BTO, jnp.zeros_like(cos_BTE), jnp.zeros_like(sin_BTE)


_triton.defvjp(_forward, _backward)


def _check(qkv, cos, sin, options: Options) -> int:
    """Check shapes and dtypes; return D."""
    if not qkv.ndim == cos.ndim == sin.ndim == 3:
        raise ValueError(
            "rotary_qkv: expected qkv (B, T, O), cos and sin (B or 1, T, E), got "
            f"{qkv.shape}, {cos.shape}, {sin.shape}"
        )
    d, rest = divmod(qkv.shape[-1], max(options.packed_heads, 1))
    h, g = options.heads, options.key_heads
    shape = (qkv.shape[1] * (2 if options.pair_heads else 1), cos.shape[-1])
    if (
        min(h, g) < 1
        or rest
        or cos.shape != sin.shape
        or not 1 <= cos.shape[-1] <= d // 2
        or cos.shape not in ((1, *shape), (qkv.shape[0], *shape))
    ):
        raise ValueError(
            f"rotary_qkv: expected qkv (B, T, O) with O a multiple of H + 2·G = "
            f"{options.packed_heads} heads, cos and sin (B or 1, T, E) with E at most D/2 "
            f"and T of the results, got {qkv.shape}, {cos.shape}, {sin.shape}"
        )
    if qkv.dtype not in _dispatch.DTYPES or {cos.dtype, sin.dtype} != {jnp.dtype(jnp.float32)}:
        raise ValueError(
            "rotary_qkv: expected qkv in float32, bfloat16 or float16, cos and sin in float32, got "
            f"{qkv.dtype}, {cos.dtype}, {sin.dtype}"
        )
    if options.pairs not in ("adjacent", "halves"):
        raise ValueError(f"rotary_qkv: expected pairs adjacent or halves, got {options.pairs!r}")
    if options.pair_heads and (h % 2 or g % 2):
        raise ValueError(f"rotary_qkv: pair_heads needs even numbers of heads, got {h} and {g}")
    if options.eps is not None and not options.eps > 0:
        raise ValueError(f"rotary_qkv: expected eps > 0 or None, got {options.eps}")
    return d


# ----------------------------------------------------------------------------------------- examples


def _example(rows: int, dtype, heads: int, key_heads: int, d: int, e: int, **how):
    length = 512 if rows % 512 == 0 else rows
    packed = (rows // length, length, (heads + 2 * key_heads) * d)
    angles = (1, length * (2 if how.get("pair_heads") else 1), e)
    shapes = (packed, angles, angles)
    dtypes = (dtype, jnp.float32, jnp.float32)
    arrays = tuple(jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True))
    options = Options(
        heads, key_heads, how.get("pairs", "adjacent"), how.get("eps"), how.get("pair_heads", False)
    )

    def call(qkv, cos, sin, **implementation):
        return rotary_qkv(qkv, cos, sin, heads=heads, key_heads=key_heads, **how, **implementation)

    return _dispatch.Example(call, functools.partial(reference, options=options), arrays)


@_dispatch.example("rotary_qkv")
def _speedrun_example(rows, dtype):
    """The speedrun's paired heads: half of the channels rotate, with a norm."""
    return _example(rows, dtype, 6, 6, 128, 32, eps=1e-6, pair_heads=True)


@_dispatch.example("rotary_qkv")
def _llama_example(rows, dtype):
    """Grouped queries of Llama 3.2 1B."""
    return _example(rows, dtype, 32, 8, 64, 32, pairs="halves")
