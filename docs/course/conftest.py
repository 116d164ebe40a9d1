"""Settings of the course's tests: strict JAX on a CPU with four devices, in one process."""

import importlib
import os

# Before JAX starts: chapter 12 needs several devices. LLVM's optimizations would take longer than
# the tests run.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    ]
)

import jax
import pytest

# Strict: JAX refuses to mix dtypes or ranks, so every cast and every broadcast is in the code.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--solutions", action="store_true", help="test solution.py, not exercise.py")


def pytest_xdist_auto_num_workers(config) -> int:
    """Run in one process: more processes would start for longer than the tests run."""
    return 0


@pytest.fixture
def chapter(request):
    """The module under test: exercise.py in the folder of the test, or solution.py."""
    name = "solution" if request.config.getoption("--solutions") else "exercise"
    return importlib.import_module(f"{request.path.parent.name}.{name}")
