"""Kernel launches on sharded arrays under `jax.jit`: each device launches the kernel on its shards.

A `Rule` names the axes of the arguments and results of a launch. It becomes the sharding rule of a
`jax.experimental.custom_partitioning` function: the compiler propagates shardings through the
launch, and adds no collective for the axes that may be sharded. Without a rule, the compiler would
gather the arrays on every device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Names = list[str]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Axes of the arrays of a launch.

    A result without an axis that is sharded in the arguments is the sum over the shards.

    Attributes:
        axes: such as "n c, c -> n c, c", with a term for each argument and each result, also for
            one that is None. Equal names are one axis.
        over: names of the axes that may be sharded. The compiler gathers the other axes, or raises
            an error if these are explicit axes of the mesh.
    """

    axes: str
    over: str

    def terms(self, arguments: list[bool], results: list[bool]) -> list[list[Names]]:
        """Return the names of the axes of each argument and each result, without those that are
        None, for which the flag is False."""
        return [
            [term.split() for term, given in zip(side.split(","), tree, strict=True) if given]
            for side, tree in zip(self.axes.split("->"), (arguments, results), strict=True)
        ]

    def sharded(self, arguments: list[Names], specs: list[Any]) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes of each named axis. The first argument with an axis decides."""
        found: dict[str, tuple[str, ...]] = {}
        for names, spec in zip(arguments, specs, strict=True):
            for name, axes in zip(names, spec, strict=False):
                axes = (axes,) if isinstance(axes, str) else axes or ()
                used = {axis for others in found.values() for axis in others}
                if name in self.over.split() and name not in found and not used & {*axes}:
                    found[name] = axes
        return found


def sharded(f: Callable, rule: Rule | None) -> Callable:
    """Wrap f, which launches kernels, to run on the shards of arrays that the compiler may shard.

    With one device, and inside `jax.shard_map`, f runs as it is. `select` refuses kernels if only
    some axes of the mesh are manual.
    """

    def launch(*args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if rule is None or mesh.manual_axes or jax.device_count() == 1:
            return f(*args)
        return _partitioned(f, rule, args, mesh)

    return launch


def _partitioned(f: Callable, rule: Rule, args: Any, mesh: AbstractMesh) -> Any:
    traced: list[list[bool]] = []

    def f_traced(*args):
        out = f(*args)
        traced.append(_present(out))
        return out

    def terms() -> list[list[Names]]:
        return rule.terms(_present(args), traced[0])

    def partition(mesh, shapes, results):
        arguments, outputs = terms()
        axes = rule.sharded(arguments, [x.sharding.spec for x in jax.tree.leaves(shapes)])

        def on_shard(*shards):
            # An explicit axis of the mesh would belong to the types of the shards.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                out, structure = jax.tree.flatten(f(*shards))
                for i, names in enumerate(outputs):
                    over = [axis for name in axes if name not in names for axis in axes[name]]
                    out[i] = jax.lax.psum(out[i], tuple(over)) if over else out[i]
            return jax.tree.unflatten(structure, out)

        def shardings(tree, sides):
            given = [NamedSharding(mesh, _partition_spec(names, axes)) for names in sides]
            return jax.tree.unflatten(jax.tree.structure(tree), given)

        return mesh, on_shard, shardings(results, outputs), shardings(shapes, arguments)

    def of_shardy(*_) -> tuple[str, dict]:
        text = " -> ".join(", ".join(map(" ".join, side)) for side in terms())
        # In the order of Shardy's factors: that of their first appearance.
        names = dict.fromkeys(name for side in terms() for axes in side for name in axes)
        whole = tuple(name for name in names if name not in rule.over.split())
        return text, {"need_replication_factors": whole}

    call = custom_partitioning(f_traced)
    call.def_partition(partition=partition, sharding_rule=of_shardy)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(axis for axis, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return call(*args)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        results = jax.eval_shape(f_traced, *plain)
    arguments, outputs = terms()
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(args)]
    axes = rule.sharded(arguments, specs)
    for names, spec in zip(arguments, specs, strict=True):
        wanted = _partition_spec(names, axes)
        if any(given not in (None, part) for given, part in zip(spec, wanted, strict=False)):
            raise ValueError(
                f"expected arrays with axes {' '.join(names)} that are sharded alike, and over "
                f"{rule.over} only, got the sharding {spec}: use jax.sharding.reshard"
            )
    out = [_partition_spec(names, axes) for names in outputs]
    out_sharding = jax.tree.unflatten(jax.tree.structure(results), out)
    return jax.sharding.auto_axes(call, axes=explicit, out_sharding=out_sharding)(*args)


def _partition_spec(names: Names, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
    parts = [axes.get(name) or None for name in names]
    return PartitionSpec(*(p[0] if p and len(p) == 1 else p for p in parts))


def _present(tree: Any) -> list[bool]:
    """Return for each leaf of the tree whether it is not None."""
    return [x is not None for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None)]
