"""How every kernel turns `implementation=` into one of its back ends."""

import jax


def platform() -> str:
    """The platform that arrays go to by default: "gpu", "cpu", … (`jax.default_device` included)."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


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
