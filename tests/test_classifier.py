"""pallas_kernels.fused_classifier against the equations in fp64, by the 2× rule: of one target a
row, and of several (multi-token prediction)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import on_gpu, unchecked
from rule_tools import in_fp64, refused

from pallas_kernels import _dispatch, linear_cross_entropy
from pallas_kernels.classifier import (
    SigmoidCap,
    fused_classifier,
    reference,
)

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
CAPS = [None, 15.0, SigmoidCap(), SigmoidCap(scale=9, shift=-1, width=2)]
BACKENDS = ["xla", "triton", "reference"]
IGNORE = -100
WEIGHTS = (1.0, 0.5, -0.25)

# (rows, columns, vocabulary)
SHAPES = [
    (6, 128, 128),  # aligned, nothing padded
    (7, 137, 101),  # all odd: no row starts where a 16-byte load may
    (5, 1, 1),  # one class: no loss, no gradient
    (5, 9000, 8500),  # more than one block, the last one cut by the vocabulary
    (5, 9000, 300),  # a block of nothing but padding
]


def inputs(shape, dtype, weights=None, seed=0):
    """Logits with NaN and infinities in the padding; targets with the first, the last, an ignored
    and two unknown ones, or rows of several with those and a column twice; the losses'
    cotangent."""
    n, v, vocab_size = shape
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((n, v))
    logits[:, vocab_size:] = rng.choice([np.nan, np.inf, -np.inf, 7.0], (n, v - vocab_size))
    if weights is None:
        targets = rng.integers(vocab_size, size=n)
        targets[:5] = [0, vocab_size - 1, IGNORE, vocab_size, IGNORE - 1]
    else:
        targets = rng.integers(vocab_size, size=(n, 3))
        rows = [[0, vocab_size - 1, 0], [5, 5, 5], [IGNORE, 0, IGNORE], [IGNORE] * 3]
        targets[:5] = [*rows, [3, vocab_size, 1]]  # the last is no column of the vocabulary
    cotangent = jnp.asarray(rng.standard_normal(n), jnp.float32)
    return jnp.asarray(logits, dtype), jnp.asarray(targets, jnp.int32), cotangent


def check(implementation, dtype, shape, softcap=None, weights=None):
    logits, targets, cotangent = inputs(shape, dtype, weights)
    vocab_size = shape[2]
    how = {"vocab_size": vocab_size, "softcap": softcap, "ignore_index": IGNORE}
    if weights is not None:
        how["target_weights"] = jnp.asarray(weights, jnp.float32)
    f = functools.partial(fused_classifier, implementation=implementation, **how)

    @jax.jit
    def outputs_and_gradient(logits, targets, cotangent):
        losses_alone, pull = jax.vjp(lambda x: f(x, targets)[0], logits)
        return *f(logits, targets), losses_alone, pull(cotangent)[0]

    losses, dlogits, losses_alone, gradient = outputs_and_gradient(logits, targets, cotangent)
    np.testing.assert_array_equal(losses, losses_alone)
    assert losses.dtype == jnp.float32 and dlogits.dtype == gradient.dtype == dtype
    losses, dlogits, gradient = (np.asarray(x, np.float64) for x in (losses, dlogits, gradient))
    true_losses, true_dlogits = in_fp64(functools.partial(reference, **how), logits, targets)

    np.testing.assert_array_equal(np.isnan(losses), np.isnan(true_losses))
    np.testing.assert_array_equal(np.isnan(dlogits), np.isnan(true_dlogits))
    ignored = (np.asarray(targets).reshape(len(targets), -1) == IGNORE).all(-1)
    padding = np.s_[:, vocab_size:]
    assert not losses[ignored].any()
    assert not any(d[at].any() for d in (dlogits, gradient) for at in (ignored, padding))

    rows = np.isfinite(true_losses) & ~ignored
    plain = fused_classifier(logits, targets, implementation="reference", **how)
    plain_losses, plain_dlogits = (np.asarray(x, np.float64)[rows] for x in plain)
    g = np.asarray(cotangent, np.float64)[rows, None]
    rounded = np.asarray(jnp.asarray(g * plain_dlogits, dtype), np.float64)
    true_losses, true_dlogits = true_losses[rows], true_dlogits[rows]
    for norm in (rms, max_abs):
        assert_within_twice(losses[rows], plain_losses, true_losses, norm=norm, name="losses")
        assert_within_twice(dlogits[rows], plain_dlogits, true_dlogits, norm=norm, name="dlogits")
        assert_within_twice(gradient[rows], rounded, g * true_dlogits, norm=norm, name="gradient")


CASES = [
    # The dtype changes loads, stores and the blocks of a long row.
    *((jnp.bfloat16, shape) for shape in SHAPES),
    *((jnp.float32, shape) for shape in (SHAPES[1], SHAPES[3])),
    (jnp.float16, SHAPES[1]),
    *((dtype, SHAPES[1], softcap) for dtype in DTYPES[:2] for softcap in CAPS[1:]),
    # Several targets.
    *(
        (dtype, (9, 137, 101), softcap, WEIGHTS)
        for dtype in DTYPES[:2]
        for softcap in (None, SigmoidCap())
    ),
    (jnp.bfloat16, (9, 9000, 8500), SigmoidCap(), WEIGHTS),
]
GPT2 = (40, 50304, 50257)
UNPADDED = (21, 50257, 50257)  # rows start anywhere
FEW = (64, 100, 90)
GPU_CASES = [
    *((jnp.bfloat16, shape) for shape in (GPT2, UNPADDED, (5, 131072, 131000), FEW)),
    *((jnp.bfloat16, GPT2, softcap) for softcap in CAPS[1:3]),
    (jnp.float32, GPT2),
    (jnp.float32, FEW, CAPS[1]),
    (jnp.float16, FEW, CAPS[2]),
    (jnp.bfloat16, GPT2, SigmoidCap(), WEIGHTS),
    (jnp.bfloat16, UNPADDED, None, WEIGHTS),
    (jnp.float32, (9, 137, 101), SigmoidCap(), WEIGHTS),
]


# The reference is the yardstick: `test_reference_is_the_definition`.
@pytest.mark.parametrize(
    "back_end, case",
    [
        *((back_end, case) for back_end in BACKENDS[:2] for case in CASES),
        *on_gpu(*(("triton", case) for case in GPU_CASES)),
    ],
    ids=str,
)
def test_outputs_and_gradient(back_end, case, interpreter):
    check(back_end, *case)


def exact(logits, targets_NM, weights, softcap):
    """Losses and dlogits in fp64, from the equations, a term at a time."""
    x = np.asarray(logits, np.float64)
    z, slope = x, np.ones_like(x)
    if isinstance(softcap, SigmoidCap):
        sigma = 1 / (1 + np.exp(-(x + softcap.shift) / softcap.width))
        z, slope = softcap.scale * sigma, softcap.scale / softcap.width * sigma * (1 - sigma)
    elif softcap is not None:
        z, slope = softcap * np.tanh(x / softcap), 1 - np.tanh(x / softcap) ** 2
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    losses, dlogits = np.zeros(len(x)), np.zeros_like(x)
    for n, targets in enumerate(np.asarray(targets_NM)):
        for target, weight in zip(targets, weights, strict=True):
            known = 0 <= target < x.shape[1]
            if target != IGNORE:
                losses[n] -= weight * np.log(p[n, target]) if known else np.nan
                hit = np.arange(x.shape[1]) == target
                dlogits[n] += weight * (p[n] - hit) * slope[n] if known else np.nan
    return losses, dlogits


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["one target", "three"])
@pytest.mark.parametrize("softcap", CAPS, ids=str)
def test_reference_is_the_definition(softcap, weights):
    logits, targets, _ = inputs(SHAPES[1], jnp.bfloat16, weights)
    how = {"vocab_size": 101, "softcap": softcap, "ignore_index": IGNORE, "target_weights": weights}
    losses, dlogits = reference(logits, targets, **how)
    targets_NM = targets.reshape(len(targets), -1)
    true_losses, true_dlogits = exact(logits[:, :101], targets_NM, weights or (1.0,), softcap)
    assert losses.dtype == dlogits.dtype == jnp.float32 and not dlogits[:, 101:].any()
    np.testing.assert_allclose(losses, true_losses, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dlogits[:, :101], true_dlogits, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(implementation, dtype, triton_on_cpu):
    """−∞ is a probability of 0, also in the target's place; the lowest finite number everywhere is
    a uniform row; only −∞ is NaN."""
    low, inf = float(jnp.finfo(dtype).min), np.inf
    logits = jnp.asarray(
        [[-inf, 0, 0, -inf], [low] * 4, [-low, low, low, low], [-inf] * 4, [-inf, 0, 0, -inf]],
        dtype,
    )
    targets = jnp.asarray([1, 3, 0, 0, 0], jnp.int32)
    losses, dlogits = fused_classifier(logits, targets, implementation=implementation)
    np.testing.assert_allclose(losses, [np.log(2), np.log(4), 0, np.nan, inf], rtol=1e-6)
    wanted = [
        [0, -0.5, 0.5, 0],
        [0.25, 0.25, 0.25, -0.75],
        [0, 0, 0, 0],
        [np.nan] * 4,
        [-1, 0.5, 0.5, 0],
    ]
    np.testing.assert_allclose(np.asarray(dlogits, np.float32), wanted, atol=1e-6)


@pytest.mark.parametrize("softcap", CAPS[1:3], ids=str)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_extreme_logits_under_a_cap(implementation, softcap, triton_on_cpu):
    """What is far outside is at the cap, infinities too, and does not disturb its neighbours."""
    logits = jnp.asarray(
        [[-np.inf, -1e4, -1e4, 0, 3, 1e4, np.inf, -1e30], [0, 1, -700, 2, -700, 3, -700, -700]]
    )
    targets = jnp.asarray([3, 5], jnp.int32)
    losses, dlogits = fused_classifier(
        logits, targets, softcap=softcap, implementation=implementation
    )
    with np.errstate(over="ignore"):
        true_losses, true_dlogits = exact(logits, targets[:, None], (1.0,), softcap)
    np.testing.assert_allclose(losses, true_losses, atol=3e-6)
    np.testing.assert_allclose(dlogits, true_dlogits, rtol=1e-5, atol=1e-6)


BEYOND = {"uint32": [2**31, 2**32 - 100], "int64": [2**32 + 3, -(2**32)], "uint64": [2**40]}


@pytest.mark.parametrize("dtype", ["uint8", "int16", *BEYOND])
@pytest.mark.parametrize("implementation", [*BACKENDS, "fused"])
def test_targets_of_any_integer_type(implementation, dtype, triton_on_cpu):
    """One beyond int32 wraps neither to a column nor to ignore_index: its loss is NaN, and no other
    row's. "fused" is a back end of linear_cross_entropy."""
    logits, _, _ = inputs((8, 64, 64), jnp.float32)

    def losses(targets, ignored):
        how = {"ignore_index": ignored, "implementation": implementation}
        if implementation == "fused":
            return linear_cross_entropy(logits, jnp.eye(64, dtype=jnp.float32), targets, **how)
        return fused_classifier(logits, targets, **how)[0]

    with jax.enable_x64(True):
        targets = jnp.arange(8, dtype=dtype)
        expected = losses(targets.astype(jnp.int32), 3)
        np.testing.assert_array_equal(losses(targets, 3), expected)
        assert expected[3] == 0
        for target in BEYOND.get(dtype, ()):
            found = losses(targets.at[3].set(target), -100)
            np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [3])


def test_the_gradient_is_not_differentiable():
    logits, targets, _ = inputs((5, 8, 8), jnp.float32)
    message = "the gradient that it returns cannot itself be differentiated"
    dlogits = lambda x: fused_classifier(x, targets)[1].sum()
    with pytest.raises(NotImplementedError, match=message):
        jax.grad(dlogits)(logits)
    used = jax.grad(lambda x: x.sum() + jax.lax.stop_gradient(dlogits(x)))(logits)
    np.testing.assert_array_equal(used, 1)


def test_a_large_tanh_cap_is_computed_by_xla(triton_on_cpu):
    logits, targets, _ = inputs((5, 8, 8), jnp.float32)
    select = functools.partial(_dispatch.select, "fused_classifier")
    assert select(softcap=128.0) == "triton" and select(softcap=129.0) == "xla"
    assert select(softcap=SigmoidCap(scale=1000.0)) == "triton"
    with pytest.raises(ValueError, match="'triton' supports .* c of at most 128, not 10000"):
        fused_classifier(logits, targets, softcap=1e4, implementation="triton")
    found = fused_classifier(logits, targets, softcap=1e4)
    expected = fused_classifier(logits, targets, softcap=1e4, implementation="reference")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.parametrize("implementation", BACKENDS)
def test_one_target_is_the_call_without_weights(implementation, triton_on_cpu):
    """Targets (N, 1) give the bits of targets (N,); a weight of 2, doubled results. Weights that
    are not given are 1; test_loss_options.py maps over them."""
    logits, targets_N, _ = inputs((9, 137, 101), jnp.float32)
    options = {"vocab_size": 101, "softcap": 15.0, "ignore_index": IGNORE}
    f = functools.partial(fused_classifier, logits, implementation=implementation, **options)
    expected, same = f(targets_N), f(targets_N[:, None])
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    for found, right in zip(f(targets_N[:, None], target_weights=[2]), expected, strict=True):
        np.testing.assert_allclose(found, 2 * right, rtol=2e-6, atol=1e-6)
    _, targets_NM, _ = inputs((9, 137, 101), jnp.float32, WEIGHTS)
    same = f(targets_NM), f(targets_NM, target_weights=jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, *same)


def test_the_weights_are_constants():
    logits, targets_NM, _ = inputs((9, 137, 101), jnp.float32, WEIGHTS)
    known = logits[:4], targets_NM[:4]

    def classifier(weights_M, weights_N, implementation="auto"):
        options = {"vocab_size": 101, "ignore_index": IGNORE, "implementation": implementation}
        options |= {"target_weights": weights_M, "weights_N": weights_N}
        return fused_classifier(*known, **options)[0].sum()

    def head(weights_M, weights_N):
        arrays = jnp.ones((4, 4)), jnp.ones((101, 4)), targets_NM[:4]
        return linear_cross_entropy(*arrays, target_weights=weights_M, weights_N=weights_N).sum()

    weights = jnp.array(WEIGHTS), jnp.ones(4)
    message = "expected constant target_weights and weights_N"
    for name, f in (("fused_classifier", classifier), ("linear_cross_entropy", head)):
        for argument in (0, 1):
            with pytest.raises(NotImplementedError, match=f"{name}: {message}"):
                jax.eval_shape(jax.grad(f, argument), *weights)
    value, gradient = jax.value_and_grad(classifier)(*weights, "reference")
    np.testing.assert_allclose(value, gradient @ jnp.array(WEIGHTS), rtol=1e-6)  # linear in them


def test_errors():
    logits, targets, _ = inputs((5, 8, 8), jnp.float32)
    both = {"fused_classifier": (fused_classifier, (logits,))}
    both["linear_cross_entropy"] = (linear_cross_entropy, (jnp.ones((5, 4)), jnp.ones((8, 4))))
    for bad, how, message in (
        ((logits, targets), {"vocab_size": 9}, r"0 < vocab_size ≤ V, got \(5, 8\), \(5,\), 9"),
        ((logits, targets[:4]), {}, r"targets \(N,\)"),
        ((logits[0], targets), {}, r"logits \(N, V\), .* got \(8,\)"),
    ):
        refused(fused_classifier, *bad, match=message, **how)
    several = jnp.zeros((5, 3), jnp.int32)
    shapes = r"expected targets \(N, M\) with M ≥ 1 and target_weights \(M,\), got "
    for name, (f, arrays) in both.items():
        for wrong, how, message in (
            (targets, {"softcap": -1.0}, "a softcap's scale and width are positive, got -1"),
            *(
                (targets, {"ignore_index": index}, f"expected ignore_index .* got {index}")
                for index in (2**31, 2**40, -(2**31) - 1)
            ),
            (targets.astype(jnp.float32), {}, "expected integer targets, got float32"),
            (targets > 3, {}, "expected integer targets, got bool"),
            (targets, {"target_weights": [1.0]}, rf"{shapes}\(5,\) and \(1,\)"),
            (several, {"target_weights": [1.0, 2.0]}, rf"{shapes}\(5, 3\) and \(2,\)"),
            (several[:, :0], {}, rf"{shapes}\(5, 0\) and \(0,\)"),
            (
                targets,
                {"label_smoothing": 1.5},
                r".*label_smoothing in \[0, 1\] .* 1.5 and 0.0",
            ),
            (targets, {"z_loss": -1.0}, ".* a finite z_loss ≥ 0, got 0.0 and -1.0"),
            (targets, {"z_loss": np.nan}, ".* a finite z_loss ≥ 0, got 0.0 and nan"),
            (targets, {"weights_N": jnp.ones(4)}, r".*weights_N of shape \(N,\), got \(4,\)"),
        ):
            with pytest.raises(ValueError, match=f"{name}: {message}"):
                unchecked(f)(*arrays, wrong, **how)


def test_invalid_targets_are_one_number_that_is_not_ignored(triton_on_cpu):
    from pallas_kernels.classifier.triton import aligned

    targets = jnp.array([-(2**31), -2, -1, 0, 9, 10, 2**31 - 1])
    for ignored, expected in (
        (None, [-1, -1, -1, 0, 9, -1, -1]),
        (-1, [-2, -2, -1, 0, 9, -2, -2]),
        (-(2**31), [-(2**31), -1, -1, 0, 9, -1, -1]),
    ):
        np.testing.assert_array_equal(aligned(targets, 10, ignored), expected)


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_in_place():
    """More rows than are worked on at once; a target's column is stored twice, in order."""
    n, v = 1024, 50304
    logits = jax.random.normal(jax.random.key(0), (n, v), jnp.bfloat16)
    targets_NM = jnp.stack([jnp.arange(n) * 37, jnp.arange(n) * 41, jnp.arange(n)], 1)
    how = {"vocab_size": 50257, "softcap": SigmoidCap(), "target_weights": (1.0, 0.5, 0.25)}
    f = jax.jit(functools.partial(fused_classifier, **how), donate_argnums=0)
    compiled = f.lower(logits, targets_NM).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < logits.nbytes
    expected = fused_classifier(logits, targets_NM, implementation="xla", **how)
    found = compiled(jnp.copy(logits), targets_NM)
    jax.tree.map(np.testing.assert_array_equal, found, compiled(jnp.copy(logits), targets_NM))
    ours, theirs = (jnp.take_along_axis(x[1], targets_NM, 1) for x in (found, expected))
    np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=2**-7)


@pytest.mark.gpu
def test_targets_that_begin_in_another_array():
    """The targets of one sequence: no multiple of 16 bytes from its beginning."""
    logits = jax.random.normal(jax.random.key(0), (64, 512), jnp.bfloat16)
    f = functools.partial(fused_classifier, vocab_size=512, implementation="triton")
    tokens = jnp.arange(65, dtype=jnp.int32)
    found = jax.jit(lambda logits, tokens: f(logits, tokens[1:]))(logits, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, f(logits, tokens[1:]))
