"""python -m gptjax.doctor finds each planted fault and its remedy; a healthy machine passes."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from packaging.requirements import Requirement
from process_tools import python

from gptjax.doctor import __main__ as doctor
from gptjax.doctor import kernels, machine
from pallas_kernels import _dispatch, extend

H200 = types.SimpleNamespace(id=0, device_kind="NVIDIA H200", platform="gpu")
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
        self.patch, self.packages, self.cuda = patch, dict(INSTALLED), (13, 0)
        self.indices, self.devices = [0], [H200]
        parsed = {key: list(map(Requirement, lines)) for key, lines in REQUIREMENTS.items()}
        self.set(
            installed=lambda name: self.packages.get(name),
            requirements=lambda name, extra="": parsed.get((name, extra), []),
            cuda_version=lambda: self.cuda,
            gpus=lambda: self.indices,
        )
        patch.setattr(jax, "devices", self._devices)
        patch.setattr(kernels, "check_all", lambda: iter(()))

    def set(self, **probes):
        for name, probe in probes.items():
            self.patch.setattr(machine, name, probe)

    def _devices(self, platform=None):
        if not self.devices:
            raise RuntimeError("Unknown backend: 'gpu' requested\nmore")
        return self.devices


@pytest.fixture
def h200(monkeypatch):
    return Machine(monkeypatch)


def bad():
    """Statuses, texts and remedies of the checks that are not ok."""
    results = list(doctor.run())
    assert all(bool(r.remedy) == (r.status != "ok") for r in results)
    return {r.name: (r.status, r.found, r.remedy) for r in results if r.status != "ok"}


def test_a_healthy_machine_passes(h200, capsys):
    assert bad() == {}
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "jax-cuda13-plugin  0.12.0\n" in out and "ok       GPUs: 0: NVIDIA H200\n" in out
    assert "ok       driver: the driver supports CUDA 13.0\n" in out
    assert out.endswith("nothing failed\nnext: gptjax train --config gpt2_tiny\n")


@pytest.mark.parametrize(
    "package, version, status, says, remedy",
    [
        ("jaxlib", "0.12.1", "failed", "jaxlib<=0.12.0,>=0.11.2", "jaxlib<=0.12.0,>=0.11.2"),
        # jax accepts an older jaxlib, its plugin does not
        ("jaxlib", "0.11.2", "failed", "jaxlib<=0.12.0,>=0.12.0", "jaxlib<=0.12.0,>=0.12.0"),
        ("jax-triton", None, "failed", "jax-triton>=0.4.1, found none", "'jax-triton>=0.4.1'"),
        ("triton", "3.6.0", "warning", "needs triton>=3.7, found 3.6.0", "'triton>=3.7'"),
    ],
)
def test_a_wrong_version(h200, capsys, package, version, status, says, remedy):
    h200.packages[package] = version
    ((name, (found, text, advice)),) = bad().items()
    assert (name, found) == ("packages", status) and says in text
    assert advice.startswith("pip install '") and remedy in advice
    assert doctor.main() == (status == "failed")
    assert ("failed: packages" in capsys.readouterr().out) == (status == "failed")


@pytest.mark.parametrize(
    "plugins, cuda, says, remedy",
    [
        ([], (13, 0), "CUDA plugins none, expected one", "pip install 'gptjax[cuda13]'"),
        ([13, 12], (13, 0), "CUDA plugins [13, 12], expected one", "in a new environment"),
        ([13], (12, 8), "the driver supports CUDA 12.8", "pip install 'gptjax[cuda12]'"),
    ],
)
def test_a_driver_and_plugins_that_do_not_fit(h200, plugins, cuda, says, remedy):
    h200.cuda = cuda
    h200.set(plugins=lambda: plugins)
    status, found, advice = bad()["driver"]
    assert status == "failed" and says in found and remedy in advice and "version 580" in advice


def test_gpus_that_jax_does_not_use(h200):
    h200.indices = [0, 1]
    status, found, remedy = bad()["GPUs"]
    assert (status, found) == ("failed", "JAX uses 0: NVIDIA H200, of 2 GPUs")
    assert "JAX_CUDA_VISIBLE_DEVICES" in remedy
    h200.devices = []
    status, found, remedy = bad()["GPUs"]
    assert status == "failed" and "unset JAX_PLATFORMS" in remedy
    assert found.endswith("none in JAX: RuntimeError: Unknown backend: 'gpu' requested")


def test_a_machine_without_a_gpu(h200, capsys):
    h200.cuda, h200.indices, h200.devices = None, [], []
    found = bad()
    assert {(name, status) for name, (status, *_) in found.items()} == {
        ("driver", "warning"), ("GPUs", "warning")
    }  # fmt: skip
    assert "train.py --device cpu" in found["GPUs"][2]
    assert doctor.main() == 0
    assert "no NVIDIA GPU: training runs on the CPU" in capsys.readouterr().out


def test_json_is_one_document_of_the_machine_and_the_checks(h200, capsys, monkeypatch):
    rows = types.SimpleNamespace(stdout="0, NVIDIA H200, 580.82, 143771 MiB\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: rows)
    assert doctor.main(json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["versions"]["jax"] == "0.12.0" and shown["versions"]["grain"] is None
    card = {"index": "0", "name": "NVIDIA H200", "driver_version": "580.82"}
    assert shown["gpus"] == [card | {"memory.total": "143771 MiB"}]
    assert (shown["cuda_of_driver"], shown["jax_devices"]) == ([13, 0], ["gpu 0: NVIDIA H200"])
    assert [check["status"] for check in shown["checks"]] == ["ok"] * 3
    h200.devices = []
    assert doctor.main(json=True) == 1
    shown = json.loads(capsys.readouterr().out)
    (bad,) = [check for check in shown["checks"] if check["status"] != "ok"]
    assert (bad["name"], bad["status"], shown["jax_devices"]) == ("GPUs", "failed", [])
    assert "unset JAX_PLATFORMS" in bad["remedy"]


def test_probes_of_this_machine(monkeypatch):
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
    done = types.SimpleNamespace(stdout="0, GPU-a\n1, GPU-b\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: done)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpus() == [0, 1]
    for visible, indices in {"1": [1], "GPU-a": [0], "0,1": [0, 1], "": [], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.gpus() == indices
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError))
    assert machine.gpus() == []


# ------------------------------------------------------------------------------------------ kernels


def test_the_examples_are_right_in_xla():
    """Two of the examples of tests/test_every_operation.py."""
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
        "print([(r.name, r.status) for r in d.run()][-1], d.machine.jax_devices(), "
        "'jaxlib' in sys.modules)"
    )
    assert python("-c", code) == "('GPUs', 'failed') [] False\n"
