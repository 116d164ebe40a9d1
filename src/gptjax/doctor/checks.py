"""Checks of the machine. Each check returns the value found, a status, and a remedy."""

from typing import Literal, NamedTuple

from gptjax.doctor import machine
from gptjax.terminal import first_line

INSTALL, INSTALL_12 = "pip install 'gptjax[cuda13]'", "pip install 'gptjax[cuda12]'"


class Result(NamedTuple):
    """Result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""
    """What to install or to do; empty if the status is "ok"."""


def packages() -> Result:
    """Compare the installed packages with the requirements of gptjax, JAX and its CUDA plugin."""
    wanted = [("gptjax", ""), ("jax", "")]
    if machine.cuda_version() is not None:  # without a driver, no kernel and no plugin is needed
        n = (machine.plugins() or [13])[0]
        wanted += [("jax-triton", ""), ("gptjax", f"cuda{n}"), ("jax", f"cuda{n}")]
        wanted += [(f"jax-cuda{n}-plugin", "")]
    found = [needed for package in wanted for needed in machine.requirements(*package)]
    wrong = {}
    for needed in found:
        version = machine.installed(needed.name)
        if version is None or not needed.specifier.contains(version, prereleases=True):
            wrong[str(needed)] = f"needs {needed.name}{needed.specifier}, found {version or 'none'}"
    if not wrong:
        return Result("packages", "ok", f"{len(found)} requirements are met")
    # PyTorch pins triton 3.6, which works too.
    old_triton = machine.installed("triton") and all("needs triton" in s for s in wrong.values())
    remedy = "pip install " + " ".join(f"'{line}'" for line in wrong)
    status = "warning" if old_triton else "failed"
    return Result("packages", status, "; ".join(wrong.values()), remedy)


def driver() -> Result:
    """Check that one CUDA plugin of JAX is installed, and that the driver supports its CUDA."""
    cuda, plugins = machine.cuda_version(), machine.plugins()
    if cuda is None:
        remedy = "on a machine with an NVIDIA GPU: install the driver, version 580 or later"
        return Result("driver", "warning", "no NVIDIA driver: training runs on the CPU", remedy)
    found = f"the driver supports CUDA {cuda[0]}.{cuda[1]}"
    if len(plugins) == 1 and cuda[0] >= plugins[0]:
        return Result("driver", "ok", found)
    found += f", and JAX has the CUDA plugins {plugins or 'none'}, expected one"
    remedy = "install NVIDIA's driver, version 580 or later, and in a new environment: " + INSTALL
    if cuda[0] == 12:
        remedy += f"; or with this driver: {INSTALL_12}"
    return Result("driver", "failed", found, remedy)


def gpus() -> Result:
    """Check that JAX can be imported, and uses every GPU of the machine."""
    present = machine.gpus()
    try:
        import jax

        found = jax.devices("gpu")
    except Exception as error:  # any error of a broken installation
        if isinstance(error, RuntimeError) and machine.cuda_version() is None:
            what = "no NVIDIA GPU: training runs on the CPU"
            return Result("GPUs", "warning", what, "on such a machine: train.py --device cpu")
        what = f"{len(present)} GPUs in nvidia-smi, none in JAX: {first_line(error)}"
        remedy = f"see the checks above; unset JAX_PLATFORMS; in a new environment: {INSTALL}"
        return Result("GPUs", "failed", what, remedy)
    names = ", ".join(f"{device.id}: {device.device_kind}" for device in found)
    if len(found) < len(present):
        remedy = "check JAX_CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
        return Result("GPUs", "failed", f"JAX uses {names}, of {len(present)} GPUs", remedy)
    return Result("GPUs", "ok", names)
