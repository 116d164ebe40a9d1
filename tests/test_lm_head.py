"""pallas_kernels.linear_cross_entropy against the definition in fp64, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import rms
from kernel_tools import on_gpu
from rule_tools import check as check_rule
from rule_tools import refused

from pallas_kernels import classifier, linear_cross_entropy
from pallas_kernels.classifier import SigmoidCap
from pallas_kernels.lm_head import reference

# (tokens, width, rows of the head, real vocabulary)
SHAPES = [
    (12, 8, 16, 16),  # aligned, no padding
    (7, 5, 13, 11),  # all odd, padding of 2
    (1, 3, 128, 1),  # one token, one real column: its loss is 0
    (33, 24, 300, 257),  # more columns than a tile of 256
]
SMALL = (12, 8, 19, 17)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
IMPLEMENTATIONS = ["fused", "xla"]


def inputs(n, c, v, vocab, dtype, seed=0):
    """x, w, targets, and the cotangents of the losses."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, c)), dtype)
    w = jnp.asarray(rng.standard_normal((v, c)) * 2 / np.sqrt(c), dtype)
    targets = jnp.asarray(rng.integers(0, vocab, n), jnp.int32)
    return x, w, targets, jnp.asarray(rng.standard_normal(n), jnp.float32)


def check(implementation, shape, dtype, cotangents=None, labels=None, plain_chunk=None, **how):
    """Losses, log-sum-exp and gradients, and exact zeros for padded rows. Return all of them.

    Args:
        cotangents: of the losses, or a function of a function and its arguments that returns those
            of all results; random ones of the losses if None.
        labels: targets and options of the loss; random targets without options if None.
    """
    *_, vocab = shape
    x, w, drawn, random = inputs(*shape, dtype)
    targets, options = labels or (drawn, {"vocab_size": vocab})

    def call(f, **how):
        return lambda x, w: tuple(jax.tree.leaves(f(x, w, targets, **options, **how)))

    def plain(x, w):
        """The logits in the inputs' own dtype, statistics in fp32."""

        def results(args):
            logits = jnp.matmul(args[0], w.T, precision="highest")
            losses, _, *lse = classifier.reference(logits, args[1], **options)
            return losses, *lse

        if plain_chunk is None:
            return results((x, targets))
        parts = (x.reshape(-1, plain_chunk, x.shape[1]), targets.reshape(-1, plain_chunk))
        return jax.tree.map(jnp.ravel, jax.lax.map(results, parts))

    f = call(linear_cross_entropy, implementation=implementation, precision="highest", **how)
    if callable(cotangents):
        directions = cotangents(f, (x, w))
    else:
        directions = (random if cotangents is None else cotangents,)
    how = {"directions": directions, "norms": (rms,), "eager": True}
    results, (dx, dw) = check_rule(f, plain, call(reference), (x, w), **how)
    assert results[0].dtype == jnp.float32 and dx.dtype == dw.dtype == dtype
    assert not np.asarray(dw[vocab:], np.float32).any(), "a padded row has a gradient"
    return results, (dx, dw)


GPT2 = (256, 768, 50304, 50257)
# The dtype changes casts alone: every dtype for one shape.
CASES = [
    *((shape, jnp.float32, None) for shape in SHAPES),
    *((SHAPES[1], dtype, None) for dtype in DTYPES[1:]),
    *((SMALL, dtype, chunk) for dtype, chunk in zip(DTYPES[:2], (1, 4), strict=True)),
]


@pytest.mark.parametrize(
    "implementation, shape, dtype, chunk",
    [
        *((implementation, *case) for implementation in IMPLEMENTATIONS for case in CASES),
        *on_gpu(
            *(("fused", GPT2, dtype, chunk) for dtype in DTYPES[:2] for chunk in (None, 64)),
            *(("xla", GPT2, jnp.bfloat16, None), ("xla", GPT2, jnp.float32, 64)),
        ),
    ],
)
def test_losses_and_gradients(implementation, shape, dtype, chunk):
    # XLA compiles the matmul of dx in a loop over chunks with other tiles than outside of it: on an
    # H100 its relative error is 4.1e-6, that of all rows at once 1.0e-6. Both sum in fp32.
    looped = shape == GPT2 and implementation == "xla" and dtype == jnp.float32
    check(implementation, shape, dtype, plain_chunk=chunk if looped else None, chunk=chunk)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_the_fused_back_end(dtype):
    """The gradients that the forward pass made: every token's cotangent is the same."""
    check("fused", SHAPES[3], dtype, jnp.full(33, 1 / 33, jnp.float32), chunk=11)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp32_weights_beside_bf16_tokens(implementation):
    """As rounded weights, but for the gradient: it is fp32, and not rounded on the way where the
    back end sums it."""
    x, w, targets, _ = inputs(33, 24, 300, 257, jnp.bfloat16)
    how = {"implementation": implementation, "chunk": 11, "vocab_size": 257}
    mean = lambda x, w: linear_cross_entropy(x, w, targets, **how).mean()
    run = jax.jit(jax.value_and_grad(mean, (0, 1)))
    loss, (dx, dw) = run(x, w)
    same_loss, (same_dx, finer_dw) = run(x, w.astype(jnp.float32) * (1 + 2**-11))  # rounds to w
    assert float(loss) == float(same_loss) and bool((dx == same_dx).all())
    assert (dx.dtype, dw.dtype, finer_dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(finer_dw, dw.astype(jnp.float32), rtol=2**-7, atol=1e-4)
    if implementation == "fused":
        assert bool((finer_dw.astype(jnp.bfloat16) == dw).all())
        assert bool((finer_dw != dw.astype(jnp.float32)).any())


def test_the_gradients_of_a_mean_take_three_products_a_chunk():
    """The branch that makes dW anew is gone when the compiler can see that all cotangents are
    equal; else it is there."""
    x, w, targets, weights = inputs(64, 8, 32, 30, jnp.float32)
    fused = functools.partial(linear_cross_entropy, implementation="fused", chunk=16, vocab_size=30)

    def text(loss, factor):
        run = jax.jit(jax.grad(lambda x, w, f: loss(fused(x, w, targets), f), (0, 1)))
        return run.lower(x, w, factor).compile().as_text()

    mean = text(lambda losses, scale: losses.mean() * scale, jnp.float32(2))
    assert "conditional" not in mean and mean.count(" dot(") == 3 * 4
    assert "conditional" in text(lambda losses, weights: (losses * weights).sum(), weights)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_the_mean_over_tokens_that_are_not_ignored(several, changed):
    """And another cotangent of one token. test_loss_options.py has other cotangents and caps."""
    *_, targets, _ = inputs(*SMALL, jnp.float32)
    options = {"vocab_size": 17, "ignore_index": -1}
    if several:  # of the changed token, one is ignored
        targets = jnp.stack([targets, targets[::-1].at[7:].set(-1), (targets + 5) % 17], 1)
        weights = {"target_weights": jnp.array([1, 0.5, -0.25])}
        options |= weights | {"softcap": SigmoidCap(6.0, 1.0, 2.0)}
    targets = targets.at[(ignored := jnp.array([0, 5, 11])),].set(-1)
    cotangents = jnp.full(12, 1 / 9).at[ignored].set(0)
    cotangents = cotangents.at[8].set(0.3) if changed else cotangents
    labels = targets, options
    (losses,), (dx, _) = check("fused", SMALL, jnp.float32, cotangents, labels, chunk=4)
    assert not losses[ignored].any() and not dx[ignored].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_definition(shape):
    *_, vocab = shape
    x, w, targets, _ = inputs(*shape, jnp.bfloat16)
    losses = reference(x, w, targets, vocab_size=vocab)
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64)[:vocab].T
    true = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(x)), targets]
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, true, rtol=0, atol=5e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunk_saves_memory(implementation):
    n, c, v = 512, 16, 4096
    arrays = (jnp.zeros((n, c)), jnp.zeros((v, c)))

    def temp_bytes(chunk):
        how = {"chunk": chunk, "implementation": implementation}
        f = lambda x, w: linear_cross_entropy(x, w, jnp.zeros(n, jnp.int32), **how).mean()
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # All logits are n·v·4 bytes; an eighth of them at a time, and little besides.
    assert temp_bytes(None) >= n * v * 4
    assert temp_bytes(64) < n * v * 4 / 2


def test_second_derivatives_of_the_fused_loss_name_it_and_say_what_to_do():
    """Of the weights, and of what scales the loss: the fused back end reads that as bits, which
    have no derivative."""
    x, w, targets, _ = inputs(*SMALL, jnp.float32)

    def size(factor, w, how="fused"):
        head = functools.partial(linear_cross_entropy, x, targets_N=targets, implementation=how)
        return jnp.linalg.norm(jax.grad(lambda w: factor * head(w).mean())(w))

    for argnum in (0, 1):
        message = "linear_cross_entropy: .*implementation='reference'"
        with pytest.raises(NotImplementedError, match=message):
            jax.grad(size, argnum)(2.0, w)
    slope = jax.grad(size)(2.0, w, "reference")
    np.testing.assert_allclose(slope, size(1.0, w, "reference"), rtol=1e-5)


def test_errors():
    x, w, targets, _ = inputs(12, 8, 16, 16, jnp.float32)
    dtypes = "w in x's dtype or float32, got float32, bfloat16"
    refused(linear_cross_entropy, x, w.astype(jnp.bfloat16), targets, match=dtypes)
    for chunk in (0, 5):
        message = f"12 tokens are not a multiple of chunk={chunk}"
        refused(linear_cross_entropy, x, w, targets, chunk=chunk, match=message)
    for vocab_size in (0, 17):
        message = rf"vocab_size ≤ V, got .* {vocab_size}"
        refused(linear_cross_entropy, x, w, targets, vocab_size=vocab_size, match=message)
    message = r"expected x \(N, C\), w \(V, C\), targets \(N,\)"
    for bad in (x[:, :7], w, targets), (x, w, targets[:11]), (x[0], w, targets), (x, w[0], targets):
        refused(linear_cross_entropy, *bad, match=message)
    for option, hint in (("reduction", "the loss of each token"), ("biases", "one of .'vocab_siz")):
        with pytest.raises(TypeError, match=f"linear_cross_entropy: unknown .* {option}: .*{hint}"):
            linear_cross_entropy(x, w, targets, **{option: None})


@pytest.mark.gpu
def test_only_a_chunk_of_logits_is_alive_on_the_gpu():
    """65,536 tokens of GPT-2 124M: all logits would be 6.1 GiB; inputs and results are counted
    apart."""
    sizes = ((65536, 768), jnp.bfloat16), ((50304, 768), jnp.bfloat16), ((65536,), jnp.int32)
    loss = lambda x, w, t: linear_cross_entropy(x, w, t, vocab_size=50257).mean()
    f = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*(jax.ShapeDtypeStruct(*s) for s in sizes))
    assert f.compile().memory_analysis().temp_size_in_bytes < 2.5 * 2**30
