"""Every back end of every operation with an example in the registry: value and gradients against
the definition in fp64 by the 2× rule, and the same call under JAX's transformations.

The definition is `Example.reference`, evaluated in fp64: while it is traced, `jnp.float32`, to
which definitions cast, is `jnp.float64`. The yardstick of the 2× rule is the back end "xla" with
each result rounded to its dtype. For the largest error of attention in bf16, it is the textbook in
bf16. "xla" and "reference" are compared with `LIMITS` instead: they would be their own yardstick.
"""

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import unchecked
from reference.attention import at_once, textbook
from reference.torch_gpt2 import assert_within_twice, max_abs, rms
from rule_tools import run_reference

import pallas_kernels as pk
from pallas_kernels import _dispatch, matmul
from pallas_kernels._dispatch import OPERATIONS, Example

DTYPES = (jnp.float32, jnp.bfloat16)
PLAIN = ("xla", "fused", "reference")
"""Back ends that run on a CPU; the others need a GPU."""
LIMITS = {"float32": 2e-6, "bfloat16": 1e-2}
"""Relative error of plain JAX in the 2-norm: 6e-7 and 6e-3 were measured on a CPU."""
GPU_LIMITS = {"float32": 1e-2, "bfloat16": 1e-2}
"""In addition to the 2× rule. fp32 may be TF32."""


def linear_example(rows, dtype):
    """Attention's projection, with a bias: `linear` has no kernel, and so no registered example."""
    sizes = ((rows, 768), (768, 2304), (2304,))

    def scaled(f):
        return lambda x, w, b, **how: f(x, w * 768**-0.5, b, **how)

    arrays = tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)
    return Example(scaled(pk.linear), scaled(matmul.reference), arrays)


EXAMPLES = {name: entry.examples for name, entry in OPERATIONS.items()}
EXAMPLES["linear"] = (linear_example,)
WITHOUT_EXAMPLE = {
    "quantize": "the result is FP8 with an own rounding: tests/test_fp8.py compares its bits",
    "fp8_linear_gelu": "not public: a part of mlp, tests/test_fp8_layers.py",
    "fp8_linear_relu_squared": "not public: a part of mlp, tests/test_fp8_layers.py",
    "decode_step": "its arrays are a model's weights and cache: tests/test_decode.py",
}
NO_GRADIENT = {
    "scaled_matmul": ("mosaic", "xla", "reference"),
    "sample_token": ("triton", "xla", "reference"),
    "transpose_sum_rows": ("triton",),
    "sum_rows": ("triton",),
}
"""Back ends that refuse differentiation: they are called in the functions of a `jax.custom_vjp`, or
return an index. Every back end accepts the other transformations of this file, shard_map with
check_vma=False."""
OWN_DTYPE = {"sample_token"}
"""The definition is the public function, which refuses fp64; its result is an index, and exact."""
FP8 = {"scaled_matmul"}
"""The 2× rule has no yardstick: tensor cores add FP8 products with 14 bits. The limit is that of
tests/test_fp8_mosaic.py."""


def cases():
    for name, examples in EXAMPLES.items():
        back_ends = [back_end.name for back_end in OPERATIONS[name].back_ends]
        for make in examples:
            dtypes = [dtype for dtype in DTYPES if make(3, dtype) is not None]
            for dtype, back_end in itertools.product(dtypes, back_ends):
                if back_end == "reference" and dtype != dtypes[-1]:
                    continue  # it casts to fp32 first: bf16 has all of its operations
                marks = () if back_end in PLAIN else pytest.mark.gpu
                label = f"{name}-{make.__name__.strip('_')}-{back_end}-{jnp.dtype(dtype).name}"
                yield pytest.param(name, make, back_end, dtype, id=label, marks=marks)


def test_every_operation_has_an_example():
    assert {name for name, examples in EXAMPLES.items() if not examples} == {*WITHOUT_EXAMPLE}


# ------------------------------------------------------------------------------------ one example


def random_rows(make, dtype, *, multiple: int = 1) -> int:
    """Return a random odd number of rows, or an odd multiple of `multiple`: few rows on a CPU."""
    random = np.random.default_rng(zlib.crc32(f"{make.__module__} {make.__name__}".encode()))
    few, many = int(random.integers(2, 12)), int(random.integers(150, 350))
    rows = 2 * (many if _dispatch.platform() == "gpu" else few) + 1
    if multiple > 1:
        return multiple * (rows // multiple | 1)
    wide = max(size for x in make(rows, dtype).shapes for size in x.shape) > 2**15
    return rows // 8 | 1 if wide else rows  # a vocabulary


def with_gradients(f, differentiable):
    """Return a function of arrays and directions: results, and gradients of their product."""

    def run(arrays, directions):
        if not differentiable:
            return f(*arrays), ()
        out, pull = jax.vjp(f, *arrays)
        return out, pull(jax.tree.map(lambda d, o: d.astype(o.dtype), directions, out))

    return run


@functools.lru_cache(maxsize=1)  # the back ends of an example follow each other
def two_calls(name, make, dtype, rows):
    """Return two random pairs of arrays and directions, stacked, and the definition of each."""
    example = make(rows, dtype)
    random = np.random.default_rng(rows)
    draw = lambda x: random.standard_normal((2, *x.shape), np.float32).astype(x.dtype)
    call = functools.partial(example.call, implementation="xla")
    stacked = jax.tree.map(draw, (example.shapes, jax.eval_shape(call, *example.shapes)))
    if name in OWN_DTYPE:
        run = jax.jit(with_gradients(example.reference, False))
        return stacked, [jax.device_get(run(*element(stacked, i))) for i in range(2)]
    differentiable = any(
        b.name not in NO_GRADIENT.get(name, ()) for b in OPERATIONS[name].back_ends
    )
    run = at_once(with_gradients(unchecked(example.reference), differentiable))
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
    ):
        patch.setattr(jnp, "float32", jnp.float64)
        wide = jax.tree.map(lambda x: x.astype(np.float64), stacked)
        exact = [jax.device_get(run(*element(wide, i))) for i in range(2)]
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(exact)) or name in FP8
    return stacked, exact


def transformed(call, differentiable, one, stacked):
    """Yield each transformation's name and results: one for each element that it computes."""
    run = with_gradients(call, differentiable)
    remat = with_gradients(jax.checkpoint(call), differentiable)
    devices = jax.devices(_dispatch.platform())[: 1 if _dispatch.platform() == "gpu" else 2]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=auto, devices=devices)

    @jax.jit
    def several(one, stacked):
        scan = jax.lax.scan(lambda _, args: (None, run(*args)), None, stacked)[1]
        return {"vmap": jax.vmap(run)(*stacked), "scan": scan}, remat(*one)

    def on_device(args):
        return jax.tree.map(lambda x: x[None], run(*element(args, 0)))

    results, found = jax.device_get(several(one, stacked))
    yield "remat", [found]
    spec = jax.P("x")
    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    local = jax.tree.map(lambda x: x[: len(devices)], stacked)
    results["shard_map"] = jax.device_get(jax.jit(sharded)(local))
    for label, found in results.items():
        size = len(devices) if label == "shard_map" else 2
        yield label, [element(found, i) for i in range(size)]
    with jax.enable_x64(True):
        # Another function than `run`, whose trace without x64 JAX has kept.
        yield "x64", [jax.device_get(jax.jit(lambda *args: run(*args))(*one))]


def element(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def why_refused(call, shapes) -> str | None:
    """Return None where the back end accepts the shapes, else the reason that `select` gives."""
    try:
        jax.eval_shape(call, *shapes)
    except ValueError as refusal:
        if f"implementation '{call.keywords['implementation']}'" not in str(refusal):
            raise
        return str(refusal)


@pytest.mark.parametrize(("name", "make", "back_end", "dtype"), [*cases()])
def test_value_gradients_and_transformations(name, make, back_end, dtype):
    for multiple in (1, 128):  # some kernels need whole tiles
        rows = random_rows(make, dtype, multiple=multiple)
        example = make(rows, dtype)
        call = functools.partial(example.call, implementation=back_end)
        if (why := why_refused(call, example.shapes)) is None:
            break
    else:
        pytest.skip(why)
    stacked, exact = two_calls(name, make, dtype, rows)
    args = [jax.tree.map(jnp.asarray, element(stacked, i)) for i in range(2)]
    differentiable = back_end not in NO_GRADIENT.get(name, ())
    if not differentiable:
        with pytest.raises(NotImplementedError, match="no derivative|differentiable once"):
            jax.eval_shape(with_gradients(call, True), *args[0])
        exact = [(out, ()) for out, _ in exact]

    run = jax.jit(with_gradients(call, differentiable))
    plain = [jax.device_get(run(*each)) for each in args]
    limits = LIMITS if back_end in PLAIN else GPU_LIMITS
    compare_with_limit(plain[0], exact[0], limits[jnp.dtype(dtype).name])
    if back_end not in ("xla", "reference") and name not in FP8:
        xla = functools.partial(example.call, implementation="xla")
        in_bf16 = name == "flash_attention" and dtype == jnp.bfloat16
        for norm, same_dtype in ((rms, xla), (max_abs, attention_in_bf16 if in_bf16 else xla)):
            yardstick = run_reference(with_gradients(same_dtype, differentiable), *args[0])
            compare("against the definition", plain[0], yardstick, exact[0], norms=(norm,))
    if back_end in PLAIN and dtype == jnp.float32 and make(rows, jnp.bfloat16) is not None:
        return  # plain JAX is the same in bf16, but for its casts: transformed in bf16 only
    compare("without jit", call(*args[0][0]), plain[0][0], exact[0][0])
    for label, found in transformed(call, differentiable, args[0], stacked):
        for ours, theirs, true in zip(found, plain, exact, strict=False):
            compare(label, ours, theirs, true, equal=label == "x64" and back_end in PLAIN)


def attention_in_bf16(x, w=None, b=None):
    """Return attention of qkv, or of its projection, with bf16 weights as the kernels have them:
    "xla" keeps the weights in fp32."""
    qkv = x if w is None else (x @ (w * 768**-0.5) + b[None, None]).reshape(*x.shape[:2], 3, 12, 64)
    return textbook(*jnp.moveaxis(qkv, 2, 0))[0]


def labelled(*trees):
    """Return (place in the tree, leaf of each tree) for each leaf."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(trees[0])]
    return zip(paths, *map(jax.tree.leaves, trees), strict=True)


def compare(label, found, plain, exact, *, equal=False, norms=(rms, max_abs)):
    """Fail unless the results have the dtypes of `plain`, and equal bits or (unless `equal`) errors
    below twice those of `plain`."""
    for place, ours, theirs, true in labelled(found, plain, exact):
        assert ours.dtype == theirs.dtype, f"{label} {place}"
        if np.array_equal(np.asarray(ours), np.asarray(theirs)):
            continue
        assert not equal, f"{label} {place}: other bits"
        for norm in norms:
            assert_within_twice(ours, theirs, true, norm=norm, name=f"{label} {place}")


def compare_with_limit(found, exact, limit):
    for place, ours, true in labelled(found, exact):
        error = rms(np.asarray(ours, np.float64) - true) / max(rms(true), 1e-30)
        assert error <= limit, f"{place}: relative error {error:.3g}, allowed {limit:.3g}"
