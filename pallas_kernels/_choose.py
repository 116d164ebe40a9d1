"""How every kernel turns `implementation=` into one of its back ends, and what those need of the device."""

import importlib.util

import jax


def platform() -> str:
    """The platform that arrays go to by default: "gpu", "cpu", … (`jax.default_device` included)."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def capability() -> tuple[int, int] | None:
    """CUDA compute capability of the default device, such as (9, 0); None where that is no NVIDIA GPU."""
    if platform() not in ("gpu", "cuda"):
        return None
    device = jax.config.jax_default_device
    device = jax.devices()[0] if device is None or isinstance(device, str) else device
    # AMD's GPUs say "gfx90a".
    major, _, minor = getattr(device, "compute_capability", "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def partitioned() -> bool:
    """Whether the compiler may split arrays over several devices: there are several, and this is not inside a `jax.shard_map`.

    It does not know how to split a kernel's work, and gathers all of its arrays on every device.
    """
    return len(jax.devices()) > 1 and not jax.sharding.get_abstract_mesh().manual_axes


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


def auto(supported: dict[str, str | None]) -> str:
    """The first back end that can run here; no kernel of ours where the compiler may split its arrays over devices.

    Args:
        supported: back end → None where it can run here, else the reason why not; the fastest first.
    """
    skipped = ("mosaic", "triton") if partitioned() else ()
    return next(name for name, why in supported.items() if why is None and name not in skipped)


def named(kernel: str, implementation: str, supported: dict[str, str | None]) -> str:
    """Returns `implementation` if this device, dtype and shape can run it.

    Args:
        kernel: the kernel's name, for the error.
        implementation: what the caller asked for.
        supported: back end → None where it can run here, else the reason why not.

    Raises:
        ValueError: no such back end, or it cannot run here; the message says which could.
    """
    if implementation not in supported:
        raise ValueError(f"{kernel}: unknown implementation {implementation!r}; choose one of {['auto', *supported]}")
    if (reason := supported[implementation]) is not None:
        usable = [name for name, why in supported.items() if why is None]
        raise ValueError(f"{kernel}: implementation {implementation!r} {reason}; these can run here: {usable}")
    return implementation
