"""Checks of the machine. Each check returns the value found, a status, and a remedy."""

import dataclasses
import os
import platform
import shutil
from collections.abc import Generator, Iterator
from typing import Literal

from packaging.requirements import Requirement

from gptjax.doctor import machine

INSTALL, INSTALL_12 = "pip install -e '.[cuda13]'", "pip install -e '.[cuda12]'"
# train.py reserves this part of a GPU's memory.
RESERVED = 0.92
# Three checkpoints of GPT-2 124M with AdamW need 5 GiB.
LEAST_DISK_GIB = 10
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin"),
    *("jax-triton", "triton", "flax", "optax", "orbax-checkpoint", "grain", "gptjax"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""
    """What to install or to do; empty if the status is "ok"."""


def versions() -> dict[str, str | None]:
    """Return the version of each package, of the driver and of its CUDA; None if absent."""
    gpus, cuda = machine.gpus(), machine.cuda_version()
    packages = {name: machine.installed(name) for name in PACKAGES}
    driver = gpus[0].driver if gpus else None
    newest = None if cuda is None else f"{cuda[0]}.{cuda[1]}"
    return {"python": platform.python_version(), **packages, "driver": driver, "cuda": newest}


def _plugins() -> list[int]:
    """Return the CUDA versions of the installed plugins of JAX, the newest first."""
    return [n for n in (13, 12) if machine.installed(f"jax-cuda{n}-plugin") is not None]


def packages() -> Result:
    """Compare the installed packages with the requirements of gptjax, JAX and its CUDA plugin."""
    wanted = [("gptjax", ""), ("jax", "")]
    if machine.cuda_version() is not None:  # without a driver, no kernel and no plugin is needed
        wanted += [("jax-triton", "")]
        for n in _plugins()[:1] or [13]:
            wanted += [("gptjax", f"cuda{n}"), ("jax", f"cuda{n}"), (f"jax-cuda{n}-plugin", "")]
    found = [needed for package in wanted for needed in machine.requirements(*package)]
    if not found:
        what = "gptjax is not installed: the requirements are unknown"
        return Result("packages", "warning", what, f"in the repository: {INSTALL}")
    wrong = {str(needed): text for needed in found if (text := _wrong(needed)) is not None}
    if not wrong:
        return Result("packages", "ok", f"{len(found)} requirements are met")
    # PyTorch pins triton 3.6, which works too.
    old_triton = machine.installed("triton") and all("needs triton" in s for s in wrong.values())
    remedy = "pip install " + " ".join(f"'{line}'" for line in wrong)
    status = "warning" if old_triton else "failed"
    return Result("packages", status, "; ".join(wrong.values()), remedy)


def _wrong(requirement: Requirement) -> str | None:
    """Describe how the installed version violates a requirement; None if the version is right."""
    version = machine.installed(requirement.name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    return f"needs {requirement.name}{requirement.specifier}, found {version or 'none'}"


def plugin() -> Result:
    """Check that one CUDA plugin of JAX is installed, or none without a driver."""
    cuda, plugins = machine.cuda_version(), _plugins()
    install = INSTALL_12 if cuda is not None and cuda[0] == 12 else INSTALL
    if len(plugins) == 2:
        what = "jax-cuda12-plugin and jax-cuda13-plugin are both installed, expected one"
        reason = "NVIDIA's libraries for CUDA 12 and 13 overwrite each other"
        return Result("CUDA plugin", "failed", what, f"in a new environment: {install}; {reason}")
    if cuda is not None and not plugins:
        what = "an NVIDIA driver, but no CUDA plugin of JAX: training would run on the CPU"
        return Result("CUDA plugin", "failed", what, install)
    return Result("CUDA plugin", "ok", f"CUDA {plugins[0]}" if plugins else "not needed")


def driver() -> Result:
    """Compare the driver's CUDA version with the plugin's."""
    cuda, plugins = machine.cuda_version(), _plugins()
    if cuda is None:
        what = "no NVIDIA driver (libcuda.so.1): training runs on the CPU"
        remedy = "on a machine with an NVIDIA GPU: install the driver, version 580 or later"
        return Result("driver", "warning", what, f"{remedy}; elsewhere nothing")
    found = f"the driver supports CUDA {cuda[0]}.{cuda[1]}"
    if plugins and cuda[0] < plugins[0]:
        remedy = "install NVIDIA's driver, version 580 or later"
        if cuda[0] == 12:
            remedy += f", or use CUDA 12, in a new environment: {INSTALL_12}"
        return Result("driver", "failed", f"{found}, and the plugin needs {plugins[0]}", remedy)
    return Result("driver", "ok", found)


def disk() -> Result:
    """Check that the current folder has space for checkpoints."""
    free = shutil.disk_usage(".").free / 2**30
    found = f"{free:.0f} GiB free in the current folder"
    if free < LEAST_DISK_GIB:
        return Result("disk", "warning", found, "free space, or write runs to another --out-dir")
    return Result("disk", "ok", found)


def memory() -> Iterator[Result]:
    """Check that no other process uses the memory of a GPU, before JAX allocates memory."""
    for gpu in machine.gpus():
        name, free = f"memory of GPU {gpu.index}", 1 - gpu.used_mib / gpu.total_mib
        found = f"{gpu.name}: {gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB in use"
        if gpu.processes or free < RESERVED:
            found += f" by {'; '.join(gpu.processes) or 'a process outside this container'}"
            remedy = (
                "end that process, or choose another GPU (CUDA_VISIBLE_DEVICES); train.py reserves "
                f"{RESERVED:.0%}, and XLA_PYTHON_CLIENT_MEM_FRACTION={max(free - 0.03, 0.01):.2f} "
                "would fit"
            )
            yield Result(name, "failed" if free < RESERVED else "warning", found, remedy)
        else:
            yield Result(name, "ok", found)


def gpus(needed: bool) -> Generator[Result, None, bool]:
    """Check that JAX uses every GPU of the machine; return whether JAX has one.

    Args:
        needed: whether no GPU is a failure.
    """
    try:
        import jax
    except Exception as error:  # any error of a broken installation
        remedy = f"see the failed checks above, or start from an empty environment: {INSTALL}"
        yield Result("import jax", "failed", _first_line(error), remedy)
        return False
    yield Result("import jax", "ok", jax.__version__)
    present = machine.gpus()
    try:
        found = machine.jax_gpus()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        status, remedy = "failed", f"see the failed checks above; {INSTALL}"
        what = f"{len(present)} GPUs in nvidia-smi, none in JAX: {_first_line(error)}"
        if platforms and "cpu" not in platforms.split(","):
            what = f"JAX_PLATFORMS={platforms}: {_first_line(error)}"
            remedy = "unset JAX_PLATFORMS; without a GPU: JAX_PLATFORMS=cpu"
        elif machine.cuda_version() is None:
            status, what = (
                "failed" if needed else "warning",
                "no NVIDIA GPU: training runs on the CPU",
            )
            remedy = "on a machine without a GPU: train.py --device cpu"
        yield Result("GPUs", status, what, remedy)
        return False
    names = ", ".join(f"{device.id}: {device.device_kind}" for device in found)
    old = [d.compute_capability for d in found if float(d.compute_capability) < 8]
    if len(found) < len(present):
        remedy = "check JAX_CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
        yield Result("GPUs", "failed", f"JAX uses {names}, of {len(present)} GPUs", remedy)
    elif old:
        what = f"{names}; compute capability {old[0]}, before Ampere (8.0)"
        yield Result("GPUs", "warning", what, "the kernels need Ampere or later; XLA runs instead")
    else:
        yield Result("GPUs", "ok", names)
    return True


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
