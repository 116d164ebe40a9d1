"""Training of bf16 parameters, with low-order bits in the optimizer's state or with stochastic
rounding.

`with_mantissa` stores an fp32 parameter as its bf16 view, which the model reads, and as the lower
16 bits in the optimizer's state. Both together are the fp32 master copy, at half the bytes of a
separate copy. The view is rounded to nearest: the model reads the same weights as from an fp32
parameter that it converts.

`with_stochastic_rounding`, as in llm.c, stores nothing. Each updated parameter is rounded at random
to one of its two bf16 neighbours, with an exact expected value.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Integer, PyTree, UInt16, UInt32

from gptjax.optim.partition import flatten


@jax.jit
def split(x: Float[Array, "*S"]) -> tuple[BFloat16[Array, "*S"], UInt16[Array, "*S"]]:
    """Return the bf16 view of an fp32 array, and the low halves; `join` is the inverse.

    The view is rounded to nearest with ties to even, as in `x.astype(jnp.bfloat16)`. Two ties round
    to one view, and 16 bits cannot distinguish them: a tie that rounds towards zero becomes the
    next smaller fp32 number. These are 1 of 2¹⁷ numbers. A NaN becomes the NaN 0x7FC00000, with its
    sign.
    """
    bits = _without_payload(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32))
    # A tie with an even upper half rounds down: make it less than a tie.
    bits = bits - ((bits & 0x1FFFF) == 0x8000).astype(jnp.uint32)
    high = (bits + jnp.uint32(0x8000)) >> 16
    view = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return view, bits.astype(jnp.uint16)


@jax.jit
def join(view: BFloat16[Array, "*S"], low: UInt16[Array, "*S"]) -> Float[Array, "*S"]:
    """Return the fp32 array that `split` received, bit for bit except for its ties and NaN."""
    high = jax.lax.bitcast_convert_type(view, jnp.uint16).astype(jnp.uint32) << 16
    low = low.astype(jnp.uint32)
    # `split` rounds up where the low half's highest bit is set.
    high = high - (low & 0x8000)
    return jax.lax.bitcast_convert_type(high | low, jnp.float32)


def _without_payload(bits: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Return fp32 bits with 0x7FC00000 and the sign in place of each NaN.

    The sum of the NaN 0x7FFFFFFF and a rounding offset is −0. The upper half of 0x7F800001 is
    infinity.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return jnp.where(is_nan, (bits & jnp.uint32(0x80000000)) | 0x7FC00000, bits)


class MantissaState(NamedTuple):
    """State of `with_mantissa`.

    Attributes:
        low: low halves of the parameters, uint16 of the same shapes; None for a parameter that is
            stored in fp32.
        inner: state of the optimizer.
    """

    low: PyTree
    inner: optax.OptState


def with_mantissa(
    tx: optax.GradientTransformation, *, select: Callable[[str], bool] = lambda path: True
) -> optax.GradientTransformation:
    """Run an optimizer on fp32 parameters whose bf16 views the caller holds.

    `init` accepts fp32 parameters and stores their low halves (train on `view(params)`, or on
    `stored(params, state)`), or accepts bf16 parameters. `update` accepts the bf16 views, passes
    fp32 to the optimizer, and returns updates with which `apply_updates` computes the new views.

    Args:
        select: function of a path such as "blocks.0.attn.c_attn.kernel". The caller holds a
            parameter for which it returns False in fp32.

    Raises:
        ValueError: parameters are neither fp32 nor bf16; `update` is called without parameters, or
            with selected parameters that are not bf16.
    """

    def init(params):
        names, leaves, structure = flatten(params)
        for name, p in zip(names, leaves, strict=True):
            if p.dtype not in (jnp.float32, jnp.bfloat16):
                raise ValueError(
                    f"with_mantissa: expected float32 or bfloat16, got {p.dtype} in {name}"
                )
        leaves = [p.astype(jnp.float32) for p in leaves]
        pairs = zip(names, leaves, strict=True)
        lows = [split(p)[1] if select(name) else None for name, p in pairs]
        inner = tx.init(jax.tree.unflatten(structure, leaves))
        return MantissaState(jax.tree.unflatten(structure, lows), inner)

    def update(updates, state, params=None, **extra):
        _check_bf16("with_mantissa", params, select)
        fp32 = whole(params, state)
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, state.inner, fp32, **extra
        )

        def apply(low, p, w, u):
            if low is None:
                return u, low
            new, low = split(w + u.astype(jnp.float32))
            p = p.astype(jnp.float32)
            step = new.astype(jnp.float32) - p
            # Exact with one exception: a view that was rounded up to a power of two and crosses
            # zero by less than its last fp32 bit. Then the sum is the parameter, and its low half
            # is 0.
            return step, jnp.where((p + step).astype(jnp.bfloat16) == new, low, jnp.uint16(0))

        lows, structure = jax.tree.flatten(state.low, is_leaf=_is_none)
        leaves = map(jax.tree.leaves, (params, fp32, updates))
        pairs = [apply(*x) for x in zip(lows, *leaves, strict=True)]
        steps, lows = zip(*pairs, strict=True)
        steps = jax.tree.unflatten(jax.tree.structure(params), steps)
        return steps, MantissaState(jax.tree.unflatten(structure, lows), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def view(params: optax.Params) -> optax.Params:
    """Return the bf16 parameters to train on, from the parameters of `with_mantissa(…).init`."""
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


def whole(params: optax.Params, state: MantissaState) -> optax.Params:
    """Return the fp32 parameters of bf16 views."""
    return _map(lambda low, p: join(p, low), state, params)


def stored(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Return fp32 parameters in the dtypes in which a run with this optimizer state stores them.

    These are the views of `with_mantissa`; all parameters for another optimizer.
    """
    if not isinstance(state, MantissaState):
        return params
    return _map(lambda _, p: view(p), state, params)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Return params + updates, added in the updates' dtype, in the parameters' dtypes."""
    return jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates)


def _is_none(x: object) -> bool:
    return x is None


def _map(f: Callable, state: MantissaState, params: optax.Params) -> optax.Params:
    """Return the parameters, with f(low half, parameter) for parameters that have a low half."""
    lows = jax.tree.leaves(state.low, is_leaf=_is_none)
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(lows, leaves, strict=True)
    return jax.tree.unflatten(structure, [p if x is None else f(x, p) for x, p in pairs])


class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`: the seed of the next update, and the optimizer's."""

    seed: Integer[Array, ""]
    inner: optax.OptState


def with_stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformation:
    """Run an optimizer on bf16 parameters, with stochastic rounding of the updated parameters.

    Raises:
        ValueError: `update` is called without parameters, or with parameters that are not bf16.
    """

    def as_fp32(params):
        return jax.tree.map(lambda p: p.astype(jnp.float32), params)

    def init(params):
        return StochasticRoundingState(_hash(jnp.uint32(seed)), tx.init(as_fp32(params)))

    def update(updates, state, params=None, **extra):
        _check_bf16("with_stochastic_rounding", params)
        old = as_fp32(params)
        update = optax.with_extra_args_support(tx).update
        updates, inner = update(updates, state.inner, old, **extra)
        new = jax.tree.map(lambda p, u: p + u.astype(jnp.float32), old, updates)
        rounded = as_fp32(round_stochastically(new, state.seed))
        steps = jax.tree.map(jnp.subtract, rounded, old)
        return steps, StochasticRoundingState(state.seed + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(tree: PyTree, seed: Integer[Array, ""]) -> PyTree:
    """Round each fp32 array to bf16 at random, with an exact expected value.

    The random bits are a hash of the seed, the array's index and the element's index: a few integer
    operations, which take no time in a kernel bound by memory bandwidth. `jax.random` would take
    about a hundred. The result depends neither on the device nor on the sharding.

    Args:
        seed: another number in each call, such as the number of updates.
    """
    leaves, structure = jax.tree.flatten(tree)
    rounded = []
    for i, x in enumerate(leaves):
        index = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            iota = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            index = index * jnp.uint32(size) + iota
        of_array = _hash(seed.astype(jnp.uint32) ^ _hash(jnp.uint32(i)))
        rounded.append(_round(x, (_hash(index ^ of_array) >> 16).astype(jnp.uint16)))
    return jax.tree.unflatten(structure, rounded)


def _round(x: Float[Array, "*S"], noise: UInt16[Array, "*S"]) -> BFloat16[Array, "*S"]:
    """Return an fp32 array in bf16, rounded up in magnitude with the probability of the low half's
    fraction of 2¹⁶."""
    bits = _without_payload(jax.lax.bitcast_convert_type(x, jnp.uint32))
    # No noise for infinity, which a carry would change into NaN.
    noise = jnp.where(jnp.isfinite(x), noise.astype(jnp.uint32), 0)
    return jax.lax.bitcast_convert_type(((bits + noise) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _hash(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Return a bijective hash: the finalizer of MurmurHash3 (Appleby), after an addition."""
    x = x + jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _check_bf16(name, params, select=lambda path: True):
    if params is None:
        raise ValueError(f"{name} needs the parameters: update(updates, state, params)")
    paths, leaves, _ = flatten(params)
    for path, p in zip(paths, leaves, strict=True):
        if select(path) and p.dtype != jnp.bfloat16:
            raise ValueError(f"{name}: expected bfloat16 parameters, got {p.dtype} in {path}")
