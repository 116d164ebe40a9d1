"""The FP8 matmuls of linear_cross_entropy, and the kernel that stores its gradient in FP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, rms
from fp8_tools import fake, power_of_two
from kernel_tools import triton_kernels
from rule_tools import in_fp64

from pallas_kernels import fused_classifier, linear_cross_entropy
from pallas_kernels.classifier import Loss, SigmoidCap, classify, reference
from pallas_kernels.gemm import (
    E4M3,
    E5M2,
    HEAD,
    quantize,
    scaled_matmul,
    stochastic_e5m2,
)

N, C, V, VOCAB = 40, 24, 160, 150
X_SCALE, D_SCALE = HEAD.activation_scale, HEAD.gradient_scale
CAP = SigmoidCap(scale=23.0, shift=5.0, width=7.5)


def inputs(seed=0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((N, C)), dtype)
    w = rng.standard_normal((V, C)) * 0.3
    w[VOCAB:] = 0
    return x, jnp.asarray(w, jnp.float32), jnp.asarray(rng.integers(0, VOCAB, N), jnp.int32)


def scale_of(w) -> float:
    return power_of_two(w, E4M3)


def exact(x, w, targets, softcap=None, w_scale=None):
    """Losses and gradients of their mean in fp64; with a scale, of rounded operands."""
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    if w_scale is not None:
        x, w = fake(x, X_SCALE, E4M3), fake(w, w_scale, E4M3)
    f = functools.partial(reference, vocab_size=VOCAB, softcap=softcap)
    losses, d = in_fp64(f, x @ w.T, targets)
    if w_scale is not None:
        d = fake(d, D_SCALE, E5M2)
    return losses, d @ w / N, d.T @ x / N


def from_rounded_logits(x, w, targets, softcap, w_scale):
    """The gradients in fp64, of rounded operands and the classifier's gradient in e5m2."""
    x8, w8 = quantize(x, X_SCALE).rows, quantize(w, w_scale).rows
    logits = scaled_matmul(x8, w8, 1 / (X_SCALE * w_scale), out_dtype=x.dtype)
    d = classify(Loss(VOCAB, softcap), logits, (targets, None), None, scale=D_SCALE)[1]
    d = np.asarray(d).astype(np.float64) / (D_SCALE * N)
    return d @ fake(w, w_scale, E4M3), d.T @ fake(x, X_SCALE, E4M3)


def with_gradients(x, w, targets, **how):
    f = functools.partial(linear_cross_entropy, vocab_size=VOCAB, **how)
    losses, pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
    return losses, *pull(jnp.full(N, 1 / N))


@pytest.mark.parametrize("softcap", [None, CAP], ids=["plain", "capped"])
def test_losses_and_gradients(softcap):
    """At most twice as far from fp64 as fp64 with rounded operands."""
    args = inputs()
    how, w_scale = {"numerics": "fp8", "chunk": 20, "softcap": softcap}, scale_of(args[1])
    found = jax.jit(functools.partial(with_gradients, **how))(*args)
    right, rounded = exact(*args, softcap), exact(*args, softcap, w_scale)
    for name, ours, theirs, truth in zip(
        ("losses", "dx", "dw"), found, rounded, right, strict=True
    ):
        assert_within_twice(ours, theirs, truth, norm=rms, name=name)
    # And near the rounded ones, with the same stochastically rounded gradient of the logits: only
    # bf16's rounding, and numbers next to a tie, differ.
    near = rounded[0], *from_rounded_logits(*args, softcap, w_scale)
    for name, ours, theirs, truth in zip(("losses", "dx", "dw"), found, near, right, strict=True):
        assert rms(np.asarray(ours, np.float64) - theirs) < 0.5 * rms(theirs - truth), name
    assert not found[2][VOCAB:].any()


def test_the_scale_of_the_weights_follows_them():
    x, w, targets = inputs()
    assert HEAD.weight(w).scale.value == scale_of(w)
    assert HEAD.weight(w * 2.0**-20).scale.value == scale_of(w) * 2**20
    assert np.isfinite(with_gradients(x, w * 2.0**-20, targets, numerics="fp8")[0]).all()


def test_different_cotangents():
    """dW is computed again, in bf16."""
    x, w, targets = inputs()
    g = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1, N), jnp.float32)

    def dw(**how):
        f = lambda w: linear_cross_entropy(x, w, targets, vocab_size=VOCAB, **how)
        return jax.vjp(f, w)[1](g)[0]

    np.testing.assert_array_equal(dw(numerics="fp8"), dw(implementation="fused"))


def in_fp32(call):
    """`_triton.call` with fp32 results in place of FP8."""

    def wide(*args, out, **options):
        return call(*args, out=[jax.ShapeDtypeStruct(o.shape, jnp.float32) for o in out], **options)

    return wide


def check_classifier(monkeypatch, rows, columns, vocab, dtype, softcap, weights, options):
    """The gradient that the kernel stores in fp32, rounded once, stochastically, by the bits of
    `stochastic_e5m2`; beyond the range, its end. NaN and ignored rows too. Return the logits, the
    targets, and the losses and the gradient for each scale."""
    from pallas_kernels import _triton

    rng = np.random.default_rng(0)
    logits = jnp.asarray(5 * rng.standard_normal((rows, columns)), dtype).at[:, vocab:].set(jnp.nan)
    targets = jnp.asarray(rng.integers(0, vocab, (rows, 2)), jnp.int32)
    targets = targets.at[0].set(-1).at[1].set(vocab + 43)  # ignored, and no column
    weights_M = None if weights is None else jnp.asarray(weights, jnp.float32)
    targets = targets[:, 0] if weights is None else targets
    results = {}
    for scale in (512.0, 2.0**17):
        f = functools.partial(classify, Loss(vocab, softcap, -1, **options), scale=scale)
        args = logits, (targets, None), weights_M
        losses, found, _ = jax.jit(f)(*args)
        with monkeypatch.context() as patch:
            patch.setattr(_triton, "call", in_fp32(_triton.call))
            same_losses, scaled, _ = jax.jit(lambda *args, f=f: f(*args))(*args)
        np.testing.assert_array_equal(losses, same_losses)
        found, expected = (
            np.asarray(x).astype(np.float32)
            for x in (found, stochastic_e5m2(scaled.clip(-57344, 57344)))
        )
        np.testing.assert_array_equal(found, expected)
        assert np.isnan(losses[1]) and np.isnan(found[1, :vocab]).all() and not found[0].any()
        results[scale] = losses, scaled
    return logits, targets, results


CLASSIFIERS = pytest.mark.parametrize(
    "softcap, weights, options",
    [
        *((None, None, {}), (None, (1.0, 0.5), {}), (CAP, None, {}), (CAP, (1.0, 0.5), {})),
        (CAP, None, {"label_smoothing": 0.1, "z_loss": 1e-2}),
    ],
    ids=["plain", "plain, two targets", "capped", "capped, two targets", "smooth"],
)


@CLASSIFIERS
def test_the_classifier_kernel(triton_on_cpu, monkeypatch, softcap, weights, options):
    sizes = 5, 300, 257, jnp.float32
    logits, targets, results = check_classifier(monkeypatch, *sizes, softcap, weights, options)
    how = {"vocab_size": 257, "softcap": softcap, "ignore_index": -1, "target_weights": weights}
    how |= options
    losses, d = fused_classifier(logits, targets, implementation="triton", **how)
    for scale, (found, scaled) in results.items():
        np.testing.assert_array_equal(found, losses)
        # The exponents of exp2 are rounded differently.
        np.testing.assert_allclose(scaled, d * np.float32(scale), rtol=2e-6, atol=2e-6 * scale)


def test_the_classifier_kernel_with_large_logits(triton_on_cpu, monkeypatch):
    """The documented error: 2⁻²³ of the largest logit."""
    from pallas_kernels import _triton

    monkeypatch.setattr(_triton, "call", in_fp32(_triton.call))
    rng = np.random.default_rng(0)
    logits = np.float32(rng.integers(-64, 64, (4, 300)) / 8)  # exact, also plus 4,000
    targets = jnp.asarray(rng.integers(0, 300, 4), jnp.int32)
    f = functools.partial(classify, Loss(300), scale=512.0)
    _, small, _ = f(jnp.asarray(logits), (targets, None), None)
    _, large, _ = f(jnp.asarray(logits + 4000), (targets, None), None)
    tolerance = 2.0**-23 * 4000
    np.testing.assert_allclose(large, small, rtol=tolerance, atol=512 * 1e-6)
    assert np.abs(np.asarray(large) / np.asarray(small) - 1).max() > tolerance / 100


def test_errors_of_the_gradient_average_out():
    """Sums over rows with nearly equal probabilities, against the same with the nearest numbers."""
    rng = np.random.default_rng(0)
    n, v, scale = 4096, 200, 512.0
    logits = jnp.asarray(rng.standard_normal(v) + 0.01 * rng.standard_normal((n, v)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, v, n), jnp.int32)
    d = np.asarray(fused_classifier(logits, targets, implementation="xla")[1], np.float64)
    stochastic = np.asarray(classify(Loss(v), logits, (targets, None), None, scale=scale)[1])
    found = (stochastic.astype(np.float64) / scale).sum(0)
    nearest = fake(d, scale, E5M2).sum(0)
    assert rms(found - d.sum(0)) < 0.1 * rms(nearest - d.sum(0))


@pytest.mark.parametrize(
    "softcap, columns, capability",
    [
        *((softcap, 50304, capability) for softcap in (None, CAP) for capability in (89, 90, 100)),
        *((softcap, 50257, 90) for softcap in (None, CAP)),
        (None, 50304, 120),
    ],
)
def test_the_compiled_classifier(softcap, columns, capability):
    """Two numbers per conversion. On an SM with 64 warps, two programs of 32."""
    f = functools.partial(classify, Loss(50257, softcap), weights_M=None, scale=512.0)
    shapes = (
        jax.ShapeDtypeStruct((64, columns), jnp.bfloat16),
        (jax.ShapeDtypeStruct((64,), jnp.int32), None),
    )
    jax.clear_caches()  # a cached trace of another capability launches nothing
    (kernel,) = triton_kernels(f, *shapes, capability=capability)
    assert kernel.name == "classifier_kernel" and kernel.spill_bytes == 0
    assert "cvt.rn.f16x2.f32" in kernel.ptx and "cvt.rn.f16.f32" not in kernel.ptx
    limited = softcap is None and columns == 50304 and capability in (90, 100)
    assert (".maxnreg 32" in kernel.ptx) == limited
    assert kernel.registers <= 32 or not limited


def test_the_limit_reaches_triton(monkeypatch):
    from pallas_kernels import _dispatch, _triton

    launched = []

    def launch(*args, out_type, **options):
        launched.append(options["backend_options"])
        return [jnp.zeros(shape.shape, shape.dtype) for shape in out_type]

    monkeypatch.setattr(_triton.jax_triton, "triton_call", launch)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    monkeypatch.setattr(_dispatch, "capability", lambda: (9, 0))
    logits, targets = jnp.zeros((1, 16384), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    for softcap in (None, CAP):
        classify(Loss(16384, softcap), logits, (targets, None), None, scale=1.0)
    assert launched == [_triton.OPTIONS | {"maxnreg": 32}, _triton.OPTIONS]


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@CLASSIFIERS
@pytest.mark.parametrize("columns", [50304, 50257], ids=["aligned", "unaligned"])
def test_the_classifier_on_the_gpu(monkeypatch, columns, softcap, weights, options):
    check_classifier(monkeypatch, 64, columns, 50257, jnp.bfloat16, softcap, weights, options)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, CAP], ids=["plain", "capped"])
def test_on_the_gpu(softcap):
    """Nine FP8 matmuls for three chunks, no other matmul but that of the branch for dW; results
    as of the CPU."""
    test_losses_and_gradients(softcap)
    n, v = 3 * 1024, 50304
    x, w = jax.ShapeDtypeStruct((n, 768), jnp.bfloat16), jax.ShapeDtypeStruct((v, 768), jnp.float32)
    targets = jax.ShapeDtypeStruct((n,), jnp.int32)

    def mean(x, w, targets):
        how = {"chunk": 1024, "softcap": softcap, "numerics": "fp8", "vocab_size": 50257}
        return linear_cross_entropy(x, w, targets, **how).mean()

    compiled = jax.jit(jax.grad(mean, (0, 1))).lower(x, w, targets).compile().as_text()
    assert compiled.count('custom_call_target="__cublas$lt$matmul$f8"') == 9
    assert compiled.count('custom_call_target="__cublas') == 9
    assert "__triton_gemm" not in compiled
