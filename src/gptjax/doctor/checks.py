"""Checks of the machine. Each check returns the value found, a status, and a remedy."""

import dataclasses
import os
import platform
from typing import TYPE_CHECKING, Literal

from gptjax.doctor import machine

if TYPE_CHECKING:
    from jax import Device

Status = Literal["ok", "warning", "failed"]

INSTALL, INSTALL_12 = "pip install -e '.[cuda13]'", "pip install -e '.[cuda12]'"
# train.py reserves this part of a GPU's memory.
RESERVED = 0.92
# Fractions of the peak that every known card reaches without interference. An H200 copies at 89 %
# and multiplies at 80 %; cards with a low power limit, such as the H100 PCIe and the L4, slow down
# in matmuls.
LEAST_COPY, LEAST_MATMUL = 0.70, 0.50
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin"),
    *("jax-triton", "triton", "flax", "optax", "orbax-checkpoint", "grain", "gptjax"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one check."""

    name: str
    status: Status
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


# ----------------------------------------------------------------------------------------- packages


def packages() -> Result:
    """Compare the installed packages with gptjax's requirements."""
    needed = machine.requirements("gptjax")
    if not needed:
        what = "gptjax is not installed: the requirements are unknown"
        return Result("packages", "warning", what, f"in the repository: {INSTALL}")
    wrong = [text for r in needed if (text := _wrong(r)) is not None]
    if wrong:
        lines = " ".join(f"'{r}'" for r in needed if _wrong(r) is not None)
        return Result("packages", "failed", "; ".join(wrong), f"pip install {lines}")
    return Result("packages", "ok", f"{len(needed)} requirements of gptjax are met")


def jaxlib() -> Result:
    """Compare jaxlib with the versions that this jax accepts."""
    jax, lib = machine.installed("jax"), machine.installed("jaxlib")
    needed = machine.requirement("jax", "jaxlib")
    if jax is None or needed is None:
        return Result("jaxlib", "failed", "jax is not installed", INSTALL)
    if (wrong := _wrong(needed)) is not None:
        return Result("jaxlib", "failed", f"jax {jax}: {wrong}", _same_versions(jax))
    return Result("jaxlib", "ok", f"jax {jax} accepts jaxlib {lib}")


def plugin() -> Result:
    """Check that one CUDA plugin of JAX is installed and fits jax and jaxlib. Without a driver, no
    plugin is needed."""
    cuda = machine.cuda_version()
    if all(machine.installed(f"jax-cuda{n}-plugin") for n in (12, 13)):
        what = "jax-cuda12-plugin and jax-cuda13-plugin are both installed, expected one"
        install = INSTALL_12 if cuda is not None and cuda[0] == 12 else INSTALL
        reason = "NVIDIA's libraries for CUDA 12 and 13 overwrite each other"
        return Result("CUDA plugin", "failed", what, f"in a new environment: {install}; {reason}")
    if cuda is None:
        return Result("CUDA plugin", "ok", "not needed: no NVIDIA driver")
    jax, extra = machine.installed("jax") or "", _cuda_extra()
    if extra is None:
        what = "an NVIDIA driver, but no CUDA plugin of JAX: training would run on the CPU"
        return Result("CUDA plugin", "failed", what, INSTALL)
    name = f"jax-{extra}-plugin"
    plugin, backend = machine.installed(name), machine.installed(f"jax-{extra}-pjrt")
    needed = [machine.requirement("jax", package, extra) for package in (name, "jaxlib")]
    wrong = [text for r in needed if r is not None and (text := _wrong(r)) is not None]
    if backend != plugin:
        wrong.append(f"needs jax-{extra}-pjrt {plugin}, found {backend or 'none'}")
    if wrong:
        text = f"jax {jax}: {'; '.join(wrong)}"
        return Result("CUDA plugin", "failed", text, _same_versions(jax, extra))
    return Result("CUDA plugin", "ok", f"{name} {plugin} fits jax {jax}")


def driver() -> Result:
    """Compare the driver's CUDA version with the plugin's."""
    cuda, extra = machine.cuda_version(), _cuda_extra()
    if cuda is None:
        what = "no NVIDIA driver (libcuda.so.1): training runs on the CPU"
        remedy = "on a machine with an NVIDIA GPU: install the driver, version 580 or later"
        return Result("driver", "warning", what, f"{remedy}; elsewhere nothing")
    found = f"the driver supports CUDA {cuda[0]}.{cuda[1]}"
    if extra is not None and cuda[0] < int(extra.removeprefix("cuda")):
        remedy = "install NVIDIA's driver, version 580 or later"
        if cuda[0] == 12:
            remedy += f", or use CUDA 12, in a new environment: {INSTALL_12}"
        return Result("driver", "failed", f"{found}, and the plugin needs {extra[4:]}", remedy)
    return Result("driver", "ok", found)


def jax_triton() -> Result:
    """Check that jax-triton and Triton are installed: most kernels need both."""
    if machine.cuda_version() is None:
        return Result("jax-triton", "ok", "not needed: no NVIDIA driver")
    version, triton = machine.installed("jax-triton"), machine.installed("triton")
    if version is None:
        what = "jax-triton is missing: no Triton kernel runs, and XLA replaces them all"
        return Result("jax-triton", "failed", what, INSTALL)
    if triton is None:
        what = f"jax-triton {version}, but no triton"
        return Result("jax-triton", "failed", what, "pip install 'triton>=3.7'")
    needed = machine.requirement("gptjax", "jax-triton", "cuda13")
    if needed is not None and (wrong := _wrong(needed)) is not None:
        return Result("jax-triton", "failed", wrong, f"pip install '{needed}'")
    needed = machine.requirement("jax-triton", "triton")
    if needed is not None and (wrong := _wrong(needed)) is not None:
        remedy = f"pip install '{needed}', unless another package pins triton: 3.6 works too"
        return Result("jax-triton", "warning", f"jax-triton {version}: {wrong}", remedy)
    return Result("jax-triton", "ok", f"jax-triton {version}, triton {triton}")


def _wrong(requirement: "machine.Requirement") -> str | None:
    """Describe how the installed version violates a requirement; None if the version is right."""
    version = machine.installed(requirement.name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    return f"needs {requirement.name}{requirement.specifier}, found {version or 'none'}"


def _same_versions(jax: str, extra: str | None = None) -> str:
    extra = extra or _cuda_extra()
    package = "jax" if extra is None else f"jax[{extra}]"
    return f"pip install --upgrade '{package}=={jax}'"


def _cuda_extra() -> str | None:
    """Return the newest extra of jax whose plugin is installed."""
    names = [f"cuda{n}" for n in (13, 12) if machine.installed(f"jax-cuda{n}-plugin") is not None]
    return names[0] if names else None


# --------------------------------------------------------------------------------------------- GPUs


def jax_import() -> Result:
    """Import JAX."""
    try:
        import jax
    except Exception as error:  # any error of a broken installation
        remedy = f"see the failed checks above, or start from an empty environment: {INSTALL}"
        return Result("import jax", "failed", _first_line(error), remedy)
    return Result("import jax", "ok", jax.__version__)


def gpus() -> Result:
    """Check that JAX uses every GPU of the machine, and that the kernels run on them."""
    present = machine.gpus()
    try:
        found = machine.jax_gpus()
    except (RuntimeError, ImportError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and "cpu" not in platforms.split(","):
            what = f"JAX_PLATFORMS={platforms}: {_first_line(error)}"
            remedy = "unset JAX_PLATFORMS; without a GPU: JAX_PLATFORMS=cpu"
            return Result("GPUs", "failed", what, remedy)
        if machine.cuda_version() is None:
            what, remedy = "no NVIDIA GPU", "on a machine without a GPU: train.py --device cpu"
            return Result("GPUs", "warning", f"{what}: training runs on the CPU", remedy)
        remedy = f"see the failed checks above; {INSTALL}; check CUDA_VISIBLE_DEVICES"
        what = f"{len(present)} GPUs in nvidia-smi, none in JAX: {_first_line(error)}"
        return Result("GPUs", "failed", what, remedy)
    names = ", ".join(f"{device.id}: {device.device_kind}" for device in found)
    if present and len(found) < len(present):
        remedy = "check JAX_CUDA_VISIBLE_DEVICES and JAX_PLATFORMS"
        return Result("GPUs", "failed", f"JAX uses {names}, of {len(present)} GPUs", remedy)
    old = [device for device in found if float(device.compute_capability) < 8]
    if old:
        what = f"{names}; compute capability {old[0].compute_capability}, before Ampere (8.0)"
        return Result("GPUs", "warning", what, "the kernels need Ampere or later; XLA runs instead")
    return Result("GPUs", "ok", names)


def memory(gpu: machine.Gpu) -> Result:
    """Check that no other process uses the memory of a GPU."""
    name, gib = f"memory of GPU {gpu.index}", 1024
    free = 1 - gpu.used_mib / gpu.total_mib
    who = "; ".join(gpu.processes) or "a process that nvidia-smi does not list"
    found = f"{gpu.name}: {gpu.used_mib / gib:.1f} of {gpu.total_mib / gib:.1f} GiB in use"
    if free < RESERVED:
        remedy = (
            f"end that process, or choose another GPU (CUDA_VISIBLE_DEVICES); train.py reserves "
            f"{RESERVED:.0%}, and XLA_PYTHON_CLIENT_MEM_FRACTION={max(free - 0.03, 0.01):.2f} "
            "would fit"
        )
        return Result(name, "failed", f"{found} by {who}", remedy)
    if gpu.processes:
        remedy = "times vary while another process uses the GPU: end it before measuring"
        return Result(name, "warning", f"{found} by {who}", remedy)
    return Result(name, "ok", found)


def copy_speed(device: "Device") -> Result:
    """Compare the measured rate of a device copy with the memory bandwidth of this card."""
    from gptjax.training.flops import peak_bandwidth

    peak = peak_bandwidth(device.device_kind)
    return _speed(f"copy on GPU {device.id}", machine.copy_rate, device, peak, "B/s", LEAST_COPY)


def matmul_speed(device: "Device") -> Result:
    """Compare the measured rate of a bf16 matmul with the peak of this card."""
    from gptjax.training.flops import peak_flops

    peak, name = peak_flops(device.device_kind, "bf16"), f"bf16 matmul on GPU {device.id}"
    return _speed(name, machine.matmul_rate, device, peak, "FLOP/s", LEAST_MATMUL)


def _speed(name, measure, device, peak: float | None, unit: str, least: float) -> Result:
    try:
        rate = measure(device)
    except Exception as error:  # a GPU that is out of memory or lost
        return Result(name, "failed", _first_line(error), "see the memory of the GPU above")
    found = f"{rate / 1e12:.2f} T{unit}"
    if peak is None:
        what = f"{found}; the peak of {device.device_kind!r} is unknown, and so is MFU"
        return Result(name, "warning", what, "train.py --peak-tflops N, from NVIDIA's datasheet")
    found += f", {rate / peak:.0%} of the peak {peak / 1e12:.2f}"
    if rate < least * peak:
        remedy = (
            "look for another process on the GPU, a power limit, a low clock or heat: "
            "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE"
        )
        return Result(name, "failed", f"{found}, expected {least:.0%} or more", remedy)
    return Result(name, "ok", found)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
