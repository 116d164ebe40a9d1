"""pallas_kernels._dispatch: the registry, what the device can run, errors that say what is
missing."""

import dataclasses
import inspect
import sys
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import unchecked

import pallas_kernels
from pallas_kernels import _dispatch, select, transpose
from pallas_kernels._dispatch import BackEnd, Operation


def gpu(compute_capability):
    return types.SimpleNamespace(platform="gpu", compute_capability=compute_capability)


@pytest.fixture
def device(monkeypatch):
    """Replace the default device by one of a given compute capability."""

    def choose(compute_capability):
        monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [gpu(compute_capability)])
        monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_default_device=None))
        monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: object())

    return choose


def test_on_a_cpu_no_kernel_runs():
    assert _dispatch.capability() is None
    for why in (_dispatch.why_not_triton(), _dispatch.why_not_mosaic()):
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
    assert _dispatch.capability() == expected
    for why, word in ((_dispatch.why_not_triton(), triton), (_dispatch.why_not_mosaic(), mosaic)):
        assert why is None if word is None else word in why


def test_without_jax_triton_the_reason_says_what_to_install(device, monkeypatch):
    device("9.0")
    monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: None)
    assert _dispatch.why_not_triton() == "needs jax-triton: pip install -e '.[cuda13]'"
    assert _dispatch.why_not_mosaic() is None


AUTO = jax.sharding.AxisType.Auto
ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


def mesh_of(devices, axis_type=AUTO):
    return jax.make_mesh((len(devices),), ("data",), axis_types=(axis_type,), devices=devices)


def on_mesh(mesh, spec=ROWS):
    return jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, spec))


def seen_by(transformed, *args):
    """What `partitioned` says of x, and of arrays computed from it, where transformed(f)(*args)
    traces f."""
    seen = []

    def f(x):
        seen.extend(
            _dispatch.partitioned(a) for a in (x, x @ x, x.reshape(-1), (x[0], None, jnp.zeros(3)))
        )
        return x.sum()

    transformed(f)(*args)
    assert len(set(seen)) == 1, "arrays of one origin differ"
    return seen[0]


TRANSFORMATIONS = [
    lambda f: f,
    jax.jit,
    jax.grad,
    lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f))),
    lambda f: jax.jit(lambda x: jax.lax.scan(lambda carry, _: (carry, f(carry)), x, length=2)[1]),
    lambda f: jax.vmap(lambda x: f(jnp.stack([x, x, x, x]))),
]


@pytest.mark.parametrize("transformed", TRANSFORMATIONS)
def test_arrays_of_one_device_are_not_partitioned(transformed):
    """However many devices there are; tests run on two."""
    assert len(jax.devices()) == 2
    one = jax.device_put(jnp.ones((4, 4)), jax.devices()[1])
    for x in (
        jnp.ones((4, 4)),
        one,
        on_mesh(mesh_of(jax.devices()[1:])),
        np.ones((4, 4), np.float32),
    ):
        assert not seen_by(transformed, x)


@pytest.mark.parametrize("transformed", TRANSFORMATIONS)
@pytest.mark.parametrize("spec", [ROWS, WHOLE], ids=["split", "replicated"])
def test_arrays_of_a_mesh_are_partitioned(transformed, spec):
    assert seen_by(transformed, on_mesh(mesh_of(jax.devices()), spec))


def test_the_mesh_of_a_program_that_is_only_lowered():
    mesh = mesh_of(jax.devices())
    shape = jax.ShapeDtypeStruct(
        (4, 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, ROWS)
    )
    assert seen_by(lambda f: jax.jit(f).lower, shape)
    assert seen_by(jax.jit, on_mesh(mesh_of(jax.devices(), jax.sharding.AxisType.Explicit), WHOLE))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert _dispatch.partitioned()
    with jax.sharding.use_abstract_mesh(mesh_of(jax.devices()[:1]).abstract_mesh):
        assert not _dispatch.partitioned()


@pytest.mark.parametrize("check_vma", [True, False])
def test_arrays_inside_shard_map_are_local(check_vma):
    mesh, how = (
        mesh_of(jax.devices()),
        {"in_specs": ROWS, "out_specs": ROWS, "check_vma": check_vma},
    )
    outside = on_mesh(mesh)
    seen = []

    def inside(x):
        seen.append(_dispatch.partitioned(x) or _dispatch.partitioned(x, outside))
        return x

    jax.shard_map(inside, mesh=mesh, **how)(outside)
    assert seen == [False]


def test_a_shard_map_over_some_axes_leaves_the_others_to_the_compiler():
    mesh = jax.make_mesh((1, 2), ("a", "b"), axis_types=(AUTO, AUTO))
    seen = []

    def inside(x):
        seen.append(_dispatch.partitioned(x))
        return x

    spec = jax.sharding.PartitionSpec("a")
    jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"}))(
        jnp.ones(2)
    )
    assert seen == [True]


# ----------------------------------------------------------------------------------------- registry


@dataclasses.dataclass(frozen=True)
class Size:
    size: int = 0


@pytest.fixture
def operation(monkeypatch):
    """Register an operation "test", whose "mosaic" never runs and whose "triton" runs up to 9."""
    back_ends = (
        BackEnd("mosaic", lambda call: "needs luck", custom=True),
        BackEnd("triton", lambda call: "takes at most 9" if call.size > 9 else None, custom=True),
        BackEnd("cudnn"),
        BackEnd("xla"),
        BackEnd("reference"),
    )
    order = lambda call, split: ("xla",) if call.size == 7 else ("mosaic", "triton", "xla")
    monkeypatch.setitem(_dispatch.OPERATIONS, "test", Operation(back_ends, Size, order))
    monkeypatch.setitem(_dispatch.OPERATIONS, "plain", Operation(back_ends, Size))


def test_auto_takes_the_first_that_runs_and_no_kernel_where_arrays_may_be_split(operation):
    split = on_mesh(mesh_of(jax.devices()))
    assert select("test") == select("test", arrays=(jnp.ones(3), None)) == "triton"
    assert select("test", arrays=split) == select("test", arrays=(jnp.ones(3), [split])) == "xla"
    assert select("test", size=10) == select("test", size=7) == "xla"
    # Without an order of its own: that of the back ends.
    assert select("plain") == "triton" and select("plain", size=10) == "cudnn"
    assert select("plain", arrays=split) == "cudnn"


def test_a_named_kernel_refuses_arrays_that_the_compiler_would_gather(operation):
    split = on_mesh(mesh_of(jax.devices()))
    assert select("test", "triton", arrays=jnp.ones(3)) == "triton"
    assert select("test", "cudnn", arrays=split) == "cudnn"
    message = (
        r"test: implementation 'triton' needs arrays of one device.*gather.*jax\.shard_map; "
        r"these can run here: \['cudnn', 'xla', 'reference'\]"
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: select("test", "triton", arrays=x) and x)(split)
    with pytest.raises(ValueError, match="'mosaic' needs luck"):
        select("test", "mosaic", arrays=split)


def test_named(operation):
    assert select("test", "triton", size=7) == "triton"
    with pytest.raises(
        ValueError,
        match=r"test: implementation 'mosaic' needs luck; these can run here: "
        r"\['triton', 'cudnn', 'xla', 'reference'\]",
    ):
        select("test", "mosaic")
    with pytest.raises(
        ValueError,
        match=r"test: unknown implementation 'c'; choose one of \['auto', 'mosaic', 'triton', ",
    ):
        select("test", "c")
    with pytest.raises(
        ValueError, match=r"unknown operation 'tset'; choose one of \['ba_plus_caa'"
    ):
        select("tset")
    with pytest.raises(
        ValueError, match=r"test: expected the facts none and optionally size, got channels"
    ):
        select("test", channels=3)


def test_missing_facts_are_named():
    expected = "dtype, length, head_dim and optionally window, .*precision"
    for facts, got in (({}, "none"), ({"length": 8, "width": 1}, "length, width")):
        message = f"flash_attention: expected the facts {expected}, got {got}"
        with pytest.raises(ValueError, match=message):
            select("flash_attention", **facts)


def test_an_empty_array_is_left_to_xla(operation):
    nothing = (jnp.ones(3), jnp.ones((0, 4)))
    assert select("test", arrays=nothing) == select("test", "triton", arrays=nothing) == "xla"
    assert select("test", "cudnn", arrays=nothing) == "xla"
    assert select("test", "reference", arrays=nothing) == "reference"
    with pytest.raises(ValueError, match="'mosaic' needs luck"):
        select("test", "mosaic", arrays=nothing)


def public_function(name):
    """The function of an operation, without jaxtyping's wrappers, and its module."""
    function = unchecked(getattr(pallas_kernels, name, None) or getattr(transpose, name))
    return function, sys.modules[function.__module__]


# `sum_rows`, whose back end nobody can name, a part of `mlp`, and the example `silu_mul`.
NOT_PUBLIC = {"sum_rows", "fp8_linear_gelu", "fp8_linear_relu_squared", "silu_mul"}


@pytest.mark.parametrize("name", sorted({*_dispatch.OPERATIONS} - NOT_PUBLIC))
def test_the_back_ends_of_an_operation_are_those_of_its_type_and_docstring(name):
    back_ends = _dispatch.OPERATIONS[name].back_ends
    names = [back_end.name for back_end in back_ends]
    function, module = public_function(name)
    assert [*typing.get_args(module.Implementation)] == ["auto", *names]
    assert names[-2:] == ["xla", "reference"]
    assert [b.name for b in back_ends if b.custom] == [
        n for n in names if n in ("mosaic", "triton")
    ]
    stated = inspect.getdoc(function).partition("implementation: ")[2]
    assert [n for n in ("auto", *names) if f'"{n}"' not in stated] == []


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="'layer_norm' is an operation of pallas_kernels"):
        _dispatch.register("layer_norm", back_ends=[_dispatch.XLA])
    assert _dispatch.OPERATIONS["layer_norm"].back_ends != (_dispatch.XLA,)
    with pytest.raises(TypeError, match=r"expected BackEnd objects such as XLA, got \['xla'\]"):
        unchecked(_dispatch.register)("mine", back_ends=["xla"])
    assert "mine" not in _dispatch.OPERATIONS


# ---------------------------------------------------------------------------- choice of each kernel

CHOICES = {
    "softmax": {},
    "layer_norm": {"channels": 768},
    "fused_classifier": {},
    "transpose_copy": {},
    "swiglu": {},
    "rotary_qkv": {"head_dim": 128, "angles": 32},
    "linear_cross_entropy": {},
    "quantize": {},
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto_takes_a_kernel_on_a_gpu_and_none_where_arrays_may_be_split(name, monkeypatch):
    """The choices that depend on more facts have tests in the files of their operations."""
    expected = "fused" if name == "linear_cross_entropy" else "triton"
    assert select(name, **CHOICES[name]) == "xla"
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    assert select(name, **CHOICES[name]) == expected
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: True)
    assert select(name, **CHOICES[name]) == "xla"
    if expected == "triton":
        message = f"{name}: implementation 'triton' needs arrays of one device"
        with pytest.raises(ValueError, match=message):
            select(name, "triton", **CHOICES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOICES)
def test_auto_takes_a_kernel_on_this_gpu(name):
    if _dispatch.partitioned():
        pytest.skip("several GPUs: outside a shard_map auto leaves kernels of ours out")
    assert select(name, **CHOICES[name]) != "xla"
    assert select("linear_gelu", dtype="float32", rows=65536, inputs=768, outputs=3072) == "triton"
    for dtype in ("bfloat16", "float32"):
        assert select("flash_attention", dtype=dtype, length=128, head_dim=64) != "xla"
    shape = {"dtype": "bfloat16", "shape": (48, 768, 768)}
    mosaic = "mosaic" if _dispatch.why_not_mosaic() is None else "xla"
    assert {select(name, **shape) for name in ("xxt", "xtx", "ba_plus_caa")} == {mosaic}
