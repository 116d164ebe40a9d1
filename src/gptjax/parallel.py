"""Devices of a run: sharding, gathering and reduction of the training state.

All devices form a mesh with one axis, `data`. Every device computes the loss and the gradient of
its share of the batch inside `jax.shard_map`, where custom kernels see the arrays of one device.
The optimizer runs outside, on global arrays. A strategy determines what each device stores:

| strategy | stored per device | gathered | gradients |
| --- | --- | --- | --- |
| data | all parameters, all optimizer state | nothing | all-reduced |
| zero1 | a shard of both | all parameters, once per step | reduce-scattered |
| fsdp | a shard of both | each block's parameters, when the block runs | reduce-scattered |

zero1 is stage 1 of ZeRO (Rajbhandari et al., 2020) and also shards the fp32 parameters: only a copy
in the compute dtype is complete. fsdp is stage 3: a block's parameters are released after the
forward pass of the block and gathered again for the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

Strategy = Literal["data", "zero1", "fsdp"]
AXIS = "data"
REDUCE_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
# Smaller arrays are replicated: a collective costs more than the memory of these copies.
SMALLEST_SHARDED = 2**14


def data_mesh(devices: list[jax.Device]) -> Mesh:
    """Return a mesh with one axis, `data`, over all devices."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh, axis: int) -> NamedSharding:
    """Return the sharding that splits the given axis over the devices."""
    return NamedSharding(mesh, _spec(axis))


def put(sharding: NamedSharding, local: PyTree) -> PyTree:
    """Return global arrays; `local` has the parts of this process, for its devices."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), local)


def shard_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """Return the axis along which a parameter or an optimizer moment is sharded, or None.

    The rule is the longest axis that the number of devices divides. It depends on the shape only,
    so a parameter and its moments have one sharding.
    """
    divisible = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if np.prod(shape, dtype=np.int64) < SMALLEST_SHARDED or devices == 1 or not divisible:
        return None
    return max(divisible, key=lambda axis: shape[axis])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter is stored, and what the step gathers.

    Attributes:
        axis: the sharded axis; None if the parameter is replicated.
        dtype: dtype in which the model reads the parameter, and in which it is gathered.
        by_block: gather the parameter when its block runs, not at the beginning of the step.
        reduce_dtype: dtype in which the gradient is summed over the devices.
    """

    axis: int | None
    dtype: Any
    by_block: bool = False
    reduce_dtype: Any = jnp.float32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shard"], meta_fields=["placement"]
)
@dataclasses.dataclass(frozen=True)
class Sharded:
    """Shard of a parameter that `apply_block` gathers."""

    shard: Any
    placement: Placement


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A mesh and a strategy.

    Attributes:
        mesh: from `data_mesh`; an abstract mesh for traces.
        strategy: see the module's docstring.
        reduce_dtype: dtype in which gradients are summed over the devices.
    """

    mesh: Mesh | AbstractMesh
    strategy: Strategy = "data"
    reduce_dtype: Any = jnp.float32

    @classmethod
    def of(
        cls, devices: list[jax.Device], strategy: Strategy = "data", reduce_dtype: str = "fp32"
    ) -> "Parallel":
        """Return the strategy on these devices; `reduce_dtype` is "fp32" or "bf16"."""
        return cls(data_mesh(devices), strategy, REDUCE_DTYPES[reduce_dtype])

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def gathers_blocks(self) -> bool:
        """Whether the parameters of a block are gathered when the block runs."""
        return self.strategy == "fsdp" and self.devices > 1

    @property
    def replicated(self) -> NamedSharding:
        """Sharding with a copy on every device."""
        return replicated(self.mesh)

    def axis_of(self, x: Any) -> int | None:
        """Return the sharded axis of an array of the training state, or None."""
        return None if self.strategy == "data" else shard_axis(x.shape, self.devices)

    def shardings(self, state: PyTree) -> PyTree:
        """Return the sharding of each array of a training state, or of parameters.

        Args:
            state: arrays, or `jax.ShapeDtypeStruct`s.
        """
        return jax.tree.map(lambda x: NamedSharding(self.mesh, _spec(self.axis_of(x))), state)

    def with_shardings(self, state: PyTree) -> PyTree:
        """Return `jax.ShapeDtypeStruct`s with the sharding of each array of a training state."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self.shardings(state),
        )

    def whole(self, state: PyTree) -> PyTree:
        """Return complete arrays on one device of this process. Every process must call this."""
        if self.strategy != "data":
            state = jax.jit(lambda x: x, out_shardings=self.replicated)(state)
        return jax.tree.map(lambda x: x.addressable_data(0), state)

    def placement(self, x: Any, dtype: Any, in_block: bool) -> Placement:
        """Return the placement of a parameter.

        Args:
            x: the parameter, or its shape.
            dtype: dtype in which the model reads the parameter.
            in_block: whether the parameter belongs to a block.
        """
        axis = self.axis_of(x)
        by_block = self.gathers_blocks and in_block and axis is not None
        return Placement(axis, dtype, by_block, self.reduce_dtype)

    def gather(self, params: PyTree, placements: PyTree) -> PyTree:
        """Gather the parameters; return a `Sharded` for each that a block gathers.

        Call inside `shard_map`. The transposed operation reduces each complete gradient at once, so
        that XLA can overlap the collective with the rest of the backward pass.

        Args:
            placements: from `gptjax.models.base.placements`.
        """

        def one(x, place: Placement):
            # Return x's dtype, so that the gradient has this dtype, too. XLA removes the
            # conversion.
            return Sharded(x, place) if place.by_block else _gather(x, place, x.dtype)

        return jax.tree.map(one, params, placements)

    def on_each_device(self, f: Callable, params: PyTree, batch_axis: int, out: Any) -> Callable:
        """Return f, a function of parameters and tokens, mapped over the devices.

        Args:
            f: function of one device's shards of the parameters and share of the tokens.
            params: parameters, or their shapes.
            batch_axis: axis of the tokens that is split.
            out: a tree like the results of f: arrays like `params`, or None for a replicated
                result.
        """
        specs = jax.tree.map(lambda x: _spec(self.axis_of(x)), params)
        out = jax.tree.map(
            lambda x: PartitionSpec() if x is None else _spec(self.axis_of(x)),
            out,
            is_leaf=lambda x: x is None,
        )
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=(specs, _spec(batch_axis)),
            out_specs=out,
            check_vma=False,
        )


def apply_block(f: Callable, block: nnx.Module, *args: Any, recompute: bool = False) -> Any:
    """Return f(block, *args). Under fsdp, gather the block's parameters first.

    Args:
        f: a function of a block and of `args`, such as `MyBlock.__call__`.
        recompute: store only `args` for the backward pass. Without it, all intermediate results are
            stored, except gathered parameters, which the backward pass gathers again.
    """
    graphdef, state, captures = nnx.split(block, nnx.Param, ...)  # captures of `nnx.capture`
    if not any(map(_is_sharded, jax.tree.leaves(state, is_leaf=_is_sharded))):
        return (nnx.remat(f) if recompute else f)(block, *args)

    def gathered(x: Any) -> jax.Array:
        return _gather(x.shard, x.placement, x.placement.dtype) if _is_sharded(x) else x

    def run(state, captures, *args):
        whole = jax.tree.map(gathered, state, is_leaf=_is_sharded)
        block = nnx.merge(graphdef, whole, captures)
        return f(block, *args), nnx.state(block, nnx.Not(nnx.Param))

    if recompute:
        run = jax.checkpoint(run)
    else:
        run = jax.checkpoint(_saving_bits(run), policy=_save_all_but_gathered)
    out, captures = run(state, captures, *args)
    nnx.update(block, captures)
    return out


def _save_all_but_gathered(primitive, *_, **__) -> bool:
    """Policy of `jax.checkpoint`: store all results except results of all-gathers.

    `save_anything_except_these_names` would store the gathered array before it is named.
    """
    return primitive is not jax.lax.all_gather_p


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class _Bits:
    """An FP8 array as unsigned integers."""

    bits: jax.Array
    dtype: Any


def _saving_bits(f: Callable) -> Callable:
    """Return f with a backward pass that reads the bits of FP8 arrays.

    `jax.checkpoint` with a policy applies `jax.lax.reduce_precision` to each floating-point array
    that it saves, and e4m3 numbers above 240 would become NaN: float8_e4m3fn uses the exponent that
    `reduce_precision` reserves for infinity.
    """

    def encode(x):
        if getattr(x, "dtype", None) != jnp.float8_e4m3fn:
            return x
        return _Bits(jax.lax.bitcast_convert_type(x, jnp.uint8), x.dtype)

    def decode(x):
        return jax.lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, _Bits) else x

    def forward(*args):
        out, pull_back = jax.vjp(f, *args)
        return out, jax.tree.map(encode, pull_back)

    def backward(pull_back, cotangents):
        return jax.tree.map(decode, pull_back, is_leaf=lambda x: isinstance(x, _Bits))(cotangents)

    saving = jax.custom_vjp(f)
    saving.defvjp(forward, backward)
    return saving


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _all_gather(x: jax.Array, place: Placement, dtype: Any) -> jax.Array:
    """Gather a parameter in the placement's dtype, and return it in `dtype`."""
    if place.axis is None:
        return x
    whole = jax.lax.all_gather(x.astype(place.dtype), AXIS, axis=place.axis, tiled=True)
    return whole.astype(dtype)


def _gather_forward(x, place, dtype):
    # Not `_gather`: `_save_all_but_gathered` must see the all-gather, not a custom derivative.
    return _all_gather(x, place, dtype), jnp.zeros((0,), x.dtype)


def _gather_backward(place, dtype, like, g):
    g = g.astype(place.reduce_dtype)
    if place.axis is None:
        g = jax.lax.psum(g, AXIS)
    else:
        g = jax.lax.psum_scatter(g, AXIS, scatter_dimension=place.axis, tiled=True)
    return (g.astype(like.dtype),)


_gather = jax.custom_vjp(_all_gather, nondiff_argnums=(1, 2))
_gather.defvjp(_gather_forward, _gather_backward)


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
