"""Sharded arrays under `jax.jit`: each device launches the kernels on its shards, and no collective
is added.

Compiled for two CPU devices with the kernels in Triton's interpreter: the executable shows the
shapes of the launches, and all collectives.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import rms
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_tools import collectives
from process_tools import python

import pallas_kernels as pk
from pallas_kernels import _dispatch
from pallas_kernels._partition import Rule, overwriting, sharded
from pallas_kernels.gemm import Plain

B, T, H, D, C, F, V = 4, 32, 4, 16, 32, 64, 128
P, WHOLE = PartitionSpec, PartitionSpec()
FIRST, SECOND = P("devices"), P(None, "devices")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, the shapes and shardings of its arrays, and the sizes of the gradients that are sums
    over the shards."""

    f: Callable
    arrays: list[tuple[tuple[int, ...], PartitionSpec]]
    sums: tuple[int, ...] = ()
    second: tuple[int, ...] = ()
    """Sums of XLA's matmuls over a second mesh axis: one more collective each."""
    results: Any = None
    """Shardings of the results of an operation without gradients."""

    def gradients(self, *arrays):
        """The gradients, or the results of an operation without gradients."""
        return with_gradients(self.f)(*arrays)[1] if self.results is None else self.f(*arrays)

    def lowered(self, mesh):
        """Lower the gradients, sharded as the arrays."""
        shardings = tuple(NamedSharding(mesh, spec) for _, spec in self.arrays)
        out = shardings
        if self.results is not None:
            out = jax.tree.map(partial(NamedSharding, mesh), self.results)
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
            for (shape, _), sharding in zip(self.arrays, shardings, strict=True)
        ]
        with jax.set_mesh(mesh):
            return jax.jit(self.gradients, out_shardings=out).lower(*arrays)


def attention(*arrays, **options):
    return pk.flash_attention(*arrays, implementation="triton", **options)


def cached(q, k, v):
    return pk.cached_attention(q, k, v, jnp.array([5, 9, 20, T]), implementation="triton")


def rotary(x):
    angles = jnp.ones((1, T, 8))
    return pk.rotary_qkv(x, angles, angles, heads=H, implementation="triton")


def losses(logits):
    return pk.fused_classifier(logits, jnp.zeros(B * T, jnp.int32), implementation="triton")[0]


def decode(k_LBSHD, v_LBSHD, likeliest=False):
    """With one sequence on each device of four, in the process of `test_on_eight_devices`."""
    sizes = {"L": 2, "S": 24, "C": 32, "N": 96, "F": 128, "V": V}
    names = [field.name for field in dataclasses.fields(pk.DecoderWeights)]
    shapes = [tuple(sizes[axis] for axis in name.rpartition("_")[2]) for name in names]
    weights = pk.DecoderWeights(*(jnp.sin(jnp.arange(np.prod(s)).reshape(s)) for s in shapes))
    cache, tokens = pk.DecoderCache.of(k_LBSHD, v_LBSHD), jnp.asarray([3, 5, 0, 9], jnp.int32)
    how = {"likeliest": likeliest, "implementation": "triton"}
    result, new = pk.decode_step(weights, cache, tokens, tokens, **how)
    return result, new.k_LBSHD, new.v_LBSHD


def sample(logits):
    uniform = jnp.full(len(logits), 0.4)
    filters = pk.Filters(jnp.float32(0.8), jnp.int32(50), jnp.float32(0.95))
    return pk.sample_token(logits, uniform, filters, implementation="triton")


def head(x, w):
    targets = jnp.zeros(len(x), jnp.int32)
    return pk.linear_cross_entropy(x, w, targets, implementation="fused")


def on_triton(f, **options):
    return lambda *args: f(*args, implementation="triton", **options)


QKV, MORE_QUERIES = (B, T, H, D), (B, T, 2 * H, D)
HEADS = P(None, None, "devices")
CASES = {
    "causal softmax": Case(on_triton(pk.softmax, causal=True), [((B, T, T), FIRST)]),
    "layer_norm": Case(
        on_triton(pk.layer_norm), [((B, T, C), FIRST), ((C,), WHOLE), ((C,), WHOLE)], (C, C)
    ),
    "layer_norm over time": Case(
        on_triton(pk.layer_norm), [((B, T, C), SECOND), ((C,), WHOLE), ((C,), WHOLE)], (C, C)
    ),
    "attention": Case(attention, [(QKV, FIRST)] * 3),
    "attention over heads": Case(attention, [(QKV, HEADS)] * 3),
    "grouped attention": Case(attention, [(MORE_QUERIES, FIRST), *[(QKV, FIRST)] * 2]),
    "grouped attention over heads": Case(attention, [(MORE_QUERIES, HEADS), *[(QKV, HEADS)] * 2]),
    "attention under vmap": Case(jax.vmap(attention), [((B, *QKV), FIRST)] * 3),
    "rms_norm under vmap": Case(
        jax.vmap(on_triton(pk.rms_norm), (0, None)), [((B, T, C), FIRST), ((C,), WHOLE)], (C,)
    ),
    "rms_norm under vmap of scales": Case(
        jax.vmap(on_triton(pk.rms_norm)), [((B, T, C), FIRST), ((B, C), FIRST)]
    ),
    "softmax of batch and time": Case(on_triton(pk.softmax), [((B, T, V), P("devices", "time"))]),
    "rms_norm of batch and time": Case(
        on_triton(pk.rms_norm), [((B, T, C), P("devices", "time")), ((C,), WHOLE)], (C,)
    ),
    "documents": Case(
        lambda *qkv: attention(*qkv, segment_ids=jnp.zeros((B, T), jnp.int32)), [(QKV, FIRST)] * 3
    ),
    "bias and more keys": Case(
        lambda q, k, v, bias: attention(q, k, v, bias=bias),
        [(QKV, FIRST), *[((B, 2 * T, H, D), FIRST)] * 2, ((1, H, T, 2 * T), WHOLE)],
        (H * T * 2 * T,),
    ),
    "bias over heads": Case(
        lambda q, k, v, bias: attention(q, k, v, bias=bias, softcap=2.0),
        [*[(QKV, HEADS)] * 3, ((B, H, T, T), SECOND)],
    ),
    "packed attention over heads": Case(
        on_triton(pk.flash_attention_qkv), [((B, T, 3, H, D), P(None, None, None, "devices"))]
    ),
    "cached_attention": Case(
        cached, [((B, 5, 2 * H, D), FIRST), *[(QKV, FIRST)] * 2], results=FIRST
    ),
    "cached_attention over key heads": Case(
        cached, [((B, 5, 2 * H, D), HEADS), *[(QKV, HEADS)] * 2], results=HEADS
    ),
    "rotary_qkv": Case(rotary, [((B, T, 3 * H * D), FIRST)]),
    "fused_classifier": Case(losses, [((B * T, V), FIRST)]),
    # tests/test_lm_head_sharded.py has the gradients, and shards of the vocabulary.
    "linear_cross_entropy": Case(head, [((B * T, C), FIRST), ((V, C), WHOLE)], results=FIRST),
    "transpose_copy": Case(on_triton(pk.transpose_copy), [((B, 64, V), FIRST)]),
    "transpose_copy over columns": Case(on_triton(pk.transpose_copy), [((64, V), SECOND)]),
    "linear_gelu": Case(
        on_triton(pk.linear_gelu), [((B, T, C), FIRST), ((C, F), WHOLE), ((F,), WHOLE)], (C * F, F)
    ),
    "mlp of batch and time": Case(
        on_triton(pk.mlp),
        [((B, T, C), P("devices", "time")), ((C, F), WHOLE), ((F,), WHOLE), ((F, C), WHOLE)],
        (C * F, F, F * C),
        (C * F, F * C),
    ),
    "swiglu of batch and time": Case(
        on_triton(pk.swiglu),
        [((B, T, C), P("devices", "time")), *[((C, F), WHOLE)] * 2, ((F, C), WHOLE)],
        (2 * C * F, F * C),  # of both matrices of x in one
        (2 * C * F, F * C),
    ),
    # And the largest numbers of a gradient and of the activation's gradient, for their scales.
    "mlp in FP8": Case(
        on_triton(pk.mlp, numerics="fp8"),
        [((B, T, C), FIRST), ((C, F), WHOLE), ((F,), WHOLE), ((F, C), WHOLE)],
        (C * F, F, F * C, 1),
    ),
    "swiglu in FP8": Case(
        on_triton(pk.swiglu, numerics="fp8"),
        [((B, T, C), FIRST), *[((C, F), WHOLE)] * 2, ((F, C), WHOLE)],
        (2 * C * F, F * C, 1),
    ),
    "sample_token": Case(sample, [((B * T, V), FIRST)], results=FIRST),
    "decode_step": Case(decode, [((2, 4, 24, 2, 16), SECOND)] * 2, results=(FIRST, *[SECOND] * 2)),
    "likeliest token": Case(
        partial(decode, likeliest=True),
        [((2, 4, 24, 2, 16), SECOND)] * 2,
        results=(FIRST, *[SECOND] * 2),
    ),
}


def mesh_of(kind):
    """Two devices, or eight in the process of `test_on_eight_devices`."""
    sizes = (4, 2) if jax.device_count() == 8 else (2, 1)
    return jax.make_mesh(sizes, ("devices", "time"), axis_types=(kind,) * 2)


def launches_and_collectives(text, case):
    """Check that no launch has the whole first array; return the sizes of all collectives."""
    launches = re.findall(r"custom-call\((.*?)\), custom_call_target=\"xla_ffi_python", text)
    assert launches
    whole = ",".join(map(str, case.arrays[0][0]))
    assert f"[{whole}]" not in " ".join(re.findall(r" = (.*?) custom-call", text))
    assert "all-gather" not in text
    return list(map(abs, collectives(text)))


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, id=f"{name}-{kind.name}")
        for name in CASES
        for kind in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_each_device_launches_on_its_shard(name, kind, triton_on_cpu):
    case, mesh = CASES[name], mesh_of(kind)
    compiled = case.lowered(mesh).compile()
    sizes = launches_and_collectives(compiled.as_text(), case)
    second = case.second if mesh.shape["time"] > 1 else ()
    assert sorted(sizes) == sorted(case.sums + second)


def test_on_eight_devices():
    """Cases in which two axes are sharded, in a process of its own."""
    cases = ["-k", "launches and (batch and time or decode_step or likeliest)"]
    python("-m", "pytest", "-q", "-n", "0", __file__, *cases, TEST_DEVICES="8")


def with_gradients(f):
    """Result of f, and its gradients in the direction of the result."""

    def call(*arrays):
        out, pull_back = jax.vjp(f, *arrays)
        return out, pull_back(out)

    return call


MOSAIC = {"implementation": "mosaic"}
# 256 rows on each of 8 GPUs.
WIDE = [((8, 256, 128), FIRST), ((128, 384), WHOLE), ((384,), WHOLE), ((384, 128), WHOLE)]
GATED = [WIDE[0], WIDE[1], WIDE[1], WIDE[3]]
ON_MOSAIC = {
    "attention": Case(partial(pk.flash_attention, **MOSAIC), [((B, 256, 4, 64), HEADS)] * 3),
    "grouped attention": Case(
        partial(pk.flash_attention, **MOSAIC),
        [((B, 256, 4, 64), FIRST), *[((B, 256, 2, 64), FIRST)] * 2],
    ),
    "xxt": Case(partial(pk.xxt, **MOSAIC), [((4, 256, 512), FIRST)]),
    "linear_gelu": Case(partial(pk.linear_gelu, **MOSAIC), WIDE[:3], (128 * 384, 384)),
    "mlp": Case(partial(pk.mlp, **MOSAIC), WIDE, (128 * 384, 384, 384 * 128)),
    "swiglu": Case(partial(pk.swiglu, **MOSAIC), GATED, (128 * 768, 384 * 128)),
    "swiglu in FP8": Case(
        partial(pk.swiglu, numerics="fp8", **MOSAIC), GATED, (128 * 768, 384 * 128, 1)
    ),
    "projected attention in FP8": Case(
        lambda x, w, b: pk.projected_attention(x, w / 28, b, heads=12, numerics="fp8", **MOSAIC),
        [((8, 256, 768), FIRST), ((768, 2304), WHOLE), ((2304,), WHOLE)],
        (768 * 2304, 768, 768, 1),
    ),
    "mlp in FP8": Case(
        partial(pk.mlp, numerics="fp8", **MOSAIC), WIDE, (128 * 384, 384, 384 * 128, 1)
    ),
}
ON_GPUS = [
    *((name, case, jnp.float32) for name, case in CASES.items()),
    *((f"{name} on mosaic", case, jnp.bfloat16) for name, case in ON_MOSAIC.items()),
]


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name, case, dtype", ON_GPUS, ids=[name for name, *_ in ON_GPUS])
def test_two_gpus_compute_what_one_computes(name, case, dtype):
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(shape), dtype) for shape, _ in case.arrays]
    f = jax.jit(with_gradients(case.f) if case.results is None else case.f)
    expected = f(*arrays)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for _, spec in case.arrays]
        split = jax.tree.map(jax.device_put, arrays, shardings)
        found = f(*split)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(b).all()
        assert rms(a - b) <= 2e-2 * rms(b), name


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_values_of_shards(kind):
    """A result without a sharded axis is the sum over the shards; absent arrays are left out."""

    def kernel(x_NC, absent, scale_C):
        return x_NC * scale_C[None], absent, x_NC.sum(0)

    rule = Rule("n c, n c, c -> n c, n c, c", over="n")
    x, scale = np.arange(32, dtype=np.float32).reshape(4, 8), np.full(8, 2, np.float32)
    with jax.set_mesh(mesh_of(kind)):
        sharding = NamedSharding(mesh_of(kind), FIRST)
        y, absent, total = jax.jit(sharded(kernel, rule))(jax.device_put(x, sharding), None, scale)
        assert absent is None and y.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(y, x * 2)
    np.testing.assert_array_equal(total, x.sum(0))


def test_a_kernel_that_overwrites_an_argument():
    """The effects of `jax.new_ref` have no lowering in a shard."""

    def kernel(x_NC):
        def launch(ref):
            ref[...] = 2 * ref[...]
            return x_NC.sum(1), x_NC.sum(0)

        (doubled,), sums = overwriting(launch, [x_NC])
        return doubled, *sums

    x, mesh = np.arange(32, dtype=np.float32).reshape(4, 8), mesh_of(AxisType.Auto)
    rule = Rule("n c -> n c, n, c", over="n")
    split = jax.device_put(x, NamedSharding(mesh, FIRST))
    for f in (sharded(kernel, rule), kernel):
        for found, expected in zip(jax.jit(f)(split), (2 * x, x.sum(1), x.sum(0)), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_numpy_arrays_with_in_shardings(triton_on_cpu):
    """Their types name no mesh."""
    shardings = [NamedSharding(mesh_of(AxisType.Auto), spec) for spec in (FIRST, WHOLE)]
    f = jax.jit(on_triton(pk.rms_norm), in_shardings=shardings)
    compiled = f.lower(np.ones((8, C), np.float32), np.ones(C, np.float32)).compile()
    assert compiled.output_shardings.is_equivalent_to(shardings[0], 2)
    assert collectives(compiled.as_text()) == []


def test_explicit_axes_that_a_kernel_needs_whole_are_refused(triton_on_cpu):
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        x = jax.device_put(jnp.ones((8, V)), NamedSharding(mesh_of(AxisType.Explicit), SECOND))
        with pytest.raises(ValueError, match=r"axes n s .* over n only.*jax\.sharding\.reshard"):
            jax.jit(on_triton(pk.softmax))(x)


def test_mosaics_tiles_divide_the_rows_of_each_device(monkeypatch):
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    sizes = {"dtype": jnp.bfloat16, "inputs": 128, "outputs": 384}
    on_mesh = jax.device_put(jnp.ones(2), NamedSharding(mesh_of(AxisType.Auto), FIRST))
    chosen = [
        pk.select("mlp", rows=rows, arrays=arrays, **sizes)
        for arrays in (jnp.ones(2), on_mesh)
        for rows in (256, 384)
    ]
    assert chosen == ["mosaic", "mosaic", "mosaic", "xla"]


@pytest.mark.parametrize(
    "name", ["attention", "swiglu in FP8", "causal softmax", "fused_classifier"]
)
def test_a_mesh_with_manual_and_other_axes(name, triton_on_cpu):
    """The batch is sharded over an automatic axis; the other axis is manual."""
    case = CASES[name]
    mesh = jax.make_mesh((1, 2), ("manual", "devices"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in case.arrays
        ]

        def gradients(*arrays):
            return with_gradients(case.f)(*arrays)[1]

        specs = {"in_specs": P(), "out_specs": P(), "axis_names": {"manual"}, "check_vma": False}
        compiled = jax.jit(jax.shard_map(gradients, **specs)).lower(*arrays).compile()
    found = launches_and_collectives(compiled.as_text(), case)
    assert sorted(found) == sorted(case.sums)


def test_sums_need_the_names_of_all_axes(triton_on_cpu):
    mesh = jax.make_mesh((1, 2), ("manual", "devices"), axis_types=(AxisType.Auto,) * 2)

    def select(x):
        norm = pk.select("layer_norm", channels=V, arrays=x)
        return norm, pk.select("linear_cross_entropy", arrays=x, numerics=Plain())

    with jax.set_mesh(mesh):
        chosen, specs = [], {"in_specs": P("manual"), "out_specs": P("manual")}
        inside = lambda x: chosen.append(select(x)) or x
        jax.jit(jax.shard_map(inside, axis_names={"manual"}, **specs))(jnp.ones((8, V)))
        assert select(jnp.ones((8, V))) == ("triton", "fused")
    assert {*chosen} == {("xla", "xla")}


def test_a_cache_key_without_the_kernel_is_refused():
    option = "jax_remove_custom_partitioning_ptr_from_cache_key"
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh_of(AxisType.Auto), FIRST))
    jax.config.update(option, True)
    try:
        with pytest.raises(ValueError, match=f"found {option}=True.*set it to False"):
            jax.jit(sharded(lambda x: 2 * x, Rule("n c -> n c", over="n")))(x)
    finally:
        jax.config.update(option, False)
