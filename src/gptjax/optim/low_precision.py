"""16-bit parameters that are trained as exactly as fp32 ones, or nearly: low halves kept beside
them, or stochastic rounding.

A bf16 number is the upper half of an fp32 one. `with_mantissa` keeps the lower half as uint16
beside the parameter, in the optimizer's
state: an update runs on all 32 bits, and the model reads the upper 16. Together they are the fp32
master copy, at half the bytes that a copy costs. As in modded-nanogpt's record the upper half is
cut off, which makes every weight that the model sees smaller, by 0.27 % on average; or rounded to
nearest.

`with_stochastic_rounding`, llm.c's way, keeps nothing: an updated parameter goes to one of its two
bf16 neighbours, to the nearer one more often, so that it is right on average.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, PyTree, UInt16


def split(
    x: Float[Array, "*S"], *, rounding: str = "truncate"
) -> tuple[BFloat16[Array, "*S"], UInt16[Array, "*S"]]:
    """The bf16 view of an fp32 array, and the low halves that `join` makes it whole with.

    Args:
        rounding: "truncate" cuts the low half off; "nearest" rounds, and ties away from zero.

    Raises:
        ValueError: another `rounding`.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    high = (bits + jnp.uint32(_half(rounding))) >> 16
    view = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return view, bits.astype(jnp.uint16)


def join(
    view: BFloat16[Array, "*S"], low: UInt16[Array, "*S"], *, rounding: str = "truncate"
) -> Float[Array, "*S"]:
    """The fp32 array that `split` took apart, bit for bit."""
    high = jax.lax.bitcast_convert_type(view, jnp.uint16).astype(jnp.uint32) << 16
    low = low.astype(jnp.uint32)
    if _half(rounding):
        # Rounded up where the low half is in its upper half: then the number lies below the view.
        high = high - (low & 0x8000)
    return jax.lax.bitcast_convert_type(high | low, jnp.float32)


def _half(rounding: str) -> int:
    """What is added before the low half is cut off."""
    if rounding not in ("truncate", "nearest"):
        raise ValueError(f"unknown rounding {rounding!r}; choose one of ['truncate', 'nearest']")
    return 0x8000 if rounding == "nearest" else 0


class MantissaState(NamedTuple):
    low: PyTree
    """uint16, like the parameters."""
    inner: optax.OptState


def with_mantissa(
    tx: optax.GradientTransformation, *, rounding: str = "truncate"
) -> optax.GradientTransformation:
    """Runs an optimizer on fp32 parameters of which the caller holds the bf16 views.

    `init` takes fp32 parameters, whose low halves it keeps (train on `view(params)`), or bf16 ones.
    `update` takes the bf16 views, gives the optimizer fp32, and returns what `optax.apply_updates`
    makes the new views of.

    Args:
        rounding: of the views, as in `split`.

    Raises:
        ValueError: another `rounding`; parameters are neither fp32 nor bf16; `update` is given no
            parameters, or others than bf16.
    """
    _half(rounding)

    def init(params):
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if p.dtype not in (jnp.float32, jnp.bfloat16):
                raise ValueError(
                    f"with_mantissa: expected float32 or bfloat16, got {p.dtype} in {_name(path)}"
                )
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return MantissaState(
            jax.tree.map(lambda p: split(p, rounding=rounding)[1], params), tx.init(params)
        )

    def update(updates, state, params=None, **extra):
        _check_bf16("with_mantissa", params)
        whole = jax.tree.map(lambda p, low: join(p, low, rounding=rounding), params, state.low)
        updates, inner = optax.with_extra_args_support(tx).update(
            updates, state.inner, whole, **extra
        )

        def apply(p, w, u):
            new, low = split(w + u.astype(jnp.float32), rounding=rounding)
            p = p.astype(jnp.float32)
            step = new.astype(jnp.float32) - p
            # Exact but for one freak: a view that was rounded up to a power of two and crosses zero
            # by less than its last fp32 bit. What it lands on is then the parameter, and the low
            # half is of another.
            return step, jnp.where((p + step).astype(jnp.bfloat16) == new, low, jnp.uint16(0))

        leaves, structure = jax.tree.flatten(params)
        made = [
            apply(*x)
            for x in zip(leaves, jax.tree.leaves(whole), jax.tree.leaves(updates), strict=True)
        ]
        steps, lows = (jax.tree.unflatten(structure, side) for side in zip(*made, strict=True))
        return steps, MantissaState(lows, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def view(params: PyTree, *, rounding: str = "truncate") -> PyTree:
    """The bf16 parameters to train on, of those that `with_mantissa(…).init` was given."""
    return jax.tree.map(lambda p: split(p.astype(jnp.float32), rounding=rounding)[0], params)


def whole(params: PyTree, state: MantissaState, *, rounding: str = "truncate") -> PyTree:
    """The fp32 parameters behind the views."""
    return jax.tree.map(lambda p, low: join(p, low, rounding=rounding), params, state.low)


class StochasticRoundingState(NamedTuple):
    key: jax.Array
    """Key data, uint32 of shape (2,)."""
    inner: optax.OptState


def with_stochastic_rounding(
    tx: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformation:
    """Runs an optimizer on bf16 parameters, and rounds each update up or down by chance, so that
    its mean is exact.

    Raises:
        ValueError: `update` is given no parameters, or others than bf16.
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
            bits = jax.lax.bitcast_convert_type(new, jnp.uint32)
            # A carry out of the low half is as likely as that is full. It is left out where it
            # would make a NaN of what is infinite.
            noise = jnp.where(
                jnp.isfinite(new), jax.random.bits(key, p.shape, jnp.uint16).astype(jnp.uint32), 0
            )
            rounded = jax.lax.bitcast_convert_type(
                (bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32
            )
            return rounded - p

        steps = [step(*x) for x in zip(leaves, jax.tree.leaves(updates), keys, strict=True)]
        state = StochasticRoundingState(jax.random.key_data(key), inner)
        return jax.tree.unflatten(jax.tree.structure(params), steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_bf16(name, params):
    if params is None:
        raise ValueError(f"{name} needs the parameters: update(updates, state, params)")
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        if p.dtype != jnp.bfloat16:
            raise ValueError(
                f"{name}: expected bfloat16 parameters, got {p.dtype} in {_name(path)}"
            )


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
