"""pallas_kernels.linear_gelu, linear_relu_squared and mlp against the equations in fp64, by the 2×
rule: in XLA, in Triton's interpreter and in JAX's for Mosaic GPU, compiled, and on a GPU."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import OPTIMIZED, h200, lower_for_h200, on_gpu
from rule_tools import check, refused, runs_are_equal

from pallas_kernels import _dispatch
from pallas_kernels.feed_forward import (
    ACTIVATIONS,
    linear_gelu,
    linear_relu_squared,
    mlp,
    reference,
)
from pallas_kernels.gemm import Plain

FUNCTIONS = {"gelu": linear_gelu, "relu_squared": linear_relu_squared}
HIGH, HIGHEST = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST
FP32, BF16, FP16 = jnp.float32, jnp.bfloat16, jnp.float16


def inputs(lead, i, o, dtype, bias_dtype=None, seed=0):
    """x, w, b: pre-activations have a standard deviation near 1.5, so both tails and the bend of
    GELU are visited."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((*lead, i)), dtype)
    w = jnp.asarray(rng.standard_normal((i, o)) * 1.4 / max(i, 1) ** 0.5, dtype)
    b = jnp.asarray(rng.standard_normal(o) * 0.5, bias_dtype or dtype)
    return x, w, b


def mlp_inputs(n, i, o, c, dtype=FP32):
    w2 = np.random.default_rng(2).standard_normal((o, c)) / o**0.5
    return *inputs((n,), i, o, dtype), jnp.asarray(w2, dtype)


def plain(x, w, b, *, activation="gelu", precision=HIGHEST):
    """The textbook in the inputs' own dtype."""
    u = jnp.matmul(x, w, precision=precision)
    u = u + jnp.broadcast_to(b.astype(x.dtype), u.shape)
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


def check_linear(
    back_end, lead, i, o, dtype, activation="gelu", precision=HIGHEST, bias_dtype=None, **how
):
    """Output and the three gradients."""
    options = {"precision": precision} if back_end == "xla" or dtype == FP32 else {}
    f = functools.partial(FUNCTIONS[activation], implementation=back_end, **options)
    textbook = functools.partial(plain, activation=activation, precision=precision)
    definition = functools.partial(reference, activation=activation)
    check(f, textbook, definition, inputs(lead, i, o, dtype, bias_dtype), **how)


def check_mlp(back_end, n, i, o, c, dtype, precision=HIGHEST, **how):
    """Output and the four gradients."""
    options = {"precision": precision} if dtype == FP32 else {}

    def textbook(x, w, b, w2):
        return jnp.matmul(plain(x, w, b, precision=precision), w2, precision=precision)

    def definition(x, w, b, w2):
        return jnp.matmul(reference(x, w, b), w2.astype(jnp.float32), precision=HIGHEST)

    f = functools.partial(mlp, implementation=back_end, **options)
    check(f, textbook, definition, mlp_inputs(n, i, o, c, dtype), **how)


def loss(*args, f=linear_gelu, **how):
    return f(*args, **how).astype(jnp.float32).sum()


def shapes(dtype, *sizes):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def exact_passes(product, b, dy, activation):
    """y and du in fp64, from the equations."""
    product, b, dy = (np.asarray(a, np.float64) for a in (product, b, dy))
    u = product + b
    if activation == "gelu":
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (u + 0.044715 * u**3))
        y = 0.5 * u * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * u * (1 - t**2) * c * (1 + 3 * 0.044715 * u**2)
    else:
        y, slope = np.maximum(u, 0) ** 2, 2 * np.maximum(u, 0)
    return y, dy * slope


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_reference_is_the_definition(activation):
    x, w, b = inputs((6,), 5, 4, FP32)
    xw = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    y, _ = exact_passes(xw, b, np.ones((6, 4)), activation)
    np.testing.assert_allclose(reference(x, w, b, activation=activation), y, rtol=0, atol=3e-6)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_derivative_in_the_tails(activation):
    """Out to where tanh is 1, and u³ is large. XLA's tanh of a scalar is 1 − 3·2⁻²⁴ there if LLVM
    does not optimize (jax 0.11.2)."""
    u = jnp.float32([-100, -12, -6, -1, 0, 1, 6, 12, 100])
    found = jax.jit(ACTIVATIONS[activation], compiler_options=OPTIMIZED)(u)
    true = exact_passes(u, 0, 1, activation)
    np.testing.assert_allclose(found, true, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------- output and gradients


@pytest.fixture
def small_tiles(request, monkeypatch):
    """On a CPU, tiles that it can go through."""
    from pallas_kernels.gemm import mosaic

    if "gpu" in request.keywords:
        return
    small = mosaic.Tiles(rows=64, columns=64, stages=2, slots=1, cluster=1)
    monkeypatch.setattr(mosaic, "TILES_16", (dataclasses.replace(small, cluster=2), small))


RELU = {"activation": "relu_squared"}
CASES = [
    *(
        ("xla", *shape, BF16, how)
        for how in ({}, RELU)
        for shape in (
            ((2, 8), 16, 32),  # aligned
            ((1,), 1, 1),  # one number
            ((3, 5), 7, 9),  # all odd
            ((), 5, 3),  # no leading axis
        )
    ),
    *(("xla", shape, 7, 9, FP32, how) for how in ({}, RELU) for shape in ((15,), (1,))),
    ("xla", (3, 5), 7, 9, FP16, {}),
    ("xla", (3, 5), 7, 9, BF16, {"bias_dtype": FP32}),
    # Triton's interpreter multiplies the bits of bf16 as integers in `tl.dot`: fp16 here.
    ("triton", (64,), 64, 64, FP16, {}),  # one tile
    ("triton", (3, 43), 40, 140, FP16, {}),  # ragged in every axis, several tiles
    ("triton", (65,), 33, 66, FP16, RELU),  # one past a tile
    ("triton", (1,), 1, 1, FP16, {}),
    # pairs of blocks that share w; each warpgroup has several tiles
    ("mosaic", (256,), 128, 192, BF16, {}),
    # single blocks, one step a tile, one warpgroup has more tiles than the other
    ("mosaic", (384,), 64, 64, FP16, RELU),
    *on_gpu(
        ("mosaic", (4096,), 768, 3072, BF16, {}),  # GPT-2 124M
        # GPT-2 XL: the widest, and fewer tiles than SMs below
        ("mosaic", (768,), 1600, 6400, BF16, {}),
        ("mosaic", (256,), 256, 384, FP16, RELU),
        ("triton", (1111,), 333, 1001, BF16, {}),  # ragged in every axis
        ("triton", (1,), 1, 1, FP16, RELU),
        # A square output: XLA once added cuBLASLt's bias along the wrong axis.
        ("xla", (512,), 256, 512, BF16, {}),
        # In TF32 whole 16 bytes: with others cuBLAS need not take the tensor cores on both sides.
        *(("triton", (1108,), 332, 1004, FP32, how | {"precision": HIGH}) for how in ({}, RELU)),
        *(("triton", (1111,), 333, 1001, FP32, how) for how in ({}, RELU)),
        ("triton", (4096,), 768, 3072, FP32, {"precision": HIGH}),
        ("triton", (1,), 3, 5, FP32, {}),
    ),
]


@pytest.mark.parametrize("back_end, lead, i, o, dtype, how", CASES, ids=str)
def test_output_and_gradients(back_end, lead, i, o, dtype, how, interpreter, small_tiles, request):
    """On a GPU of mlp too, in the back ends that it has there."""
    check_linear(back_end, lead, i, o, dtype, **how)
    of_mlp = "activation" not in how and (back_end == "mosaic" or dtype == FP32)
    if "gpu" in request.keywords and of_mlp:
        check_mlp(back_end, *lead, i, o, i, dtype, **how)


# N, O against the tiles of the two passes, 8×512 and 64×64; the wide one has two columns of both.
@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
@pytest.mark.parametrize(
    "back_end, n, i, o",
    [
        ("xla", 257, 33, 65),
        *(("triton", *s) for s in ((64, 8, 64), (129, 5, 70), (3, 7, 530))),
        ("triton", 64 * 17 + 5, 2, 67),  # more tiles down than one group holds
    ],
)
def test_fp32(triton_on_cpu, back_end, n, i, o, precision):
    # Triton's interpreter adds up a column number by number, a GPU and XLA in a tree: the worst of
    # its sums is worse than they would be.
    norms = {"norms": (rms,)} if back_end == "triton" else {}
    for activation in FUNCTIONS:
        check_linear(back_end, (n,), i, o, FP32, activation, precision, **norms)
    if n < 1000:
        check_mlp(back_end, n, i, o, 11, FP32, precision, **norms)


@pytest.mark.parametrize("back_end", ["xla", "triton"])
@pytest.mark.parametrize("precision", [HIGH, HIGHEST])
def test_relu_squared_without_a_bias(back_end, precision, interpreter):
    x, w, b = inputs((67,), 4, 70, FP32)
    f = functools.partial(linear_relu_squared, precision=precision, implementation=back_end)
    found, pull = jax.vjp(f, x, w)
    with_zeros, pull_zeros = jax.vjp(f, x, w, jnp.zeros_like(b))
    np.testing.assert_array_equal(found, with_zeros)
    for one, other in zip(pull(found), pull_zeros(found), strict=False):
        np.testing.assert_array_equal(one, other)
    assert len(pull(found)) == 2


def test_the_result_is_rounded_once():
    """A bias too small to move a bf16 sum still moves gelu of it where it is added in fp32."""
    x, w = jnp.full((1, 1), 0.5, jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    b = jnp.asarray([0.00195, 0], jnp.float32)
    y = linear_gelu(x, w, b, implementation="xla")[0]
    np.testing.assert_array_equal(y, reference(x, w, b)[0].astype(jnp.bfloat16))
    assert y[0] != y[1]


def selected(dtype, rows, inputs, outputs, implementation="auto"):
    facts = {"dtype": dtype, "rows": rows, "inputs": inputs, "outputs": outputs}
    return _dispatch.select("linear_gelu", implementation, **facts)


def test_auto_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    assert selected("bfloat16", 4096, 768, 3072) == "mosaic"
    assert selected("bfloat16", 100, 768, 3072) == "triton"
    assert selected("float32", 4096, 768, 3072) == selected("float32", 1, 1, 1) == "triton"
    assert selected("float64", 4096, 768, 3072) == "xla"
    monkeypatch.setattr(_dispatch, "capability", lambda: (8, 0))
    assert selected("bfloat16", 4096, 768, 3072) == "triton"
    with pytest.raises(ValueError, match="'mosaic' needs a Hopper GPU"):
        selected("bfloat16", 4096, 768, 3072, "mosaic")


def test_errors(monkeypatch):
    x, w, b = inputs((4,), 3, 2, BF16)
    dtypes = "w and b in x's dtype or float32, got float16, bfloat16, bfloat16"
    refused(linear_gelu, x.astype(FP16), w, b, match=dtypes)
    refused(linear_relu_squared, x, w, b.astype(FP16), match="got bfloat16, bfloat16, float16")
    message = r"linear_gelu: expected x \(..., I\), w \(I, O\) and b \(O,\), got"
    for bad in ((x, w.T, b), (x, w, b[:1]), (x, w[0], b), (x[0, 0], w, b)):
        refused(linear_gelu, *bad, match=message)
    w2 = jnp.zeros((2, 3), BF16)
    for bad in (w2.T, w2[0], w2.astype(FP16), None):
        message = r"mlp: expected w2 \(O, C\) with O=2, of x's dtype or float32, got"
        refused(mlp, x, w, b, bad, match=message)
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    for dtype, n, name, message in [
        ("float32", 4096, "mosaic", "supports bfloat16 or float16, not float32"),
        ("bfloat16", 4000, "mosaic", "has no tiles for 4000 rows, 3072 columns and 768 contracted"),
        ("float64", 4096, "triton", "supports float32, bfloat16 or float16, not float64"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}' {message}"):
            selected(dtype, n, 768, 3072, name)


# ------------------------------------------------------------------------------------------- Triton


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize(
    "back_end, n, o, bias",
    [
        # More tiles down than one group holds.
        *(("triton", 64 * 17 + 5, 67, bias) for bias in (True, False)),
        *on_gpu(*(("triton", *x) for x in ((4096, 3072, 1), (1111, 1001, 0), (1, 1, 1)))),
    ],
)
def test_the_passes_are_their_definition(back_end, n, o, bias, activation, interpreter):
    """Without products beside them: they are true fp32, whatever those are. Transposes are exact,
    and nothing is made that was not asked for."""
    from pallas_kernels.feed_forward import triton

    rng = np.random.default_rng(0)
    dy, product = (jnp.asarray(2 * rng.standard_normal((n, o)), FP32) for _ in range(2))
    b = jnp.asarray(rng.standard_normal(o), FP32) if bias else jnp.zeros(o)
    given = b if bias else None

    def passes(product, dy, transposed):
        stored = Plain(HIGH if transposed else HIGHEST).hidden_format(activation, FP32)
        how = {"activation": activation, "stored": stored}
        y, *_ = triton.activated_pass(product, given, **how)
        return y, *triton.gradient(dy, product, given, None, again=transposed, **how)

    y, du, du_transposed, db, y_transposed = runs_are_equal(
        lambda *args: passes(*args, True), product, dy, times=3
    )
    np.testing.assert_array_equal(du_transposed, du.T)
    np.testing.assert_array_equal(y_transposed, y.T)
    _, bare, none, same_db, no_y = jax.jit(lambda *args: passes(*args, False))(product, dy)
    assert none is no_y is None and (db is None) == (same_db is None) == (not bias)
    np.testing.assert_array_equal(bare, du)

    plain = jax.nn.gelu if activation == "gelu" else lambda u: jnp.square(jax.nn.relu(u))
    their_y, pull = jax.vjp(lambda u: plain(u), product + b[None])
    true_y, true_du = exact_passes(product, b, dy, activation)
    for name, *arrays in (("y", y, their_y, true_y), ("du", du, *pull(dy), true_du)):
        for norm in (rms, max_abs):
            assert_within_twice(*arrays, norm=norm, name=name)
    if bias:
        # Of what was written: the rounding of an fp32 sum of so many numbers.
        written = np.asarray(du, np.float64)
        assert (np.abs(db - written.sum(0)) <= 2e-6 * np.abs(written).sum(0)).all()


@pytest.mark.parametrize("u", [-1e12, -100, -12, 0, 12, 100, 1e12])
def test_triton_in_the_tails(triton_on_cpu, u):
    f, w = functools.partial(linear_gelu, implementation="triton"), jnp.ones((1, 1), FP32)
    y, pull = jax.vjp(f, jnp.full((1, 1), u, FP32), w, w[0] * 0)
    np.testing.assert_allclose(y, [[max(u, 0)]], rtol=1e-6)
    np.testing.assert_allclose(pull(w)[2], [np.heaviside(u, 0.5)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("f", [linear_gelu, linear_relu_squared])
def test_nan_propagates(triton_on_cpu, f, dtype):
    """To the row of y that reads the NaN, and to its derivative."""
    x, w = jnp.asarray([[np.nan, 1], [1, 1]], dtype), jnp.ones((2, 2), dtype)
    y, pull = jax.vjp(lambda x: f(x, w, w[0] * 0, implementation="triton"), x)
    np.testing.assert_array_equal(jnp.isnan(y), [[True] * 2, [False] * 2])
    np.testing.assert_array_equal(jnp.isnan(pull(w)[0]), jnp.isnan(y))


def saved(f, *args):
    """Shapes of what the backward pass keeps of the forward pass."""
    kept = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(kept) if leaf.size)


def test_in_tf32_the_hidden_layer_is_not_saved(triton_on_cpu):
    """But its product before bias and activation, from which it is made again."""
    args = mlp_inputs(16, 4, 20, 6)
    weights = [(4, 20), (20,), (20, 6)]
    kept = lambda precision: saved(
        functools.partial(mlp, implementation="triton", precision=precision), *args
    )
    assert kept(HIGH) == sorted([(16, 4), *weights, (16, 20)])
    assert kept(HIGHEST) == sorted([(16, 4), *weights, (16, 20), (16, 20)])


@pytest.mark.parametrize("precision, transposes", [(HIGH, 4), (HIGHEST, 0)])
def test_what_moves_the_hidden_layer_on_an_h200(precision, transposes):
    """Two products and two passes make all that is as large: no sum, no transpose, no elementwise
    pass of XLA's beside them."""
    args = shapes(FP32, (4096, 768), (768, 3072), (3072,), (3072, 768))
    with h200():
        assert selected("float32", 4096, 768, 3072) == "triton"
    run = jax.value_and_grad(functools.partial(loss, f=mlp, precision=precision), (0, 1, 2, 3))
    text = lower_for_h200(run, *args)
    calls = collections.Counter(re.findall(r"custom_call @(\w+)", text))
    # Of w and w2 forward; x and dy backward.
    assert calls == {"activate_forward": 1, "activate_backward": 1} | (
        {"transpose": transposes} if transposes else {}
    )
    lines = text.splitlines()
    large = [x for x in lines if re.search(r"-> .*tensor<(4096x3072|3072x4096)xf32>", x)]
    names = (x.split("stablehlo.")[-1] for x in large)
    made = collections.Counter(re.match(r"(custom_call @\w+|\w+)", name)[1] for name in names)
    passes = {"custom_call @activate_forward": 1, "custom_call @activate_backward": 1}
    assert made == {"dot_general": 2} | passes, large
    assert not [x for x in lines if "stablehlo.reduce" in x and "tensor<4096x3072xf32>" in x]


# ------------------------------------------------------------------------------------------- Mosaic


@pytest.mark.parametrize(
    "n, i, o, c, rows, columns, slots, dtype",
    [
        # pairs of blocks that share w2; each warpgroup has several tiles
        (256, 128, 192, 64, 64, 64, 1, BF16),
        # single blocks, two parts a tile through one slot
        (192, 64, 256, 128, 64, 128, 1, BF16),
        (128, 64, 384, 64, 64, 192, 1, FP16),  # three parts
        (128, 64, 1280, 64, 64, 192, 1, BF16),  # the last tile is cut
        (256, 64, 1344, 64, 128, 128, 2, BF16),  # and its parts go through two slots
        # the same warpgroup goes on with another tile
        (512, 64, 448, 64, 128, 192, 2, BF16),
    ],
)
def test_mosaic_mlp_on_a_cpu(
    mosaic_on_cpu, small_tiles, monkeypatch, n, i, o, c, rows, columns, slots, dtype
):
    from pallas_kernels.gemm import mosaic

    sizes = {"rows": rows, "columns": columns, "slots": slots}
    tiles = tuple(dataclasses.replace(tiles, **sizes) for tiles in mosaic.TILES_16)
    monkeypatch.setattr(mosaic, "TILES_16", tiles)
    monkeypatch.setattr(mosaic, "MOST_WASTED", 0.5)
    check_mlp("mosaic", n, i, o, c, dtype)


def test_tiles_for_a_width():
    """192 columns, up to 5 % of them past the end; else 128, which must divide O."""
    from pallas_kernels.gemm import mosaic

    for n, o, columns in (
        (256, 3072, 192), (256, 4096, 192), (256, 6400, 192),
        (128, 4096, 128), (256, 256, 128),
    ):  # fmt: skip
        assert mosaic.tiles_for(n, o, 64, 2).columns == columns
    with pytest.raises(ValueError, match="mosaic has no tiles for 256 rows, 320 col.*each device"):
        mosaic.tiles_for(256, 320, 64, 2)
    # Of 8 bits. With a last step out of bounds, K = 1552 and 1600 failed on an H200.
    assert [mosaic.tiles_for(256, n, k, 1).columns for n, k in ((3072, 768), (6400, 3200))] == [
        192
    ] * 2
    assert "columns a multiple of 128" in mosaic.why_not(256, 200, 128, 1)
    assert all(mosaic.why_not(*sizes, 1) for sizes in ((128, 192, 128), (256, 192, 1552)))
    assert mosaic.tiles_for(256, 6400, 1600, 1).depth(1) == 64
    with pytest.raises(ValueError, match="2 slots do not divide the 1 parts of a column"):
        mosaic.Tiles(rows=64, columns=192)


def test_mosaic_mlp_without_gradients_saves_nothing(mosaic_on_cpu, small_tiles, monkeypatch):
    from pallas_kernels.feed_forward import mosaic

    saved, forward = [], mosaic.activated
    watched = lambda *a, save, **how: saved.append(save) or forward(*a, save=save, **how)
    monkeypatch.setattr(mosaic, "activated", watched)
    f = functools.partial(loss, f=mlp, implementation="mosaic")
    for run in (f, jax.grad(f)):
        jax.eval_shape(run, *mlp_inputs(64, 64, 64, 64, BF16))
    assert saved[0] is False and saved[-1] is True


@pytest.mark.parametrize(
    "width, out, numerics, kernels",
    [
        *((width, width, None, 2) for width in (768, 1024, 1280, 1600)),
        # No tiles divide 96: the gradient of the second product is XLA's.
        (768, 96, None, 1),
        *((width, width, "fp8", 2) for width in (768, 1280)),
        (1600, 1600, "fp8", 2),  # no multiple of 128: steps of 64 numbers
    ],
)
def test_widths_lower_for_an_h200(width, out, numerics, kernels):
    arrays = shapes(BF16, (4096, width), (width, 4 * width), (4 * width,), (4 * width, out))
    how = {"implementation": "mosaic", "numerics": numerics}
    f = jax.grad(functools.partial(loss, f=mlp, **how), (0, 1, 2, 3))
    assert lower_for_h200(f, *arrays).count("custom_call @mosaic_gpu") == kernels
    if numerics is None:
        f = jax.grad(functools.partial(loss, implementation="mosaic"), (0, 1, 2))
        assert lower_for_h200(f, *arrays[:3]).count("custom_call @mosaic_gpu") == 1


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n, i, o, bias",
    [(16384, 768, 3072, b) for b in (True, False, None)] + [(8192, 1280, 5120, None)],
)
def test_mosaic_over_many_tiles_and_again(n, i, o, bias):
    """Every block has a dozen tiles or more: an operand overwritten too early shows in one of them,
    and what is left of a race as a difference between runs. Of mlp, if bias is None."""
    x, w, b, w2 = mlp_inputs(n, i, o, i, BF16)
    args = (x, w, b, w2) if bias is None else (x, w, b) if bias else (x, w)

    def gradients(implementation):
        f = mlp if bias is None else linear_relu_squared
        y, pull = jax.vjp(functools.partial(f, implementation=implementation), *args)
        return y, *pull(y)

    f = jax.jit(gradients, static_argnums=0)
    found = f("mosaic")
    for ours, theirs in zip(found, f("xla"), strict=True):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.abs(ours - theirs).max() <= 2**-7 * jnp.abs(theirs).max()
        assert jnp.sqrt(jnp.mean((ours - theirs) ** 2)) <= 2**-7 * jnp.sqrt(jnp.mean(theirs**2))
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, f("mosaic"), found)
