"""Cache of executables on disk. A hit skips tracing and lowering.

JAX's own cache looks up an executable by its lowered text. Computing this text takes most of a warm
start: Python traces the model, and Triton and Mosaic compile their kernels. The key of this cache
is a hash of everything that determines the text.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import pickle
import platform
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from gptjax.config import ConfigError

# Maximum number of executables in the folder.
NEWEST = 24
PACKAGES = ("gptjax", "pallas_kernels")
# Prefixes of environment variables that XLA, CUDA's libraries, Triton, Mosaic or JAX read.
ENVIRONMENT = (
    "CUBLAS",
    "CUDA",
    "CUDNN",
    "JAX",
    "LD_LIBRARY_PATH",
    "LIBTPU",
    "LLVM",
    "MLIR",
    "MOSAIC",
    "NCCL",
    "NPROC",
)
ENVIRONMENT += ("NVIDIA", "OMP", "PTXAS", "TF_", "TRITON", "XLA")
# Excluded: variables that name folders, and the choice of devices, whose properties are in the
# hash.
HARMLESS = {"CUDA_CACHE_PATH", "CUDA_VISIBLE_DEVICES", "JAX_COMPILATION_CACHE_DIR"}
# Modules that a loaded executable needs. `import jax` registers Triton's custom call, and the CUDA
# plugin contains Mosaic's. Loading compiles Mosaic's kernels again, with libraries whose paths the
# module below sets in the environment.
NEEDED = ("jax.experimental.mosaic.gpu",)

_IMPORTED = time.time()


class NoKey(ValueError):
    """The inputs of an executable cannot be determined."""


def check_private(folder: Path) -> None:
    """Create a cache folder with mode 700, or check that no other user owns it or can write to it.

    Loading an executable runs its code. The files of JAX's own cache in `folder` are checked too.

    Raises:
        ConfigError: another user owns or can write to the folder or a file in it, or `folder` is
            not a folder.
        OSError: the folder cannot be created or read.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--compilation-cache must be a folder, but {folder} is not") from error
    whole = folder.stat()  # of the target of a symbolic link
    refusal = f"executables in {folder} could run another user's code and are not loaded: "
    if fault := _why_unsafe(whole):
        raise ConfigError(
            f"{refusal}{fault}. If the folder is yours: chmod go-w {folder}. "
            "Otherwise choose another --compilation-cache, or None"
        )
    others_can_enter = bool(whole.st_mode & 0o011)
    for path in (*folder.iterdir(), *folder.glob("executables/*"), *folder.glob("jax/*")):
        with contextlib.suppress(FileNotFoundError):  # another process of this user removed it
            if fault := _why_unsafe(path.lstat(), may_be_writable=not others_can_enter):
                raise ConfigError(
                    f"{refusal}{path}: {fault}. Delete that file, or choose another "
                    "--compilation-cache, or None"
                )


def _why_unsafe(status: os.stat_result, may_be_writable: bool = False) -> str | None:
    """Return why a file or folder of a cache cannot be trusted, or None.

    Args:
        may_be_writable: other users cannot enter the folder, so its files may be writable. With a
            umask of 002, files that JAX writes have mode 664.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "expected a regular file or a folder, found a link or a device"
    if status.st_uid != os.geteuid():
        return f"expected owner {os.geteuid()} (you), found {status.st_uid}"
    if status.st_mode & 0o022 and not may_be_writable:
        return f"other users can write, mode {stat.S_IMODE(status.st_mode):o}"
    return None


class ExecutableCache:
    """A folder of executables.

    There is a cache hit only if no input of the executable has changed: the files of both packages,
    of the running script and of each loaded module that is not installed; the versions of all
    installed packages; the devices; JAX's configuration; the environment variables of
    `ENVIRONMENT`; the compiler's options; the arguments' shapes, dtypes and shardings; and
    `inputs`.

    The files are Python pickles: a user who can write to the folder can run code in processes that
    read the folder. Each file is checked when it is opened. Call `check_private` on the folder
    first.

    Args:
        folder: created with mode 700 when the first executable is stored.
        inputs: all values that the functions close over, or that their `jax.jit` options depend
            on; JSON.
    """

    def __init__(self, folder: Path, inputs: Any):
        self.folder = folder
        self._sources = source_files()
        # JAX sets some options of its cache at the first use of the cache.
        self._config = sorted(name for name in jax.config.values if "_cache_" not in name)
        self._fixed = {
            "inputs": inputs,
            "sources": {
                str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in self._sources
            },
            "installed": _installed(),
            "python": sys.version,
            "processor": _processor(),
            "devices": [_device_key(device) for device in jax.devices()],
            "runtime": jax.devices()[0].client.platform_version,
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(ENVIRONMENT) and name not in HARMLESS
            },
        }

    def _check_sources(self) -> None:
        """Raise NoKey if a source file changed after the process began.

        The hash would not describe the running code.
        """
        began = _process_began()
        for file in self._sources:
            if not file.exists() or file.stat().st_mtime > began:
                raise NoKey(f"{file} has changed since this process began")

    def key(
        self, function: Callable, abstract: tuple, options: dict[str, Any], inputs: Any = None
    ) -> str:
        """Return the cache key of an executable, its file name.

        Args:
            function: from `jax.jit`.
            abstract: arguments: arrays, or only their shapes, dtypes and shardings.
            options: the compiler's options.
            inputs: values that only this function closes over; JSON.

        Raises:
            NoKey: a source file changed since this process began, or the function has no source
                file, as in an interactive session.
        """
        self._check_sources()
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or Path(code.co_filename).resolve() not in self._sources:
            raise NoKey("its source is in no file that was read")
        leaves, tree = jax.tree.flatten(abstract)
        config = jax.config.values
        everything = self._fixed | {
            "function": [code.co_filename, code.co_firstlineno, code.co_qualname],
            "arguments": [str(tree), *map(_argument_key, leaves)],
            "options": options,
            "inputs of the function": inputs,
            # Use current values, which `with` statements may have set. Options that a kernel's
            # module added later are excluded.
            "config": {name: repr(config[name]) for name in self._config},
            "mesh": repr(jax.sharding.get_abstract_mesh()),
        }
        text = json.dumps(everything, sort_keys=True)
        return f"{function.__name__}-{hashlib.sha256(text.encode()).hexdigest()}"

    def __contains__(self, key: str) -> bool:
        return (self.folder / key).is_file()

    def load(self, key: str) -> jax.stages.Compiled:
        """Load an executable.

        Raises:
            Exception: of any kind, if the file is damaged or this machine cannot run it.
        """
        # Check the open file and follow no links: the folder may have been replaced.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(self.folder / key, flags), "rb") as file:
            if fault := _why_unsafe(os.fstat(file.fileno())):
                raise ConfigError(fault)
            digest, body = file.read(32), file.read()
        # XLA does not validate its input. The checksum includes the key: a renamed file is refused.
        if _checksum(key, body) != digest:
            raise ValueError("its checksum is wrong")
        stored = pickle.loads(body)
        for module in stored["needed"]:
            importlib.import_module(module)
        devices = {device.id: device for device in jax.devices(stored["platform"])}
        compiled = serialize_executable.deserialize_and_load(
            *stored["executable"],
            backend=stored["platform"],
            execution_devices=[devices[id] for id in stored["devices"]],
        )
        os.utime(self.folder / key)  # `store` deletes the least recently used files
        return compiled

    def store(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Store an executable under its key, atomically, and delete all but the `NEWEST`.

        Raises:
            Exception: of any kind, if XLA cannot serialize the executable or the disk is full.
        """
        self._check_sources()  # again: lowering imported the kernels' modules
        devices = compiled.runtime_executable().local_devices()
        stored = {
            "executable": serialize_executable.serialize(compiled),
            "platform": devices[0].platform,
            "devices": [device.id for device in devices],
            "needed": [module for module in NEEDED if module in sys.modules],
        }
        body = pickle.dumps(stored)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.folder / f".{key}-{os.getpid()}-{threading.get_ident()}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(temporary, flags, mode=0o600), "wb") as file:
                file.write(_checksum(key, body) + body)
            temporary.replace(self.folder / key)
        finally:
            temporary.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process also deletes files
            files = sorted(
                self.folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True
            )
            for file in files[NEWEST:]:
                file.unlink()


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + body).digest()


def source_files() -> set[Path]:
    """Return all source files that may affect an executable.

    The list has every file of both packages, the running script, and each loaded module that is
    neither installed nor part of Python.
    """
    files = set()
    for package in PACKAGES:
        folder = Path(importlib.import_module(package).__file__).parent
        files |= {file for file in folder.rglob("*") if "__pycache__" not in file.parts}
    elsewhere = (
        *_folders_of_installed(),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    )
    elsewhere = tuple(str(Path(folder).resolve()) + os.sep for folder in elsewhere)
    for name, module in list(sys.modules.items()):
        # Not `module.__file__`, which would load a lazy module.
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and (name == "__main__" or not str(Path(file).resolve()).startswith(elsewhere)):
            files.add(Path(file))
    return {file.resolve() for file in files if file.is_file()}


def _folders_of_installed() -> list[str]:
    return [folder for folder in sys.path if os.path.isdir(folder) and _packages(folder)]


def _packages(folder: str) -> list[str]:
    """Return the packages installed in a folder, with their versions."""
    return [entry for entry in os.listdir(folder) if entry.endswith((".dist-info", ".egg-info"))]


def _installed() -> list[str]:
    return sorted({entry for folder in _folders_of_installed() for entry in _packages(folder)})


def _processor() -> str:
    """Return the properties of the CPU that XLA compiles for."""
    lines = [platform.machine()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in iter(file.readline, "\n"):  # up to the second core
            if not line:
                break
            if line.startswith(("model name", "flags", "CPU part", "Features")):
                lines.append(line)
    return "".join(lines)


def _device_key(device: jax.Device) -> list:
    details = [getattr(device, name, None) for name in ("compute_capability", "core_count")]
    return [
        device.platform,
        device.device_kind,
        device.id,
        device.process_index,
        *map(str, details),
    ]


def _argument_key(leaf: Any) -> list:
    if not hasattr(leaf, "dtype"):
        return [repr(leaf)]
    sharding = getattr(leaf, "sharding", None)
    devices = [] if sharding is None else sorted(device.id for device in sharding.device_set)
    # The repr of a mesh does not contain the order of its devices.
    mesh = getattr(sharding, "mesh", None)
    order = (
        [device.id for device in mesh.devices.flat] if isinstance(mesh, jax.sharding.Mesh) else []
    )
    return [
        list(leaf.shape),
        str(leaf.dtype),
        getattr(leaf, "weak_type", False),
        repr(sharding),
        devices,
        order,
    ]


def _process_began() -> float:
    """Return the start of the process in seconds since the epoch.

    If the operating system does not provide it, return the time when this module was imported.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        # Linux rounds down to ticks of 10 ms. A file that was written in this tick, before the
        # process began, is not a changed file: Python needs longer to start.
        return boot + (ticks + 1) / os.sysconf("SC_CLK_TCK") if ticks else _IMPORTED
    except (OSError, AttributeError):  # not Linux
        return _IMPORTED
