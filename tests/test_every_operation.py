"""One suite over the operations, their back ends, and JAX's transformations.

Value and gradients are compared with the definition in fp64 by the 2× rule. The yardstick is the
back end "xla" with each result rounded to its dtype. For the largest error of attention in bf16, it
is the textbook in bf16. "xla" and "reference" are compared with `LIMITS` instead: they would be
their own yardstick, and each operation's own file compares "xla" with a textbook.

The calls are the examples of the registry, and small ones. In the small calls every back end runs
on a CPU except Mosaic's: Triton's kernels in Triton's interpreter.
"""

import functools
import inspect
import itertools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import h200, triton_kernels, unchecked
from reference.attention import textbook
from rule_tools import (
    in_fp64,
    is_float,
    refused,
    run_reference,
    runs_are_equal,
    with_gradients,
)

import pallas_kernels as pk
from pallas_kernels import (
    _dispatch,
    attention,
    classifier,
    feed_forward,
    gated_mlp,
    lm_head,
    norm,
    rotary,
    row_softmax,
    symmetric,
    transpose,
)
from pallas_kernels._dispatch import OPERATIONS, Example
from pallas_kernels.linear import reference as linear_reference

DTYPES = (jnp.float32, jnp.bfloat16)
PLAIN = ("xla", "fused", "reference")
"""Back ends that run on a CPU; the others need a GPU, or an interpreter."""
LIMITS = {"float32": 2e-6, "bfloat16": 1e-2}
"""Relative error of plain JAX in the 2-norm: 6e-7 and 6e-3 were measured on a CPU."""
KERNEL_LIMITS = {"float32": 1e-2, "bfloat16": 1e-2, "float16": 2e-3}
"""In addition to the 2× rule. fp32 may be TF32."""
WITHOUT_EXAMPLE = {
    "linear": "no kernel: a small call",
    "quantize": "the result is FP8 with an own rounding: tests/test_fp8.py compares its bits",
    "decode_step": "its arrays are a model's weights and cache: tests/test_decode.py",
}
NO_GRADIENT = {
    "scaled_matmul": ("mosaic", "xla", "reference"),
    "sample_token": ("triton", "xla", "reference"),
    "cached_attention": ("triton",),
    "transpose_sum_rows": ("triton",),
    "sum_rows": ("triton",),
}
"""Back ends that refuse differentiation: they are called in the functions of a `jax.custom_vjp`, or
return an index. Every back end accepts the other transformations of this file, shard_map with
check_vma=False."""
OWN_DTYPE = {"sample_token"}
"""The definition is the public function, which refuses fp64; its result is an index, and exact."""
FP8 = {"scaled_matmul"}
"""The 2× rule has no yardstick: tensor cores add FP8 products with 14 bits. tests/test_fp8.py has a
limit."""


EXAMPLES = {name: entry.examples for name, entry in OPERATIONS.items()}


def test_every_operation_has_an_example():
    assert {name for name, examples in EXAMPLES.items() if not examples} == {*WITHOUT_EXAMPLE}
    assert {*OPERATIONS} & {*pk.__all__} <= {*SMALL, *WITHOUT_EXAMPLE, *NO_GRADIENT}


# -------------------------------------------------------------------------------------- small calls


def weighted(f):
    """Matrices of a size that keeps the results near 1."""
    near_1 = lambda w: w * w.shape[0] ** -0.5 if w.ndim == 2 else w
    return lambda x, *ws, **how: f(x, *map(near_1, ws), **how)


def linear_definition(x, w, b):
    return linear_reference(x.reshape(-1, x.shape[-1]), w, b).reshape(*x.shape[:-1], -1)


def mlp_reference(x, w, b, w2):
    hidden = feed_forward.reference(x, w, b)
    return jnp.matmul(hidden, w2, precision=jax.lax.Precision.HIGHEST)


ANGLES = np.random.default_rng(9).uniform(-9, 9, (1, 8, 2)).astype(np.float32)


def small_rotary(f):
    def call(qkv, **how):
        return jnp.concatenate(
            f(qkv, *map(jnp.asarray, (np.cos(ANGLES), np.sin(ANGLES))), **how), axis=2
        )

    return call


def rotary_definition(qkv, cos, sin):
    return rotary.reference(qkv, cos, sin, rotary.Options(2, 1, "adjacent", 0.1, False))


def projected_definition(x, w, b):
    qkv = linear_definition(x, w, b).reshape(*x.shape[:2], 3, 2, -1)
    return attention.reference(*jnp.moveaxis(qkv, 2, 0))


def losses_of(f):
    """Losses of the classifier, and of the head, whose last array but one has V rows."""

    def call(x, *w, **how):
        *w, targets = w
        how |= {"vocab_size": w[0].shape[0] - 3 if w else x.shape[-1] - 3, "ignore_index": 0}
        found = f(x.reshape(-1, x.shape[-1]), *w, targets.ravel(), **how)
        return (found if w else found[0]).reshape(targets.shape)

    return call


def polynomial(f):
    return lambda a, bcd, **how: f(a + a.mT, b=bcd[0], c=bcd[1], d=bcd[2], **how)


def sizes(*trailing):
    return lambda r, c: [(r, 8, c), *(tuple(n * c for n in multiples) for multiples in trailing)]


# The function, its definition, and its arrays by the number of rows r and the width c. Arrays whose
# first axis is r are split over devices, the others are whole. Targets are integers.
ROWS, DENSE = sizes(), sizes((1, 3), (3,))
relu_squared = functools.partial(feed_forward.reference, activation="relu_squared")
SMALL = {
    "softmax": (pk.softmax, row_softmax.reference, ROWS),
    "layer_norm": (
        *EXAMPLES["layer_norm"][0](8, jnp.float32)[:2], lambda r, c: [(r, 8, c)] * 2 + [(c,)] * 3
    ),
    "rms_norm": (pk.rms_norm, norm.rms_reference, sizes((1,))),
    "linear": (weighted(pk.linear), weighted(linear_definition), DENSE),
    "linear_gelu": (weighted(pk.linear_gelu), weighted(feed_forward.reference), DENSE),
    "linear_relu_squared": (weighted(pk.linear_relu_squared), weighted(relu_squared), DENSE),
    "mlp": (weighted(pk.mlp), weighted(mlp_reference), sizes((1, 3), (3,), (3, 1))),
    "swiglu": (weighted(pk.swiglu), weighted(gated_mlp.reference), sizes((1, 3), (1, 3), (3, 1))),
    "rotary_qkv": (
        small_rotary(functools.partial(pk.rotary_qkv, heads=2, key_heads=1, eps=0.1)),
        small_rotary(rotary_definition), ROWS,
    ),
    "flash_attention": (
        pk.flash_attention, attention.reference,
        lambda r, c: [(r, 8, 2, c), (r, 8, 1, c), (r, 8, 1, c)],
    ),
    "projected_attention": (
        weighted(functools.partial(pk.projected_attention, heads=2)),
        weighted(projected_definition), DENSE,
    ),
    "fused_classifier": (
        losses_of(pk.fused_classifier), losses_of(classifier.reference),
        lambda r, c: [(r, 8, c), (r, 8)],
    ),
    "linear_cross_entropy": (
        losses_of(pk.linear_cross_entropy), losses_of(lm_head.reference),
        lambda r, c: [(r, 8, c), (2 * c + 3, c), (r, 8)],
    ),
    "xxt": (pk.xxt, symmetric.xxt_reference, lambda r, c: [(r, c // 2, c)]),
    "xtx": (pk.xtx, symmetric.xtx_reference, lambda r, c: [(r, c // 2, c)]),
    "ba_plus_caa": (
        polynomial(pk.ba_plus_caa), polynomial(symmetric.ba_plus_caa_reference),
        lambda r, c: [(r, c, c), (3,)],
    ),
    "transpose_copy": (pk.transpose_copy, transpose.reference, ROWS),
    "transpose_add": (
        pk.transpose_add, lambda dst, src: transpose.reference(src, dst),
        lambda r, c: [(r, c, 8), (r, 8, c)],
    ),
}  # fmt: skip
INTEGERS = {"fused_classifier", "linear_cross_entropy"}
ON_CPU = {
    name: [b.name for b in OPERATIONS[name if name in OPERATIONS else "flash_attention"].back_ends]
    for name in SMALL
}
ON_CPU = {name: [b for b in names if b in (*PLAIN, "triton")] for name, names in ON_CPU.items()}
ON_CPU["projected_attention"].remove("triton")  # of separate calls, which have tests of their own
BACK_ENDS = [(name, back_end) for name, names in ON_CPU.items() for back_end in names]


def small(name, rows, dtype, width=16) -> Example:
    call, reference, sizes_of = SMALL[name]
    shapes = [jax.ShapeDtypeStruct(size, dtype) for size in sizes_of(rows, width)]
    if name in INTEGERS:
        shapes[-1] = jax.ShapeDtypeStruct(shapes[-1].shape, jnp.int32)
    if name == "ba_plus_caa":  # a coefficient of another dtype
        shapes[1] = jax.ShapeDtypeStruct((3,), jnp.float32)
    return Example(call, reference, tuple(shapes))


SMALL_MAKERS = {name: functools.partial(small, name) for name in SMALL}


def drawn(tree, seed=0, lead=()):
    """Return random arrays of these shapes; targets below 11."""
    rng = np.random.default_rng(seed)

    def draw(x):
        if not is_float(x):
            return rng.integers(0, 11, (*lead, *x.shape)).astype(x.dtype)
        return rng.standard_normal((*lead, *x.shape)).astype(np.float32).astype(x.dtype)

    return jax.tree.map(draw, tree)


# ------------------------------------------------------------- value, gradients and transformations


def cases():
    for name, examples in EXAMPLES.items():
        back_ends = [back_end.name for back_end in OPERATIONS[name].back_ends]
        for make in examples:
            dtypes = [dtype for dtype in DTYPES if make(3, dtype) is not None]
            for dtype, back_end in itertools.product(dtypes, back_ends):
                if back_end == "reference" or (back_end in PLAIN and dtype != dtypes[-1]):
                    continue  # the small calls have the other dtype, and "reference"
                marks = () if back_end in PLAIN else pytest.mark.gpu
                label = f"{name}-{make.__name__.strip('_')}-{back_end}-{jnp.dtype(dtype).name}"
                yield pytest.param(name, make, back_end, dtype, id=label, marks=marks)


def random_rows(make, dtype, *, multiple: int = 1) -> int:
    """Return a random odd number of rows, or an odd multiple of `multiple`: few rows on a CPU."""
    random = np.random.default_rng(zlib.crc32(f"{make.__module__} {make.__name__}".encode()))
    few, many = int(random.integers(2, 12)), int(random.integers(150, 350))
    rows = 2 * (many if _dispatch.platform() == "gpu" else few) + 1
    if multiple > 1:
        return multiple * (rows // multiple | 1)
    wide = max(size for x in make(rows, dtype).shapes for size in x.shape) > 2**15
    return rows // 8 | 1 if wide else rows  # a vocabulary


def gradients_of(f, differentiable):
    """Return a function of arrays and directions: results, and gradients of their product."""
    if differentiable:
        return with_gradients(f)
    return lambda args, directions: (f(*args), ())


@functools.lru_cache(maxsize=1)  # the back ends of an example follow each other
def two_calls(name, make, dtype, rows, back_ends):
    """Return two random pairs of arrays and directions, stacked, and the definition of the first
    pair, on a GPU of each."""
    example = make(rows, dtype)
    call = functools.partial(example.call, implementation="xla")
    shapes = example.shapes, jax.eval_shape(call, *example.shapes)
    stacked = jax.tree.map(jnp.asarray, drawn(shapes, rows, lead=(2,)))
    elements = [element(stacked, i) for i in range(2 if _dispatch.platform() == "gpu" else 1)]
    if name in OWN_DTYPE:
        run = jax.jit(gradients_of(example.reference, False))
        return stacked, [jax.device_get(run(*each)) for each in elements]
    differentiable = any(b not in NO_GRADIENT.get(name, ()) for b in back_ends)
    run = gradients_of(unchecked(example.reference), differentiable)
    exact = [in_fp64(run, *each) for each in elements]
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(exact)) or name in FP8
    return stacked, exact


def transformed(call, differentiable, stacked, *more):
    """Yield each transformation's name and results: one for each element that it computes.

    Args:
        more: pairs of the axes and arrays of other calls of `jax.vmap`.
    """
    run = gradients_of(call, differentiable)
    remat = gradients_of(jax.checkpoint(call), differentiable)
    platform = _dispatch.platform()
    devices = jax.devices(platform)[: 1 if platform == "gpu" else 2]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=auto, devices=devices)
    one = element(stacked, 0)

    @jax.jit
    def several(one, stacked, directions, others):
        scan = jax.lax.scan(lambda _, args: (None, run(*args)), None, stacked)[1]
        results = {"vmap": jax.vmap(run)(*stacked), "scan": scan}
        for (axes, _), arrays in zip(more, others, strict=True):
            results[f"vmap {axes}"] = jax.vmap(run, (axes, 0))(arrays, directions)
        return results, remat(*one)

    def on_device(args):
        return jax.tree.map(lambda x: x[None], run(*element(args, 0)))

    arrays = [arrays for _, arrays in more]
    results, found = jax.device_get(several(one, stacked, stacked[1], arrays))
    yield "remat", [found]
    spec = jax.P("x")
    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    local = jax.tree.map(lambda x: x[: len(devices)], stacked)
    results["shard_map"] = jax.device_get(jax.jit(sharded)(local))
    for label, found in results.items():
        yield label, [element(found, i) for i in range(len(devices) if label == "shard_map" else 2)]
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


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("name", "make", "back_end", "dtype"), [*cases()])
def test_examples(name, make, back_end, dtype):
    """On a CPU, value and gradients: plain JAX is the same in each size, but for its casts.

    A transformed call has at most twice the error of the jitted call. Or it has the bits of the
    call without jit, and at most twice the error of plain JAX.
    """
    for multiple in (1, 128):  # some kernels need whole tiles
        rows = random_rows(make, dtype, multiple=multiple)
        example = make(rows, dtype)
        call = functools.partial(example.call, implementation=back_end)
        if (why := why_refused(call, example.shapes)) is None:
            break
    else:
        pytest.skip(why)
    back_ends = tuple(b.name for b in OPERATIONS[name].back_ends)
    stacked, exact = two_calls(name, make, dtype, rows, back_ends)
    args = [element(stacked, i) for i in range(len(exact))]
    differentiable = back_end not in NO_GRADIENT.get(name, ())
    run = gradients_of(call, differentiable)
    if not differentiable:
        with pytest.raises(NotImplementedError, match="no derivative|differentiable once"):
            jax.eval_shape(gradients_of(call, True), *args[0])
        exact = [(out, ()) for out, _ in exact]

    plain = [jax.device_get(jax.jit(run)(*each)) for each in args]
    limits = LIMITS if back_end in PLAIN else KERNEL_LIMITS
    compare_with_limit(plain[0], exact[0], limits[jnp.dtype(dtype).name])
    xla = functools.partial(example.call, implementation="xla")
    # The examples of a packed projection, or of its input.
    in_bf16 = name == "flash_attention" and dtype == jnp.bfloat16 and example.shapes[0].ndim != 4

    def compare_with_definition(label, found, each, true):
        for size, same_dtype in ((rms, xla), (max_abs, attention_in_bf16 if in_bf16 else xla)):
            yardstick = run_reference(gradients_of(same_dtype, differentiable), *each)
            compare(label, found, yardstick, true, norms=(size,))

    if back_end != "xla" and name not in FP8:
        compare_with_definition("against the definition", plain[0], args[0], exact[0])
    if back_end in PLAIN:
        return
    if make is not EXAMPLES[name][0]:
        return  # another kernel, or mask, inside of the same transformations
    compare("without jit", call(*args[0][0]), plain[0][0], exact[0][0])
    for label, found in transformed(call, differentiable, stacked):
        for each, ours, theirs, true in zip(args, found, plain, exact, strict=False):
            try:
                compare(label, ours, theirs, true)
            except AssertionError:
                # Under jit, XLA fuses the casts and sums around the kernels, and rounds less often.
                jax.tree.map(np.testing.assert_array_equal, ours, jax.device_get(run(*each)))
                compare_with_definition(label, ours, each, true)
    donated = jax.jit(lambda *args: run(*args), donate_argnums=0)
    found = donated(*jax.tree.map(jnp.copy, args[0]))
    compare("donated", jax.device_get(found), plain[0], exact[0])


def attention_in_bf16(x, w=None, b=None):
    """Return attention of qkv, or of its projection, with bf16 weights as the kernels have them:
    "xla" keeps the weights in fp32."""
    qkv = x if w is None else (x @ (w * 768**-0.5) + b[None, None]).reshape(*x.shape[:2], 3, 12, 64)
    return textbook(*jnp.moveaxis(qkv, 2, 0), np.tri(qkv.shape[1], dtype=bool)[None])[0]


def labelled(*trees):
    """Return (place in the tree, leaf of each tree) for each leaf."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(trees[0])]
    return zip(paths, *map(jax.tree.leaves, trees), strict=True)


def compare(label, found, plain, exact, *, norms=(rms, max_abs)):
    """Fail unless the results have the dtypes of `plain`, and equal bits or errors below twice
    those of `plain`."""
    for place, ours, theirs, true in labelled(found, plain, exact):
        assert ours.dtype == theirs.dtype, f"{label} {place}"
        if np.array_equal(np.asarray(ours), np.asarray(theirs)):
            continue
        for size in norms:
            assert_within_twice(ours, theirs, true, norm=size, name=f"{label} {place}")


def compare_with_limit(found, exact, limit):
    for place, ours, true in labelled(found, exact):
        error = rms(np.asarray(ours, np.float64) - true) / max(rms(true), 1e-30)
        assert error <= limit, f"{place}: relative error {error:.3g}, allowed {limit:.3g}"


# ------------------------------------------------------------------- small calls, on every back end

MULTIPLIES = ("linear_gelu", "linear_relu_squared", "mlp", "flash_attention")


def small_call(name, back_end, rows=4):
    """Return an example, its call, and the allowed difference of equal computations."""
    # Triton's interpreter multiplies bf16 as integers, and these kernels round fp32 to TF32.
    half = back_end == "triton" and name in MULTIPLIES
    example = small(name, rows, jnp.float16 if half else jnp.float32)
    call = functools.partial(example.call, implementation=back_end)
    return example, call, 2.0**-10 if half else 1e-5


def assert_near(found, expected, tolerance, label=""):
    for place, ours, theirs in labelled(found, expected):
        assert ours.dtype == theirs.dtype, f"{label} {place}"
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        atol = tolerance * np.abs(theirs).max(initial=0)
        message = f"{label} {place}"
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=atol, err_msg=message)


@pytest.mark.parametrize("name, back_end", BACK_ENDS)
def test_transformations(name, back_end, interpreter):
    """Value and gradients against the definition; `jax.vmap` over all arrays, over the first array
    alone, along its second axis, over all others, and over directions; the other transformations.
    """
    example, call, tolerance = small_call(name, back_end, rows=2)
    dtype = example.shapes[0].dtype
    stacked, exact = two_calls(name, SMALL_MAKERS[name], dtype, 2, tuple(ON_CPU[name]))
    run = jax.jit(with_gradients(call))
    args, directions = stacked
    one, other = element(args, 0), element(args, 1)
    limit = LIMITS if back_end in PLAIN else KERNEL_LIMITS
    plain = [jax.device_get(run(*element(stacked, i))) for i in range(2)]
    compare_with_limit(plain[0], exact[0], limit[dtype.name])
    if back_end == "reference":
        with jax.enable_x64(True):
            found = jax.jit(lambda *args: with_gradients(call)(*args))(*element(stacked, 0))
        jax.tree.map(np.testing.assert_array_equal, found, plain[0])
        return
    others = len(args) - 1
    more = [
        ((0, *[None] * others), (args[0], *one[1:])),
        ((1, *[None] * others), (jnp.moveaxis(args[0], 0, 1), *one[1:])),
        ((None, *[0] * others), (one[0], *args[1:])),
        ((None, *[None] * others), one),
    ]
    mixed = [(other[0], *one[1:])] * 2 + [(one[0], *other[1:]), one]
    expected = {f"vmap {axes}": arrays for (axes, _), arrays in zip(more, mixed, strict=True)}
    for label, found in transformed(call, True, stacked, *more):
        theirs = plain
        if label in expected:
            theirs = [plain[0], jax.device_get(run(expected[label], element(directions, 1)))]
        for i, ours in enumerate(found):
            assert_near(ours, theirs[i], tolerance, label)
            if label == "x64" and back_end in PLAIN:
                jax.tree.map(np.testing.assert_array_equal, ours, theirs[i])


@pytest.mark.parametrize("name, back_end", [b for b in BACK_ENDS if b[1] != "reference"])
def test_gradients_inside_shard_map(name, back_end, interpreter):
    """With its default, check_vma=True, those of whole arrays are summed over devices, as JAX's own
    are. What a kernel writes varies over devices as what it reads does."""
    example, f, tolerance = small_call(name, back_end)
    args = jax.tree.map(jnp.asarray, drawn(example.shapes))
    weights = jax.tree.map(jnp.asarray, drawn(jax.eval_shape(f, *args), 9))
    rows, whole = jax.P("data"), jax.P()
    specs = tuple(rows if x.shape[:1] == (4,) else whole for x in args)
    run = lambda args, weights: with_gradients(f)(args, weights)[1]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices())
    floats = tuple(s for s, x in zip(specs, args, strict=True) if is_float(x))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, rows), out_specs=floats)
    if back_end == "triton" and name in ("transpose_add", "fused_classifier"):
        with pytest.raises(ValueError, match="overwrites an argument.*Pass check_vma=False"):
            jax.jit(sharded)(args, weights)
        return
    assert_near(jax.jit(sharded)(args, weights), jax.jit(run)(args, weights), 2 * tolerance)


# ------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("name", SMALL)
def test_an_empty_array_launches_nothing(name, monkeypatch):
    """In any back end, named or not: results and gradients are XLA's."""
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr("pallas_kernels._mosaic.num_sms", lambda: 132)
    example = small(name, 0, jnp.bfloat16, width=16 if name == "rotary_qkv" else 128)
    args = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), example.shapes)
    operation = "flash_attention" if name == "projected_attention" else name
    for back_end in ("auto", *(b.name for b in OPERATIONS[operation].back_ends)):
        if back_end == "cudnn":
            continue
        f = functools.partial(example.call, implementation=back_end)
        out = jax.eval_shape(f, *args)
        directions = jax.tree.map(lambda o: jnp.ones(o.shape, o.dtype), out)
        out, gradients = with_gradients(f)(args, directions)
        assert all(leaf.size == 0 for leaf in jax.tree.leaves(out))
        for gradient, x in zip(gradients, filter(is_float, args), strict=True):
            assert gradient.shape == x.shape and not jnp.asarray(gradient).any()


def public_call(name):
    """Return the public function and small arrays, in the order of its signature."""
    example = small(name, 4, jnp.float32)
    args = list(drawn(example.shapes))
    how = {}
    if name == "layer_norm":
        args = [args[0], *args[2:4]]
    elif name == "rotary_qkv":
        args += [np.cos(ANGLES), np.sin(ANGLES)]
        how = {"heads": 2, "key_heads": 1}
    elif name == "ba_plus_caa":
        args, how = args[:1], {"b": 1.0, "c": 1.0}
    elif name in INTEGERS:
        args = [x.reshape(-1, *x.shape[2:]) if x.shape[0] == 4 else x for x in args]
    elif name == "projected_attention":
        how = {"heads": 2}
    return getattr(pk, name), args, how


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float8_e4m3fn, jnp.int32], ids=str)
@pytest.mark.parametrize("name, back_end", [pair for pair in BACK_ENDS if pair[1] != "triton"])
def test_other_dtypes_are_refused(name, back_end, dtype):
    """In every back end: none computes in float64, and none says so with another dtype in its
    result."""
    f, args, how = public_call(name)
    message = f"{name}: expected .*float32, bfloat16 or float16.*{jnp.dtype(dtype)}"
    with jax.enable_x64(True):
        args = [jnp.asarray(a).astype(dtype) if is_float(a) else a for a in args]
        with pytest.raises(ValueError, match=message):
            unchecked(f)(*args, implementation=back_end, **how)


NUMERIC = [name for name in SMALL if "precision" in inspect.signature(getattr(pk, name)).parameters]


@pytest.mark.parametrize("name", [*NUMERIC, "flash_attention_qkv"])
def test_numerics_name_a_precision(name):
    """In the forward and the backward pass."""
    f, args, how = public_call(operation := name.removesuffix("_qkv"))
    args = [jnp.asarray(x) for x in args]
    if name == "flash_attention_qkv":
        f, args = pk.flash_attention_qkv, [jnp.stack(args[:1] * 3, 2)]

    def traced(**numerics):
        call = lambda x: f(x, *args[1:], implementation="xla", **how, **numerics).sum()
        return str(jax.make_jaxpr(jax.grad(call))(args[0])).replace("Precision.", "").lower()

    traces = []
    of_jax = jax.lax.Precision
    for numerics, precision in (("fp32", of_jax.HIGHEST), ("tf32", of_jax.HIGH), ("bf16", None)):
        traces.append(traced(numerics=numerics))
        assert traces[-1] == traced(precision=precision)
        if precision is not None:
            assert traces[-1] == traced(precision=precision.name.lower())
    assert len({*traces}) == 3 and traces[0].count("highest") >= 2 * traces[0].count("dot_general[")
    refused(f, *args, **how, numerics="tf32", precision="highest", match="numerics or precision")
    plain_only = operation in ("flash_attention", "xxt", "xtx", "ba_plus_caa")
    for wrong in ("fp16", *["fp8"] * plain_only):
        message = f"{operation}: expected numerics as one of .*'{wrong}'"
        refused(f, *args, **how, numerics=wrong, match=message)


@pytest.mark.parametrize("name", SMALL)
def test_back_ends_that_cannot_run_are_refused(name):
    """A name that no back end has, and each that needs a GPU. `auto` on a CPU is XLA."""
    f, args, how = public_call(name)
    args = [jnp.asarray(x) for x in args]
    names = [b.name for b in OPERATIONS[name].back_ends] if name in OPERATIONS else []
    if name != "projected_attention":
        listed = rf"\['auto', {', '.join(map(repr, names))}\]"
        message = f"{name}: unknown implementation 'fast'; choose one of {listed}"
        with pytest.raises(ValueError, match=message):
            f(*args, implementation="fast", **how)
    message = "implementation '{}' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"
    for other in (b for b in names if b not in PLAIN):
        with pytest.raises(ValueError, match=message.format(other)):
            f(*args, implementation=other, **how)
    auto = jax.jit(functools.partial(f, **how))(*args)
    in_xla = jax.jit(functools.partial(f, implementation="xla", **how))(*args)
    jax.tree.map(np.testing.assert_array_equal, auto, in_xla)


@pytest.mark.parametrize(
    "name, back_end",
    [pair for pair in BACK_ENDS if SMALL[pair[0]][2] is DENSE or pair[0] in ("mlp", "swiglu")],
)
def test_fp32_parameters_beside_bf16(name, back_end, interpreter):
    """The results are those of the rounded parameters; XLA rounds nothing on the way to the
    gradients, which are fp32."""
    f, args, how = public_call(name)
    x, *parameters = (jnp.asarray(a, jnp.bfloat16) for a in args)
    loss = lambda *args: f(*args, implementation=back_end, **how).astype(jnp.float32).sum()
    run = jax.value_and_grad(loss, tuple(range(len(args))))
    rounded, gradients = run(x, *parameters), run(x, *(p.astype(jnp.float32) for p in parameters))
    assert [g.dtype for g in gradients[1]] == [x.dtype, *[jnp.float32] * len(parameters)]
    for one, other in zip(*map(jax.tree.leaves, (gradients, rounded)), strict=True):
        np.testing.assert_array_equal(one.astype(other.dtype), other)


MOSAIC = [
    name
    for name, operation in OPERATIONS.items()
    if operation.examples and "mosaic" in [back_end.name for back_end in operation.back_ends]
]


@pytest.mark.parametrize("name", MOSAIC)
def test_mosaic_kernels_can_be_traced_with_x64(name):
    """Forward and backward: with x64, JAX's Python integers are int64."""
    with jax.enable_x64(True), h200():
        for make in OPERATIONS[name].examples:
            if (example := make(2048, jnp.bfloat16)) is None:
                continue
            call = functools.partial(example.call, implementation="mosaic")
            if name == "flash_attention" and why_refused(call, example.shapes):
                continue  # an option of Triton's
            loss = lambda *args, call=call: sum(
                leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(call(*args))
            )
            jax.jit(jax.grad(loss) if example.differentiable else call).trace(*example.shapes)


# -------------------------------------------------------------------------- compiled Triton kernels

SHARED_KB = {80: 163, 90: 227}
TWO_BYTES = {"classifier_kernel", "sum_partials", "sum_kernel"}
"""Kernels that load the logit of a target, or store one bf16 number for a column."""
MOST_NARROW = {
    **{"linear_forward": 16, "classifier_kernel": 3, "several_targets_example": 7},
    **{"norm_forward": 5, "norm_backward": 4, "cached_attention_kernel": 2},
    "sum_kernel": 9,  # the log-sum-exp of each part, twice, and the sink
    "capped_with_options_example": 9,
}
"""Loads and stores of less than 16 bytes in an example or kernel; in others at most one, such as
that of a row's sum. Two-byte ones would cost eight times the instructions. Not of rows that start
anywhere, and of tiles of products."""
MOST_REGISTERS = {"classifier_kernel": 32}
"""Of a bf16 example. With more, an SM holds one program instead of two: 98 % of the copy rate, or
72 %."""
MOST_REGISTERS |= {"activate_forward": 80, "activate_backward": 80}  # three programs of 256 threads
WIDTHS = {"layer_norm": (64, 1600), "rms_norm": (64,), "softmax": (16384, 50304)}


def compiled_cases():
    for name, operation in OPERATIONS.items():
        if name in ("flash_attention", "sample_token") or _dispatch.TRITON.name not in {
            back_end.name for back_end in operation.back_ends
        }:
            continue  # with tests of their own
        makes = [(make.__name__.strip("_"), make) for make in operation.examples]
        for width in WIDTHS.get(name, ()):
            makes.append((f"{width}", lambda n, d, w=width, f=name: small(f, n // 8, d, width=w)))
        for (label, make), dtype in itertools.product(makes, DTYPES):
            if make(8, dtype) is None:
                continue
            for capability in SHARED_KB if dtype == jnp.bfloat16 else [90]:
                id = f"{name}-{label}-{jnp.dtype(dtype).name}-{capability}"
                yield pytest.param(label, make, dtype, capability, id=id)


@pytest.mark.parametrize("label, make, dtype, capability", [*compiled_cases()])
def test_triton_kernels_compile(label, make, dtype, capability):
    """Without spills, in the shared memory of a GPU, with accesses of 16 bytes."""
    jax.clear_caches()  # a cached trace of another capability launches nothing
    example = make(4096 if label == "1600" else 65536 if not label.isdigit() else 512, dtype)
    call = functools.partial(example.call, implementation="triton")

    def run(*args):
        out = jax.eval_shape(call, *args)
        directions = jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out)
        return gradients_of(call, getattr(example, "differentiable", True))(args, directions)

    for kernel in triton_kernels(run, *example.shapes, capability=capability):
        name = kernel.name
        assert kernel.spill_bytes == 0, (name, kernel.registers, kernel.spill_bytes)
        assert kernel.shared_bytes <= SHARED_KB[capability] * 1024, name
        accesses = re.findall(r"(?:ld|st)\.global\S*", kernel.ptx)
        narrow = [access for access in accesses if "v4" not in access]
        if label != "long_example":
            most = MOST_NARROW.get(label, MOST_NARROW.get(name, 1))
            assert len(narrow) <= min(most, len(accesses) - 1), (name, narrow)
            assert name in TWO_BYTES or not any("b16" in access for access in narrow), name
        if name == "linear_forward":
            assert ("wgmma" if capability == 90 else "mma.sync") in kernel.ptx
        own = jnp.float32 if name.startswith("activate") else jnp.bfloat16
        if capability == 90 and "capped" not in label and dtype == own:
            assert kernel.registers <= MOST_REGISTERS.get(name, 255), name


# ----------------------------------------------------------------- forward mode, second derivatives

ONCE = [
    (name, back_end)
    for name, back_end in BACK_ENDS
    if back_end in ("xla", "fused") and not name.startswith(("flash", "rotary", "transpose"))
]


def scalar_of(name, back_end):
    """Return a function with curvature of the floating-point arrays of a small call, and those
    arrays."""
    example, f, _ = small_call(name, back_end)
    args = jax.tree.map(jnp.asarray, drawn(example.shapes))
    floats = [x for x in args if is_float(x)]

    def scalar(*floats):
        out = f(*floats, *args[len(floats) :])
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(out))

    return scalar, [x / 2 for x in floats]


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_has_forward_mode_and_second_derivatives(name):
    """Forward over reverse against differences of gradients, which the tests above check."""
    scalar, floats = scalar_of(name, "reference")
    direction = [jnp.asarray(x) for x in drawn(floats, 21)]
    gradient = jax.grad(scalar, tuple(range(len(floats))))
    along = lambda *a: sum(map(jnp.vdot, gradient(*a), direction))

    @jax.jit
    def derivatives(*a):
        slope = jax.jvp(scalar, a, tuple(direction))[1]
        over_reverse = jax.jvp(gradient, a, tuple(direction))[1]
        return slope, along(*a), over_reverse, jax.grad(along, tuple(range(len(floats))))(*a)

    compiled = jax.jit(gradient)
    moved = lambda step: compiled(*(a + step * d for a, d in zip(floats, direction, strict=True)))
    pairs = zip(moved(1e-3), moved(-1e-3), strict=True)
    differences = [(after - before) / 2e-3 for after, before in pairs]
    slope, expected, over_reverse, of_reverse = derivatives(*floats)
    np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-3)
    for forward, reverse, difference in zip(over_reverse, of_reverse, differences, strict=True):
        size = float(jnp.abs(difference).max())
        np.testing.assert_allclose(forward, reverse, atol=1e-4 * size, rtol=1e-3)
        np.testing.assert_allclose(forward, difference, atol=2e-2 * size)


@pytest.mark.parametrize("name, back_end", ONCE)
def test_forward_mode_of_the_others_says_what_to_do(name, back_end):
    scalar, floats = scalar_of(name, back_end)
    with pytest.raises(TypeError, match=f"{name}: .*forward-mode .*implementation='reference'"):
        jax.jvp(scalar, floats, floats)


@pytest.mark.parametrize("name", SMALL)
def test_xla_has_second_derivatives(name):
    """`jax.jvp` and `jax.grad` of `jax.grad`, also in lax.scan and jax.checkpoint, against those of
    the definition, which the tests above check."""

    def second(back_end):
        scalar, floats = scalar_of(name, back_end)
        direction = tuple(jnp.asarray(x) for x in drawn(floats, 21))
        every = tuple(range(len(floats)))

        def twice(*a):
            body = lambda total, _: (total + jax.checkpoint(scalar)(*a), None)
            return jax.lax.scan(body, 0.0, length=2)[0]

        def along(*a):
            return sum(map(jnp.vdot, jax.grad(scalar, every)(*a), direction))

        of_gradient = lambda f: jax.jvp(jax.grad(f, every), tuple(floats), direction)
        return of_gradient(scalar), of_gradient(twice), jax.grad(along, every)(*floats)

    found, expected = (jax.jit(second, static_argnums=0)(name) for name in ("xla", "reference"))
    assert_near(found, expected, 1e-4)


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "make", "back_end", "dtype"),
    [
        pytest.param(name, make, b.name, dtype, id=f"{name}-{make.__name__}-{b.name}-{d}")
        for name, operation in OPERATIONS.items()
        for make in operation.examples
        for b in operation.back_ends
        if b.name in ("mosaic", "triton")
        and name != "flash_attention"  # with deterministic=True: test_attention.py
        for d, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16))
        if make(4096, dtype) is not None
        # Other kernels have the same code in fp32.
        and (dtype == jnp.bfloat16 or name in MULTIPLIES or make(4096, jnp.bfloat16) is None)
    ],
)
def test_runs_are_equal(name, make, back_end, dtype):
    """At sizes of training: what is left of a race shows as a difference between runs."""
    example = make(4096, dtype)
    call = functools.partial(example.call, implementation=back_end)
    if why := why_refused(call, example.shapes):
        pytest.skip(why)
    args = jax.tree.map(jnp.asarray, drawn(example.shapes))
    differentiable = back_end not in NO_GRADIENT.get(name, ())
    directions = jax.tree.map(jnp.asarray, drawn(jax.eval_shape(call, *args), 1))
    found = runs_are_equal(gradients_of(call, differentiable), args, directions)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(found))
