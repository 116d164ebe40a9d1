"""pallas_kernels.flash_attention against its `reference()` and NumPy, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import h200, unchecked
from reference.torch_gpt2 import assert_within_twice, rms

from pallas_kernels import _dispatch, attention, flash_attention, flash_attention_qkv
from pallas_kernels.attention import reference

# (batch, time, heads, head dimension)
SHAPES = [
    (2, 16, 2, 8),  # aligned
    (1, 1, 1, 1),  # one key: the output is v
    (2, 7, 3, 5),  # all odd
    (1, 33, 3, 20),  # just above a power of two
]
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [5, 3, 5, 5, 3, 3, 9]])
MASKS = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 5},
    {"scale": 0.7},
    {"segment_ids": SEGMENTS},
    {"segment_ids": SEGMENTS, "causal": False},
    {"segment_ids": SEGMENTS, "window": 2},
]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def named(mask):
    return (
        ", ".join(key if key == "segment_ids" else f"{key}={value}" for key, value in mask.items())
        or "causal"
    )


def runs_of(segment_ids):
    """Number of the run of equal ids that each token belongs to."""
    return np.cumsum(np.diff(segment_ids, axis=1, prepend=0) != 0, axis=1)


def inputs(shape, dtype, seed=0, key_heads=None):
    """q, k, v and directions for the gradients of O and L. Scores have a standard deviation of 2:
    weights are far from uniform."""
    rng = np.random.default_rng(seed)
    keys = (*shape[:2], key_heads or shape[2], shape[3])
    q, k, v, direction = (
        jnp.asarray(rng.standard_normal(s), dtype) for s in (shape, keys, keys, shape)
    )
    dlse = jnp.asarray(rng.standard_normal((shape[0], shape[2], shape[1])), jnp.float32)
    return q * jnp.asarray(2, dtype), k, v, direction, dlse


def exact(q, k, v, direction, dlse, *, causal=True, scale=None, window=None, segment_ids=None):
    """O, L and the three gradients in fp64, from the equations, a row at a time."""
    q, k, v, direction, dlse = (np.asarray(x, np.float64) for x in (q, k, v, direction, dlse))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, dq, dk, dv, lse = *(np.zeros_like(x) for x in (q, q, k, v)), np.zeros_like(dlse)
    batch, time, heads, _ = q.shape
    run = None if segment_ids is None else runs_of(segment_ids)
    for b, h, t in np.ndindex(batch, heads, time):
        g = h // (heads // k.shape[2])
        keys = (
            range(time)
            if not causal
            else range(0 if window is None else max(0, t - window + 1), t + 1)
        )
        keys = [s for s in keys if run is None or run[b, s] == run[b, t]]
        scores = scale * k[b, keys, g] @ q[b, t, h]
        lse[b, h, t] = scores.max() + np.log(np.exp(scores - scores.max()).sum())
        weights = np.exp(scores - lse[b, h, t])
        out[b, t, h] = weights @ v[b, keys, g]
        dweights = v[b, keys, g] @ direction[b, t, h]
        dscores = weights * (dweights - weights @ dweights + dlse[b, h, t])
        dq[b, t, h] = scale * dscores @ k[b, keys, g]
        dk[b, keys, g] += scale * np.outer(dscores, q[b, t, h])
        dv[b, keys, g] += np.outer(weights, direction[b, t, h])
    return out, lse, dq, dk, dv


def with_gradients(f, q, k, v, direction, dlse):
    found, pull = jax.vjp(f, q, k, v)
    return (*found, *pull((direction, dlse)))


def plain(q, k, v, *, causal=True, scale=None, window=None, segment_ids=None):
    """The textbook in the inputs' own dtype; the softmax alone is fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest").astype(jnp.float32) * scale
    time = q.shape[1]
    mask = np.ones((1, 1, time, time), bool)
    if causal:
        mask = mask & np.tril(mask) & ~np.tril(mask, -(window or time))
    if segment_ids is not None:
        run = runs_of(segment_ids)
        mask = mask & (run[:, None, :, None] == run[:, None, None, :])
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest"), jax.nn.logsumexp(
        scores, axis=-1
    )


def check(f, shape, dtype, norm, key_heads=None, lse=True, **mask):
    """O, every gradient and, where the back end has it, L by the 2× rule."""
    *args, dlse = inputs(shape, dtype, key_heads=key_heads)
    args += [dlse if lse else jnp.zeros_like(dlse)]
    arrays = {
        key: jnp.asarray(x, jnp.int32) if key == "segment_ids" else x for key, x in mask.items()
    }

    def with_lse(q, k, v):
        return (
            f(q, k, v, return_lse=True, **arrays)
            if lse
            else (f(q, k, v, **arrays), jnp.zeros_like(dlse))
        )

    found = jax.jit(functools.partial(with_gradients, with_lse))(*args)
    # Not under jit: XLA leaves out roundings to bf16 between the operations that it fuses.
    same_dtype = with_gradients(functools.partial(plain, **mask), *args)
    for name, ours, theirs, true in zip(
        ("out", "lse", "dq", "dk", "dv"), found, same_dtype, exact(*args, **mask), strict=True
    ):
        if name != "lse" or lse:
            assert ours.dtype == (jnp.float32 if name == "lse" else dtype)
            assert_within_twice(ours, theirs, true, norm=norm, name=name)


def packed(q, k, v, **how):
    return flash_attention_qkv(jnp.stack((q, k, v), axis=2), **how)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients(shape, dtype):
    check(functools.partial(flash_attention, precision="highest"), shape, dtype, rms)


@pytest.mark.parametrize("mask", MASKS, ids=named)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_masks(mask, dtype):
    check(functools.partial(flash_attention, precision="highest"), (2, 7, 3, 5), dtype, rms, **mask)


@pytest.mark.parametrize("mask", [{}, {"segment_ids": SEGMENTS, "causal": False}], ids=named)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_query_heads(key_heads, mask):
    f = functools.partial(flash_attention, precision="highest")
    check(f, (2, 7, 4, 5), jnp.float32, rms, key_heads=key_heads, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=named)
def test_packed(mask):
    check(functools.partial(packed, precision="highest"), (2, 7, 3, 5), jnp.float32, rms, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=named)
@pytest.mark.parametrize("key_heads", [1, 3])
def test_reference_is_the_definition(mask, key_heads):
    args = inputs((2, 7, 3, 5), jnp.bfloat16, key_heads=key_heads)
    found = reference(*args[:3], **mask, return_lse=True)
    for ours, true in zip(found, exact(*args, **mask), strict=False):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, true, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(reference(*args[:3], **mask), found[0])


@settings(max_examples=10, deadline=None)
@given(time=st.integers(1, 9), window=st.integers(1, 12), seed=st.integers(0, 99))
def test_each_query_sees_exactly_its_window(time, window, seed):
    """With v = the key's own index as one-hot, the output is the attention matrix."""
    q, k, *_ = inputs((1, time, 1, time), jnp.float32, seed)
    one_hot = jnp.eye(time, dtype=jnp.float32)[None, :, None, :]
    weights = np.asarray(flash_attention(q, k, one_hot, window=window))[0, :, 0]
    t, s = np.arange(time)[:, None], np.arange(time)[None, :]
    np.testing.assert_array_equal(weights > 0, (s <= t) & (t - s < window))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_a_window_as_long_as_the_sequence_is_none():
    q, k, v, *_ = inputs((2, 7, 3, 5), jnp.float32)
    np.testing.assert_array_equal(flash_attention(q, k, v, window=7), flash_attention(q, k, v))


def test_the_future_does_not_matter():
    q, k, v, *_ = inputs((1, 8, 2, 4), jnp.float32)
    changed = flash_attention(q, k.at[:, 5:].set(99.0), v.at[:, 5:].set(99.0))
    np.testing.assert_array_equal(changed[:, :5], flash_attention(q, k, v)[:, :5])
    assert not np.array_equal(changed[:, 5:], flash_attention(q, k, v)[:, 5:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_stay_finite(dtype):
    q, k, v, direction, dlse = inputs((1, 9, 1, 4), dtype)
    size = jnp.asarray(100, dtype)
    found = with_gradients(
        functools.partial(flash_attention, return_lse=True), q * size, k * size, v, direction, dlse
    )
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_no_array_grows_with_the_square_of_time(implementation, monkeypatch):
    """In the program of O and its gradient, whatever the kernels are."""
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)

    def largest(time):
        qkv = jax.ShapeDtypeStruct((1, time, 3, 2, 64), jnp.bfloat16)
        f = lambda qkv: (
            flash_attention_qkv(qkv, implementation=implementation).astype(jnp.float32).sum()
        )
        with h200():
            return max(sizes(jax.make_jaxpr(jax.grad(f))(qkv).jaxpr))

    assert largest(16384) == 8 * largest(2048) < 16384 * 16384


def sizes(jaxpr):
    """Elements of every array in a program and in what it calls."""
    for equation in jaxpr.eqns:
        yield from (
            v.aval.size for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "size")
        )
        for parameter in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner := getattr(parameter, "jaxpr", parameter), "eqns"):
                yield from sizes(inner)


def selected(dtype, length, head_dim, implementation="auto", **facts):
    facts |= {"dtype": dtype, "length": length, "head_dim": head_dim}
    return _dispatch.select("flash_attention", implementation, **facts)


def test_auto_on_a_cpu_is_xla():
    assert selected("bfloat16", 128, 64) == "xla"


def test_errors():
    q, k, v, *_ = inputs((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError,
        match=r"flash_attention: unknown implementation 'flash'; choose one of \['auto', 'cudnn'",
    ):
        flash_attention(q, k, v, implementation="flash")
    with pytest.raises(
        ValueError, match="'cudnn' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"
    ):
        flash_attention(q, k, v, implementation="cudnn")
    with pytest.raises(
        ValueError,
        match="needs causal=True and an integer size of at least 1, got causal=False window=2",
    ):
        flash_attention(q, k, v, causal=False, window=2)
    with pytest.raises(ValueError, match="got causal=True window=0"):
        flash_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="got causal=True window=2.5"):
        unchecked(flash_attention)(q, k, v, window=2.5)
    with pytest.raises(
        ValueError, match="expected one dtype for q, k, v, got bfloat16, float32, bfloat16"
    ):
        flash_attention(q, k.astype(jnp.float32), v)
    # jaxtyping refuses first under pytest; without it the function itself does.
    no_heads, no_channels = (q, k[:, :, :0], v[:, :, :0]), (q[..., :0], k[..., :0], v[..., :0])
    shapes = ((q, k[:, :3], v), (q, k, v[..., :4]), (q[0], k[0], v[0]))
    for bad in (*shapes, no_heads, no_channels):
        with pytest.raises((ValueError, TypeError)):
            flash_attention(*bad)
        with pytest.raises(ValueError, match="expected q of shape"):
            unchecked(flash_attention)(*bad)
    with pytest.raises(ValueError, match="a multiple of that of key heads"):
        unchecked(flash_attention)(
            jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2, 8))
        )
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16, got int32"):
        unchecked(flash_attention)(*(jnp.zeros((1, 4, 2, 8), jnp.int32),) * 3)
    for ids in (jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 4))):
        with pytest.raises(ValueError, match=r"expected segment_ids of shape \(1, 4\) in integers"):
            unchecked(flash_attention)(q, k, v, segment_ids=ids)
    with pytest.raises(
        ValueError, match=r"expected \(batch, time, 3, heads, head_dim\), got \(1, 4, 2, 2, 8\)"
    ):
        unchecked(flash_attention_qkv)(jnp.zeros((1, 4, 2, 2, 8)))


def test_cudnn_says_what_it_cannot_take(monkeypatch):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"'cudnn' needs compute capability 8.0 .* not \(7, 5\)"):
        selected("bfloat16", 128, 64, "cudnn")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    with pytest.raises(ValueError, match="'cudnn' supports bfloat16 or float16, not float32"):
        selected("float32", 128, 64, "cudnn")
    with pytest.raises(ValueError, match="multiple of 8 and at most 128, not 20"):
        selected("bfloat16", 128, 20, "cudnn")
    with pytest.raises(ValueError, match="at most 128, not 136"):
        selected("bfloat16", 128, 136, "cudnn")
    with pytest.raises(ValueError, match="an even sequence length .* not 65"):
        selected("bfloat16", 65, 64, "cudnn")
    with pytest.raises(ValueError, match="does not support segment ids"):
        selected("bfloat16", 64, 64, "cudnn", segments=True)
    with pytest.raises(ValueError, match="drops the gradient of the log-sum-exp"):
        selected("bfloat16", 64, 64, "cudnn", return_lse=True)
    with pytest.raises(ValueError, match="sums the gradients in any order, and deterministic=True"):
        selected("bfloat16", 64, 64, "cudnn", deterministic=True)


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
        ((8, 0), "float32", 1024, 256, {}, "xla"),
        ((8, 0), "float32", 1024, 64, {"precision": jax.lax.Precision.HIGHEST}, "xla"),
        ((7, 5), "bfloat16", 1024, 64, {}, "xla"),
    ],
)
def test_auto_takes_the_fastest_that_can_run(
    capability, dtype, length, head_dim, how, chosen, monkeypatch
):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: capability)
    assert selected(dtype, length, head_dim, **how) == chosen


def test_no_precision_is_the_default_precision_of_jax(triton_on_cpu, monkeypatch):
    """Also in a backward pass that is traced where another default is set."""
    seen = []
    real = attention.Options.true_fp32.fget
    watched = property(lambda options: seen.append(real(options)) or seen[-1])
    monkeypatch.setattr(attention.Options, "true_fp32", watched)
    q, k, v, *_ = inputs((1, 8, 2, 16), jnp.float32)
    f = functools.partial(flash_attention, implementation="triton")
    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.vjp(f, q, k, v)
    pull_back(out)
    assert len(seen) >= 2 and all(seen)
    del seen[:]
    f(q, k, v)
    assert not any(seen) and seen


def test_auto_leaves_arrays_that_may_be_split_to_the_compiler(monkeypatch):
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    monkeypatch.setattr(_dispatch, "partitioned", lambda *arrays: True)
    assert selected("bfloat16", 1024, 64) == "cudnn" and selected("float32", 1024, 64) == "xla"


# ---------------------------------------------------------------------------------------------- GPU

GPU_SHAPES = [
    (2, 128, 12, 64),  # GPT-2 124M's heads
    (1, 100, 3, 64),  # T is no multiple of a tile
    (1, 66, 2, 8),  # the smallest head dimension
    (1, 258, 2, 128),  # the largest, two rows into a new tile
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype, mask",
    [
        *((shape, jnp.bfloat16, {}) for shape in GPU_SHAPES),
        *((GPU_SHAPES[1], dtype, {"causal": False}) for dtype in (jnp.bfloat16, jnp.float16)),
        *((GPU_SHAPES[1], dtype, {"window": 17}) for dtype in (jnp.bfloat16, jnp.float16)),
        (GPU_SHAPES[1], jnp.bfloat16, {"scale": 0.2}),
        (GPU_SHAPES[0], jnp.float16, {}),
    ],
    ids=str,
)
def test_cudnn_output_and_gradients(shape, dtype, mask):
    check(
        functools.partial(flash_attention, implementation="cudnn"),
        shape,
        dtype,
        rms,
        lse=False,
        **mask,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_xla_output_and_gradients_on_the_gpu(shape, dtype):
    f = functools.partial(flash_attention, implementation="xla", precision="highest")
    check(f, shape, dtype, rms)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_very_long_sequences_run(implementation):
    """65,536 tokens, whose weights would fill 8 GiB a head: the last rows of O against their
    definition."""
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).standard_normal((1, 65536, 2, 64)), jnp.bfloat16)
        for i in range(3)
    )
    f = functools.partial(flash_attention, implementation=implementation)
    out, pull = jax.jit(lambda *qkv: jax.vjp(f, *qkv))(q, k, v)
    gradients = pull(jnp.ones_like(out))
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in gradients)

    def last_rows(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q[:, -8:], k, precision="highest") / 8
        visible_TS = np.arange(65536)[None, :] <= np.arange(65528, 65536)[:, None]
        weights = jax.nn.softmax(jnp.where(visible_TS[None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")

    true = last_rows(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(
        out[:, -8:].astype(jnp.float32), true, rtol=0, atol=2**-8 * float(jnp.abs(true).max())
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


@pytest.mark.gpu
def test_auto_on_a_gpu_is_not_xla():
    assert selected("bfloat16", 128, 64) != "xla" and selected("float32", 128, 64) != "xla"
