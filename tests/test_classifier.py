"""pallas_kernels.fused_classifier against the equations in fp64, by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from kernel_tools import triton_kernels, unchecked
from reference.torch_gpt2 import assert_within_twice, max_abs, rms

from pallas_kernels import _dispatch
from pallas_kernels.classifier import (
    SigmoidCap,
    apply_softcap,
    fused_classifier,
    reference,
)

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
CAPS = [None, 15.0, SigmoidCap(), SigmoidCap(scale=9, shift=-1, width=2)]
BACKENDS = ["xla", "triton", "reference"]
IGNORE = -100

# (rows, columns, vocabulary)
SHAPES = [
    (6, 128, 128),  # aligned, nothing padded
    (7, 137, 101),  # all odd: no row starts where a 16-byte load may
    (5, 1, 1),  # one class: no loss, no gradient
    (5, 9000, 8500),  # more than one block, the last one cut by the vocabulary
    (5, 9000, 300),  # a block of nothing but padding
]


def inputs(shape, dtype, seed=0, spread=3.0):
    """Logits with NaN and infinities in the padding, targets with the first, the last, an ignored
    and an unknown one; the losses' cotangent."""
    n, v, vocab_size = shape
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal((n, v))
    logits[:, vocab_size:] = rng.choice([np.nan, np.inf, -np.inf, 7.0], (n, v - vocab_size))
    targets = rng.integers(vocab_size, size=n)
    targets[:5] = [0, vocab_size - 1, IGNORE, vocab_size, -1]
    return (
        jnp.asarray(logits, dtype),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(rng.standard_normal(n), jnp.float32),
    )


def exact(logits, targets, vocab_size, softcap=None):
    """Losses and dlogits in fp64, from the equations, a row at a time."""
    logits = np.asarray(logits, np.float64)
    losses, dlogits = np.zeros(len(logits)), np.zeros_like(logits)
    for n, target in enumerate(np.asarray(targets)):
        if target == IGNORE:
            continue
        if not 0 <= target < vocab_size:
            losses[n] = dlogits[n, :vocab_size] = np.nan
            continue
        x = logits[n, :vocab_size]
        if softcap is None:
            z, slope = x, np.ones_like(x)
        elif isinstance(softcap, SigmoidCap):
            sigma = 1 / (1 + np.exp(-(x + softcap.shift) / softcap.width))
            z, slope = softcap.scale * sigma, softcap.scale / softcap.width * sigma * (1 - sigma)
        else:
            z, slope = softcap * np.tanh(x / softcap), 1 - np.tanh(x / softcap) ** 2
        weights = np.exp(z - z.max())
        losses[n] = np.log(weights.sum()) + z.max() - z[target]
        dlogits[n, :vocab_size] = (
            weights / weights.sum() - (np.arange(vocab_size) == target)
        ) * slope
    return losses, dlogits


def plain(logits, targets, vocab_size, softcap=None):
    """The textbook in fp32, its gradient rounded to the logits' dtype."""

    def losses(real):
        z = apply_softcap(real, softcap)
        hit = jax.nn.one_hot(targets, vocab_size, dtype=jnp.float32)
        return jax.nn.logsumexp(z, axis=-1) - jnp.where(hit == 1, z, 0.0).sum(-1)

    real = logits[:, :vocab_size].astype(jnp.float32)
    losses, pull = jax.vjp(losses, real)
    dlogits = pull(jnp.ones_like(losses))[0].astype(logits.dtype)
    return losses, jnp.pad(dlogits, ((0, 0), (0, logits.shape[1] - vocab_size)))


def check(implementation, shape, dtype, softcap=None, seed=0):
    logits, targets, cotangent = inputs(shape, dtype, seed)
    vocab_size = shape[2]
    f = functools.partial(
        fused_classifier,
        vocab_size=vocab_size,
        softcap=softcap,
        ignore_index=IGNORE,
        implementation=implementation,
    )

    @jax.jit
    def outputs_and_gradient(logits, targets, cotangent):
        losses, dlogits = f(logits, targets)
        losses_alone, pull = jax.vjp(lambda x: f(x, targets)[0], logits)
        return losses, dlogits, losses_alone, pull(cotangent)[0]

    losses, dlogits, losses_alone, gradient = outputs_and_gradient(logits, targets, cotangent)
    np.testing.assert_array_equal(losses, losses_alone)
    assert losses.dtype == jnp.float32 and dlogits.dtype == gradient.dtype == dtype
    losses, dlogits, gradient = (np.asarray(x, np.float64) for x in (losses, dlogits, gradient))
    true_losses, true_dlogits = exact(logits, targets, vocab_size, softcap)

    np.testing.assert_array_equal(np.isnan(losses), np.isnan(true_losses))
    np.testing.assert_array_equal(np.isnan(dlogits), np.isnan(true_dlogits))
    ignored = np.asarray(targets) == IGNORE
    for zero in (
        losses[ignored],
        dlogits[ignored],
        gradient[ignored],
        dlogits[:, vocab_size:],
        gradient[:, vocab_size:],
    ):
        np.testing.assert_array_equal(zero, 0)

    rows = np.isfinite(true_losses) & ~ignored
    plain_losses, plain_dlogits = (
        np.asarray(x, np.float64)[rows] for x in plain(logits, targets, vocab_size, softcap)
    )
    g = np.asarray(cotangent, np.float64)[rows, None]
    for norm in (rms, max_abs):
        assert_within_twice(losses[rows], plain_losses, true_losses[rows], norm=norm, name="losses")
        assert_within_twice(
            dlogits[rows], plain_dlogits, true_dlogits[rows], norm=norm, name="dlogits"
        )
        rounded = np.asarray(jnp.asarray(g * plain_dlogits, dtype), np.float64)
        assert_within_twice(
            gradient[rows], rounded, g * true_dlogits[rows], norm=norm, name="gradient"
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_outputs_and_gradient(implementation, dtype, shape, triton_on_cpu):
    check(implementation, shape, dtype)


@pytest.mark.parametrize("softcap", CAPS[1:], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", BACKENDS)
def test_softcaps(implementation, dtype, softcap, triton_on_cpu):
    check(implementation, SHAPES[1], dtype, softcap)


@settings(max_examples=5, deadline=None)
@given(
    n=st.integers(5, 9), v=st.integers(2, 40), padding=st.integers(0, 20), seed=st.integers(0, 99)
)
def test_drawn_shapes(n, v, padding, seed):
    check("xla", (n, v + padding, v), jnp.bfloat16, seed=seed)


@pytest.mark.parametrize("softcap", CAPS, ids=str)
def test_reference_is_the_definition(softcap):
    logits, targets, _ = inputs(SHAPES[1], jnp.bfloat16)
    losses, dlogits = reference(
        logits, targets, vocab_size=101, softcap=softcap, ignore_index=IGNORE
    )
    true_losses, true_dlogits = exact(logits, targets, 101, softcap)
    assert losses.dtype == dlogits.dtype == jnp.float32
    np.testing.assert_allclose(losses, true_losses, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dlogits, true_dlogits, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_row_of_gradients_sums_to_zero(implementation, triton_on_cpu):
    logits, _, _ = inputs((5, 333, 333), jnp.float32)
    _, dlogits = fused_classifier(
        logits, jnp.arange(5, dtype=jnp.int32), implementation=implementation
    )
    np.testing.assert_allclose(np.asarray(dlogits, np.float64).sum(-1), 0, atol=2e-6)


@pytest.mark.parametrize("implementation", BACKENDS)
def test_a_shift_changes_nothing(implementation, triton_on_cpu):
    logits, _, _ = inputs((5, 64, 64), jnp.float32)
    targets = jnp.arange(5, dtype=jnp.int32)
    here, there = (
        fused_classifier(x, targets, implementation=implementation) for x in (logits, logits + 1000)
    )
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-4)  # fp32 near 1000 is that coarse


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
        true_losses, true_dlogits = exact(logits, targets, 8, softcap)
    np.testing.assert_allclose(losses, true_losses, atol=3e-6)
    np.testing.assert_allclose(dlogits, true_dlogits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int16, jnp.int32])
def test_targets_of_any_integer_type(implementation, dtype, triton_on_cpu):
    logits, _, _ = inputs((5, 64, 64), jnp.float32)
    found, wanted = (
        fused_classifier(
            logits, jnp.arange(5, dtype=t), ignore_index=3, implementation=implementation
        )
        for t in (dtype, jnp.int32)
    )
    np.testing.assert_array_equal(found[1], wanted[1])
    assert found[0][3] == 0


@pytest.mark.parametrize("implementation", BACKENDS)
def test_under_the_transformations(implementation, triton_on_cpu):
    """vmap over logits, targets and both; checkpoint; shard_map over two devices."""
    f = functools.partial(fused_classifier, vocab_size=60, implementation=implementation)
    logits, _, _ = inputs((6, 64, 60), jnp.float32)
    logits_BNV, targets_BN = logits.reshape(2, 3, 64), jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)

    for in_axes in ((0, 0), (0, None), (None, 0)):
        args = [
            x if axis == 0 else x[0]
            for x, axis in zip((logits_BNV, targets_BN), in_axes, strict=True)
        ]
        found = jax.jit(jax.vmap(f, in_axes))(*args)
        for b in range(2):
            one = f(*(x[b] if axis == 0 else x for x, axis in zip(args, in_axes, strict=True)))
            jax.tree.map(same, jax.tree.map(lambda batch, b=b: batch[b], found), one)

    mean = lambda x, t: f(x, t)[0].mean()
    gradient = jax.grad(mean)(logits, targets_BN.ravel())
    same(gradient, f(logits, targets_BN.ravel())[1] / 6)
    same(jax.jit(jax.grad(jax.checkpoint(mean)))(logits, targets_BN.ravel()), gradient)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )
    shards = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    same(
        jax.jit(jax.grad(lambda x, t: shards(x, t)[0].mean()))(logits, targets_BN.ravel()), gradient
    )


def test_the_gradient_is_not_differentiable():
    logits, targets, _ = inputs((5, 8, 8), jnp.float32)
    with pytest.raises(
        NotImplementedError, match="the gradient that it returns cannot itself be differentiated"
    ):
        jax.grad(lambda x: fused_classifier(x, targets)[1].sum())(logits)
    used = lambda x: (
        x.sum()
        + jax.lax.stop_gradient(fused_classifier(x, jnp.arange(5, dtype=jnp.int32))[1]).sum()
    )
    np.testing.assert_array_equal(jax.grad(used)(logits), 1)


def test_nothing_in_nothing_out(triton_on_cpu):
    losses, dlogits = fused_classifier(
        jnp.zeros((0, 8)), jnp.zeros((0,), jnp.int32), implementation="triton"
    )
    assert losses.shape == (0,) and dlogits.shape == (0, 8)


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


def test_errors():
    logits, targets, _ = inputs((5, 8, 8), jnp.float32)
    with pytest.raises(
        ValueError, match=r"unknown implementation 'fast'; choose one of \['auto', "
    ):
        fused_classifier(logits, targets, implementation="fast")
    with pytest.raises(
        ValueError, match="'triton' needs an NVIDIA GPU, and the default device is a cpu; .*'xla'"
    ):
        fused_classifier(logits, targets, implementation="triton")
    with pytest.raises(ValueError, match=r"0 < vocab_size ≤ V, got \(5, 8\), \(5,\), 9"):
        fused_classifier(logits, targets, vocab_size=9)
    for implementation in ("auto", "reference"):
        with pytest.raises(ValueError, match="a softcap's scale and width are positive, got -1"):
            fused_classifier(logits, targets, softcap=-1.0, implementation=implementation)
    with pytest.raises(
        ValueError, match="expected float32, bfloat16 or float16 logits, got float8_e4m3fn"
    ):
        fused_classifier(logits.astype(jnp.float8_e4m3fn), targets)
    # jaxtyping refuses first under pytest; without it the function itself does.
    for bad, message in (
        ((logits, targets[:4]), r"targets \(N,\)"),
        ((logits[None], targets[None]), r"logits \(N, V\), .* got \(1, 5, 8\)"),
        ((logits[0], targets), r"logits \(N, V\), .* got \(8,\)"),
        ((logits, targets.astype(jnp.float32)), "integer targets"),
    ):
        with pytest.raises((ValueError, TypeError)):
            fused_classifier(*bad)
        with pytest.raises(ValueError, match=message):
            unchecked(fused_classifier)(*bad)


def test_auto(monkeypatch):
    assert _dispatch.select("fused_classifier") == "xla"
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    assert _dispatch.select("fused_classifier") == "triton"


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("softcap", CAPS[:3], ids=str)
def test_compiles_without_spills(capability, softcap):
    logits = jax.ShapeDtypeStruct((64, 50304), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((64,), jnp.int32)
    f = functools.partial(
        fused_classifier, vocab_size=50257, softcap=softcap, implementation="triton"
    )
    (kernel,) = triton_kernels(f, logits, targets, capability=capability)
    assert kernel.spill_bytes == 0
    if softcap is None and capability == 90:
        assert (
            kernel.registers <= 32
            # with more, a multiprocessor holds one program instead of two: 98 % of the copy rate,
            # or 72 %
        )
    # Every load and store is one of 16 bytes, but for the target, its logit and the loss.
    accesses = [
        line for line in kernel.ptx.splitlines() if "ld.global" in line or "st.global" in line
    ]
    assert sum(".v4.b32" not in line for line in accesses) == 3 < len(accesses)


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

GPU_SHAPES = [
    (40, 50304, 50257),  # GPT-2's head
    (21, 50257, 50257),  # the same without padding: rows start anywhere
    (5, 131072, 131000),
    (64, 100, 90),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype, softcap",
    [
        *((shape, jnp.bfloat16, None) for shape in GPU_SHAPES),
        *((GPU_SHAPES[0], jnp.bfloat16, softcap) for softcap in CAPS[1:3]),
        (GPU_SHAPES[0], jnp.float32, None),
        (GPU_SHAPES[3], jnp.float32, CAPS[1]),
        (GPU_SHAPES[3], jnp.float16, CAPS[2]),
    ],
    ids=str,
)
def test_triton_on_the_gpu(shape, dtype, softcap):
    check("triton", shape, dtype, softcap)


@pytest.mark.gpu
def test_in_place_and_the_same_each_time():
    shape = (600, 50304, 50257)  # more rows than are worked on at once
    logits, targets = (
        jax.random.normal(jax.random.key(0), shape[:2], jnp.bfloat16),
        jnp.arange(600, dtype=jnp.int32),
    )
    f = jax.jit(functools.partial(fused_classifier, vocab_size=shape[2]), donate_argnums=0)
    compiled = f.lower(logits, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < logits.nbytes
    first, *others = (compiled(jnp.copy(logits), targets) for _ in range(3))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.gpu
def test_targets_that_begin_in_another_array():
    """The targets of one sequence: no multiple of 16 bytes from its beginning."""
    logits = jax.random.normal(jax.random.key(0), (64, 512), jnp.bfloat16)
    tokens = jnp.arange(65, dtype=jnp.int32)
    f = functools.partial(fused_classifier, vocab_size=512, implementation="triton")
    found = jax.jit(lambda logits, tokens: f(logits, tokens[1:]))(logits, tokens)
    jax.tree.map(np.testing.assert_array_equal, found, f(logits, jnp.arange(1, 65)))
