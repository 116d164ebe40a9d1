"""pallas_kernels.linear_cross_entropy against its `reference()` and NumPy, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.torch_gpt2 import assert_within_twice, rms

from pallas_kernels import linear_cross_entropy
from pallas_kernels.linear_cross_entropy import reference

# (tokens, width, rows of the head, real vocabulary)
SHAPES = [
    (12, 8, 16, 16),  # aligned, no padding
    (7, 5, 13, 11),  # all odd, padding of 2
    (1, 3, 128, 1),  # one token, one real column: its loss is 0
    (33, 24, 300, 257),  # more columns than a tile of 256
]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def inputs(n, c, v, vocab, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, c)), dtype)
    w = jnp.asarray(rng.standard_normal((v, c)) * 2 / np.sqrt(c), dtype)
    return x, w, jnp.asarray(rng.integers(0, vocab, n), jnp.int32), jnp.asarray(rng.standard_normal(n), jnp.float32)


def exact(x, w, targets, weights, vocab):
    """Losses and both gradients of Σ weights·losses, in fp64 from the equations."""
    x, w, weights = (np.asarray(a, np.float64) for a in (x, w, weights))
    logits = x @ w[:vocab].T
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    probs = shifted / shifted.sum(-1, keepdims=True)
    rows = np.arange(len(x))
    losses = -np.log(probs[rows, targets])
    probs[rows, targets] -= 1
    dlogits = probs * weights[:, None]
    return losses, dlogits @ w[:vocab], np.concatenate([dlogits.T @ x, np.zeros((len(w) - vocab, x.shape[1]))])


def with_gradients(f, x, w, targets, weights):
    losses, pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
    return (losses, *pull(weights))


def materialised(x, w, targets, *, vocab_size):
    """The plain way in the inputs' own dtype, statistics in fp32."""
    logits = jnp.matmul(x, w[:vocab_size].T, precision="highest").astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[:, None], -1)[:, 0]


def check(f, n, c, v, vocab, dtype, norm):
    args = inputs(n, c, v, vocab, dtype)
    found = jax.jit(functools.partial(with_gradients, functools.partial(f, vocab_size=vocab)))(*args)
    # Not under jit: XLA leaves out roundings to bf16 between the operations that it fuses.
    plain = with_gradients(functools.partial(materialised, vocab_size=vocab), *args)
    assert found[0].dtype == jnp.float32 and found[1].dtype == found[2].dtype == dtype
    for name, ours, theirs, true in zip(("losses", "dx", "dw"), found, plain, exact(*args, vocab), strict=True):
        assert_within_twice(ours, theirs, true, norm=norm, name=name)
    assert not np.asarray(found[2][vocab:], np.float32).any(), "a padded row has a gradient"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients(shape, dtype):
    check(functools.partial(linear_cross_entropy, precision="highest"), *shape, dtype, rms)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_chunks_change_nothing(chunk, dtype):
    check(functools.partial(linear_cross_entropy, chunk=chunk, precision="highest"), 12, 8, 19, 17, dtype, rms)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_definition(shape):
    vocab = shape[-1]
    args = inputs(*shape, jnp.bfloat16)
    losses = reference(*args[:3], vocab_size=vocab)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, exact(*args, vocab)[0], rtol=0, atol=5e-6)


@settings(max_examples=15, deadline=None)
@given(shift=st.floats(-40, 40), seed=st.integers(0, 99))
def test_a_constant_added_to_every_logit_changes_nothing(shift, seed):
    """Shift invariance, through a channel that every row of the head reads alike."""
    x, w, targets, _ = inputs(6, 4, 9, 7, jnp.float32, seed)
    w = w.at[:, 0].set(1.0)
    moved = x.at[:, 0].add(np.float32(shift))
    found = linear_cross_entropy(moved, w, targets, vocab_size=7, precision="highest")
    expected = linear_cross_entropy(x, w, targets, vocab_size=7, precision="highest")
    assert (np.asarray(found) >= -1e-5).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)


def test_rows_of_the_padding_do_not_matter():
    x, w, targets, weights = inputs(7, 5, 13, 11, jnp.float32)
    f = functools.partial(linear_cross_entropy, vocab_size=11)
    zero, huge = (with_gradients(f, x, w.at[11:].set(value), targets, weights) for value in (0.0, 1e4))
    for a, b in zip(zero, huge, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_huge_logits_stay_finite(size):
    x, w, targets, weights = inputs(7, 5, 13, 11, jnp.float32)
    found = with_gradients(
        functools.partial(linear_cross_entropy, vocab_size=11), x * np.float32(size), w, targets, weights
    )
    assert all(np.isfinite(np.asarray(a)).all() for a in found)


@pytest.mark.parametrize("target", [-1, 11, 12, 13, 10**6])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_target_outside_the_vocabulary_gives_nan(target, chunk):
    x, w, targets, _ = inputs(4, 5, 13, 11, jnp.float32)
    losses = linear_cross_entropy(x, w, targets.at[2].set(target), vocab_size=11, chunk=chunk)
    assert np.isnan(losses).tolist() == [False, False, True, False]


def test_chunk_saves_memory():
    n, c, v = 512, 16, 4096

    def temp_bytes(chunk):
        f = lambda x, w, t: linear_cross_entropy(x, w, t, chunk=chunk).mean()
        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((n, c), "float32"), ((v, c), "float32"), ((n,), "int32"))]
        return jax.jit(jax.grad(f, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    # All logits are n·v·4 bytes; an eighth of them at a time, and little besides.
    assert temp_bytes(None) >= n * v * 4
    assert temp_bytes(64) < n * v * 4 / 2


def test_errors():
    x, w, targets, _ = inputs(12, 8, 16, 16, jnp.float32)
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy: unknown implementation 'triton'; choose one of \['auto', 'xla'"
    ):
        linear_cross_entropy(x, w, targets, implementation="triton")
    with pytest.raises(ValueError, match="12 tokens are not a multiple of chunk=5"):
        linear_cross_entropy(x, w, targets, chunk=5)
    for vocab_size in (0, 17):
        with pytest.raises(ValueError, match=rf"vocab_size ≤ V, got .* {vocab_size}"):
            linear_cross_entropy(x, w, targets, vocab_size=vocab_size)
    # jaxtyping refuses first under pytest; without it the function itself does.
    for bad in ((x[:, :7], w, targets), (x, w, targets[:11])):
        with pytest.raises((ValueError, TypeError)):
            linear_cross_entropy(*bad)
        with pytest.raises(ValueError, match=r"expected x \(N, C\), w \(V, C\), targets \(N,\)"):
            unchecked(linear_cross_entropy)(*bad)


def unchecked(function):
    """The function under jaxtyping's and beartype's wrappers."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [None, 256])
def test_gpt2s_own_shape_on_the_gpu(dtype, chunk):
    f = functools.partial(linear_cross_entropy, chunk=chunk, precision="highest")
    check(f, 1024, 768, 50304, 50257, dtype, rms)
