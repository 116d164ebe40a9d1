"""pallas_kernels.linear_cross_entropy against its `reference()` and NumPy, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import unchecked
from reference.torch_gpt2 import assert_within_twice, rms

from pallas_kernels import _dispatch, linear_cross_entropy
from pallas_kernels.classifier import SigmoidCap
from pallas_kernels.lm_head import reference

# (tokens, width, rows of the head, real vocabulary)
SHAPES = [
    (12, 8, 16, 16),  # aligned, no padding
    (7, 5, 13, 11),  # all odd, padding of 2
    (1, 3, 128, 1),  # one token, one real column: its loss is 0
    (33, 24, 300, 257),  # more columns than a tile of 256
]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
IMPLEMENTATIONS = ["fused", "xla"]


def inputs(n, c, v, vocab, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, c)), dtype)
    w = jnp.asarray(rng.standard_normal((v, c)) * 2 / np.sqrt(c), dtype)
    return (
        x,
        w,
        jnp.asarray(rng.integers(0, vocab, n), jnp.int32),
        jnp.asarray(rng.standard_normal(n), jnp.float32),
    )


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
    return (
        losses,
        dlogits @ w[:vocab],
        np.concatenate([dlogits.T @ x, np.zeros((len(w) - vocab, x.shape[1]))]),
    )


def with_gradients(f, x, w, targets, weights):
    losses, pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
    return (losses, *pull(weights))


def materialized(x, w, targets, *, vocab_size):
    """The plain way in the inputs' own dtype, statistics in fp32."""
    logits = jnp.matmul(x, w[:vocab_size].T, precision="highest").astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[:, None], -1)[:, 0]


@functools.cache
def plain_and_exact(n, c, v, vocab, dtype):
    """The same for every back end and every chunk."""
    args = inputs(n, c, v, vocab, dtype)
    # Not under jit: XLA leaves out roundings to bf16 between the operations that it fuses.
    plain = with_gradients(functools.partial(materialized, vocab_size=vocab), *args)
    return plain, exact(*args, vocab)


def check(f, n, c, v, vocab, dtype, norm, in_sequence=False):
    """`in_sequence`: dx may have the error of a sum of V terms one by one in fp32, √V/2 · 2⁻²³."""
    args = inputs(n, c, v, vocab, dtype)
    found = jax.jit(functools.partial(with_gradients, functools.partial(f, vocab_size=vocab)))(
        *args
    )
    assert found[0].dtype == jnp.float32 and found[1].dtype == found[2].dtype == dtype
    for name, ours, theirs, true in zip(
        ("losses", "dx", "dw"), found, *plain_and_exact(n, c, v, vocab, dtype), strict=True
    ):
        error = norm(np.asarray(ours, np.float64) - np.asarray(true, np.float64))
        if name == "dx" and in_sequence and error < vocab**0.5 * 2**-24 * norm(np.asarray(true)):
            continue
        assert_within_twice(ours, theirs, true, norm=norm, name=name)
    assert not np.asarray(found[2][vocab:], np.float32).any(), "a padded row has a gradient"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_losses_and_gradients(shape, dtype, implementation):
    f = functools.partial(linear_cross_entropy, implementation=implementation, precision="highest")
    check(f, *shape, dtype, rms)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [1, 4, 12])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_change_nothing(chunk, dtype, implementation):
    f = functools.partial(
        linear_cross_entropy, implementation=implementation, chunk=chunk, precision="highest"
    )
    check(f, 12, 8, 19, 17, dtype, rms)


def mean_loss(f, **how):
    """Value and gradients of a mean: every token's cotangent is the same."""
    return jax.jit(jax.value_and_grad(lambda x, w, targets: f(x, w, targets, **how).mean(), (0, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_the_fused_back_end(dtype):
    """The gradients that the forward pass made."""
    n, c, v, vocab = 33, 24, 300, 257
    x, w, targets, _ = inputs(n, c, v, vocab, dtype)
    (loss, (dx, dw)) = mean_loss(
        linear_cross_entropy, implementation="fused", chunk=11, vocab_size=vocab
    )(x, w, targets)
    weights = jnp.full(n, 1 / n)
    losses, *true = exact(x, w, targets, weights, vocab)
    _, *plain = with_gradients(
        functools.partial(materialized, vocab_size=vocab), x, w, targets, weights
    )
    np.testing.assert_allclose(
        loss, losses.mean(), rtol={"float32": 1e-6, "float16": 2e-3}.get(dtype.__name__, 1e-2)
    )
    for name, ours, theirs, right in zip(("dx", "dw"), (dx, dw), plain, true, strict=True):
        assert_within_twice(ours, theirs, right, norm=rms, name=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp32_weights_beside_bf16_tokens(implementation):
    """As rounded weights, but for the gradient: it is fp32, and not rounded on the way where the
    back end sums it."""
    x, w, targets, _ = inputs(33, 24, 300, 257, jnp.bfloat16)
    fp32 = w.astype(jnp.float32) * (1 + 2**-11)  # rounds back to w
    grad = functools.partial(mean_loss, implementation=implementation, chunk=11, vocab_size=257)
    loss, (dx, dw) = grad(linear_cross_entropy)(x, w, targets)
    same_loss, (same_dx, finer_dw) = grad(linear_cross_entropy)(x, fp32, targets)
    assert float(loss) == float(same_loss) and bool((dx == same_dx).all())
    assert (dx.dtype, dw.dtype, finer_dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(finer_dw, dw.astype(jnp.float32), rtol=2**-7, atol=1e-4)
    if implementation == "fused":
        assert bool((finer_dw.astype(jnp.bfloat16) == dw).all()) and bool(
            (finer_dw != dw.astype(jnp.float32)).any()
        )


def text_of(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def test_the_gradients_of_a_mean_take_three_products_a_chunk():
    """The branch that makes dW anew is gone when the compiler can see that all cotangents are
    equal; else it is there."""
    x, w, targets, weights = inputs(64, 8, 32, 30, jnp.float32)
    fused = functools.partial(linear_cross_entropy, implementation="fused", chunk=16, vocab_size=30)
    mean = text_of(
        jax.grad(lambda x, w, scale: fused(x, w, targets).mean() * scale, (0, 1)),
        x,
        w,
        jnp.float32(2),
    )
    assert "conditional" not in mean and mean.count(" dot(") == 3 * 4
    weighted = text_of(
        jax.grad(lambda x, w, weights: (fused(x, w, targets) * weights).sum(), (0, 1)),
        x,
        w,
        weights,
    )
    assert "conditional" in weighted


CAPS = [None, 5.0, SigmoidCap(), SigmoidCap(6.0, 1.0, 2.0)]


@functools.cache
def capped(softcap, implementation=None):
    """Losses and gradients with a softcap and ignored tokens, of a back end or the reference."""
    how = {"vocab_size": 17, "softcap": softcap, "ignore_index": -1}
    if implementation is None:
        f = functools.partial(reference, **how)
    else:
        how |= {"implementation": implementation, "chunk": 4, "precision": "highest"}
        f = functools.partial(linear_cross_entropy, **how)
    return jax.jit(functools.partial(with_gradients, f))


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_softcap_and_ignored_tokens(implementation, softcap, reduction):
    x, w, targets, weights = inputs(12, 8, 19, 17, jnp.float32)
    targets = targets.at[jnp.array([0, 5, 11])].set(-1)
    weights = weights if reduction == "weighted" else jnp.where(targets == -1, 0.0, 1 / 9)
    found = capped(softcap, implementation)(x, w, targets, weights)
    expected = capped(softcap)(x, w, targets, weights)
    for ours, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, right, rtol=0, atol=2e-6)
    for ignored in (0, 5, 11):
        assert found[0][ignored] == 0 and not np.asarray(found[1][ignored]).any()


def test_only_ignored_tokens():
    x, w, targets, weights = inputs(4, 8, 19, 17, jnp.float32)
    f = functools.partial(linear_cross_entropy, implementation="fused", ignore_index=-1)
    for array in with_gradients(f, x, w, jnp.full_like(targets, -1), weights):
        assert not np.asarray(array).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_transformations(implementation):
    """jit, grad, checkpoint, vmap and shard_map say the same."""
    x, w, targets, _ = inputs(12, 8, 19, 17, jnp.float32)
    f = functools.partial(
        linear_cross_entropy, implementation=implementation, vocab_size=17, precision="highest"
    )
    mean = lambda x, w, t: f(x, w, t).mean()
    gradient = jax.grad(mean, (0, 1))(x, w, targets)
    checkpointed = jax.jit(jax.grad(jax.checkpoint(mean), (0, 1)))(x, w, targets)
    batch = (x.reshape(2, 6, 8), targets.reshape(2, 6))
    mapped = jax.vmap(lambda x, t: jax.grad(mean, (0, 1))(x, w, t))(*batch)
    mapped = (mapped[0].reshape(12, 8) / 2, mapped[1].mean(0))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("data")

    def on_a_device(x, w, t):
        dx, dw = jax.grad(mean, (0, 1))(x, w, t)
        return dx / 2, jax.lax.pmean(dw, "data")

    whole = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=(split, whole, split),
        out_specs=(split, whole),
        check_vma=False,
    )
    for found in (checkpointed, mapped, jax.jit(sharded)(x, w, targets)):
        for ours, right in zip(found, gradient, strict=True):
            np.testing.assert_allclose(ours, right, rtol=0, atol=1e-6)


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
    zero, huge = (
        with_gradients(f, x, w.at[11:].set(value), targets, weights) for value in (0.0, 1e4)
    )
    for a, b in zip(zero, huge, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [1e3, 1e30])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_huge_logits_stay_finite(size, implementation):
    x, w, targets, weights = inputs(7, 5, 13, 11, jnp.float32)
    f = functools.partial(linear_cross_entropy, vocab_size=11, implementation=implementation)
    found = with_gradients(f, x * np.float32(size), w, targets, weights)
    assert all(np.isfinite(np.asarray(a)).all() for a in found)


@pytest.mark.parametrize("target", [-1, 11, 12, 13, 10**6])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_target_outside_the_vocabulary_gives_nan(target, chunk, implementation):
    x, w, targets, _ = inputs(4, 5, 13, 11, jnp.float32)
    f = functools.partial(
        linear_cross_entropy, vocab_size=11, chunk=chunk, implementation=implementation
    )
    losses = f(x, w, targets.at[2].set(target))
    assert np.isnan(losses).tolist() == [False, False, True, False]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunk_saves_memory(implementation):
    n, c, v = 512, 16, 4096

    def temp_bytes(chunk):
        f = lambda x, w, t: linear_cross_entropy(
            x, w, t, chunk=chunk, implementation=implementation
        ).mean()
        shapes = [
            jax.ShapeDtypeStruct(s, d)
            for s, d in (((n, c), "float32"), ((v, c), "float32"), ((n,), "int32"))
        ]
        return (
            jax.jit(jax.grad(f, (0, 1)))
            .lower(*shapes)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    # All logits are n·v·4 bytes; an eighth of them at a time, and little besides.
    assert temp_bytes(None) >= n * v * 4
    assert temp_bytes(64) < n * v * 4 / 2


def test_errors():
    x, w, targets, _ = inputs(12, 8, 16, 16, jnp.float32)
    with pytest.raises(
        ValueError,
        match=r"linear_cross_entropy: unknown implementation 'triton'; "
        r"choose one of \['auto', 'fused', 'xla'",
    ):
        linear_cross_entropy(x, w, targets, implementation="triton")
    with pytest.raises(
        ValueError, match="and w in x's dtype or float32, got x in float32 and w in bfloat16"
    ):
        linear_cross_entropy(x, w.astype(jnp.bfloat16), targets)
    for implementation in ("auto", "reference"):
        with pytest.raises(ValueError, match="linear_cross_entropy: a softcap's scale .* got -3"):
            linear_cross_entropy(x, w, targets, softcap=-3.0, implementation=implementation)
    with pytest.raises(ValueError, match="12 tokens are not a multiple of chunk=0"):
        linear_cross_entropy(x, w, targets, chunk=0)
    assert _dispatch.select("linear_cross_entropy") == "xla"
    with pytest.raises(ValueError, match="12 tokens are not a multiple of chunk=5"):
        linear_cross_entropy(x, w, targets, chunk=5)
    for vocab_size in (0, 17):
        with pytest.raises(ValueError, match=rf"vocab_size ≤ V, got .* {vocab_size}"):
            linear_cross_entropy(x, w, targets, vocab_size=vocab_size)
    # jaxtyping refuses first under pytest; without it the function itself does.
    for bad in (
        (x[:, :7], w, targets),
        (x, w, targets[:11]),
        (x[0], w, targets),
        (x, w[0], targets),
    ):
        with pytest.raises((ValueError, TypeError)):
            linear_cross_entropy(*bad)
        with pytest.raises(ValueError, match=r"expected x \(N, C\), w \(V, C\), targets \(N,\)"):
            unchecked(linear_cross_entropy)(*bad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gpt2s_own_head_on_the_gpu(dtype, chunk, implementation):
    f = functools.partial(
        linear_cross_entropy, implementation=implementation, chunk=chunk, precision="highest"
    )
    # XLA compiles the matmul of dx in the loop over chunks with other tiles than outside of it: on
    # an H100 its relative error is 4.1e-6, that of all rows at once 1.0e-6. Both sum in fp32.
    in_sequence = implementation == "xla" and chunk is not None and dtype == jnp.float32
    check(f, 256, 768, 50304, 50257, dtype, rms, in_sequence)


@pytest.mark.gpu
def test_what_auto_takes_on_the_gpu():
    assert _dispatch.select("linear_cross_entropy") == "fused"


@pytest.mark.gpu
def test_only_a_chunk_of_logits_is_alive_on_the_gpu():
    """65,536 tokens of GPT-2 124M: all logits would be 6.1 GiB; inputs and results are counted
    apart."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((65536, 768), (50304, 768)))
    targets = jax.ShapeDtypeStruct((65536,), jnp.int32)
    f = jax.jit(
        jax.value_and_grad(
            lambda x, w, t: linear_cross_entropy(x, w, t, vocab_size=50257).mean(), (0, 1)
        )
    )
    assert f.lower(x, w, targets).compile().memory_analysis().temp_size_in_bytes < 2.5 * 2**30
