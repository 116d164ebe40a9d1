"""How every kernel turns `implementation=` into one of its back ends, and what those need of the
device and of the arrays."""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
"""Of the floating-point arrays of every public function, in every back end. None of them computes
in float64."""
KERNELS = ("mosaic", "triton")
"""Back ends that launch kernels of ours, which the compiler does not know how to partition."""
_SPLIT = (
    "needs arrays of one device, and the compiler may split these over several: it would gather "
    "them on each. "
    "Call it inside jax.shard_map"
)


def platform() -> str:
    """The platform that arrays go to by default: "gpu", "cpu", … (`jax.default_device`
    included)."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def capability() -> tuple[int, int] | None:
    """CUDA compute capability of the default device, such as (9, 0); None where that is no NVIDIA
    GPU."""
    if platform() not in ("gpu", "cuda"):
        return None
    device = jax.config.jax_default_device
    device = jax.devices()[0] if device is None or isinstance(device, str) else device
    # AMD's GPUs say "gfx90a".
    major, _, minor = getattr(device, "compute_capability", "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def partitioned(*arrays: Any) -> bool:
    """Whether the compiler may split work on these arrays over several devices.

    It may where an array, or the mesh of `jax.set_mesh`, has axes that are not manual and span
    several devices. Under `jax.jit`, too, the type of an array names the mesh that the array is on,
    and what is computed from it inherits that mesh. Inside `jax.shard_map` the axes are manual and
    arrays are local.

    Arrays without a mesh count as on one device, however many there are. Of NumPy arrays that
    `jax.jit(..., in_shardings=...)` splits the type names no mesh: put those on their devices
    first, or call `jax.set_mesh`.
    """
    context = jax.sharding.get_abstract_mesh()
    meshes = [context]
    if not context.manual_axes:
        meshes += [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return any(_devices_of_compiler(mesh) > 1 for mesh in meshes)


def _devices_of_compiler(mesh: jax.sharding.AbstractMesh) -> int:
    """The number of devices along the axes that are not manual."""
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, axis_type in axes if axis_type != jax.sharding.AxisType.Manual)


def why_not_triton() -> str | None:
    """None where Triton kernels run on the default device, else the reason."""
    if capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {platform()}"
    if capability() < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or later, not {capability()}"
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax-triton: pip install -e '.[cuda13]'"
    return None


def why_not_mosaic() -> str | None:
    """None where Mosaic GPU kernels for Hopper run on the default device, else the reason."""
    if capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {platform()}"
    if capability() != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), not {capability()}"
    return None


def auto(supported: dict[str, str | None], *arrays: Any) -> str:
    """The first back end that can run here; no kernel of ours where the compiler may split the
    arrays over devices.

    Args:
        supported: back end → None where it can run here, else the reason why not; the fastest
            first.
        arrays: those of the call, or pytrees of them; none where only shapes are known.
    """
    return next(name for name, why in _with_arrays(supported, arrays).items() if why is None)


def named(kernel: str, implementation: str, supported: dict[str, str | None], *arrays: Any) -> str:
    """Returns `implementation` if this device, dtype, shape and these arrays can run it.

    Args:
        kernel: the kernel's name, for the error.
        implementation: what the caller asked for.
        supported, arrays: as in `auto`.

    Raises:
        ValueError: no such back end, or it cannot run here; the message says which could.
    """
    if implementation not in supported:
        raise ValueError(
            f"{kernel}: unknown implementation {implementation!r}; choose one of "
            f"{['auto', *supported]}"
        )
    supported = _with_arrays(supported, arrays)
    if (reason := supported[implementation]) is not None:
        usable = [name for name, why in supported.items() if why is None]
        raise ValueError(
            f"{kernel}: implementation {implementation!r} {reason}; these can run here: {usable}"
        )
    return implementation


def _with_arrays(supported: dict[str, str | None], arrays: tuple) -> dict[str, str | None]:
    """`supported`, where a kernel of ours that could run is refused for arrays that the compiler
    may split."""
    if not partitioned(*arrays):
        return supported
    return {
        name: _SPLIT if why is None and name in KERNELS else why for name, why in supported.items()
    }
