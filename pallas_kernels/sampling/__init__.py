"""Sample a token of each sequence from the softmax of the logits, with top-k and top-p filters.

    p = softmax(logits / temperature), restricted to the top_k likeliest tokens, renormalized, then
        restricted to the fewest likeliest tokens whose probabilities sum to at least top_p
    token = the least id i with p_0 + … + p_i > u·Σp

The likeliest tokens are those of the largest logits; of equal logits, the filters keep the tokens
with the lowest ids. A token with a logit of −∞ has probability 0 at every temperature.

Shapes: B sequences, V vocabulary.

Library: generation (`gptjax.generate`).

Back ends:
    triton: one program per row; thresholds by bisection, no sort. NVIDIA GPUs from Ampere on.
    xla: plain JAX with a sort; any device.
    reference: as xla.
No back end is differentiable.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _calls, _dispatch
from pallas_kernels._dispatch import REFERENCE, TRITON, XLA
from pallas_kernels._partition import Rule
from pallas_kernels._types import Array, Float, Int

Implementation = Literal["auto", "triton", "xla", "reference"]
NO_DERIVATIVE = "has no derivative: call jax.lax.stop_gradient on its arrays"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filters:
    """Options of a draw: scalars of JAX or NumPy. None disables an option."""

    temperature: Array | np.generic | None = None
    """Positive, fp32. None: return the likeliest token; of equally likely tokens, the lowest id.
    Infinity: draw uniformly from the tokens that the filters keep."""
    top_k: Array | np.generic | None = None
    """int32, at least 1."""
    top_p: Array | np.generic | None = None
    """fp32, in (0, 1]."""


_dispatch.register(
    "sample_token", back_ends=[dataclasses.replace(TRITON, rule=True), XLA, REFERENCE]
)


def sample_token(
    logits_BV: Float[Array, "B V"],
    uniform_B: Float[Array, " B"],
    filters: Filters,
    *,
    implementation: Implementation | str = "auto",
) -> Int[Array, " B"]:
    """Draw a token of each row, int32.

    Args:
        logits_BV: fp32, bf16 or fp16. Each logit is finite or −∞, and a row has at least one finite
            logit. With NaN or +∞ the token is unspecified, and the back ends return different
            tokens.
        uniform_B: uniform random numbers in [0, 1), fp32; not read without a temperature.
        filters: temperature, top-k and top-p.
        implementation: "auto", or a back end: "triton", "xla", "reference".

    Raises:
        ValueError: wrong shapes or dtypes, a NumPy scalar of `filters` is out of bounds, or the
            named back end cannot run here. The values of JAX scalars are not checked.
    """
    _check(logits_BV, uniform_B, filters)
    # Not `filters`: under jax.vmap, JAX builds pytrees of the arguments with placeholders.
    args = (logits_BV, uniform_B, filters.temperature, filters.top_k, filters.top_p)
    args = _calls.once("sample_token", args, NO_DERIVATIVE)
    if _dispatch.select("sample_token", implementation, arrays=args[:2]) == "triton":
        from pallas_kernels.sampling import triton

        rule = Rule("b v, b, , , -> b", over="b")
        return _calls.looped("sample_token", triton.sample_token, rule=rule)(*args)
    logits_BV, uniform_B, *options = args
    return _in_jax(logits_BV, uniform_B, Filters(*options))


def _in_jax(logits_BV, uniform_B, filters):
    if filters.temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.float32)
    # Subtract first: rounding errors of logits / temperature are large at a small temperature.
    # XLA divides by a large temperature as a multiplication by 0: not of infinities.
    scaled_BV = logits_BV - logits_BV.max(-1, keepdims=True)
    scaled_BV = jnp.maximum(scaled_BV, jnp.finfo(jnp.float32).min) / filters.temperature
    scaled_BV = jnp.where(logits_BV == -jnp.inf, -jnp.inf, scaled_BV)
    probs_BV = jax.nn.softmax(scaled_BV, axis=-1)
    if filters.top_k is not None or filters.top_p is not None:
        # Compare ranks, not thresholds: bf16 logits are often equal, and a threshold would keep all
        # equal logits.
        order_BV = jnp.argsort(logits_BV, axis=-1, descending=True, stable=True)
        keep_BV = _kept(jnp.take_along_axis(scaled_BV, order_BV, axis=-1), filters)
        keep_BV = jnp.take_along_axis(keep_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
        probs_BV = jnp.where(keep_BV, probs_BV, 0)
    sum_BV = jnp.cumsum(probs_BV, axis=-1)
    below_BV = (probs_BV > 0) & (sum_BV > uniform_B[:, None] * sum_BV[:, -1:])
    # If rounding leaves no such id, return the last token with a positive probability.
    last_B = probs_BV.shape[1] - 1 - jnp.argmax(probs_BV[:, ::-1] > 0, axis=-1)
    token_B = jnp.where(below_BV.any(axis=-1), jnp.argmax(below_BV, axis=-1), last_B)
    return token_B.astype(jnp.int32)


def _kept(ranked_BV, filters):
    """Return the mask of the logits, sorted likeliest first, that the filters keep."""
    v = ranked_BV.shape[1]
    top_k = jnp.asarray(v if filters.top_k is None else filters.top_k, jnp.int32)
    inside_1V = jnp.arange(v, dtype=jnp.int32)[None] < top_k  # int32 with x64, too
    keep_BV = jnp.broadcast_to(inside_1V, ranked_BV.shape)
    if filters.top_p is not None:
        probs_BV = jax.nn.softmax(jnp.where(inside_1V, ranked_BV, -jnp.inf), axis=-1)
        likelier_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        # Always keep the likeliest token: rounding or a probability of NaN must not result in an
        # empty set.
        keep_BV &= (likelier_BV < filters.top_p).at[:, 0].set(True)
    return keep_BV


def _check(logits_BV, uniform_B, filters):
    if (
        logits_BV.ndim != 2
        or logits_BV.shape[1] == 0
        or logits_BV.dtype not in _dispatch.DTYPES
        or uniform_B.shape != logits_BV.shape[:1]
        or not jnp.issubdtype(uniform_B.dtype, jnp.floating)
    ):
        raise ValueError(
            "sample_token: expected logits (B, V) in float32, bfloat16 or float16, with V ≥ 1, and "
            f"uniform numbers (B,) in float32, got {logits_BV.shape} in {logits_BV.dtype} and "
            f"{uniform_B.shape} in {uniform_B.dtype}"
        )
    bounds = {
        "temperature": ("positive", lambda x: x > 0),
        "top_k": ("at least 1", lambda x: x >= 1),
        "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
    }
    for name, (expected, inside) in bounds.items():
        if (value := getattr(filters, name)) is None:
            continue
        if shape := jnp.shape(value):
            raise ValueError(f"sample_token: expected {name} to be a scalar, got shape {shape}")
        # Not the value of a JAX array: the read would wait for the device.
        if not isinstance(value, jax.Array) and not inside(value):
            raise ValueError(f"sample_token: expected {name} to be {expected}, got {value}")


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("sample_token")
def _example(rows, dtype):
    """A row of GPT-2's vocabulary, temperature, top-k and top-p."""
    filters = Filters(jnp.float32(0.8), jnp.int32(50), jnp.float32(0.95))

    def draw(logits_BV, noise_B, **how):
        # Not the noise, which is no uniform.
        uniform_B = (jnp.arange(len(noise_B), dtype=jnp.float32) + 0.5) / 64
        return sample_token(logits_BV, uniform_B, filters, **how).astype(jnp.float32) / 50257

    def reference(*arrays):
        return draw(*arrays, implementation="reference")

    b = min(rows, 64)
    arrays = (jax.ShapeDtypeStruct((b, 50257), dtype), jax.ShapeDtypeStruct((b,), dtype))
    return _dispatch.Example(draw, reference, arrays, differentiable=False)
