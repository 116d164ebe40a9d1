"""Layers shared by architectures: linear layer, embedding lookup, attention, KV cache, ….

Shapes: B batch, T time, S keys or cache positions, C channels, H query heads, K key and value heads
(in `next_targets`, predicted tokens), G = H/K, D head dimension, E = D/4, L layers.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, PyTree

from gptjax.precision import Precision
from pallas_kernels import cached_attention, flash_attention, linear
from pallas_kernels.attention import reference
from pallas_kernels.classifier import to_int32
from pallas_kernels.gemm import Numerics


@functools.partial(jax.jit, static_argnames=("shape", "std", "dtype", "uniform"))
def normal(
    key: Array,
    shape: tuple[int, ...],
    *,
    std: float,
    dtype: jax.typing.DTypeLike,
    uniform: bool = False,
) -> Array:
    """Return samples of N(0, std²), or uniform ones, on one device: a sharded sampler would differ
    in the last bits.

    The barrier keeps XLA from folding the factor into a constant of the sampler. Folding would
    change the last bit of the samples between executables.
    """
    sample = functools.partial(jax.random.uniform, minval=-1) if uniform else jax.random.normal
    factor = jnp.array(3**0.5 * std if uniform else std, dtype)
    return jax.lax.optimization_barrier(sample(key, shape, dtype)) * factor


class Block(nnx.Module):
    """Base class of a transformer block: fsdp gathers the parameters of one block at a time.

    Call a block through `gptjax.parallel.apply_block`.
    """


class Linear(nnx.Module):
    """Linear layer x W + b in x's dtype.

    kernel (in, out) and bias (out,) are stored in fp32, as are their gradients. The kernel is read
    in the compute dtype: in this dtype it is gathered from other devices.

    Args:
        std: standard deviation of the initial kernel; the initial bias is 0.
        implementation: back end of the matmul, "auto" or "reference".
        numerics: of the matmul in the training step; None: those of `precision.parts.matmuls`.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        std: float,
        precision: Precision,
        rngs: nnx.Rngs,
        bias: bool = True,
        implementation: str = "auto",
        numerics: str | Numerics | None = None,
    ):
        dtype = precision.param_dtype
        kernel_IO = normal(rngs.params(), (in_dim, out_dim), std=std, dtype=dtype)
        self.kernel = nnx.Param(kernel_IO, read_dtype=precision.compute_dtype)
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if bias else None
        self.numerics = numerics or precision.parts.matmuls
        self.implementation = implementation

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        return self.matmul(x, None if self.bias is None else self.bias[...])

    def matmul(
        self, x: Float[Array, "*B I"], bias_O: Float[Array, " O"] | None = None
    ) -> Float[Array, "*B O"]:
        """Return x W + bias_O, by default without a bias, in x's dtype."""
        how = {"implementation": self.implementation, "numerics": self.numerics}
        return linear(x, self.kernel[...], bias_O, **how)


def lookup(
    table_PC: Float[Array, "P C"], tokens_BT: Integer[Array, "B T"], *, vocab_size: int
) -> Float[Array, "B T C"]:
    """Return table[token] for each token, in the table's dtype.

    An id outside [0, vocab_size) results in NaN. The gather reads the fp32 table, so that its
    gradient, a scatter-add, accumulates in fp32.
    """
    # A narrower dtype could not represent the out-of-bounds index that results in NaN.
    tokens_BT = to_int32(tokens_BT)
    known_BT = (tokens_BT >= 0) & (tokens_BT < vocab_size)
    # `take` returns NaN out of bounds. A negative id would wrap, and an id in the padding reads
    # zeros.
    return jnp.take(table_PC, jnp.where(known_BT, tokens_BT, table_PC.shape[0]), axis=0)


def segment_positions(segment_ids_BT: Integer[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the position of each token in its segment, a run of equal ids, counted from 0."""
    t_1T = jnp.arange(segment_ids_BT.shape[1])[None]
    before_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    first_BT = jax.lax.cummax(jnp.where(segment_ids_BT != before_BT, t_1T, 0), axis=1)
    return t_1T - first_BT


def split_bank(bank: Float[Array, "L ..."]) -> list[Float[Array, "..."]]:
    """Return the slices along the first axis."""
    # The gradient of `jnp.split` is one concatenation; the gradient of slices is a sum of padded
    # arrays.
    return [part.squeeze(0) for part in jnp.split(bank, len(bank))]


def scalars(
    lambdas: nnx.Param, each: int, dtype: jax.typing.DTypeLike
) -> list[tuple[Float[Array, ""], ...]]:
    """Return the elements of a parameter, rounded to `dtype`, in tuples of length `each`."""
    return list(itertools.batched(split_bank(rounded(lambdas[...].reshape(-1), dtype)), each))


def rounded(x: Float[Array, "*S"], dtype: jax.typing.DTypeLike) -> Float[Array, "*S"]:
    """Return x rounded to a narrower dtype, in its own dtype. XLA may drop a pair of casts."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def weighted_sum(dtype: jax.typing.DTypeLike, *terms: tuple) -> Float[Array, "..."]:
    """Return Σ weight · x of pairs (weight, x), added in fp32 and rounded once."""
    return sum(weight * x.astype(jnp.float32) for weight, x in terms).astype(dtype)


def rotary_angles(
    frequency_E: np.ndarray, position_BT: Integer[Array, "#B T"]
) -> tuple[Float[Array, "#B T E"], Float[Array, "#B T E"]]:
    """Return cosine and sine of position · frequency, in fp32."""
    frequency_E = jnp.asarray(frequency_E, jnp.float32)
    angle_BTE = position_BT.astype(jnp.float32)[:, :, None] * frequency_E[None, None]
    return jnp.cos(angle_BTE), jnp.sin(angle_BTE)


def next_targets(targets_BT: Int[Array, "B T"], k: int, end: int) -> Int[Array, "N K"]:
    """Return K targets per position: the next K tokens, with `end` after the sequence."""
    t, later = targets_BT.shape[1], jnp.pad(targets_BT, ((0, 0), (0, k - 1)), constant_values=end)
    return jnp.stack([later[:, i : i + t] for i in range(k)], axis=-1).reshape(-1, k)


def attention_pattern(
    q_BTHD: Float[Array, "B T H D"], k_BTKD: Float[Array, "B T K D"], **options: Any
) -> Float[Array, "B H T T"]:
    """Return P of causal `flash_attention` in fp32, which no kernel stores: the attention of unit
    vectors as values.

    Args:
        options: window, scale, softcap and sinks_H of `flash_attention`.
    """
    b, t, k, _ = k_BTKD.shape
    unit_BTKT = jnp.broadcast_to(jnp.eye(t)[:, None], (b, t, k, t))
    return reference(q_BTHD, k_BTKD, unit_BTKT, **options).swapaxes(1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """Keys and values of one block. `attend` replaces the arrays of the object in place.

    A cache of a prompt has no arrays before the pass over the prompt, which attends to itself only.

    Attributes:
        k_BSHD, v_BSHD: keys and values of S positions; None in a cache of a prompt.
        length_B: number of filled positions of each sequence, int32. Other positions are masked.
    """

    # Not annotated as arrays: JAX also builds such pytrees with placeholders.
    k_BSHD: PyTree
    v_BSHD: PyTree
    length_B: PyTree

    @staticmethod
    def empty(shape: tuple[int, int, int, int], dtype: jax.typing.DTypeLike) -> "KVCache":
        """Return a cache of shape (B, S, H, D) without filled positions."""
        k_BSHD, v_BSHD = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return KVCache(k_BSHD, v_BSHD, jnp.zeros(shape[:1], jnp.int32))

    @staticmethod
    def of_prompt() -> "KVCache":
        """Return a cache for the pass over a prompt, from which `extended` makes a cache of S
        positions."""
        return KVCache(None, None, jnp.zeros((1,), jnp.int32))

    def positions(self, t: int) -> Int[Array, "#B T"]:
        """Return the positions of the next T tokens of each sequence."""
        return self.length_B[:, None] + jnp.arange(t)[None]

    def attend(
        self,
        q_BTHD: Float[Array, "B T H D"],
        k_BTKD: Float[Array, "B T K D"],
        v_BTKD: Float[Array, "B T K D"],
        *,
        window: int | None = None,
        **options: Any,
    ) -> Float[Array, "B T H D"]:
        """Append T keys and values; return the attention of T queries over the cache.

        The query at position length + t sees positions 0…length + t, or the last `window` of these.

        Args:
            options: scale, softcap, sinks_H, implementation and precision of `cached_attention`.
        """
        if self.k_BSHD is None:
            self.k_BSHD, self.v_BSHD = k_BTKD, v_BTKD
            return flash_attention(q_BTHD, k_BTKD, v_BTKD, window=window, **options)
        append = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        self.k_BSHD = append(self.k_BSHD, k_BTKD, self.length_B)
        self.v_BSHD = append(self.v_BSHD, v_BTKD, self.length_B)
        self.length_B = self.length_B + q_BTHD.shape[1]
        cache = self.k_BSHD, self.v_BSHD, self.length_B
        return cached_attention(q_BTHD, *cache, window=window, **options)

    def extended(self, s: int, length_B: Int[Array, " B"]) -> "KVCache":
        """Return a cache of S positions that begins with the prompt.

        Raises:
            TypeError: `attend` was not called.
        """
        if self.k_BSHD is None:
            raise TypeError(
                "expected the model's hidden(tokens, cache) to call cache[i].attend in block i; a "
                "model without a KV cache defines start_decoding and decode (docs/extending.md)"
            )
        pad = ((0, 0), (0, s - self.k_BSHD.shape[1]), (0, 0), (0, 0))
        return KVCache(jnp.pad(self.k_BSHD, pad), jnp.pad(self.v_BSHD, pad), length_B)
