"""pallas_kernels._choose: what the device can run, and errors that say what is missing."""

import types

import jax
import pytest

from pallas_kernels import _choose


def gpu(compute_capability):
    return types.SimpleNamespace(platform="gpu", compute_capability=compute_capability)


@pytest.fixture
def device(monkeypatch):
    """Makes the default device one of a given compute capability."""

    def choose(compute_capability):
        monkeypatch.setattr(_choose, "platform", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [gpu(compute_capability)])
        monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_default_device=None))
        monkeypatch.setattr(_choose.importlib.util, "find_spec", lambda name: object())

    return choose


def test_on_a_cpu_no_kernel_runs():
    assert _choose.capability() is None
    for why in (_choose.why_not_triton(), _choose.why_not_mosaic()):
        assert why == "needs an NVIDIA GPU, and the default device is a cpu"


@pytest.mark.parametrize(
    ("compute_capability", "expected", "triton", "mosaic"),
    [
        ("7.5", (7, 5), "Ampere", "Hopper"),
        ("8.0", (8, 0), None, "Hopper"),
        ("8.9", (8, 9), None, "Hopper"),
        ("9.0", (9, 0), None, None),
        ("10.0", (10, 0), None, "Hopper"),
        ("gfx90a", None, "NVIDIA", "NVIDIA"),  # AMD's
    ],
)
def test_what_each_gpu_runs(device, compute_capability, expected, triton, mosaic):
    device(compute_capability)
    assert _choose.capability() == expected
    for why, word in ((_choose.why_not_triton(), triton), (_choose.why_not_mosaic(), mosaic)):
        assert why is None if word is None else word in why


def test_without_jax_triton_the_reason_says_what_to_install(device, monkeypatch):
    device("9.0")
    monkeypatch.setattr(_choose.importlib.util, "find_spec", lambda name: None)
    assert _choose.why_not_triton() == "needs jax-triton: pip install -e '.[cuda13]'"
    assert _choose.why_not_mosaic() is None


def test_several_devices_are_partitioned_but_inside_shard_map():
    assert _choose.partitioned()  # tests run on two CPU devices
    seen = []

    def inside(x):
        seen.append(_choose.partitioned())
        return x

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.PartitionSpec()
    jax.shard_map(inside, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(jax.numpy.ones(2))
    assert seen == [False]


def test_auto_takes_the_first_that_runs_and_no_kernel_where_arrays_may_be_split(monkeypatch):
    supported = {"mosaic": "needs luck", "triton": None, "xla": None}
    assert _choose.auto(supported) == "xla"  # tests run on two CPU devices
    monkeypatch.setattr(_choose, "partitioned", lambda: False)
    assert _choose.auto(supported) == "triton"


def test_named():
    supported = {"a": None, "b": "needs luck"}
    assert _choose.named("kernel", "a", supported) == "a"
    with pytest.raises(ValueError, match=r"kernel: implementation 'b' needs luck; these can run here: \['a'\]"):
        _choose.named("kernel", "b", supported)
    with pytest.raises(ValueError, match=r"kernel: unknown implementation 'c'; choose one of \['auto', 'a', 'b'\]"):
        _choose.named("kernel", "c", supported)
