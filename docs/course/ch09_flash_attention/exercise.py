"""Chapter 9: flash attention in Pallas, run by Pallas's interpreter on a CPU.

    S = Q Kᵀ / √D      P = exp(S − L) where the query sees the key, else 0      O = P V
    D_t = Σ_d dO · O   dV = Pᵀ dO    dS = P ∘ (dO Vᵀ − D_t)    dQ = dS K / √D    dK = dSᵀ Q / √D

Shapes: N heads of all sequences, T time, X queries of a tile, Y keys of a tile, D head dimension.
A program of the grid (N, T/TILE) computes one tile of one head.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import jax
import jax.numpy as jnp
from ch08_online_softmax.solution import finish, start, update
from jax.experimental import pallas as pl

TILE = 16


def tile(ref, i):
    """Load rows i·TILE … i·TILE + TILE − 1 of a head."""
    return ref[pl.ds(i * TILE, TILE)]


def masked_scores(q_XD, k_YD, i, j):
    """Return the scores of query tile i and key tile j: −∞ where the key is after the query."""
    raise NotImplementedError("TODO: compare the positions of the tile's queries and keys")


def forward_kernel(q_ref, k_ref, v_ref, out_ref, lse_ref):
    """Store O and L of query tile i, with the online softmax over key tiles 0…i."""
    raise NotImplementedError("TODO: jax.lax.fori_loop over the key tiles 0…i")


def tile_gradients(i, j, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref):
    """Return P and dS of query tile i and key tile j, computed again from Q, K and L."""
    raise NotImplementedError("TODO: P from the scores and L, then dP, then dS")


def dq_kernel(*refs):
    """Store dQ of query tile i: the sum of dS K over key tiles 0…i.

    refs: q, k, v, dout, lse and delta, then dq.
    """
    raise NotImplementedError("TODO: jax.lax.fori_loop over the key tiles 0…i")


def dkv_kernel(*refs):
    """Store dK and dV of key tile j: the sums over query tiles j, j + 1, …, the last.

    refs: q, k, v, dout, lse and delta, then dk and dv.
    """
    raise NotImplementedError("TODO: jax.lax.fori_loop over the query tiles from j on")


def launch(kernel, inputs, outputs):
    """Run a kernel on inputs of shape (N, T, …); it stores one tile of each output at a time."""
    heads, time = inputs[0].shape[:2]

    def whole(x):  # the block of an input: all rows of head n
        return pl.BlockSpec((None, *x.shape[1:]), lambda n, i: (n,) + (0,) * (x.ndim - 1))

    def one_tile(x):  # the block of an output: tile i of head n
        return pl.BlockSpec((None, TILE, *x.shape[2:]), lambda n, i: (n, i) + (0,) * (x.ndim - 2))

    return pl.pallas_call(
        kernel,
        grid=(heads, time // TILE),
        in_specs=[whole(x) for x in inputs],
        out_specs=[one_tile(x) for x in outputs],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in outputs],
        interpret=True,
    )(*inputs)


@jax.custom_vjp
def flash(q_NTD, k_NTD, v_NTD):
    """Return the causal attention of N heads; T is a multiple of TILE."""
    return flash_forward(q_NTD, k_NTD, v_NTD)[0]


def flash_forward(q_NTD, k_NTD, v_NTD):
    """Return O, and the arrays that the backward pass reads: Q, K, V, O and L."""
    lse_NT = jax.ShapeDtypeStruct(q_NTD.shape[:2], jnp.float32)
    out_NTD, lse_NT = launch(forward_kernel, (q_NTD, k_NTD, v_NTD), (q_NTD, lse_NT))
    return out_NTD, (q_NTD, k_NTD, v_NTD, out_NTD, lse_NT)


def flash_backward(saved, dout_NTD):
    """Return dQ, dK and dV."""
    q_NTD, k_NTD, v_NTD, out_NTD, lse_NT = saved
    delta_NT = (dout_NTD * out_NTD).sum(axis=-1)
    inputs = (q_NTD, k_NTD, v_NTD, dout_NTD, lse_NT, delta_NT)
    (dq_NTD,) = launch(dq_kernel, inputs, (q_NTD,))
    return (dq_NTD, *launch(dkv_kernel, inputs, (k_NTD, v_NTD)))


flash.defvjp(flash_forward, flash_backward)


def flash_attention(q_BTHD, k_BTHD, v_BTHD):
    """Return the causal attention of each head, like `causal_attention` of chapter 2."""
    batch, time, heads, head_dim = q_BTHD.shape

    def to_heads(x_BTHD):
        return x_BTHD.swapaxes(1, 2).reshape(batch * heads, time, head_dim)

    out_NTD = flash(to_heads(q_BTHD), to_heads(k_BTHD), to_heads(v_BTHD))
    return out_NTD.reshape(batch, heads, time, head_dim).swapaxes(1, 2)
