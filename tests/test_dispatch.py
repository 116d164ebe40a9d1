"""pallas_kernels._dispatch: the registry, what the device can run, errors that say what is
missing."""

import dataclasses
import functools
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


@pytest.fixture
def device(monkeypatch):
    """Replace the default device by one of a given compute capability."""

    def choose(compute_capability):
        gpu = types.SimpleNamespace(platform="gpu", compute_capability=compute_capability)
        monkeypatch.setattr(_dispatch, "default_device", lambda: gpu)
        monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: object())

    return choose


@pytest.mark.parametrize(
    ("compute_capability", "expected", "triton", "mosaic"),
    [
        ("7.5", (7, 5), "Ampere", "Hopper"),
        ("8.0", (8, 0), None, "Hopper"),
        ("8.9", (8, 9), None, "Hopper"),
        ("9.0", (9, 0), None, None),
        ("10.0", (10, 0), None, "Hopper"),
        ("gfx90a", None, "NVIDIA", "NVIDIA"),  # AMD's
        (None, None, *["needs an NVIDIA GPU, and the default device is a cpu"] * 2),
    ],
)
def test_what_each_gpu_runs(device, monkeypatch, compute_capability, expected, triton, mosaic):
    if compute_capability is not None:
        device(compute_capability)
    assert _dispatch.capability() == expected
    for why, word in ((_dispatch.why_not_triton(), triton), (_dispatch.why_not_mosaic(), mosaic)):
        assert why is None if word is None else word in why
    if triton is None:
        monkeypatch.setattr(_dispatch.importlib.util, "find_spec", lambda name: None)
        assert _dispatch.why_not_triton() == "needs jax-triton: pip install 'gptjax[cuda13]'"


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
        arrays = (x, x @ x, x.reshape(-1), (x[0], None, jnp.zeros(3)))
        seen.extend(map(_dispatch.partitioned, arrays))
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
def test_arrays_of_a_mesh_are_partitioned(transformed):
    """And those of one device are not, however many devices there are; tests run on two."""
    first, second = jax.devices()
    ones = jnp.ones((4, 4))
    for x in (ones, jax.device_put(ones, second), on_mesh(mesh_of([second])), np.asarray(ones)):
        assert not seen_by(transformed, x)
    for spec in (ROWS, WHOLE):
        assert seen_by(transformed, on_mesh(mesh_of([first, second]), spec))


def test_the_mesh_of_a_program_that_is_only_lowered():
    mesh = mesh_of(jax.devices())
    sharding = jax.sharding.NamedSharding(mesh, ROWS)
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=sharding)
    assert seen_by(lambda f: jax.jit(f).lower, shape)
    assert seen_by(jax.jit, on_mesh(mesh_of(jax.devices(), jax.sharding.AxisType.Explicit), WHOLE))
    for devices in (jax.devices(), jax.devices()[:1]):
        with jax.sharding.use_abstract_mesh(mesh_of(devices).abstract_mesh):
            assert _dispatch.partitioned() == (len(devices) == 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_arrays_inside_shard_map_are_local(check_vma):
    """Unless the map is over some axes: the others are the compiler's."""
    outside, seen = on_mesh(mesh_of(jax.devices())), []

    def inside(x):
        seen.append(_dispatch.partitioned(x) or _dispatch.partitioned(x, outside))
        return x

    how = {"in_specs": ROWS, "out_specs": ROWS, "check_vma": check_vma}
    jax.shard_map(inside, mesh=mesh_of(jax.devices()), **how)(outside)
    if check_vma:
        mesh = jax.make_mesh((1, 2), ("data", "b"), axis_types=(AUTO, AUTO))
        jax.jit(jax.shard_map(inside, mesh=mesh, axis_names={"data"}, **how))(jnp.ones(2))
    assert seen == [False, *[True] * check_vma]


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
    facts = "flash_attention: expected the facts dtype, length, head_dim and optionally window, .*"
    test_facts = "test: expected the facts none and optionally size, got channels"
    runs = (
        r"test: implementation 'mosaic' needs luck; these can run here: "
        r"\['triton', 'cudnn', 'xla', 'reference'\]"
    )
    names = r"test: unknown implementation 'c'; choose one of \['auto', 'mosaic', 'triton', "
    for (name, *args), given, message in [
        (("test", "mosaic"), {}, runs),
        (("test", "c"), {}, names),
        (("tset",), {}, r"unknown operation 'tset'; choose one of \['ba_plus_caa'"),
        (("test",), {"channels": 3}, test_facts),
        (("flash_attention",), {}, f"{facts}precision, .*got none"),
        (
            ("flash_attention",),
            {"length": 8, "width": 1},
            f"{facts}precision, .*, got length, width",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            select(name, *args, **given)


def test_an_empty_array_is_left_to_xla(operation):
    nothing = (jnp.ones(3), jnp.ones((0, 4)))
    assert select("test", arrays=nothing) == select("test", "triton", arrays=nothing) == "xla"
    assert select("test", "cudnn", arrays=nothing) == "xla"
    assert select("test", "reference", arrays=nothing) == "reference"
    with pytest.raises(ValueError, match="'mosaic' needs luck"):
        select("test", "mosaic", arrays=nothing)


def test_recorded_lists_the_choices_of_traced_calls(operation):
    with _dispatch.recorded() as choices:
        select("test", size=10)
        with _dispatch.recorded() as inner:
            select("plain", "cudnn")
        with pytest.raises(ValueError, match="needs luck"):
            select("test", "mosaic")
        select("test", arrays=jnp.ones((0, 4)))
        x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        f = lambda x: pallas_kernels.linear(x, x.T, numerics="fp32").sum()
        jax.eval_shape(jax.grad(f), x)
    select("test")
    made = [(choice.operation, choice.numerics, choice.back_end) for choice in choices]
    assert made == [("test", None, "xla"), ("test", None, "xla"), ("linear", "fp32", "xla")]
    assert choices[0].facts == Size(10) and [choice.back_end for choice in inner] == ["cudnn"]


# Two calls of the operation in the example; `projected_attention` calls `flash_attention_qkv`.
TWICE = {"sum_rows", "transpose_add", "flash_attention"}


def gradients(f, *arrays):
    out, pull_back = jax.vjp(f, *arrays)
    return pull_back(out)


@pytest.mark.parametrize("name", sorted({*_dispatch.OPERATIONS} - {"silu_mul"}))
def test_a_call_and_its_gradient_select_once(name):
    for make in _dispatch.OPERATIONS[name].examples:
        example = make(256, jnp.bfloat16) or make(256, jnp.float32)
        call = functools.partial(example.call, implementation="auto")
        call = functools.partial(gradients, call) if example.differentiable else call
        with _dispatch.recorded() as choices:
            jax.eval_shape(call, *example.shapes)
        times = [choice.operation for choice in choices].count(name)
        assert times == 1 or (name in TWICE and times == 2)


# `sum_rows`, whose back end nobody can name, a part of `mlp`, and the example `silu_mul`.
NOT_PUBLIC = {"sum_rows", "fp8_linear_gelu", "fp8_linear_relu_squared", "silu_mul"}


@pytest.mark.parametrize("name", sorted({*_dispatch.OPERATIONS} - NOT_PUBLIC))
def test_the_back_ends_of_an_operation_are_those_of_its_type_and_docstring(name):
    back_ends = _dispatch.OPERATIONS[name].back_ends
    names = [back_end.name for back_end in back_ends]
    function = unchecked(getattr(pallas_kernels, name, None) or getattr(transpose, name))
    implementations = sys.modules[function.__module__].Implementation
    assert [*typing.get_args(implementations)] == ["auto", *names]
    assert names[-2:] == ["xla", "reference"]
    assert {b.name for b in back_ends if b.custom} == {*names} & {"mosaic", "triton"}
    stated = inspect.getdoc(function).partition("implementation: ")[2]
    assert [n for n in ("auto", *names) if f'"{n}"' not in stated] == []


def test_what_cannot_be_registered():
    with pytest.raises(ValueError, match="'layer_norm' is an operation of pallas_kernels"):
        _dispatch.register("layer_norm", back_ends=[_dispatch.XLA])
    assert _dispatch.OPERATIONS["layer_norm"].back_ends != (_dispatch.XLA,)
    with pytest.raises(TypeError, match=r"expected BackEnd objects such as XLA, got \['xla'\]"):
        unchecked(_dispatch.register)("mine", back_ends=["xla"])
    assert "mine" not in _dispatch.OPERATIONS


@pytest.mark.parametrize("name", ["linear_cross_entropy", "quantize"])
def test_auto_takes_a_kernel_also_for_arrays_that_may_be_split(name, monkeypatch):
    """The other choices: docs/cards.md, tests/test_sharded_arrays.py, the files of the
    operations."""
    pytest.importorskip("jax_triton", reason="needs jax_triton: pip install -e '.[test]'")
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    assert (kernel := select(name)) != "xla"
    monkeypatch.setattr(_dispatch, "devices_of", lambda *arrays: 2)
    assert select(name) == kernel
