"""Label smoothing, z-loss, weights of rows and the log-sum-exp of `fused_classifier` and
`linear_cross_entropy`, by the 2× rule, and against PyTorch and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rule_tools import check as check_rule
from test_lm_head import check as check_lm_head

from pallas_kernels import classifier, fused_classifier, linear_cross_entropy
from pallas_kernels.classifier import SigmoidCap

IGNORE = -100
SMOOTH, Z, LSE = {"label_smoothing": 0.1}, {"z_loss": 0.02}, {"return_lse": True}
WEIGHTED = {"weights_N": "drawn"}
CAP = {"softcap": SigmoidCap(scale=9, shift=-1, width=2)}
SEVERAL = {"target_weights": (1.0, 0.5, -0.25)}
CASES = {
    "smooth": SMOOTH,
    "z-loss": Z,
    "weights": WEIGHTED,
    "lse": LSE,
    # Triton computes c·tanh(x/c) with an error of 2c·2⁻²⁴: a c of which that is little.
    "capped lse": {**LSE, "softcap": 5.0},
    "capped z-loss": {**Z, "softcap": 5.0},
    "all": {**SMOOTH, **Z, **LSE, **WEIGHTED, **CAP},
    "several": {**SMOOTH, **Z, **LSE, **WEIGHTED, **CAP, **SEVERAL},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def labels(n, vocab, options, seed=0):
    """Return targets, some ignored, and the options with arrays in place of lists."""
    rng = np.random.default_rng(seed)
    shape = (n, 3) if "target_weights" in options else (n,)
    targets = rng.integers(vocab, size=shape)
    targets[0] = IGNORE
    targets[1:3] = vocab - 1  # with several targets, three times the same
    if "weights_N" in options:
        options = options | {"weights_N": jnp.asarray(rng.uniform(-1, 2, n), jnp.float32)}
    return jnp.asarray(targets), {"vocab_size": vocab, "ignore_index": IGNORE} | options


def directions(f, args, only):
    """Return random directions in result `only`, and 0 in the others."""
    rng = np.random.default_rng(1)
    shapes = jax.tree.leaves(jax.eval_shape(f, *args))
    drawn = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in shapes]
    return tuple(d if i == only else jnp.zeros_like(d) for i, d in enumerate(drawn))


def check_classifier(implementation, dtype, shape, options):
    n, v, vocab = shape
    logits = 3 * np.random.default_rng(2).standard_normal((n, v))
    logits[:, vocab:] = np.nan
    args = (jnp.asarray(logits, dtype),)
    targets, options = labels(n, vocab, options)

    def call(f, **how):
        def results(logits):
            losses, dlogits, *lse = f(logits, targets, **options, **how)
            return losses, *lse, jax.lax.stop_gradient(dlogits)

        return results

    def plain(logits):
        """As the definition, but the gradient is rounded before and after the cotangent."""
        losses, *lse, dlogits = call(fused_classifier, implementation="reference")(logits)
        real = jnp.float32(logits[:, :vocab])
        gradient = jnp.float32(dlogits[:, :vocab])
        moved = (gradient * (real - jax.lax.stop_gradient(real))).sum(-1)
        return jax.lax.stop_gradient(losses) + moved, *lse, dlogits

    f = call(fused_classifier, implementation=implementation)
    for only in range(2 if "return_lse" in options else 1):
        found, (gradient,) = check_rule(
            f, plain, call(classifier.reference), args, directions=directions(f, args, only)
        )
        assert found[0].dtype == jnp.float32 and found[-1].dtype == gradient.dtype == dtype
        assert not found[0][0] and not found[-1][0].any() and not gradient[:, vocab:].any()


@every_case
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_classifier(implementation, options, triton_on_cpu):
    for dtype in (jnp.float32, jnp.bfloat16):
        check_classifier(implementation, dtype, (7, 137, 101), options)


@pytest.mark.parametrize("name", ["smooth", "several"])
def test_classifier_of_several_blocks(name, triton_on_cpu):
    check_classifier("triton", jnp.float32, (5, 9000, 8500), CASES[name])


def check_head(implementation, dtype, shape, options, **how):
    drawn = labels(shape[0], shape[3], options)
    for only in range(2 if "return_lse" in options else 1):
        cotangents = functools.partial(directions, only=only)
        (losses, *_), _ = check_lm_head(implementation, shape, dtype, cotangents, drawn, **how)
        assert not losses[0]


@pytest.mark.parametrize(
    "implementation, chunk, name",
    [
        *(("fused", 4, name) for name in CASES),
        *(("xla", None, name) for name in CASES),
        *((*how, name) for how in (("fused", None), ("xla", 4)) for name in ("lse", "several")),
    ],
)
def test_head(implementation, chunk, name):
    # "xla" adds the chunks' bf16 gradients of w in bf16.
    for dtype in (jnp.float32, jnp.bfloat16)[: 1 if (implementation, chunk) == ("xla", 4) else 2]:
        check_head(implementation, dtype, (12, 8, 19, 17), CASES[name], chunk=chunk)


def test_head_on_triton(triton_on_cpu):
    check_head("fused", jnp.float32, (12, 8, 19, 17), CASES["several"], chunk=4)


def test_the_reference_is_pytorchs_label_smoothing():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 20)).astype(np.float32)
    targets, _ = labels(6, 17, {})
    real = torch.tensor(logits[:, :17], requires_grad=True)
    how = {"label_smoothing": 0.1, "ignore_index": IGNORE}
    right = torch.nn.functional.cross_entropy(
        real, torch.tensor(np.asarray(targets)).long(), reduction="none", **how
    )
    right.sum().backward()
    for implementation in ("reference", "xla"):
        losses, dlogits = fused_classifier(
            jnp.asarray(logits), targets, vocab_size=17, implementation=implementation, **how
        )
        np.testing.assert_allclose(losses, right.detach(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(dlogits[:, :17], real.grad, rtol=1e-5, atol=1e-7)


def test_the_reference_is_the_definition():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 20)).astype(np.float32)
    targets, options = labels(6, 17, CASES["several"])
    losses, _, lse = classifier.reference(jnp.asarray(logits), targets, **options)
    scale, shift, width = CAP["softcap"]
    z = scale / (1 + np.exp(-(logits[:, :17].astype(np.float64) + shift) / width))
    true = np.log(np.exp(z).sum(-1))
    for n in range(1, 6):
        terms = [true[n] - 0.9 * z[n, t] - 0.1 * z[n].mean() for t in targets[n]]
        weighted = np.dot(SEVERAL["target_weights"], np.array(terms) + 0.02 * true[n] ** 2)
        np.testing.assert_allclose(losses[n], options["weights_N"][n] * weighted, rtol=1e-5)
    np.testing.assert_allclose(lse, true, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["triton", "xla", "reference", "fused"])
def test_lse_needs_no_valid_target(implementation, triton_on_cpu):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 17)), jnp.float32)
    targets = jnp.array([IGNORE, 17, 3])
    how = {"ignore_index": IGNORE, "return_lse": True, "implementation": implementation}
    if implementation == "fused":
        losses, lse = linear_cross_entropy(logits, jnp.eye(17), targets, **how)
    else:
        losses, _, lse = fused_classifier(logits, targets, **how)
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, -1), rtol=1e-6)


def test_an_unused_lse_adds_no_matmul():
    x, w, targets = jnp.ones((12, 8)), jnp.ones((16, 8)), jnp.zeros(12, jnp.int32)

    def mean(x, w):
        how = {"implementation": "fused", "chunk": 4, "return_lse": True}
        losses, lse = linear_cross_entropy(x, w, targets, **how)
        return losses.mean(), lse

    text = jax.jit(jax.grad(mean, (0, 1), has_aux=True)).lower(x, w).compile().as_text()
    assert text.count(" dot(") == 3 * 3


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_weights_may_be_mapped(implementation, triton_on_cpu):
    """Of rows, and of targets."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    args = draw(2, 6, 20), draw(2, 6), draw(2, 3)
    targets = jnp.arange(18).reshape(6, 3)
    how = {"implementation": implementation, "label_smoothing": 0.1, "return_lse": True}

    def f(logits, rows, of_targets):
        weights = {"weights_N": rows, "target_weights": of_targets}
        return fused_classifier(logits, targets, **weights, **how)

    for found, *each in zip(jax.vmap(f)(*args), *map(f, *args), strict=True):
        np.testing.assert_allclose(found, jnp.stack(each), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@every_case
def test_on_the_gpu(options):
    """In bf16, unpadded and padded."""
    check_classifier("triton", jnp.bfloat16, (21, 50257, 50257), options)
    check_head("fused", jnp.bfloat16, (256, 768, 50304, 50257), options, chunk=64)
