"""The 2× rule between two models or kernels, and the weights for it. PyTorch is not needed."""

import math

import numpy as np


def flatten(params: dict, prefix: str = "") -> dict:
    """{"blocks": {0: {"ln_1": {"bias": x}}}} → {"blocks.0.ln_1.bias": x}."""
    flat = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def random_params(params: dict, vocab_size: int, seed: int) -> dict:
    """Weights like `params` for comparing two models: every bias and scale off its start, attention
    far from uniform.

    GPT-2's own start would hide mistakes: biases are 0, scores are so small that a model with q and
    k swapped looks right.
    """
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        z = rng.standard_normal(shape)
        if name == "scale":
            z = 1 + 0.2 * z
        elif name == "bias":
            z = 0.1 * z
        elif name == "kernel":
            z = z / math.sqrt(shape[0])
        else:
            z = 0.3 * z
        if name == "wte":
            z[vocab_size:] = 0
        return z.astype(np.float32)

    return {
        k: random_params(v, vocab_size, seed + i + 1) if isinstance(v, dict) else draw(k, v.shape)
        for i, (k, v) in enumerate(sorted(params.items(), key=lambda item: str(item[0])))
    }


def max_abs(x) -> float:
    return float(np.abs(x).max())


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_within_twice(ours, theirs, exact, *, norm=max_abs, name=""):
    """The 2× rule: |ours − exact| < 2·|theirs − exact| + 1e-6, where `theirs` is PyTorch in the
    precision of ours.

    The 1e-6 is relative to the tensor where its numbers are below 1, or a small gradient would pass
    whatever it is. A tensor that is zero by symmetry has no size to be relative to.
    """
    ours, theirs, exact = (np.asarray(x, np.float64) for x in (ours, theirs, exact))
    assert ours.shape == theirs.shape == exact.shape, (name, ours.shape, theirs.shape, exact.shape)
    size = norm(exact) if norm(exact) > 1e-12 else 1.0
    found, allowed = norm(ours - exact), 2 * norm(theirs - exact) + 1e-6 * min(1.0, size)
    assert found < allowed, (
        f"{name}: off by {found:.3g}, allowed {allowed:.3g} (its size: {norm(exact):.3g})"
    )
