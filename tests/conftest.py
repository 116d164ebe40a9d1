"""Settings of every test: strict JAX, checked array shapes, two CPU devices; a GPU only for tests
with the marker gpu."""

import contextlib
import gc
import os
import signal
from pathlib import Path

# Two CPU devices, before JAX starts: a test of sharding needs more than one. On a machine without a
# GPU LLVM does not optimize unless a test requests it (kernel_tools.OPTIMIZED, for the parity
# with PyTorch): half of the suite's time is compilation, of executables that run once.
# On a GPU XLA compiles matmuls as in training (gptjax.training.compilation.compiler_options), or it
# times Triton variants of every matmul of a reference.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_gpu_enable_triton_gemm=false"
        if Path("/proc/driver/nvidia").exists()
        else "--xla_backend_optimization_level=0",
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={os.environ.get('TEST_DEVICES', 2)}",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# XLA's threads: in the interpreter for Mosaic GPU each warpgroup that waits at a barrier holds one
# of them, and two hang.
os.environ.setdefault("NPROC", "32")
# PyTorch's threads: one for each process, or the threads of several processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No compilation cache but where a test names one.
os.environ["JAX_COMPILATION_CACHE_DIR"] = ""
# A test session on a GPU shares it with the training runs that some tests start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import gpu_of_process  # isort: skip
import jax
import jaxtyping
import numpy as np
import pytest

pytest_plugins = ["kernel_tools", "train_tools", "bench_tools"]
# Before a test imports them.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*_tools.py")))
# `nohup pytest` ignores SIGHUP, and `pytest &` in a script SIGINT; processes that tests start would
# inherit this.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_hook = jaxtyping.install_import_hook(["gptjax", "pallas_kernels"], "beartype.beartype").hook
# Triton reads the source of its kernels, so nothing may be wrapped around them.
_checked = _hook.should_instrument
_hook.should_instrument = lambda module: (
    _checked(module) and not module.split(".")[-1].lstrip("_").startswith("triton")
)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_xdist_auto_num_workers(config) -> int:
    """Return one process a core, at most 8 (a GPU), for whole folders, none for names and `-s`.

    A process takes four seconds to start and up to 4 GB; xdist hides the output of `-s`. With
    `-m gpu`, 8 processes share a GPU, of whose memory they take up to 70 GB.
    """
    folders = all(Path(name).is_dir() for name in config.args)
    if not folders or config.option.capture == "no":
        return 0
    return min(os.cpu_count() or 1, 8 * max(len(gpu_of_process.GPUS), 1))


# The marker `quick`: whole files, and single tests of the slow ones, one minute on two cores.
QUICK = {
    *("test_adamw", "test_bench_profile", "test_cli", "test_config", "test_corpora"),
    *("test_dataset", "test_devices", "test_dispatch", "test_fineweb", "test_flops"),
    *("test_loader", "test_low_precision", "test_outliers", "test_params"),
    "test_partition",
    *("test_manual", "test_precision", "test_public_names", "test_run_log", "test_schedules"),
    "test_parallel::test_the_sharded_axis",
    *("test_shards", "test_status_line", "test_tokenizers"),
    "test_result_tables",
    *("test_attention_options::test_packed_is_separate[xla]", "test_attention::test_errors"),
    *("test_classifier::test_reference_is_the_definition", "test_classifier::test_errors"),
    *("test_classifier::test_extreme_logits", "test_classifier::test_targets_of_any_integer_type"),
    *("test_gpt2::test_fp32_parity[odd]", "test_gpt2::test_fp32_parity[one of each]"),
    *("test_models::test_no_position_sees_a_later_token", "test_gpt2::test_bf16_dtypes"),
    *("test_readme::test_the_names_of_a_page_resolve", "test_readme::test_a_table_has_one_header"),
    "test_readme::test_the_files_that_a_page_names_are_there",
    *("test_row_softmax::test_reference_is_the_definition", "test_row_softmax::test_extreme_rows"),
    *("test_row_softmax::test_output_and_gradient", "test_row_softmax::test_errors"),
    "test_transpose::test_errors",
}


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items):
    for item in items:
        test = f"{item.path.stem}::{item.name}"
        if {item.path.stem, test, test.split("[")[0]} & QUICK:
            item.add_marker("quick")
    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU and jax[cuda13]; JAX sees none here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


# Packages of the extra `test` that `quick` lacks. Without one, a test that imports it is skipped.
HEAVY = ("torch", "transformers", "jinja2", "triton", "jax_triton")


@contextlib.contextmanager
def _skipping_without_heavy():
    try:
        yield
    except (ImportError, pytest.Collector.CollectError) as error:
        cause = error.__cause__ if isinstance(error, pytest.Collector.CollectError) else error
        if isinstance(cause, ModuleNotFoundError) and cause.name in HEAVY:
            reason = f"needs {cause.name}: pip install -e '.[test]'"
            pytest.skip(reason, allow_module_level=True)
        raise


class _Module(pytest.Module):
    def collect(self):
        with _skipping_without_heavy():
            return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    return _Module.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    with _skipping_without_heavy():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    with _skipping_without_heavy():
        return (yield)


def pytest_collection_finish():
    """Let Python's garbage collector run less often: traces allocate many objects, few in
    cycles."""
    gc.set_threshold(20_000, 20, 20)


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
    strict promotion refuses. For all threads: a thread compiles the later stages of a run."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


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
