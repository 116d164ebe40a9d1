"""Chapter 11: NorMuon.

Shapes: P matrices packed side by side (3 for q|k|v, else 1), I inputs, O outputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ch05_adamw.solution import AdamState, adamw, clip, init_adam

# Coefficients a, b, c of each step of Polar Express (Amsel et al., 2025).
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class NorMuonState(NamedTuple):
    """Trees with a leaf for each kernel: the momentum, and the running mean squares of neurons."""

    momentum: dict
    variance: dict


class State(NamedTuple):
    """The state of `normuon_and_adamw`."""

    normuon: NorMuonState
    adam: AdamState


def unpack(kernel_IF, packed):
    """Return the matrices of a kernel (I, P·O), of shape (P, I, O)."""
    inputs, features = kernel_IF.shape
    return kernel_IF.reshape(inputs, packed, features // packed).swapaxes(0, 1)


def pack(matrices_PIO):
    """Return the kernel of the matrices: the inverse of `unpack`."""
    packed, inputs, outputs = matrices_PIO.shape
    return matrices_PIO.swapaxes(0, 1).reshape(inputs, packed * outputs)


def norm(x_PIO):
    """Return the Frobenius norm of each matrix, √(Σ x²), of shape (P, 1, 1)."""
    return jnp.sqrt(jnp.square(x_PIO).sum(axis=(1, 2), keepdims=True))


def orthogonalize(x_PIO):
    """Return approximately U Vᵀ of each matrix U Σ Vᵀ, by matmuls only.

    X ← X / (1.02·‖X‖ + 1e-6), then X ← a·X + b·(X Xᵀ)X + c·(X Xᵀ)²X with the coefficients of each
    step.
    """
    x_PIO = x_PIO / (1.02 * norm(x_PIO) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram_PII = x_PIO @ x_PIO.mT
        x_PIO = a * x_PIO + (b * gram_PII + c * gram_PII @ gram_PII) @ x_PIO
    return x_PIO


def neuron_axis(x_PIO):
    """Return the axis of the mean squares: the inputs, or the outputs where they are fewer."""
    return 1 if x_PIO.shape[2] >= x_PIO.shape[1] else 2


def normalize_neurons(x_PIO, variance, b2=0.95):
    """Divide each neuron by its running root mean square, and keep the norm of the matrix.

        V ← b2·V + (1 − b2)·mean(x²)      y = x / √max(V, 1e-10)      result = y · ‖x‖/‖y‖

    Returns:
        The result and the new V.
    """
    mean = jnp.square(x_PIO).mean(axis=neuron_axis(x_PIO), keepdims=True)
    variance = b2 * variance + (1 - b2) * mean
    y_PIO = x_PIO / jnp.sqrt(jnp.maximum(variance, 1e-10))
    return y_PIO * norm(x_PIO) / norm(y_PIO), variance


def normuon(grad_IF, momentum_IF, variance, kernel_IF, packed, lr, beta=0.95, weight_decay=0.0):
    """Return the kernel, the momentum and the variance after one update of NorMuon.

    m ← β·m + (1 − β)·g      u = β·m + (1 − β)·g
    x = normalize_neurons(orthogonalize(u))
    x ← x + decay·w where x·w ≥ 0
    w ← w − lr · √max(1, O/I) · x
    """
    momentum_IF = beta * momentum_IF + (1 - beta) * grad_IF
    u_PIO = unpack(beta * momentum_IF + (1 - beta) * grad_IF, packed)
    x_PIO, variance = normalize_neurons(orthogonalize(u_PIO), variance)
    w_PIO = unpack(kernel_IF, packed)
    x_PIO = x_PIO + jnp.where(x_PIO * w_PIO >= 0, weight_decay * w_PIO, 0.0)
    scale = max(1, x_PIO.shape[2] / x_PIO.shape[1]) ** 0.5
    return pack(w_PIO - lr * scale * x_PIO), momentum_IF, variance


def packed_of(path):
    """Return the number of matrices in the kernel of a path: 3 in c_attn (q|k|v), else 1."""
    return 3 if "c_attn" in jax.tree_util.keystr(path) else 1


def split(params):
    """Return the kernels of the blocks and the rest: two trees like params, with None elsewhere.

    `jax.tree.map` skips None.
    """

    def is_kernel(path):
        name = jax.tree_util.keystr(path)
        return "blocks" in name and "kernel" in name

    map_with_path = jax.tree_util.tree_map_with_path
    kernels = map_with_path(lambda path, p: p if is_kernel(path) else None, params)
    rest = map_with_path(lambda path, p: None if is_kernel(path) else p, params)
    return kernels, rest


def join(kernels, rest):
    """Return the whole tree: the inverse of `split`."""
    return jax.tree.map(
        lambda k, r: r if k is None else k, kernels, rest, is_leaf=lambda x: x is None
    )


def init_state(params):
    """Return the state before the first update: zeros."""
    kernels, rest = split(params)

    def zero_variance(path, kernel_IF):
        x_PIO = unpack(kernel_IF, packed_of(path))
        return jnp.zeros_like(x_PIO.sum(axis=neuron_axis(x_PIO), keepdims=True))

    variance = jax.tree_util.tree_map_with_path(zero_variance, kernels)
    momentum = jax.tree.map(jnp.zeros_like, kernels)
    return State(NorMuonState(momentum, variance), init_adam(rest))


def normuon_and_adamw(grads, state, params, lr, matrix_lr, matrix_weight_decay=0.0):
    """Return the parameters and the state after one update.

    The gradients are clipped together. The kernels of the blocks are updated by NorMuon with
    matrix_lr, all other parameters by AdamW with lr.
    """
    kernel_grads, rest_grads = split(clip(grads))
    kernels, rest = split(params)
    rest, adam = adamw(rest_grads, state.adam, rest, lr)

    def update(path, grad, momentum, variance, kernel):
        packed = packed_of(path)
        decay = matrix_weight_decay
        return normuon(grad, momentum, variance, kernel, packed, matrix_lr, weight_decay=decay)

    updated = jax.tree_util.tree_map_with_path(
        update, kernel_grads, state.normuon.momentum, state.normuon.variance, kernels
    )
    # The leaves of `updated` are tuples (kernel, momentum, variance): a tree of each.
    kernels, momentum, variance = jax.tree.transpose(
        jax.tree.structure(kernels), jax.tree.structure((0, 0, 0)), updated
    )
    return join(kernels, rest), State(NorMuonState(momentum, variance), adam)
