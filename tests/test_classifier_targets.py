"""Several targets per row (multi-token prediction) in fused_classifier and linear_cross_entropy:
the equations in fp64, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from kernel_tools import triton_kernels, unchecked
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import fused_classifier, linear_cross_entropy, lm_head
from pallas_kernels.classifier import SigmoidCap, apply_softcap

BACKENDS = ["xla", "triton", "reference"]
WEIGHTS = (1.0, 0.5, -0.25)
IGNORE = -1
# (rows, columns, vocabulary)
SMALL = (9, 137, 101)
BLOCKS = (9, 9000, 8500)  # more than one block, the last one cut by the vocabulary


def inputs(shape, dtype, targets=3, seed=0):
    """Logits with NaN and infinities in the padding; targets; the losses' cotangent."""
    n, v, vocab_size = shape
    rng = np.random.default_rng(seed)
    logits = 4 * rng.standard_normal((n, v))
    logits[:, vocab_size:] = rng.choice([np.nan, np.inf, -np.inf, 7.0], (n, v - vocab_size))
    targets_NM = rng.integers(vocab_size, size=(n, targets))
    targets_NM[:5] = np.array(
        [
            [0, vocab_size - 1, 0],  # the same column twice
            [5, 5, 5],
            [IGNORE, 0, IGNORE],
            [IGNORE] * 3,
            [3, vocab_size, 1],  # no column of the vocabulary
        ]
    )[:, :targets]
    cotangent_N = rng.standard_normal(n)
    return (
        jnp.asarray(logits, dtype),
        jnp.asarray(targets_NM, jnp.int32),
        jnp.asarray(cotangent_N, jnp.float32),
    )


def exact(logits, targets_NM, weights, vocab_size, softcap):
    """Losses and dlogits in fp64, a term at a time."""
    x_NV = np.asarray(logits, np.float64)[:, :vocab_size]
    z_NV, slope_NV = x_NV, np.ones_like(x_NV)
    if softcap is not None:
        sigma = 1 / (1 + np.exp(-(x_NV + softcap.shift) / softcap.width))
        z_NV, slope_NV = softcap.scale * sigma, softcap.scale / softcap.width * sigma * (1 - sigma)
    exp_NV = np.exp(z_NV - z_NV.max(-1, keepdims=True))
    p_NV = exp_NV / exp_NV.sum(-1, keepdims=True)
    losses, dlogits = np.zeros(len(x_NV)), np.zeros(logits.shape)
    for n, targets in enumerate(np.asarray(targets_NM)):
        for target, weight in zip(targets, weights, strict=True):
            if target == IGNORE:
                continue
            known = 0 <= target < vocab_size
            losses[n] -= weight * np.log(p_NV[n, target]) if known else np.nan
            hit_V = np.arange(vocab_size) == target
            dlogits[n, :vocab_size] += weight * (p_NV[n] - hit_V) if known else np.nan
    dlogits[:, :vocab_size] *= slope_NV
    return losses, dlogits


@functools.cache
def plain(weights, vocab_size, softcap):
    """The textbook in fp32, its gradient by autodiff and rounded to the logits' dtype."""

    def losses(real_NV, targets_NM):
        z_NV = apply_softcap(real_NV, softcap)
        total = 0.0
        for weight, targets_N in zip(weights, targets_NM.T, strict=True):
            hit_NV = jax.nn.one_hot(targets_N, vocab_size) == 1
            term_N = jax.nn.logsumexp(z_NV, -1) - jnp.where(hit_NV, z_NV, 0.0).sum(-1)
            total += weight * jnp.where(targets_N == IGNORE, 0.0, term_N)
        return total

    @jax.jit
    def both(logits, targets_NM):
        real_NV = logits[:, :vocab_size].astype(jnp.float32)
        losses_N, pull = jax.vjp(lambda x: losses(x, targets_NM), real_NV)
        dlogits = pull(jnp.ones_like(losses_N))[0].astype(logits.dtype)
        return losses_N, jnp.pad(dlogits, ((0, 0), (0, logits.shape[1] - vocab_size)))

    return both


def check(implementation, shape, dtype, softcap):
    logits, targets_NM, cotangent_N = inputs(shape, dtype)
    vocab_size = shape[2]
    options = {"vocab_size": vocab_size, "softcap": softcap, "ignore_index": IGNORE}

    @jax.jit
    def run(logits, targets_NM, weights_M, cotangent_N):
        f = lambda x: fused_classifier(
            x, targets_NM, target_weights=weights_M, implementation=implementation, **options
        )
        losses, dlogits = f(logits)
        return losses, dlogits, jax.vjp(lambda x: f(x)[0], logits)[1](cotangent_N)[0]

    results = run(logits, targets_NM, jnp.array(WEIGHTS), cotangent_N)
    assert [x.dtype for x in results] == [jnp.float32, dtype, dtype]
    losses, dlogits, gradient = (np.asarray(x, np.float64) for x in results)
    true_losses, true_dlogits = exact(logits, targets_NM, WEIGHTS, vocab_size, softcap)
    np.testing.assert_array_equal(np.isnan(losses), np.isnan(true_losses))
    np.testing.assert_array_equal(np.isnan(dlogits), np.isnan(true_dlogits))
    assert np.isnan(losses[4]) and not np.isnan(losses[:4]).any()
    for zero in (losses[3], dlogits[3], gradient[3], dlogits[:, vocab_size:]):
        np.testing.assert_array_equal(zero, 0)

    rows = np.isfinite(true_losses)
    plain_losses, plain_dlogits = (
        np.asarray(x, np.float64)[rows]
        for x in plain(WEIGHTS, vocab_size, softcap)(logits, targets_NM)
    )
    g_N1 = np.asarray(cotangent_N, np.float64)[rows, None]
    rounded = np.asarray(jnp.asarray(g_N1 * plain_dlogits, dtype), np.float64)
    true_losses, true_dlogits = true_losses[rows], true_dlogits[rows]
    for norm in (rms, max_abs):
        assert_within_twice(losses[rows], plain_losses, true_losses, norm=norm, name="losses")
        assert_within_twice(dlogits[rows], plain_dlogits, true_dlogits, norm=norm, name="dlogits")
        assert_within_twice(
            gradient[rows], rounded, g_N1 * true_dlogits, norm=norm, name="gradient"
        )


@pytest.mark.parametrize("softcap", [None, SigmoidCap()], ids=str)
@pytest.mark.parametrize(
    "implementation, dtype",
    [(name, jnp.float32) for name in BACKENDS] + [("triton", jnp.bfloat16)],
)
def test_losses_and_gradient(implementation, dtype, softcap, triton_on_cpu):
    check(implementation, SMALL, dtype, softcap)


def test_several_blocks_of_columns(triton_on_cpu):
    check("triton", BLOCKS, jnp.bfloat16, SigmoidCap())


@pytest.mark.parametrize("implementation", BACKENDS)
def test_one_target_is_the_call_without_weights(implementation, triton_on_cpu):
    """Targets (N, 1) give the bits of targets (N,); a weight of 2, doubled results."""
    logits, targets_N1, _ = inputs(SMALL, jnp.float32, targets=1)
    options = {"vocab_size": 101, "softcap": 15.0, "ignore_index": IGNORE}
    f = functools.partial(fused_classifier, logits, implementation=implementation, **options)
    expected, same, doubled = jax.jit(
        lambda: (f(targets_N1[:, 0]), f(targets_N1), f(targets_N1, target_weights=[2]))
    )()
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    for found, right in zip(doubled, expected, strict=True):
        np.testing.assert_allclose(found, 2 * right, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_weights_default_to_one_and_may_be_mapped(implementation, triton_on_cpu):
    logits, targets_NM, _ = inputs(SMALL, jnp.float32)
    options = {"vocab_size": 101, "ignore_index": IGNORE, "implementation": implementation}
    f = lambda x, t, w=None: fused_classifier(x, t, target_weights=w, **options)
    two = lambda x: jnp.stack([x, x[::-1]])
    mapped_rows = two(logits), two(targets_NM), jnp.array(WEIGHTS)
    mapped_weights = logits, targets_NM, two(jnp.array(WEIGHTS))

    def pairs():
        """Equal results."""
        yield f(logits, targets_NM), f(logits, targets_NM, jnp.ones(3))
        for args, axes in ((mapped_rows, (0, 0, None)), (mapped_weights, (None, None, 0))):
            each = [
                f(*(x if axis is None else x[b] for x, axis in zip(args, axes, strict=True)))
                for b in range(2)
            ]
            yield jax.vmap(f, axes)(*args), jax.tree.map(lambda *x: jnp.stack(x), *each)

    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    for found, expected in jax.jit(lambda: list(pairs()))():
        jax.tree.map(same, found, expected)


def test_the_weights_are_constants():
    logits, targets_NM, _ = (x[:4] for x in inputs(SMALL, jnp.float32))  # the known targets
    w_VC, x_NC = jnp.ones((101, 4)), jnp.ones((4, 4))

    def classifier(weights_M, **how):
        options = {"vocab_size": 101, "ignore_index": IGNORE, "target_weights": weights_M}
        return fused_classifier(logits, targets_NM, **options, **how)[0].sum()

    def head(weights_M):
        return linear_cross_entropy(x_NC, w_VC, targets_NM, target_weights=weights_M).sum()

    for name, f in (("fused_classifier", classifier), ("linear_cross_entropy", head)):
        with pytest.raises(NotImplementedError, match=f"{name}: expected constant target_weights"):
            jax.eval_shape(jax.grad(f), jnp.array(WEIGHTS))
    in_reference = jax.jit(
        jax.value_and_grad(functools.partial(classifier, implementation="reference"))
    )
    value, gradient = in_reference(jnp.array(WEIGHTS))  # the loss is linear in the weights
    np.testing.assert_allclose(value, gradient @ jnp.array(WEIGHTS), rtol=1e-6)


def test_errors():
    logits, targets_NM, _ = inputs(SMALL, jnp.float32)
    message = r"expected targets \(N, M\) with M ≥ 1 and target_weights \(M,\), got "
    for targets, weights, shapes in (
        (targets_NM[:, 0], [1.0], r"\(9,\) and \(1,\)"),
        (targets_NM, [1.0, 2.0], r"\(9, 3\) and \(2,\)"),
        (targets_NM, [[1.0, 2.0, 3.0]], r"\(9, 3\) and \(1, 3\)"),
        (targets_NM[:, :0], None, r"\(9, 0\) and \(0,\)"),
    ):
        with pytest.raises(ValueError, match="fused_classifier: " + message + shapes):
            unchecked(fused_classifier)(logits, targets, target_weights=weights)
    with pytest.raises(ValueError, match="linear_cross_entropy: " + message):
        linear_cross_entropy(jnp.ones((9, 4)), jnp.ones((8, 4)), targets_NM, target_weights=[1.0])


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("ignore_index", [2**31, 2**40, -(2**31) - 1])
def test_an_ignore_index_that_is_no_int32_is_refused(ignore_index, implementation):
    options = {"ignore_index": ignore_index, "implementation": implementation}
    targets = jnp.zeros(3, jnp.int32)
    calls = {
        "fused_classifier": lambda: fused_classifier(jnp.ones((3, 7)), targets, **options),
        "linear_cross_entropy": lambda: linear_cross_entropy(
            jnp.ones((3, 4)), jnp.ones((7, 4)), targets, **options
        ),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=f"{name}: expected ignore_index .* got {ignore_index}"
        ):
            call()


@functools.cache
def head_results(implementation):
    """Losses and gradients of a head stored as (C, V), in chunks, for three cotangents.

    The first cotangent is that of a mean over the tokens that are not ignored; in the second, a
    token with an ignored target has another value.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x_NC, w_CV, mean_N = normal(12, 8), normal(8, 19), jnp.full(12, 0.1).at[5].set(0)
    targets_NM = jnp.asarray(rng.integers(0, 17, (12, 3)), jnp.int32)
    targets_NM = targets_NM.at[5].set(IGNORE).at[7:, 1].set(IGNORE)
    f = lm_head.reference
    if implementation != "reference":
        how = {"implementation": implementation, "chunk": 4, "precision": "highest"}
        f = functools.partial(linear_cross_entropy, **how)
    loss = {"vocab_size": 17, "softcap": SigmoidCap(6.0, 1.0, 2.0), "ignore_index": IGNORE}

    @jax.jit
    def run(cotangent_N, weights_M):
        g = lambda x, w: f(x, w.T, targets_NM, target_weights=weights_M, **loss)
        losses, pull = jax.vjp(g, x_NC, w_CV)
        return (losses, *pull(cotangent_N))

    cotangents = (mean_N, mean_N.at[8].set(0.3), normal(12))
    return [run(cotangent_N, jnp.array(WEIGHTS)) for cotangent_N in cotangents]


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_the_head(implementation):
    pairs = zip(head_results(implementation), head_results("reference"), strict=True)
    for found, expected in pairs:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
        assert found[0][5] == 0 and not np.asarray(found[1][5]).any()
        assert not np.asarray(found[2][:, 17:]).any()


@pytest.mark.parametrize("softcap", [None, SigmoidCap()], ids=str)
def test_two_programs_fill_an_sm(softcap):
    """At most 32 registers per thread on an H100; Triton 3.8 uses 48 without a soft cap."""
    most = 48 if softcap is None and triton.__version__.startswith("3.8.") else 32
    f = lambda x, t, w: fused_classifier(
        x, t, target_weights=w, vocab_size=50257, softcap=softcap, implementation="triton"
    )
    shapes = ((64, 50304), jnp.bfloat16), ((64, 3), jnp.int32), ((3,), jnp.float32)
    (kernel,) = triton_kernels(f, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert kernel.name == "several_targets_kernel"
    assert kernel.registers <= most and kernel.spill_bytes == 0


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("softcap", [None, SigmoidCap()], ids=str)
@pytest.mark.parametrize("shape", [(24, 50304, 50257), (21, 50257, 50257), SMALL], ids=str)
def test_triton_on_the_gpu(shape, softcap, dtype):
    check("triton", shape, dtype, softcap)


@pytest.mark.gpu
def test_the_same_each_time_on_the_gpu():
    """More rows than run at once; a target's column is stored twice, in order."""
    n, v = 1024, 50304
    logits = jax.random.normal(jax.random.key(0), (n, v), jnp.bfloat16)
    targets_NM = jnp.stack([jnp.arange(n) * 37, jnp.arange(n) * 41, jnp.arange(n)], 1)
    how = {"vocab_size": 50257, "softcap": SigmoidCap(), "target_weights": (1.0, 0.5, 0.25)}
    f = jax.jit(functools.partial(fused_classifier, **how))
    first, *others = (f(logits, targets_NM) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    in_xla = jax.jit(functools.partial(fused_classifier, implementation="xla", **how))
    expected = jnp.take_along_axis(in_xla(logits, targets_NM)[1], targets_NM, 1)
    found = jnp.take_along_axis(first[1], targets_NM, 1)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2**-7
    )


@pytest.mark.gpu
def test_the_speedruns_head_on_the_gpu():
    """Losses and gradients of a head stored as (768, 50304), in bf16, against the reference."""
    keys = jax.random.split(jax.random.key(0), 3)
    x_NC = jax.random.normal(keys[0], (512, 768), jnp.bfloat16)
    w_CV = 0.05 * jax.random.normal(keys[1], (768, 50304), jnp.float32)
    targets_NM = jax.random.randint(keys[2], (512, 3), -1, 50257)
    loss = {"vocab_size": 50257, "softcap": SigmoidCap(), "ignore_index": IGNORE}
    loss |= {"target_weights": (1.0, 0.5, 0.25)}

    def run(f, x_NC, w_CV):
        mean = lambda x, w: f(x, w.T, targets_NM, **loss).mean()
        return jax.jit(jax.value_and_grad(mean, (0, 1)))(x_NC, w_CV)

    ours = functools.partial(linear_cross_entropy, implementation="fused", chunk=256)
    in_xla = functools.partial(linear_cross_entropy, implementation="xla")
    found, plain, right = (run(f, x_NC, w_CV) for f in (ours, in_xla, lm_head.reference))
    for name, *three in zip(("dx", "dw"), found[1], plain[1], right[1], strict=True):
        assert_within_twice(*(np.asarray(a, np.float64) for a in three), norm=rms, name=name)
    np.testing.assert_allclose(found[0], right[0], rtol=1e-3)
    assert not np.asarray(found[1][1][:, 50257:]).any()
