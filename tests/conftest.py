"""What every test runs under: strict JAX, checked array shapes, two CPU devices, and the GPU only
where it is asked for."""

import os
from pathlib import Path

# Two CPU devices, before JAX starts: a test of sharding needs more than one.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
# XLA's threads: in the interpreter for Mosaic GPU each warpgroup that waits at a barrier holds one
# of them, and two hang.
os.environ.setdefault("NPROC", "32")
# A test session on a GPU shares it with the training runs that some tests start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jaxtyping
import numpy as np
import pytest

pytest_plugins = ["kernel_tools"]
_hook = jaxtyping.install_import_hook(["gptjax", "pallas_kernels"], "beartype.beartype").hook
# Triton reads the source of its kernels, so nothing may be wrapped around them.
_checked = _hook.should_instrument
_hook.should_instrument = lambda module: (
    _checked(module) and not module.split(".")[-1].lstrip("_").startswith("triton")
)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_xdist_auto_num_workers(config) -> int:
    """Return one process a core for whole folders, and none for named tests, `-s` and `-m gpu`.

    A process takes four seconds to start and up to 4 GB; xdist hides the output of `-s`; the tests
    of `-m gpu` share one GPU, for which `-n 8` is a choice of its user.
    """
    folders = all(Path(name).is_dir() for name in config.args)
    if not folders or config.option.capture == "no" or "gpu" in config.option.markexpr:
        return 0
    return min(os.cpu_count() or 1, 8)


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(items):
    if not _has_gpu():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU and jax[cuda13]; JAX sees none here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _device(request):
    """Tests run on the CPU, also where there is a GPU, unless they carry the marker `gpu`."""
    if "gpu" in request.keywords:
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def optax_promotion():
    """For tests that run an optax optimizer: optax's Adam itself mixes int32 and float, which
    strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder with a shard for training and one for validation, 4,000 tokens each of a vocabulary
    of 61."""
    from gptjax.data.shards import write_shard  # after the hook above

    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        write_shard(
            folder / f"x_{split}_000000.bin", rng.zipf(1.5, 4000).clip(max=61).astype(np.uint16) - 1
        )
    return folder
