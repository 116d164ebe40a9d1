"""NorMuon and Polar Express from their equations: in NumPy float64, and as a PyTorch optimizer."""

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


class TorchNorMuon:
    """The record's optimizer for one PyTorch weight (outputs, inputs), from the equations, in
    fp32."""

    def __init__(self, weight, lr, b2, wd):
        self.w, self.lr, self.b2, self.wd = weight, lr, b2, wd
        self.m, self.variance = torch.zeros_like(weight), None

    def step(self, k, g):
        beta = 0.85 + 0.1 * min(1.0, k / 300)
        self.m.lerp_(g, 1 - beta)
        x = g.lerp(self.m, beta)
        x = x / (x.norm() * 1.02 + 1e-6)
        wide = x.shape[0] <= x.shape[1]
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.T if wide else x.T @ x
            polynomial = b * gram + c * gram @ gram
            x = a * x + (polynomial @ x if wide else x @ polynomial)
        axis = 1 if x.shape[0] >= x.shape[1] else 0
        mean = x.square().mean(axis, keepdim=True)
        self.variance = (
            (1 - self.b2) * mean if self.variance is None else self.variance.lerp(mean, 1 - self.b2)
        )
        step_size = self.variance.clamp_min(1e-10).rsqrt()
        scaled = x * step_size
        v = scaled * (x.norm() / scaled.norm().clamp_min(1e-10))
        lr = float(self.lr(k)) * max(1.0, self.w.shape[0] / self.w.shape[1]) ** 0.5
        mask = v * self.w >= 0
        self.w.sub_(self.w * mask * (self.wd * float(self.lr(k))) * lr).sub_(v * lr)
