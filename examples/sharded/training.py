"""Mesh, batch and training loop of the examples in this folder, for 1, 2, 4, … 32 devices:

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/sharded/plain_jax.py
"""

import argparse

import jax
import numpy as np
from jax.sharding import AxisType

from pallas_kernels import linear_cross_entropy
from pallas_kernels.extend import recorded

V, C, H, D, F = 256, 128, 4, 32, 512  # vocabulary, channels, heads, channels of a head, of the MLP
TOKENS_BT = np.int32((np.arange(16)[:, None] * 7 + np.arange(65)) % V)

_model = 2 - jax.device_count() % 2
MESH = jax.make_mesh(
    (jax.device_count() // _model, _model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)


def mean_loss(x_NC, w_VC, targets_N):
    """Cross-entropy of a head that is sharded over the vocabulary."""
    return linear_cross_entropy(x_NC, w_VC, targets_N).mean()


def train(step, state):
    """Call `state, loss = step(state, tokens)` five times. Print the back ends and the losses."""
    argparse.ArgumentParser(description="Train a transformer block for five steps.").parse_args()
    losses = []
    with recorded() as choices:
        for _ in range(5):
            state, loss = step(state, TOKENS_BT)
            losses.append(f"{loss:.6f}")
    print(f"{jax.device_count()} {jax.default_backend()} devices, mesh {dict(MESH.shape)}")
    print(*sorted({f"{choice.operation}: {choice.back_end}" for choice in choices}), sep=", ")
    print("losses", *losses)
