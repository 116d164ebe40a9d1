"""pallas_kernels.flash_attention against its `reference()` and NumPy, by the 2× rule."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import unchecked
from reference.torch_gpt2 import assert_within_twice, rms

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import choose, reference

# (batch, time, heads, head dimension)
SHAPES = [
    (2, 16, 2, 8),  # aligned
    (1, 1, 1, 1),  # one key: the output is v
    (2, 7, 3, 5),  # all odd
    (1, 33, 3, 20),  # just above a power of two
]
MASKS = [{}, {"causal": False}, {"window": 1}, {"window": 5}, {"scale": 0.7}]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def inputs(shape, dtype, seed=0):
    """q, k, v and a direction for the gradient. Scores have a standard deviation of 2: weights are far from uniform."""
    rng = np.random.default_rng(seed)
    q, k, v, direction = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4))
    return q * jnp.asarray(2, dtype), k, v, direction


def exact(q, k, v, direction, *, causal=True, scale=None, window=None):
    """Output and the three gradients in fp64, from the equations, a row at a time."""
    q, k, v, direction = (np.asarray(x, np.float64) for x in (q, k, v, direction))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
    batch, time, heads, _ = q.shape
    for b, h, t in np.ndindex(batch, heads, time):
        keys = range(time) if not causal else range(0 if window is None else max(0, t - window + 1), t + 1)
        keys = list(keys)
        scores = scale * k[b, keys, h] @ q[b, t, h]
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, h] = weights @ v[b, keys, h]
        dweights = v[b, keys, h] @ direction[b, t, h]
        dscores = weights * (dweights - weights @ dweights)
        dq[b, t, h] = scale * dscores @ k[b, keys, h]
        dk[b, keys, h] += scale * np.outer(dscores, q[b, t, h])
        dv[b, keys, h] += np.outer(weights, direction[b, t, h])
    return out, dq, dk, dv


def with_gradients(f, q, k, v, direction):
    out, pull = jax.vjp(f, q, k, v)
    return (out, *pull(direction))


def plain(q, k, v, *, causal=True, scale=None, window=None):
    """The textbook in the inputs' own dtype; the softmax alone is fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest").astype(jnp.float32) * scale
    time = q.shape[1]
    mask = np.ones((time, time), bool)
    if causal:
        mask = np.tril(mask) & ~np.tril(mask, -(window or time))
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest")


def check(f, shape, dtype, norm, **mask):
    args = inputs(shape, dtype)
    found = jax.jit(functools.partial(with_gradients, functools.partial(f, **mask)))(*args)
    # Not under jit: XLA leaves out roundings to bf16 between the operations that it fuses.
    same_dtype = with_gradients(functools.partial(plain, **mask), *args)
    for name, ours, theirs, true in zip(
        ("out", "dq", "dk", "dv"), found, same_dtype, exact(*args, **mask), strict=True
    ):
        assert ours.dtype == dtype
        assert_within_twice(ours, theirs, true, norm=norm, name=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients(shape, dtype):
    check(functools.partial(flash_attention, precision="highest"), shape, dtype, rms)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_masks(mask, dtype):
    check(functools.partial(flash_attention, precision="highest"), (2, 7, 3, 5), dtype, rms, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_reference_is_the_definition(mask):
    args = inputs((2, 7, 3, 5), jnp.bfloat16)
    found = reference(*args[:3], **mask)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact(*args, **mask)[0], rtol=0, atol=2e-6)


@settings(max_examples=10, deadline=None)
@given(time=st.integers(1, 9), window=st.integers(1, 12), seed=st.integers(0, 99))
def test_each_query_sees_exactly_its_window(time, window, seed):
    """With v = the key's own index as one-hot, the output is the attention matrix."""
    q, k, _, _ = inputs((1, time, 1, time), jnp.float32, seed)
    one_hot = jnp.eye(time, dtype=jnp.float32)[None, :, None, :]
    weights = np.asarray(flash_attention(q, k, one_hot, window=window))[0, :, 0]
    t, s = np.arange(time)[:, None], np.arange(time)[None, :]
    np.testing.assert_array_equal(weights > 0, (s <= t) & (t - s < window))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_a_window_as_long_as_the_sequence_is_none():
    q, k, v, _ = inputs((2, 7, 3, 5), jnp.float32)
    np.testing.assert_array_equal(flash_attention(q, k, v, window=7), flash_attention(q, k, v))


def test_the_future_does_not_matter():
    q, k, v, _ = inputs((1, 8, 2, 4), jnp.float32)
    changed = flash_attention(q, k.at[:, 5:].set(99.0), v.at[:, 5:].set(99.0))
    np.testing.assert_array_equal(changed[:, :5], flash_attention(q, k, v)[:, :5])
    assert not np.array_equal(changed[:, 5:], flash_attention(q, k, v)[:, 5:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_stay_finite(dtype):
    q, k, v, direction = inputs((1, 9, 1, 4), dtype)
    size = jnp.asarray(100, dtype)
    found = with_gradients(flash_attention, q * size, k * size, v, direction)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


def test_auto_on_a_cpu_is_xla():
    assert choose("bfloat16", 128, 64) == "xla"


def test_errors():
    q, k, v, _ = inputs((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"flash_attention: unknown implementation 'flash'; choose one of \['auto', 'cudnn'"
    ):
        flash_attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="'cudnn' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"):
        flash_attention(q, k, v, implementation="cudnn")
    with pytest.raises(
        ValueError, match="a window needs causal=True and a size of at least 1, got causal=False window=2"
    ):
        flash_attention(q, k, v, causal=False, window=2)
    with pytest.raises(ValueError, match="got causal=True window=0"):
        flash_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="expected one dtype for q, k, v, got bfloat16, float32, bfloat16"):
        flash_attention(q, k.astype(jnp.float32), v)
    # jaxtyping refuses first under pytest; without it the function itself does.
    for bad in ((q, k[:, :3], v), (q, k, v[..., :4]), (q[0], k[0], v[0])):
        with pytest.raises((ValueError, TypeError)):
            flash_attention(*bad)
        with pytest.raises(ValueError, match="expected q, k, v of one shape"):
            unchecked(flash_attention)(*bad)


def test_cudnn_says_what_it_cannot_take(monkeypatch):
    monkeypatch.setattr(sys.modules["pallas_kernels.flash_attention"], "platform", lambda: "gpu")
    with pytest.raises(ValueError, match="'cudnn' takes bfloat16 or float16, not float32"):
        choose("float32", 128, 64, "cudnn")
    with pytest.raises(ValueError, match="multiple of 8 and at most 128, not 20"):
        choose("bfloat16", 128, 20, "cudnn")
    with pytest.raises(ValueError, match="at most 128, not 136"):
        choose("bfloat16", 128, 136, "cudnn")
    with pytest.raises(ValueError, match="an even sequence length .* not 65"):
        choose("bfloat16", 65, 64, "cudnn")
    assert choose("bfloat16", 65, 64) == "xla"
    assert choose("bfloat16", 128, 64) != "xla" and choose("float32", 128, 64) == "xla"


# ------------------------------------------------------------------------------------------------------------------ GPU

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
    check(functools.partial(flash_attention, implementation="cudnn"), shape, dtype, rms, **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_xla_output_and_gradients_on_the_gpu(shape, dtype):
    f = functools.partial(flash_attention, implementation="xla", precision="highest")
    check(f, shape, dtype, rms)


@pytest.mark.gpu
def test_cudnn_memory_is_linear_in_time():
    def temp_bytes(implementation):
        shape = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
        f = lambda q, k, v: flash_attention(q, k, v, implementation=implementation).astype(jnp.float32).sum()
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes("cudnn") < 2 * 4096 * 4096 < temp_bytes("xla")


@pytest.mark.gpu
def test_auto_on_a_gpu_is_not_xla():
    assert choose("bfloat16", 128, 64) != "xla" and choose("float32", 128, 64) == "xla"
