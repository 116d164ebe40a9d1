"""pallas_kernels.flash_attention in plain JAX and by cuDNN, and what all back ends share."""

import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_tools import check, inputs, results, seen
from comparison_tools import rms
from kernel_tools import h200
from reference.attention import exact_attention
from rule_tools import refused, runs_are_equal

from pallas_kernels import (
    _dispatch,
    attention,
    cached_attention,
    flash_attention,
    flash_attention_qkv,
    ring_attention,
)
from pallas_kernels.attention import reference

RMS = {"norms": (rms,)}
SEGMENTS = {"segment_ids": np.array([[0, 0, 0, 1, 1, 1, 1], [5, 3, 5, 5, 3, 3, 9]], np.int32)}
MASKS = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 5},
    {"window": 7},  # the whole sequence
    {"scale": 0.7},
    SEGMENTS,
    SEGMENTS | {"causal": False},
    SEGMENTS | {"window": 2},
]


@pytest.mark.parametrize("key_heads", [1, 3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_reference_is_the_definition(mask, key_heads):
    """O and L in fp64, from the equations, a row at a time."""
    (q, k, v), _ = inputs((2, 7, 3, key_heads, 5), jnp.bfloat16)
    found = reference(q, k, v, **mask, return_lse=True)
    np.testing.assert_array_equal(reference(q, k, v, **mask), found[0])
    how = {name: x for name, x in mask.items() if name != "scale"}
    exact = exact_attention(q, k, v, seen((2, 7, 7), **how), scale=mask.get("scale"))
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, true, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "implementation, dtype",
    [
        *(("xla", dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)),
        ("triton", jnp.float16),
    ],
)
def test_huge_scores_stay_finite(implementation, dtype, triton_on_cpu):
    (q, k, v), directions = inputs((1, 9, 1, 1, 8), dtype)
    f = functools.partial(flash_attention, return_lse=True, implementation=implementation)
    size = jnp.asarray(100, dtype)
    found = jax.jit(functools.partial(results, f))((q * size, k * size, v), directions)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_no_array_grows_with_the_square_of_time(implementation, monkeypatch):
    """In the program of O and its gradient, whatever the kernels are."""
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    f = functools.partial(flash_attention_qkv, implementation=implementation)
    gradient = jax.grad(lambda qkv: f(qkv).astype(jnp.float32).sum())

    def largest(time):
        with h200():
            text = str(jax.make_jaxpr(gradient)(jnp.zeros((1, time, 3, 2, 64), jnp.bfloat16)))
        shapes = re.findall(r"[a-z]+\d+\[(\d+(?:,\d+)*)\]", text)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest(16384) == 8 * largest(2048) < 16384 * 16384


def test_errors():
    (q, k, v), _ = inputs((1, 4, 2, 2, 8), jnp.bfloat16)
    window = "needs causal=True and an integer size of at least 1, got causal={} window={}"
    ids = r"expected segment_ids of shape \(1, 4\) in integers"
    packed = r"expected \(batch, time, 3, heads, head_dim\), got \(1, 4, 2, 2, 8\)"
    for args, how, message in [
        ((q, k, v), {"causal": False, "window": 2}, window.format(False, 2)),
        ((q, k, v), {"window": 0}, window.format(True, 0)),
        ((q, k, v), {"window": 2.5}, window.format(True, 2.5)),
        ((q, k.astype(jnp.float32), v), {}, "one dtype for q, k, v, got bfloat16, float32, bfl"),
        ((q, k[:, :3], v), {}, "expected q of shape"),
        ((q, k, v[:, :, :1]), {}, "expected q of shape"),
        ((q, k[:, :0], v[:, :0]), {}, "expected q of shape"),
        (
            (jnp.zeros((1, 2, 300, 8)),) * 3,
            {},
            r"300 heads of 2 tokens. Swap axes 1 and 2 .*swapaxes",
        ),
        ((q[0], k[0], v[0]), {}, "expected q of shape"),
        ((q, k[:, :, :0], v[:, :, :0]), {}, "expected q of shape"),
        ((q[..., :0], k[..., :0], v[..., :0]), {}, "expected q of shape"),
        ((q[:, :, [0, 1, 1]], k, v), {}, "heads a multiple of key heads"),
        ((q, k, v), {"segment_ids": jnp.zeros((1, 3), jnp.int32)}, ids),
        ((q, k, v), {"segment_ids": jnp.zeros((1, 4))}, ids),
        ((q, k, v), {"softcap": 0.0}, "a positive softcap, got 0.0"),
        ((q, k, v), {"sinks_H": jnp.zeros(3)}, r"sinks_H of shape \(2,\), got \(3,\)"),
        ((q, k, v), {"window": (1, -1)}, "a window of two integers of at least 0 or None"),
        ((q, k, v), {"bias": jnp.zeros((1, 2, 4, 5))}, r"a bias of shape \(1, 2, 4, 4\)"),
        ((q, k, v), {"bias": jnp.zeros(2, jnp.float16)}, "a bias in bfloat16 or float32"),
        ((q[:, 1:], k, v), {"segment_ids": jnp.zeros((1, 3), jnp.int32)}, "a pair of segment_ids"),
        ((q, k, v), {"key_range": (jnp.zeros((1, 4)),) * 2}, r"key_range of shape \(1, 4\)"),
        ((q, k, v), {"numerics": "fp8"}, "flash_attention: expected numerics as one of .*'fp8'"),
        ((q, k, v), {"numerics": "tf32", "precision": "highest"}, "numerics or precision, got"),
    ]:
        refused(flash_attention, *args, **how, match=message)
    refused(flash_attention_qkv, jnp.zeros((1, 4, 2, 2, 8)), match=packed)


FUNCTIONS = (flash_attention, flash_attention_qkv, cached_attention, ring_attention)
BIAS, NO_BIAS = (
    "an arbitrary mask is a bias of 0 and −∞",
    "only flash_attention has arbitrary masks",
)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_options_of_other_libraries(f):
    """And options by position, traced numbers and swapped axes."""
    q, k, v = jnp.zeros((3, 2, 8, 2, 4))
    args, swapped, how = (q, k, v), (q[:, :1], k, v), {}  # 1 query and 8 keys
    if f is flash_attention_qkv:
        args, swapped = (jnp.stack(args, 2),), None
    elif f is cached_attention:
        args += (jnp.ones(2, jnp.int32),)
    elif f is ring_attention:  # 2 heads and 1 key head
        swapped, how = (q, k[:, :, :1], v[:, :, :1]), {"axis_name": "seq"}
    causal, mask = (
        "the option is named causal, and is True by default",
        "only flash_attention has arbitrary masks, as a bias of 0 and −∞",
    )
    first = [*inspect.signature(f).parameters][len(args)]
    for more, option, message in [
        ((True,), {}, f"options are passed by name, such as {first}=…, after {len(args)} arrays"),
        ((), {"is_causal": True}, "every call is causal" if f is cached_attention else causal),
        ((), {"mask": None}, "an arbitrary mask is a bias" if f is flash_attention else mask),
        ((), {"logits_soft_cap": 1.0}, "the option is named softcap"),
        ((), {"dropout_p": 0.1}, "there is no dropout"),
        ((), {"scales": 0.1}, r"expected one of \[.*'scale', "),
    ]:
        unknown = "".join(f"unknown option {name}: " for name in option)
        with pytest.raises(TypeError, match=f"^{f.__name__}: {unknown}{message}"):
            f(*args, *more, **how, **option)
    with pytest.raises(TypeError, match=f"^{f.__name__}: scale is compiled into the kernel"):
        jax.jit(lambda scale: f(*args, scale=scale, **how))(1.0)
    if swapped:
        swapped = [x.swapaxes(1, 2) for x in swapped]
        refused(f, *swapped, *args[3:], **how, match=f"^{f.__name__}: .*Swap axes 1 and 2 .*swapax")


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_each_option_has_an_example(f):
    examples = re.findall(r"^ *(?:>>>|\.\.\.) (.*?)(?:  #.*)?$", f.__doc__, re.MULTILINE)
    options = [p.name for p in inspect.signature(f).parameters.values() if p.kind == p.KEYWORD_ONLY]
    assert options
    assert [x for x in options if not re.search(rf"\b{x}=", "\n".join(examples))] == []


def selected(dtype, length, head_dim, implementation="auto", **facts):
    facts |= {"dtype": dtype, "length": length, "head_dim": head_dim}
    return _dispatch.select("flash_attention", implementation, **facts)


@pytest.mark.parametrize(
    "capability, dtype, length, head_dim, how, message",
    [
        ((7, 5), "bfloat16", 128, 64, {}, r"needs compute capability 8.0 .* not \(7, 5\)"),
        ((9, 0), "float32", 128, 64, {}, "supports bfloat16 or float16, not float32"),
        ((9, 0), "bfloat16", 128, 20, {}, "multiple of 8 and at most 256 here, not 20"),
        ((8, 0), "bfloat16", 128, 136, {}, "at most 128 here, not 136"),
        ((9, 0), "bfloat16", 128, 264, {}, "at most 256 here, not 264"),
        ((9, 0), "bfloat16", 65, 64, {}, "an even sequence length .* not 65"),
        ((9, 0), "bfloat16", 64, 64, {"segments": True}, "does not support segment ids"),
        ((9, 0), "bfloat16", 64, 64, {"return_lse": True}, "drops the gradient of the log-sum-ex"),
        ((9, 0), "bfloat16", 64, 64, {"deterministic": True}, "in any order, and deterministic="),
        ((9, 0), "bfloat16", 64, 64, {"keys": 8}, "as many keys as queries, not 8 and 64"),
        ((9, 0), "bfloat16", 64, 64, {"value_dim": 8}, "values of the head dimension .* not 8"),
        ((9, 0), "bfloat16", 64, 64, {"bias": True}, "scores without a bias"),
        ((9, 0), "bfloat16", 64, 64, {"ranges": True}, "documents, not other masks"),
    ],
)
def test_cudnn_says_what_it_cannot_take(
    capability, dtype, length, head_dim, how, message, monkeypatch
):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: capability)
    with pytest.raises(ValueError, match=f"'cudnn' .*{message}"):
        selected(dtype, length, head_dim, "cudnn", **how)


@pytest.mark.parametrize(
    "capability, dtype, length, head_dim, how, chosen",
    [
        ((9, 0), "bfloat16", 1024, 64, {}, "mosaic"),
        ((9, 0), "float16", 1024, 64, {"segments": True}, "mosaic"),
        ((9, 0), "bfloat16", 1024, 80, {}, "cudnn"),
        ((9, 0), "bfloat16", 1023, 80, {}, "triton"),
        ((9, 0), "float32", 1024, 64, {}, "triton"),
        ((9, 0), "float32", 1024, 64, {"precision": jax.lax.Precision.HIGHEST}, "triton"),
        ((9, 0), "float32", 1024, 128, {"precision": jax.lax.Precision.HIGHEST}, "xla"),
        ((9, 0), "float32", 1024, 128, {"precision": ("highest", "highest")}, "xla"),
        ((9, 0), "float32", 1024, 128, {"precision": "F32_F32_F32"}, "xla"),
        ((9, 0), "bfloat16", 1024, 128, {}, "mosaic"),
        ((9, 0), "bfloat16", 4096, 64, {"window": 256}, "triton"),
        ((9, 0), "bfloat16", 1024, 64, {"window": 256}, "mosaic"),
        ((8, 0), "bfloat16", 1024, 64, {}, "cudnn"),
        ((8, 0), "bfloat16", 1024, 64, {"deterministic": True}, "triton"),
        ((8, 0), "float32", 1024, 256, {}, "triton"),
        ((9, 0), "bfloat16", 1024, 256, {}, "cudnn"),
        ((9, 0), "bfloat16", 1024, 256, {"segments": True}, "triton"),
        ((8, 0), "bfloat16", 1024, 256, {}, "triton"),
        ((9, 0), "bfloat16", 1024, 264, {}, "xla"),
        *(
            ((9, 0), "bfloat16", 1024, 128, how, "triton")
            for how in ({"value_dim": 64}, {"ranges": True}, {"bias": True, "softcap": True})
        ),
        *(
            ((9, 0), "bfloat16", 1024, 128, how, "mosaic")
            for how in ({"keys": 2048}, {"softcap": True})
        ),
        *(
            ((9, 0), "bfloat16", 1024, 96, how, "triton")
            for how in ({"keys": 2048}, {"softcap": True})
        ),
        ((9, 0), "bfloat16", 1024, 128, {"sinks": True, "return_lse": True}, "mosaic"),
        ((8, 0), "float32", 1024, 64, {"precision": "highest", "ranges": True}, "triton"),
        ((8, 0), "float32", 1024, 64, {"precision": jax.lax.Precision.HIGHEST}, "xla"),
        ((7, 5), "bfloat16", 1024, 64, {}, "xla"),
    ],
)
def test_auto_takes_the_fastest_that_can_run(
    capability, dtype, length, head_dim, how, chosen, monkeypatch
):
    assert selected(dtype, length, head_dim, **how) == "xla"
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: capability)
    assert selected(dtype, length, head_dim, **how) == chosen


def test_no_precision_is_the_default_precision_of_jax(triton_on_cpu, monkeypatch):
    """Also in a backward pass that is traced where another default is set."""
    seen = []
    real = attention.Options.true_fp32.fget
    watched = property(lambda options: seen.append(real(options)) or seen[-1])
    monkeypatch.setattr(attention.Options, "true_fp32", watched)
    (q, k, v), _ = inputs((1, 8, 2, 2, 16), jnp.float32)
    f = functools.partial(flash_attention, implementation="triton")
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.vjp(f, q, k, v)
    pull_back(out)
    assert len(seen) >= 2 and all(seen)
    del seen[:]
    f(q, k, v)
    assert not any(seen) and seen


def test_auto_keeps_its_kernels_where_arrays_may_be_split(monkeypatch):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    monkeypatch.setattr(_dispatch, "devices_of", lambda *arrays: 2)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert selected("bfloat16", 1024, 64) == "mosaic" and selected("float32", 1024, 64) == "triton"


# ---------------------------------------------------------------------------------------------- GPU

GPU_SHAPES = [
    (2, 128, 12, 12, 64),  # GPT-2 124M's heads
    (1, 100, 3, 3, 64),  # T is no multiple of a tile
    (1, 66, 2, 2, 8),  # the smallest head dimension
    (1, 258, 2, 2, 128),  # the largest, two rows into a new tile
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "back_end, shape, dtype, mask",
    [
        *(("cudnn", shape, jnp.bfloat16, {}) for shape in GPU_SHAPES),
        *(
            ("cudnn", GPU_SHAPES[1], jnp.float16, mask)
            for mask in ({"causal": False}, {"window": 17}, {"scale": 0.2})
        ),
        *(("xla", GPU_SHAPES[1], dtype, {}) for dtype in (jnp.float32, jnp.bfloat16)),
    ],
    ids=str,
)
def test_on_the_gpu(back_end, shape, dtype, mask):
    check(back_end, shape, dtype, lse=back_end != "cudnn", **RMS, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("back_end", ["mosaic", "triton"])
@pytest.mark.parametrize(
    "shape, window", [((16, 1024, 3, 12, 64), None), ((2, 4096, 3, 4, 128), 256)], ids=str
)
def test_deterministic_runs_are_equal(back_end, shape, window):
    qkv = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    how = {"implementation": back_end, "deterministic": True, "window": window}
    f = functools.partial(flash_attention_qkv, **how)
    runs_are_equal(lambda qkv: jax.vjp(f, qkv)[1](qkv[:, :, 0]), qkv, times=10)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_very_long_sequences_run(implementation, t=2**17):
    """131,072 tokens, whose weights would fill 32 GiB a head: the last rows of O and of the
    gradients against their definition. Only the last queries see the last keys."""
    (q, k, v), (dout, _) = inputs((1, t, 2, 2, 64), jnp.bfloat16)
    f = functools.partial(flash_attention, implementation=implementation)
    out, pull = jax.jit(lambda *qkv: jax.vjp(f, *qkv))(q, k, v)
    gradients = pull(dout)
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in gradients)

    def last_rows(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q[:, -8:], k, precision="highest") / 8
        visible_TS = np.arange(t)[None, :] <= np.arange(t - 8, t)[:, None]
        weights = jax.nn.softmax(jnp.where(visible_TS[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")

    exact = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    true, pull = jax.vjp(last_rows, *exact[:3])
    trues = true, *(x[:, -8:] for x in pull(exact[3][:, -8:]))
    for x, true, bits in zip((out, *gradients), trues, (8, 7, 7, 7), strict=True):
        np.testing.assert_allclose(
            x[:, -8:].astype(jnp.float32), true, rtol=0, atol=2**-bits * float(jnp.abs(true).max())
        )


@pytest.mark.gpu
def test_cudnn_memory_is_linear_in_time():
    def temp_bytes(implementation):
        shape = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
        f = lambda q, k, v: (
            flash_attention(q, k, v, implementation=implementation).astype(jnp.float32).sum()
        )
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes("cudnn") < 2 * 4096 * 4096 < temp_bytes("xla")
