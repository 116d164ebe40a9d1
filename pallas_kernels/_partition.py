"""Kernel launches on sharded arrays under `jax.jit`: each device launches the kernel on its shards.

A `Rule` names the axes of the arguments and results of a launch. It becomes the sharding rule of a
`jax.experimental.custom_partitioning` function: the compiler propagates shardings through the
launch, and adds no collective for the axes that may be sharded. Without a rule, the compiler would
gather the arrays on every device.
"""

import contextvars
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Names = list[str]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Axes of the arrays of a launch.

    A result without an axis that is sharded in the arguments is the sum over the shards.

    Attributes:
        axes: such as "n* c, c -> n* c, c", with a term for each argument and each result, also for
            one that is None. Equal names are one axis. A name with a star is one axis for the
            function that launches, and any number of axes in the arrays. "k.g" is one axis that
            merges an axis k, which may be sharded, and an axis g inside it, which may not.
        over: names of the axes that may be sharded. The compiler gathers the other axes, or raises
            an error if these are explicit axes of the mesh.
        reduced: names over whose shards the function itself reduces its results (`shards_of`).
    """

    axes: str
    over: str
    reduced: str = ""

    @property
    def sides(self) -> list[list[Names]]:
        """The names of the axes of all arguments, and of all results."""
        sides = self.axes.split("->")
        return [[term.split() for term in side.split(",")] for side in sides]

    def of_shapes(self, shapes: list[tuple[int, ...] | None]) -> tuple["Rule", tuple[int, ...]]:
        """Return the rule with a name for each axis of arguments of these shapes, and the sizes of
        the axes of the name with a star."""
        for names, shape in zip(self.sides[0], shapes, strict=True):
            for i, name in enumerate(names):
                if name.endswith("*") and shape is not None:
                    sizes = shape[i : i + len(shape) - len(names) + 1]
                    stem = name[:-1]
                    more = " ".join(f"{stem}{j}" for j in range(len(sizes)))
                    more = stem if len(sizes) == 1 else more
                    axes, over = self.axes.replace(name, more), self.over.replace(name, more)
                    return Rule(axes, over, self.reduced), sizes
        return self, ()

    def mapped(self, name: str, flags: list[bool]) -> "Rule":
        """Return the rule of a launch with a further axis in front of the arguments of these flags
        and of all results."""
        sides = [[" ".join(names) for names in side] for side in self.sides]
        given = zip(sides[0], flags, strict=True)
        arguments = [f"{name} {term}" if flag else term for term, flag in given]
        results = [f"{name} {term}" for term in sides[1]]
        axes = f"{', '.join(arguments)} -> {', '.join(results)}"
        return Rule(axes, f"{name} {self.over}", self.reduced)

    def sharded(
        self, names: list[Names], specs: list[Any], sizes: dict[str, int], devices: dict[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes of each named axis. The first argument with an axis decides.

        Args:
            names, specs: axes of the arguments, and their sharding.
            sizes: size of each named axis.
            devices: number of devices along each mesh axis.
        """
        found: dict[str, tuple[str, ...]] = {}
        for term, spec in zip(names, specs, strict=True):
            for name, axes in zip(term, spec, strict=False):
                name, axes = outer(name), (axes,) if isinstance(axes, str) else axes or ()
                used = {axis for others in found.values() for axis in others}
                number = math.prod(devices.get(axis, 1) for axis in axes)
                divides = sizes.get(name, number) % number == 0
                if name in self.over.split() and divides and not (name in found or used & {*axes}):
                    found[name] = axes
        return found


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of an axis, inside the function of a `Rule`. Without mesh axes, the array of the
    function is the whole array."""

    axes: tuple[str, ...] = ()

    def sum(self, x: Any) -> Any:
        """Return the sum of x over the shards."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum of x over the shards."""
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def places(self, size: int) -> jax.Array:
        """Return the places in the whole axis of a shard of this size, int32."""
        place = jnp.arange(size, dtype=jnp.int32)
        return place + size * jax.lax.axis_index(self.axes) if self.axes else place


_mesh_axes: contextvars.ContextVar[dict[str, tuple[str, ...]] | None] = contextvars.ContextVar(
    "mesh_axes", default=None
)


def shards_of(name: str) -> Shards:
    """Return the shards of an axis that a `Rule` names. Call it while the function is traced."""
    return Shards((_mesh_axes.get() or {}).get(name, ()))


def outer(name: str) -> str:
    """Return the axis that may be sharded of an axis such as "k.g"."""
    return name.partition(".")[0]


def may_shard() -> bool:
    """Return whether the compiler may shard arrays: not with one device, and not if `jax.shard_map`
    made all axes of the mesh manual."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    left = math.prod(size for size, kind in sizes if kind != AxisType.Manual)
    return jax.device_count() > 1 and (mesh.empty or left > 1)


def automatic(f: Callable, x: jax.Array, w: Any = None) -> Callable:
    """Wrap f, with a result x w: all axes of the mesh are automatic in f. Without w, the results
    have the rows of x and no columns.

    With explicit axes, JAX's matmuls raise an error where the sharding of the result is ambiguous.
    The result is sharded as the rows of x and the columns of w. An axis of the mesh that shards
    both shards the rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = _axes_of(mesh, AxisType.Explicit)
    if not explicit or mesh.manual_axes:
        return f
    *rows, _ = jax.typeof(x).sharding.spec
    if w is None:
        return jax.sharding.auto_axes(f, axes=explicit, out_sharding=PartitionSpec(*rows))
    *_, columns = jax.typeof(jax.tree.leaves(w)[0]).sharding.spec
    used = {axis for axes in rows for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    taken = used & {*((columns,) if isinstance(columns, str) else columns or ())}
    spec = PartitionSpec(*rows, None if taken else columns)
    return jax.sharding.auto_axes(f, axes=explicit, out_sharding=spec)


def _axes_of(mesh: AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, axis_type in axes if axis_type == kind)


def sharded(f: Callable, rule: Rule | None) -> Callable:
    """Wrap f, which launches kernels, to run on the shards of arrays that the compiler may shard.

    With one device, where all axes of the mesh are manual, and inside another such function, f runs
    as it is.
    """

    def launch(*args: Any) -> Any:
        if rule is None:
            return f(*args)
        mesh = jax.sharding.get_abstract_mesh()
        shapes = [None if x is None else x.shape for x in _leaves(args)]
        f_merged, (of_arrays, _) = _merging(f, rule), rule.of_shapes(shapes)
        if not may_shard() or _mesh_axes.get() is not None:
            return f_merged(*args)
        return _partitioned(f_merged, of_arrays, args, mesh)

    return launch


def overwriting(f: Callable, arrays: list[jax.Array]) -> tuple[list[jax.Array], Any]:
    """Call f with references to these arrays, which f overwrites. Return the new arrays, and the
    results of f.

    The effect of `jax.new_ref` cannot be lowered in a `custom_partitioning` function.
    """

    def with_new_refs(*arrays):
        refs = [jax.new_ref(x) for x in arrays]
        out = f(*refs)
        return [jax.freeze(ref) for ref in refs], out

    if not may_shard():
        return with_new_refs(*arrays)
    from jax.experimental import pallas

    def body(refs):
        overwritten, results = refs
        out = f(*overwritten)
        for ref, x in zip(jax.tree.leaves(results), jax.tree.leaves(out), strict=True):
            ref[...] = x

    shapes = jax.eval_shape(with_new_refs, *arrays)[1]
    empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), shapes)
    return pallas.run_state(body)((arrays, empty))


def _merging(f: Callable, rule: Rule) -> Callable:
    """Wrap f: its arguments and results have one axis for a name with a star."""
    arguments, results = rule.sides

    def reshaped(tree, terms, shape_of):
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_none)
        for i, names in enumerate(terms):
            at = next((at for at, name in enumerate(names) if name.endswith("*")), None)
            if leaves[i] is not None and at is not None:
                leaves[i] = leaves[i].reshape(shape_of(leaves[i].shape, at, len(names)))
        return jax.tree.unflatten(structure, leaves)

    def f_merged(*args):
        _, sizes = rule.of_shapes([None if x is None else x.shape for x in _leaves(args)])
        if len(sizes) == 1:
            return f(*args)

        def merged(shape, at, axes):
            more = len(shape) - axes + 1
            return (*shape[:at], math.prod(sizes), *shape[at + more :])

        def split(shape, at, axes):
            return (*shape[:at], *sizes, *shape[at + 1 :])

        return reshaped(f(*reshaped(args, arguments, merged)), results, split)

    return f_merged


def _partitioned(f: Callable, rule: Rule, args: Any, mesh: AbstractMesh) -> Any:
    if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key:
        raise ValueError(
            "found jax_remove_custom_partitioning_ptr_from_cache_key=True: with JAX's compilation "
            "cache, kernels of equal shapes would share an executable, with wrong results; set it "
            "to False, or call the kernels in jax.shard_map"
        )
    given = [x is not None for x in _leaves(args)]
    arguments = _present(rule.sides[0], given)
    sizes = {
        name: size
        for names, x in zip(arguments, jax.tree.leaves(args), strict=True)
        for name, size in zip(names, x.shape, strict=True)
    }
    results: list[list[Names]] = []

    def f_traced(*args):
        out = f(*args)
        results.append(_present(rule.sides[1], [x is not None for x in _leaves(out)]))
        return out

    def partition(mesh, shapes, outputs):
        if mesh.empty:  # some axes are manual: JAX passes shardings without names
            parts = _parts([*zip(arguments, jax.tree.leaves(shapes), strict=True)])
            for names in results[0]:
                if whole := {*parts} - {outer(name) for name in names}:
                    raise ValueError(
                        f"expected no sharded axis {sorted(whole)}: on a mesh with manual and "
                        "other axes, sums over shards are not supported; use implementation='xla'"
                    )
            given = [jax.tree.map(lambda x: x.sharding, tree) for tree in (outputs, shapes)]
            return mesh, f, *given
        specs = [x.sharding.spec for x in jax.tree.leaves(shapes)]
        axes = rule.sharded(arguments, specs, sizes, dict(mesh.shape))

        def on_shard(*shards):
            token = _mesh_axes.set(axes)
            try:
                # An explicit axis of the mesh would belong to the types of the shards.
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    out, structure = jax.tree.flatten(f(*shards))
                    for i, names in enumerate(results[0]):
                        own = {*rule.reduced.split(), *map(outer, names)}
                        over = [axis for name in axes if name not in own for axis in axes[name]]
                        out[i] = Shards(tuple(over)).sum(out[i])
            finally:
                _mesh_axes.reset(token)
            return jax.tree.unflatten(structure, out)

        def shardings(tree, side):
            given = [NamedSharding(mesh, _partition_spec(names, axes)) for names in side]
            return jax.tree.unflatten(jax.tree.structure(tree), given)

        return mesh, on_shard, shardings(outputs, results[0]), shardings(shapes, arguments)

    def of_shardy(*_) -> tuple[str, dict]:
        sides = arguments, results[0]
        text = " -> ".join(
            ", ".join(" ".join(_factors(name) for name in names) for names in side)
            for side in sides
        )
        # In the order of Shardy's factors: that of their first appearance.
        names = dict.fromkeys(
            factor for side in sides for axes in side for name in axes for factor in name.split(".")
        )
        whole = tuple(name for name in names if name not in rule.over.split())
        inner = {
            name.partition(".")[2]: size // sizes[outer(name)]
            for name, size in sizes.items()
            if "." in name
        }
        return text, {"need_replication_factors": whole, **inner}

    call = custom_partitioning(f_traced)
    call.def_partition(partition=partition, sharding_rule=of_shardy)
    if not (explicit := _axes_of(mesh, AxisType.Explicit)):
        return call(*args)
    device = mesh.abstract_device
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        shapes = jax.eval_shape(f_traced, *plain)
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(args)]
    axes = rule.sharded(arguments, specs, sizes, dict(mesh.shape))
    for names, spec in zip(arguments, specs, strict=True):
        wanted = _partition_spec(names, axes)
        if any(given not in (None, part) for given, part in zip(spec, wanted, strict=False)):
            raise ValueError(
                f"expected arrays with axes {' '.join(names)} that are sharded alike, and over "
                f"{rule.over} only, got the sharding {spec}: use jax.sharding.reshard"
            )
    out = [_partition_spec(names, axes) for names in results[0]]
    out_sharding = jax.tree.unflatten(jax.tree.structure(shapes), out)
    return jax.sharding.auto_axes(call, axes=explicit, out_sharding=out_sharding)(*args)


def _parts(arrays: list[tuple[Names, Any]]) -> dict[str, int]:
    """Return the number of shards along each axis that is sharded.

    Raises:
        ValueError: two arrays are sharded differently along an axis of the same name.
    """
    parts: dict[str, int] = {}
    for names, x in arrays:
        shard = x.sharding.shard_shape(x.shape)
        for name, size, own in zip(names, x.shape, shard, strict=True):
            if parts.setdefault(outer(name), size // own) != size // own:
                raise ValueError(
                    f"expected arrays that are sharded alike along {name!r}, got parts of "
                    f"{shard} of {x.shape}: use jax.lax.with_sharding_constraint"
                )
    return {name: number for name, number in parts.items() if number > 1}


def _factors(name: str) -> str:
    return f"({name.replace('.', ' ')})" if "." in name else name


def _partition_spec(names: Names, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
    parts = [axes.get(outer(name)) or None for name in names]
    return PartitionSpec(*(p[0] if p and len(p) == 1 else p for p in parts))


def _present(terms: list[Names], given: list[bool]) -> list[Names]:
    """Return the terms without those of absent arrays."""
    return [names for names, flag in zip(terms, given, strict=True) if flag]


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of the tree, None included."""
    return jax.tree.leaves(tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None
