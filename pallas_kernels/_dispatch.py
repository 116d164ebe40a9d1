"""Registry of the back ends of every operation, and the function that selects a back end.

Each kernel folder calls `register` for the operations that it defines. Callers use `select`.
"""

import contextlib
import contextvars
import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
"""Supported dtypes of the floating-point arrays of every public function. No back end computes in
float64."""
_PARTITIONED = (
    "needs arrays of one device, and the compiler may split these over several: it would gather "
    "them on each, since this kernel has no sharding rule for this call. Call it inside "
    "jax.shard_map"
)


# ----------------------------------------------------------------------------------------- registry


@dataclasses.dataclass(frozen=True)
class NoFacts:
    """Facts of operations whose choice of a back end depends on the device and sharding alone."""


@dataclasses.dataclass(frozen=True)
class BackEnd:
    """One implementation of an operation."""

    name: str
    why_not: Callable[[Any], str | None] = lambda facts: None
    """Return None where the back end can run a call with these facts, else the reason why not."""
    custom: bool = False
    """Launches custom kernels, which GSPMD cannot partition without a sharding rule."""
    rule: bool | Callable[[Any, int], bool] = False
    """Whether all launches have a sharding rule (pallas_kernels/_partition.py); a bool, or a
    function of the facts and of the number of devices of the mesh."""
    sums: bool = False
    """Whether a launch returns sums over the shards, which need the names of all mesh axes."""


class Example(NamedTuple):
    """An example call of an operation, defined in the folder of the operation."""

    call: Callable[..., Any]
    """Function of the arrays and of the option `implementation`. Returns the result."""
    reference: Callable[..., Any]
    """Function of the same arrays. Returns the definition of the result in fp32."""
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes and dtypes of the arrays."""
    differentiable: bool = True


MakeExample = Callable[[int, jax.typing.DTypeLike], Example | None]
"""Function of the number of rows (tokens) and the dtype. Returns an example of that size, or None
if the dtype has no example."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """The back ends of a public function."""

    back_ends: tuple[BackEnd, ...]
    """Back ends, fastest first. "xla" is one of these back ends."""
    facts: type = NoFacts
    """Dataclass of the properties of a call on which the choice depends, such as dtype and
    shape."""
    order: Callable[[Any, bool], Sequence[str]] | None = None
    """Function of the facts and of whether the compiler may split the arrays. Returns the names
    that `auto` tries. None: all names, in the order of `back_ends`."""
    examples: tuple[MakeExample, ...] = ()
    """Calls that together launch every kernel of the operation. Programs that run or compile all
    kernels use them: `python -m gptjax.doctor`, benchmarks/tools/compile_for_cards.py."""


OPERATIONS: dict[str, Operation] = {}
"""Every operation by the name of its public function."""


def register(
    *names: str,
    back_ends: Sequence[BackEnd],
    facts: type = NoFacts,
    order: Callable[[Any, bool], Sequence[str]] | None = None,
) -> None:
    """Add operations that share their back ends; the parameters are the fields of `Operation`.

    Raises:
        ValueError: `pallas_kernels` has an operation of this name.
        TypeError: a back end is not a `BackEnd`.
    """
    if wrong := [each for each in back_ends if not isinstance(each, BackEnd)]:
        raise TypeError(f"register: expected BackEnd objects such as XLA, got {wrong}")
    for name in names:
        # Another operation may be registered again: a cell of a notebook runs several times.
        if name in OPERATIONS and name in sys.modules[__package__].__all__:
            raise ValueError(
                f"register: {name!r} is an operation of {__package__}; choose another name"
            )
        OPERATIONS[name] = Operation(tuple(back_ends), facts, order)


def example(operation: str) -> Callable[[MakeExample], MakeExample]:
    """Register the decorated function, which returns an example of a registered operation.

    The first line of the function's docstring names the example and the reason for the example.
    """

    def add(make: MakeExample) -> MakeExample:
        entry = OPERATIONS[operation]
        OPERATIONS[operation] = dataclasses.replace(entry, examples=(*entry.examples, make))
        return make

    return add


def title(make: MakeExample) -> str:
    """Return the name of an example: the first line of its docstring."""
    return (make.__doc__ or "").partition("\n")[0].removesuffix(".")


def select(operation: str, implementation: str = "auto", *, arrays: Any = (), **facts: Any) -> str:
    """Return the name of the back end that an operation uses on the default device.

    "auto" selects the fastest supported back end. Custom kernels are skipped where GSPMD may shard
    the arrays. With an empty array, "xla" replaces every back end except "reference": an empty
    array needs no launch.

    Args:
        operation: name of the public function.
        implementation: "auto", or the name of a back end.
        arrays: pytree of the call's arrays. The types of the arrays show whether the compiler may
            split the arrays. None if only the facts are known.
        facts: dtype, shape and options of the call: fields of a dataclass of the kernel folder.

    Raises:
        ValueError: no such operation or back end, missing or unknown facts, or the named back end
            cannot run here; the message lists the back ends that can.

    Example:
        >>> select("layer_norm", channels=768)
        'triton'
    """
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; choose one of {sorted(OPERATIONS)}")
    entry = OPERATIONS[operation]
    back_ends = {back_end.name: back_end for back_end in entry.back_ends}
    if implementation not in ("auto", *back_ends):
        raise ValueError(
            f"{operation}: unknown implementation {implementation!r}; choose one of "
            f"{['auto', *back_ends]}"
        )
    fields = {field.name: field.default for field in dataclasses.fields(entry.facts)}
    needed = [name for name, default in fields.items() if default is dataclasses.MISSING]
    if not {*needed} <= {*facts} <= {*fields}:
        optional = [name for name in fields if name not in needed]
        needed, optional, got = (", ".join(x) or "none" for x in (needed, optional, facts))
        raise ValueError(
            f"{operation}: expected the facts {needed} and optionally {optional}, got {got}"
        )
    call = entry.facts(**facts)
    split = (devices := devices_of(arrays)) > 1
    partly_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)

    def gathers(back_end: BackEnd) -> bool:
        rule = back_end.rule
        rule = rule(call, devices) if split and callable(rule) else rule
        return split and back_end.custom and (not rule or (partly_manual and back_end.sums))

    reasons = ((name, back_end.why_not(call)) for name, back_end in back_ends.items())
    why_not = {
        name: _PARTITIONED if why is None and gathers(back_ends[name]) else why
        for name, why in reasons
    }
    if implementation == "auto":
        order = tuple(back_ends) if entry.order is None else entry.order(call, split)
        name = next((name for name in order if why_not[name] is None), None)
        if name is None:
            last = "xla" if "xla" in order else order[-1]
            raise ValueError(f"{operation}: no back end can run here: {why_not[last]}")
    elif why_not[implementation] is None:
        name = implementation
    else:
        usable = [name for name, why in why_not.items() if why is None]
        raise ValueError(
            f"{operation}: implementation {implementation!r} {why_not[implementation]}; these can "
            f"run here: {usable}"
        )
    if name != "reference" and any(math.prod(x.shape) == 0 for x in jax.tree.leaves(arrays)):
        name = "xla"
    if (choices := _choices.get()) is not None:
        choices.append(Choice(operation, call, name))
    return name


# ----------------------------------------------------------------------------------------- recorder


class Choice(NamedTuple):
    """The result of one `select`."""

    operation: str
    facts: Any
    """The operation's dataclass of facts."""
    back_end: str

    @property
    def numerics(self) -> str | None:
        """Name of the numerics of the call's matmuls; None for an operation without numerics."""
        return getattr(getattr(self.facts, "numerics", None), "name", None)


_choices: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Record every choice of a back end in the context, those inside other operations included.

    An operation selects its back end when JAX traces the operation. The call of a function that is
    already compiled records nothing. `jax.eval_shape` traces a function without arrays:

        >>> with recorded() as choices:
        ...     _ = jax.eval_shape(layer_norm, x_NC, scale_C, bias_C)
        >>> [(choice.operation, choice.back_end) for choice in choices]
        [('layer_norm', 'triton')]

    Returns:
        The list of choices, in order. The list grows while the context is active.
    """
    token = _choices.set([])
    try:
        yield _choices.get()
    finally:
        _choices.reset(token)


# --------------------------------------------------------------------------------- device, sharding


def default_device() -> jax.Device:
    """Return the default device, `jax.default_device` included, which may name a platform."""
    device = jax.config.jax_default_device
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def platform() -> str:
    """Return the platform of the default device: "gpu", "cpu", …"""
    return default_device().platform


def capability() -> tuple[int, int] | None:
    """Return the CUDA compute capability of the default device, such as (9, 0), or None if the
    device is not an NVIDIA GPU."""
    if platform() != "gpu":
        return None
    # AMD's GPUs say "gfx90a".
    major, _, minor = getattr(default_device(), "compute_capability", "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def partitioned(*arrays: Any) -> bool:
    """Return whether the compiler may split work on these arrays over several devices."""
    return devices_of(*arrays) > 1


def devices_of(*arrays: Any) -> int:
    """Return the number of devices over which the compiler may split work on these arrays.

    These are the devices along the axes that are not manual, of the mesh of an array or of
    `jax.set_mesh`. Under `jax.jit`, too, the type of an array names the array's mesh,
    and results inherit the mesh of their operands. Inside `jax.shard_map` the axes are manual and
    arrays are local.

    Arrays without a mesh count as arrays of one device, even if several devices exist. The types
    of NumPy arrays that `jax.jit(..., in_shardings=...)` splits name no mesh. Put such arrays on
    devices first, or call `jax.set_mesh`.
    """
    context = jax.sharding.get_abstract_mesh()
    meshes = [context]
    if not context.manual_axes:
        meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return max(_devices_of_compiler(mesh) for mesh in meshes)


def _devices_of_compiler(mesh: jax.sharding.AbstractMesh) -> int:
    """Return the number of devices along the axes that are not manual."""
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, axis_type in axes if axis_type != jax.sharding.AxisType.Manual)


def why_not_triton() -> str | None:
    """Return None where Triton kernels run on the default device, else the reason why not."""
    if capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {platform()}"
    if capability() < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or later, not {capability()}"
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax-triton: pip install 'gptjax[cuda13]'"
    return None


def why_not_mosaic() -> str | None:
    """Return None where Mosaic GPU kernels for Hopper run on the default device, else the reason
    why not."""
    if capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {platform()}"
    if capability() != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {capability()}"
    return None


def why_not_16_bit(dtype: jax.typing.DTypeLike, others: str = "") -> str | None:
    """Return None for bf16 and fp16, else the reason why not.

    Args:
        others: further dtypes that the back end supports, for the reason, such as "float32, ".
    """
    if jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16):
        return None
    return f"supports {others}bfloat16 or float16, not {jnp.dtype(dtype).name}"


# --------------------------------------------------------------------------------- common back ends

# The lambda looks up `why_not_triton` at each call, since tests replace `why_not_triton`.
TRITON = BackEnd("triton", lambda facts: why_not_triton(), custom=True)
"""Kernels in Triton: an NVIDIA GPU of Ampere or later, and jax-triton."""
XLA = BackEnd("xla")
"""Plain JAX, on any device."""
REFERENCE = BackEnd("reference")
"""The definition in fp32, on any device."""
