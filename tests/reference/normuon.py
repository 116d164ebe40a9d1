"""NorMuon and Polar Express from their equations: in NumPy float64, and in PyTorch."""

import math

import numpy as np
import torch

# Amsel et al., "The Polar Express", 2025, as modded-nanogpt prints them: not imported from gptjax.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(x, coefficients=POLAR_EXPRESS, steps=5, margin=1.02, rounded=lambda x: x):
    """The iteration in float64, from the equations, a matrix at a time.

    Args:
        rounded: applied to every matrix that is made.
    """
    x = np.asarray(x, np.float64)
    out = np.empty_like(x)
    for i in np.ndindex(x.shape[:-2]):
        tall = x.shape[-2] > x.shape[-1]
        y = rounded(x[i] / (np.sqrt((x[i] ** 2).sum()) * margin + 1e-6))
        y = y.T if tall else y
        for k in range(steps):
            a, b, c = coefficients[min(k, len(coefficients) - 1)]
            gram = rounded(y @ y.T)
            polynomial = rounded(a * np.eye(len(gram)) + b * gram + c * gram @ gram)
            y = rounded(polynomial @ y)
        out[i] = y.T if tall else y
    return out


def neuron_norm(v_IO, variance, b2):
    """The equation, of one matrix, in float64."""
    axis = 0 if v_IO.shape[1] >= v_IO.shape[0] else 1
    r = (v_IO**2).mean(axis, keepdims=True)
    variance = b2 * variance + (1 - b2) * r
    scaled = v_IO / np.sqrt(np.maximum(variance, 1e-10))
    return scaled * (np.linalg.norm(v_IO) / max(np.linalg.norm(scaled), 1e-10)), variance


@torch.no_grad()
def torch_step(w, g, m, variance, *, beta, lr, decay):
    """One update of the record's optimizer, in place, in the dtype of the weight.

    Args:
        w, g, m: a weight (outputs, inputs), its gradient and momentum.
        variance: mean squares of the longer axis' neurons, with the other axis of length 1.
        decay: the weight decay times the learning rate.
    """
    m.copy_(beta * m + (1 - beta) * g)
    v = (1 - beta) * g + beta * m
    v = v / (v.norm() * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = v @ v.T
        v = a * v + (b * gram + c * gram @ gram) @ v
    rows, columns = v.shape
    axis, length = (-1, columns) if rows >= columns else (-2, rows)
    r = (v**2).mean(axis, keepdim=True)
    variance.copy_(0.95 * variance + 0.05 * r)
    s = variance.clamp_min(1e-10).rsqrt()
    v = v * s * (v.norm() / (r * length * s**2).sum().sqrt().clamp_min(1e-10))
    lr = lr * math.sqrt(max(1, rows / columns))
    w -= w * (v * w >= 0) * decay * lr + v * lr


@torch.no_grad()
def torch_paper_step(w, g, m, variance, *, beta, b2, lr, decay):
    """One update of Li et al.'s NorMuon, in place, in the dtype of the weight.

    Args:
        w, g, m: a weight (outputs, inputs), its gradient and momentum.
        variance: mean squares of each output, (outputs, 1).
    """
    m.copy_(beta * m + (1 - beta) * g)
    v = (1 - beta) * g + beta * m
    tall = v.shape[0] > v.shape[1]
    v = v.T if tall else v
    v = v / (v.norm() + 1e-7)
    for _ in range(5):
        gram = v @ v.T
        v = 3.4445 * v + (-4.7750 * gram + 2.0315 * gram @ gram) @ v
    v = v.T if tall else v
    variance.copy_(b2 * variance + (1 - b2) * (v**2).mean(-1, keepdim=True))
    scaled = v / (variance.sqrt() + 1e-10)
    v = scaled * v.norm() / (scaled.norm() + 1e-10)
    w *= 1 - lr * decay
    w -= lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * v
