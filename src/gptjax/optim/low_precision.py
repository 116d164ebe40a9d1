"""Training of bf16 parameters, with low-order bits in the optimizer's state or with stochastic
rounding.

A bf16 number is the upper half of an fp32 number. `with_mantissa` stores the lower half as uint16
in the optimizer's state: an update uses all 32 bits, and the model reads the upper 16. Both halves
together are the fp32 master copy, at half the bytes of a separate copy. The upper half is
truncated, as in modded-nanogpt's record, or rounded to nearest. Truncation reduces the magnitude of
the weights that the model reads, by 0.27 % on average. Rounding to nearest is the conversion to
bf16: the model reads the same weights as from an fp32 parameter that it converts.

`with_stochastic_rounding`, as in llm.c, stores nothing. Each updated parameter is rounded at random
to one of its two bf16 neighbours, with an exact expected value.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Integer, PyTree, UInt16, UInt32

from gptjax.optim.matrices import flatten


@functools.partial(jax.jit, static_argnames="rounding")
def split(
    x: Float[Array, "*S"], *, rounding: str = "truncate"
) -> tuple[BFloat16[Array, "*S"], UInt16[Array, "*S"]]:
    """Return the bf16 view of an fp32 array, and the low halves; `join` is the inverse.

    Args:
        rounding: "truncate", or "nearest" with ties to even, as in `x.astype(jnp.bfloat16)`. Two
            ties round to one view, and 16 bits cannot distinguish them: with "nearest", a tie that
            rounds towards zero becomes the next smaller fp32 number. These are 1 of 2¹⁷ numbers.
            A NaN becomes the NaN 0x7FC00000, with its sign.

    Raises:
        ValueError: another `rounding`.
    """
    bits = _without_payload(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32))
    half = _half(rounding)
    if half:
        # A tie with an even upper half rounds down: make it less than a tie.
        bits = bits - ((bits & 0x1FFFF) == half).astype(jnp.uint32)
    high = (bits + jnp.uint32(half)) >> 16
    view = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return view, bits.astype(jnp.uint16)


@functools.partial(jax.jit, static_argnames="rounding")
def join(
    view: BFloat16[Array, "*S"], low: UInt16[Array, "*S"], *, rounding: str = "truncate"
) -> Float[Array, "*S"]:
    """Return the fp32 array that `split` received, bit for bit except for its ties and NaN."""
    high = jax.lax.bitcast_convert_type(view, jnp.uint16).astype(jnp.uint32) << 16
    low = low.astype(jnp.uint32)
    if _half(rounding):
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


def _half(rounding: str) -> int:
    """Return the rounding offset that is added before the truncation."""
    if rounding not in ("truncate", "nearest"):
        raise ValueError(f"unknown rounding {rounding!r}; choose one of ['truncate', 'nearest']")
    return 0x8000 if rounding == "nearest" else 0


class InFP32(NamedTuple):
    """Empty node in place of a low half.

    `optax.MaskedNode` would not differ from the parameters that `optax.partition` masks.
    """


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["low", "inner"], meta_fields=["rounding"]
)
@dataclasses.dataclass(frozen=True)
class MantissaState:
    """State of `with_mantissa`.

    Attributes:
        low: low halves of the parameters, uint16 of the same shapes; `InFP32` for a parameter that
            is stored in fp32.
        inner: state of the optimizer.
        rounding: rounding of the views, see `split`.
    """

    low: PyTree
    inner: optax.OptState
    rounding: str = "truncate"


def with_mantissa(
    tx: optax.GradientTransformation,
    *,
    rounding: str = "truncate",
    select: Callable[[str], bool] = lambda path: True,
) -> optax.GradientTransformation:
    """Run an optimizer on fp32 parameters whose bf16 views the caller holds.

    `init` accepts fp32 parameters and stores their low halves (train on `view(params)`, or on
    `stored(params, state)`), or accepts bf16 parameters. `update` accepts the bf16 views, passes
    fp32 to the optimizer, and returns updates with which `apply_updates` computes the new views.

    Args:
        rounding: rounding of the views, see `split`.
        select: function of a path such as "blocks.0.attn.c_attn.kernel". The caller holds a
            parameter for which it returns False in fp32.

    Raises:
        ValueError: another `rounding`; parameters are neither fp32 nor bf16; `update` is called
            without parameters, or with selected parameters that are not bf16.
    """
    _half(rounding)

    def init(params):
        names, leaves, structure = flatten(params)
        lows = []
        for i, (name, p) in enumerate(zip(names, leaves, strict=True)):
            if p.dtype not in (jnp.float32, jnp.bfloat16):
                raise ValueError(
                    f"with_mantissa: expected float32 or bfloat16, got {p.dtype} in {name}"
                )
            leaves[i] = p.astype(jnp.float32)
            is_split = select(name)
            lows.append(split(leaves[i], rounding=rounding)[1] if is_split else InFP32())
        inner = tx.init(jax.tree.unflatten(structure, leaves))
        return MantissaState(jax.tree.unflatten(structure, lows), inner, rounding)

    def update(updates, state, params=None, **extra):
        _check_bf16("with_mantissa", params, select)
        fp32 = whole(params, state)
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, state.inner, fp32, **extra
        )

        def apply(low, p, w, u):
            if _is_in_fp32(low):
                return u, low
            new, low = split(w + u.astype(jnp.float32), rounding=rounding)
            p = p.astype(jnp.float32)
            step = new.astype(jnp.float32) - p
            # Exact with one exception: a view that was rounded up to a power of two and crosses
            # zero by less than its last fp32 bit. Then the sum is the parameter, and its low half
            # is 0.
            return step, jnp.where((p + step).astype(jnp.bfloat16) == new, low, jnp.uint16(0))

        lows, structure = jax.tree.flatten(state.low, is_leaf=_is_in_fp32)
        leaves = map(jax.tree.leaves, (params, fp32, updates))
        pairs = [apply(*x) for x in zip(lows, *leaves, strict=True)]
        steps, lows = zip(*pairs, strict=True)
        steps = jax.tree.unflatten(jax.tree.structure(params), steps)
        return steps, MantissaState(jax.tree.unflatten(structure, lows), inner, rounding)

    return optax.GradientTransformationExtraArgs(init, update)


def view(params: optax.Params, *, rounding: str = "truncate") -> optax.Params:
    """Return the bf16 parameters to train on, from the parameters of `with_mantissa(…).init`."""
    return jax.tree.map(lambda p: split(p.astype(jnp.float32), rounding=rounding)[0], params)


def whole(params: optax.Params, state: MantissaState) -> optax.Params:
    """Return the fp32 parameters of bf16 views."""
    return _map(lambda low, p: join(p, low, rounding=state.rounding), state, params)


def stored(params: optax.Params, state: optax.OptState) -> optax.Params:
    """Return fp32 parameters in the dtypes in which a run with this optimizer state stores them.

    These are the views of `with_mantissa`; all parameters for another optimizer.
    """
    if not isinstance(state, MantissaState):
        return params
    return _map(lambda _, p: split(p, rounding=state.rounding)[0], state, params)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Return params + updates, added in the updates' dtype, in the parameters' dtypes."""
    return jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates)


def _is_in_fp32(x: object) -> bool:
    return isinstance(x, InFP32)


def _map(f: Callable, state: MantissaState, params: optax.Params) -> optax.Params:
    """Return the parameters, with f(low half, parameter) for parameters that have a low half."""
    lows = jax.tree.leaves(state.low, is_leaf=_is_in_fp32)
    leaves, structure = jax.tree.flatten(params)
    pairs = zip(lows, leaves, strict=True)
    return jax.tree.unflatten(structure, [p if _is_in_fp32(x) else f(x, p) for x, p in pairs])


class StochasticRoundingState(NamedTuple):
    key: jax.Array
    """Key data, uint32 of shape (2,)."""
    inner: optax.OptState


def with_stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformation:
    """Run an optimizer on bf16 parameters, with stochastic rounding of the updated parameters.

    Raises:
        ValueError: `update` is called without parameters, or with parameters that are not bf16.
    """

    def init(params):
        as_fp32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return StochasticRoundingState(jax.random.key_data(jax.random.key(seed)), tx.init(as_fp32))

    def update(updates, state, params=None, **extra):
        _check_bf16("with_stochastic_rounding", params)
        as_fp32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, state.inner, as_fp32, **extra
        )
        key, *keys = jax.random.split(
            jax.random.wrap_key_data(state.key), 1 + len(leaves := jax.tree.leaves(as_fp32))
        )

        def step(p, u, key):
            new = p + u.astype(jnp.float32)
            rounded = _round(new, jax.random.bits(key, p.shape, jnp.uint16))
            return rounded.astype(jnp.float32) - p

        steps = [step(*x) for x in zip(leaves, jax.tree.leaves(updates), keys, strict=True)]
        state = StochasticRoundingState(jax.random.key_data(key), inner)
        return jax.tree.unflatten(jax.tree.structure(params), steps), state

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
