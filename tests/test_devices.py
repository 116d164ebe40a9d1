"""Selection of devices, and the errors without a GPU."""

import jax
import pytest

from gptjax import devices


@pytest.fixture
def no_gpu(monkeypatch):
    """Make JAX find no GPU on any machine."""
    real = jax.devices

    def without(backend=None):
        if backend == "gpu":
            raise RuntimeError("Unknown backend: 'gpu' requested")
        return real("cpu")

    monkeypatch.setattr(devices.jax, "devices", without)


def machine(monkeypatch, *, driver, plugin):
    monkeypatch.setattr(devices, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(devices, "has_cuda_plugin", lambda: plugin)


@pytest.mark.parametrize(
    ("driver", "plugin", "says"),
    [
        (False, False, r"needs an NVIDIA GPU.*pip install 'gptjax\[cuda13\]'.*--device cpu"),
        (True, False, r"no CUDA plugin: pip install 'gptjax\[cuda13\]'.*--device cpu"),
        (True, True, r"cannot use the GPU: Unknown backend.*--device cpu"),
    ],
)
def test_an_unavailable_gpu_is_an_error_with_its_cause(no_gpu, monkeypatch, driver, plugin, says):
    machine(monkeypatch, driver=driver, plugin=plugin)
    with pytest.raises(devices.DeviceError, match=says):
        devices.select("gpu")


def test_auto_uses_the_cpu_and_notes_an_unused_gpu(no_gpu, monkeypatch):
    machine(monkeypatch, driver=True, plugin=False)
    found, idle = devices.select("auto")
    assert found[0].platform == "cpu" and "no CUDA plugin" in idle
    machine(monkeypatch, driver=False, plugin=False)
    assert devices.select("auto")[1] is None


@pytest.mark.gpu
def test_auto_and_gpu_use_every_gpu():
    for kind in ("auto", "gpu"):
        found, idle = devices.select(kind)
        assert found == jax.devices("gpu") and idle is None


def test_platforms_that_do_not_work_are_named(monkeypatch):
    """With JAX_PLATFORMS=cuda and no GPU, JAX ends with an assertion without a text."""

    def no_platform(backend=None):
        raise AssertionError

    monkeypatch.setattr(devices.jax, "devices", no_platform)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    for kind in ("auto", "gpu"):
        with pytest.raises(
            devices.DeviceError, match="^JAX_PLATFORMS=cuda: .* unset JAX_PLATFORMS"
        ):
            devices.select(kind)
