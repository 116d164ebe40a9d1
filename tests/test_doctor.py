"""python -m gptjax.doctor finds each planted fault and its remedy; a healthy machine passes."""

import functools
import json
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement

from gptjax.doctor import __main__ as doctor
from gptjax.doctor import kernels, machine
from gptjax.doctor.machine import Gpu
from pallas_kernels import _dispatch, extend

ROOT = Path(__file__).parent.parent
H200 = types.SimpleNamespace(
    id=0, device_kind="NVIDIA H200", platform="gpu", compute_capability="9.0"
)
INSTALLED = {
    "jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0", "jax-cuda13-pjrt": "0.12.0",
    "jax-triton": "0.4.1", "triton": "3.9.0", "flax": "0.12.12", "gptjax": "0.1.0",
}  # fmt: skip
REQUIREMENTS = {
    ("gptjax", ""): ["jax<0.13,>=0.11.2", "jaxlib<0.13,>=0.11.2", "flax<0.13,>=0.12.10"],
    ("gptjax", "cuda13"): ["jax-triton>=0.4.1"],
    ("jax", ""): ["jaxlib<=0.12.0,>=0.11.2"],
    ("jax", "cuda13"): ["jaxlib<=0.12.0,>=0.12.0", "jax-cuda13-plugin<=0.12.0,>=0.12.0"],
    ("jax-cuda13-plugin", ""): ["jax-cuda13-pjrt==0.12.0"],
    ("jax-triton", ""): ["triton>=3.7"],
}


class Machine:
    """A machine with an H200 on which everything is right; a test plants a fault."""

    def __init__(self, patch):
        self.patch, self.packages, self.devices = patch, dict(INSTALLED), [H200]
        self.gpu = Gpu(0, "GPU-1", "NVIDIA H200", 143_771, 0, "580.95.05")
        self.set(
            installed=lambda name: self.packages.get(name),
            requirements=lambda name, extra="": [
                Requirement(r) for r in REQUIREMENTS.get((name, extra), [])
            ],
            cuda_version=lambda: (13, 0),
            gpus=lambda: [self.gpu],
            jax_gpus=lambda: self.devices,
        )
        patch.setattr(kernels, "check_all", lambda: iter(()))
        patch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**40))

    def set(self, **probes):
        for name, probe in probes.items():
            self.patch.setattr(machine, name, probe)

    def without_driver(self):
        self.set(cuda_version=lambda: None, gpus=list, jax_gpus=_no_gpu)
        for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
            del self.packages[name]


def _no_gpu():
    raise RuntimeError("Unknown backend: 'gpu' requested\nmore")


@pytest.fixture
def h200(monkeypatch):
    return Machine(monkeypatch)


def bad(**options):
    """Names and remedies of the checks that are not ok."""
    results = list(doctor.run(doctor.Options(**options)))
    assert all(bool(r.remedy) == (r.status != "ok") for r in results)
    return {r.name: (r.status, r.found, r.remedy) for r in results if r.status != "ok"}


def only(**options):
    """The one check that is not ok."""
    ((name, (status, found, remedy)),) = bad(**options).items()
    return name, status, found, remedy


def test_a_healthy_machine_passes(h200, capsys):
    assert bad() == {}
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "jax-cuda13-plugin  0.12.0\n" in out and "driver             580.95.05\n" in out
    assert "ok       GPUs: 0: NVIDIA H200\n" in out
    assert "ok       disk: 1024 GiB free in the current folder\n" in out
    assert out.endswith("nothing failed\n")


# ----------------------------------------------------------------------------------- planted faults


def test_no_plugin(h200):
    del h200.packages["jax-cuda13-plugin"]
    h200.set(jax_gpus=_no_gpu)
    found = bad()
    assert found["CUDA plugin"][0] == found["GPUs"][0] == "failed"
    assert "no CUDA plugin" in found["CUDA plugin"][1]
    assert found["CUDA plugin"][2] == "pip install -e '.[cuda13]'"
    assert "1 GPUs in nvidia-smi, none in JAX: RuntimeError: Unknown backend" in found["GPUs"][1]
    assert "more" not in found["GPUs"][1]


@pytest.mark.parametrize(
    "package, version, status, says, remedy",
    [
        ("jaxlib", "0.12.1", "failed", "jaxlib<=0.12.0,>=0.11.2", "jaxlib<=0.12.0,>=0.11.2"),
        # jax accepts an older jaxlib, its plugin does not
        ("jaxlib", "0.11.2", "failed", "jaxlib<=0.12.0,>=0.12.0", "jaxlib<=0.12.0,>=0.12.0"),
        ("jax-cuda13-pjrt", "0.11.2", "failed", "jax-cuda13-pjrt==0.12.0", "pjrt==0.12.0'"),
        ("jax-triton", None, "failed", "jax-triton>=0.4.1, found none", "'jax-triton>=0.4.1'"),
        ("triton", "3.6.0", "warning", "needs triton>=3.7, found 3.6.0", "'triton>=3.7'"),
        ("flax", "0.12.9", "failed", "flax<0.13,>=0.12.10, found 0.12.9", "flax<0.13,>=0.12.10"),
    ],
)
def test_a_wrong_version(h200, package, version, status, says, remedy):
    h200.packages[package] = version
    found = only()
    assert found[:2] == ("packages", status) and says in found[2]
    assert found[3].startswith("pip install '") and remedy in found[3]


@pytest.mark.parametrize(
    "package, old, floor",
    [("orbax-checkpoint", "0.11.20", "0.11.24"), ("grain", "0.2.12", "0.2.15")],
)
def test_a_version_below_the_floor_of_pyproject(h200, package, old, floor):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in project["dependencies"]]
    h200.set(requirements=lambda name, extra="": needed if (name, extra) == ("gptjax", "") else [])
    h200.packages |= {r.name: next(iter(r.specifier)).version for r in needed} | {package: old}
    assert bad()["packages"] == (
        "failed",
        f"needs {package}>={floor}, found {old}",
        f"pip install '{package}>={floor}'",
    )


@pytest.mark.parametrize("cuda, extra", [((13, 0), 13), ((12, 8), 12), (None, 13)])
def test_both_cuda_plugins(h200, cuda, extra):
    h200.packages |= {f"jax-cuda12-{part}": "0.12.0" for part in ("plugin", "pjrt")}
    h200.set(cuda_version=lambda: cuda)
    status, found, remedy = bad()["CUDA plugin"]
    assert status == "failed" and "jax-cuda12-plugin and jax-cuda13-plugin" in found
    assert f"in a new environment: pip install -e '.[cuda{extra}]'" in remedy


def test_memory_that_another_process_holds(h200):
    h200.gpu = Gpu(0, "GPU-1", "NVIDIA H200", 143_771, 71_885, "580", ("python, pid 7, 71885 MiB",))
    name, status, text, remedy = only()
    assert (name, status) == ("memory of GPU 0", "failed")
    assert text == "NVIDIA H200: 70.2 of 140.4 GiB in use by python, pid 7, 71885 MiB"
    assert "end that process" in remedy and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.47" in remedy
    # A small process leaves train.py its memory.
    h200.gpu = Gpu(0, "GPU-1", "NVIDIA H200", 143_771, 900, "580", ("python, pid 7, 900 MiB",))
    assert only()[1] == "warning"


# ------------------------------------------------------------------------------------- other faults


def test_little_space(h200, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**30))
    assert only()[:3] == ("disk", "warning", "1 GiB free in the current folder")


def test_an_old_driver(h200):
    h200.set(cuda_version=lambda: (12, 8))
    name, status, text, remedy = only()
    assert (name, status) == ("driver", "failed") and "version 580" in remedy
    assert text == "the driver supports CUDA 12.8, and the plugin needs 13"
    assert "pip install -e '.[cuda12]'" in remedy


def test_a_gpu_that_jax_does_not_use_and_an_old_one(h200):
    h200.set(gpus=lambda: [h200.gpu, h200.gpu])
    assert bad()["GPUs"][0] == "failed"
    h200.set(gpus=lambda: [h200.gpu])
    h200.devices = [types.SimpleNamespace(**vars(H200) | {"compute_capability": "7.5"})]
    assert only()[:2] == ("GPUs", "warning")


def test_platforms_that_do_not_work(h200, monkeypatch):
    def fail():
        raise RuntimeError("no platform of JAX_PLATFORMS works")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    h200.set(jax_gpus=fail)
    status, what, remedy = bad()["GPUs"]
    assert status == "failed" and what.startswith("JAX_PLATFORMS=cuda: RuntimeError: no platform")
    assert "unset JAX_PLATFORMS" in remedy


def test_a_machine_without_a_gpu(h200, capsys, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    h200.without_driver()
    found = bad()
    assert {name: status for name, (status, *_) in found.items()} == {
        "driver": "warning",
        "GPUs": "warning",
    }
    assert "train.py --device cpu" in found["GPUs"][2]
    assert doctor.main([]) == 0
    assert "no NVIDIA GPU: training runs on the CPU" in capsys.readouterr().out
    assert bad(need_gpu=True)["GPUs"][0] == "failed"
    assert doctor.main(["--need-gpu"]) == 1


def test_json(h200, capsys):
    del h200.packages["jax-triton"]
    assert doctor.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["versions"]["jaxlib"] == "0.12.0"
    assert report["versions"]["jax-triton"] is None and report["versions"]["cuda"] == "13.0"
    assert report["gpus"][0]["total_mib"] == 143_771
    failed = [check for check in report["checks"] if check["status"] == "failed"]
    assert [check["name"] for check in failed] == ["packages"] and failed[0]["remedy"]


# ------------------------------------------------------------------------------------------- probes


def test_probes_of_this_machine():
    assert machine.installed("jax") == jax.__version__ and machine.installed("no-such") is None
    assert machine.requirements("no-such") == []
    (needed,) = [r for r in machine.requirements("gptjax") if r.name == "flax"]
    assert needed.specifier.contains(machine.installed("flax"))
    extra = machine.requirements("gptjax", "cuda13")
    assert {r.name for r in extra} == {"jax", "jax-triton"}
    names = {
        extra: {r.name for r in machine.requirements("jax", extra)} for extra in ("", "cuda13")
    }
    assert "jax-cuda13-plugin" in names["cuda13"] - names[""]


def test_what_nvidia_smi_says(monkeypatch):
    answers = {
        "compute-apps": "GPU-b, 12, /usr/bin/python, 4096\nGPU-b, 13, x, [N/A]\n",
        "gpu": "0, GPU-a, NVIDIA L4, 23034, 0, 570.1\n1, GPU-b, NVIDIA L4, 23034, 4200, 570.1\n"
        "2, GPU-c, NVIDIA L4, [N/A], [N/A], 570.1\n",
    }

    def run(command, **_):
        query = command[1].removeprefix("--query-").split("=")[0]
        return types.SimpleNamespace(stdout=answers[query], returncode=0)

    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = machine.gpus()
    assert first == Gpu(0, "GPU-a", "NVIDIA L4", 23034, 0, "570.1")
    assert second.processes == ("/usr/bin/python, pid 12, 4096 MiB", "x, pid 13, [N/A] MiB")
    for visible, indices in {"1": [1], "GPU-a": [0], "0,1": [0, 1], "": [], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.index for gpu in machine.gpus()] == indices
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError))
    assert machine.gpus() == []


# ------------------------------------------------------------------------------------------ kernels


def test_every_kernel_has_an_example():
    import pallas_kernels  # noqa: F401

    missing = {
        name
        for name, entry in _dispatch.OPERATIONS.items()
        if any(back_end.custom for back_end in entry.back_ends) and not entry.examples
    }
    # The arguments of decode_step are a model's weights and cache; the example of a matmul covers
    # the conversions to FP8; silu_mul is the kernel in examples/, which another test may have
    # registered.
    assert missing <= {
        "decode_step",
        "quantize",
        "fp8_linear_gelu",
        "fp8_linear_relu_squared",
        "silu_mul",
    }
    for entry in _dispatch.OPERATIONS.values():
        assert all(make.__doc__ for make in entry.examples)


def test_the_examples_and_their_definitions_have_the_same_results():
    """Shapes of results and gradients, traced in the sizes and dtypes of the doctor."""

    def shapes(f, arrays, differentiable):
        def with_gradients(*arrays):
            out, pull = jax.vjp(f, *arrays)
            return out, pull(out)

        return jax.tree.leaves(jax.eval_shape(with_gradients if differentiable else f, *arrays))

    for operation, entry in _dispatch.OPERATIONS.items():
        for make in entry.examples:
            for dtype in kernels.DTYPES:
                if (example := make(kernels.ROWS, dtype)) is None:
                    continue
                call = functools.partial(example.call, implementation="xla")
                exact = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in example.shapes]
                found = shapes(call, example.shapes, example.differentiable)
                expected = shapes(example.reference, exact, example.differentiable)
                assert [x.shape for x in found] == [x.shape for x in expected], operation
                assert all(x.dtype == jnp.float32 for x in expected), operation


def test_the_examples_are_right_in_xla():
    """Results and gradients of two examples; a GPU runs them all."""
    for operation in ("ba_plus_caa", "rms_norm"):
        (make,) = _dispatch.OPERATIONS[operation].examples
        assert kernels.relative_error(make(16, jnp.float32), "xla") < 1e-5


@pytest.fixture
def operation(monkeypatch):
    """Register an operation whose back ends are right, wrong, broken and not supported."""

    def call(x, implementation):
        if implementation == "absent":
            raise ValueError("test: implementation 'absent' needs luck; these can run here: []")
        if implementation == "broken":
            raise RuntimeError("no kernel image\nmore")
        return jnp.sin(x) * (1.1 if implementation == "wrong" else 1.0)

    def make(rows, dtype):
        """A sine."""
        x = jax.ShapeDtypeStruct((rows,), dtype)
        return _dispatch.Example(call, jnp.sin, (x,)) if dtype == jnp.float32 else None

    back_ends = [_dispatch.BackEnd(name) for name in ("right", "wrong", "broken", "absent", "xla")]
    operations: dict = {}
    for module in (_dispatch, extend):
        monkeypatch.setattr(module, "OPERATIONS", operations)
    _dispatch.register("test", back_ends=back_ends)
    _dispatch.example("test")(make)


def test_a_wrong_kernel_fails(operation):
    right, wrong, broken, absent = kernels.check_all()
    assert (right.name, right.status) == ("test, right", "ok")
    assert wrong.status == "failed" and "relative error 10.00% (A sine, float32)" in wrong.found
    assert "implementation='xla'" in wrong.remedy
    assert broken.status == "failed" and broken.found.endswith("RuntimeError: no kernel image")
    assert (absent.status, absent.found) == ("ok", "not run here: needs luck")


@pytest.mark.gpu
def test_every_kernel_on_this_gpu():
    results = list(kernels.check_all())
    assert results and [r for r in results if r.status != "ok"] == []


def test_the_doctor_starts_without_jax():
    """With a wrong jaxlib the import of JAX fails."""
    code = (
        "import sys; sys.modules['jax'] = None; import gptjax.doctor.__main__ as d; "
        "print([r.name for r in d.run(d.Options())][-1], 'jaxlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "import jax False\n", done.stderr
