"""Layers shared by architectures: linear layer, embedding lookup, KV cache, ….

Shapes: B batch, T time, S cache positions, C channels, H heads, D head dimension, E = D/4,
L layers, K predicted tokens.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, PyTree

from gptjax.parallel import initial_sharding
from gptjax.precision import Precision
from pallas_kernels import flash_attention, linear
from pallas_kernels.classifier import to_int32


def normal(key: Array, shape: tuple[int, ...], *, std: float, dtype: jax.typing.DTypeLike) -> Array:
    """Return samples of N(0, std²), sharded as in `gptjax.parallel.initial_sharding`.

    The sampler runs unsharded on one device: a sharded sampler would differ in the last bits.
    """
    samples, sharding = _normal(key, shape, std=std, dtype=dtype), initial_sharding(shape)
    return samples if sharding is None else jax.device_put(samples, sharding)


@functools.partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _normal(key, shape, *, std, dtype):
    """Return samples of N(0, std²).

    The barrier keeps XLA from folding std into a constant of the sampler. Folding would change the
    last bit of the samples between executables.
    """
    samples = jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype))
    return samples * jnp.array(std, dtype)


def uniform(
    key: Array, shape: tuple[int, ...], *, std: float, dtype: jax.typing.DTypeLike
) -> Array:
    """Return uniform samples of mean 0, in `gptjax.parallel.initial_sharding`, as `normal` does."""
    samples, sharding = _uniform(key, shape, std=std, dtype=dtype), initial_sharding(shape)
    return samples if sharding is None else jax.device_put(samples, sharding)


@functools.partial(jax.jit, static_argnames=("shape", "std", "dtype"))
def _uniform(key, shape, *, std, dtype):
    samples = jax.lax.optimization_barrier(jax.random.uniform(key, shape, dtype, -1, 1))
    return samples * jnp.array(3**0.5 * std, dtype)


class Linear(nnx.Module):
    """Linear layer x W + b in x's dtype.

    kernel (in, out) and bias (out,) are stored in fp32, as are their gradients.

    Args:
        std: standard deviation of the initial kernel; the initial bias is 0.
        implementation: back end of the matmul, "auto" or "reference".
        fp8: whether the matmuls of the training step are in FP8.
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
        fp8: bool = False,
    ):
        dtype = precision.param_dtype
        self.kernel = nnx.Param(normal(rngs.params(), (in_dim, out_dim), std=std, dtype=dtype))
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if bias else None
        self.precision, self.implementation, self.fp8 = precision, implementation, fp8

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        return self.apply(x, None if self.bias is None else self.bias[...])

    def matmul(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        """Return x W without the bias, in x's dtype."""
        return self.apply(x, None)

    def apply(self, x, bias_O):
        how = {"implementation": self.implementation, "precision": self.precision.matmul}
        how["fp8"] = self.fp8
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
    frequency_E: np.ndarray, times: int
) -> tuple[Float[Array, "1 T E"], Float[Array, "1 T E"]]:
    """Return cosine and sine of time · frequency, times 0…T − 1, in fp32."""
    time_T = jnp.arange(times, dtype=jnp.float32)
    angle_TE = time_T[:, None] * jnp.asarray(frequency_E, jnp.float32)[None]
    return jnp.cos(angle_TE)[None], jnp.sin(angle_TE)[None]


def next_targets(targets_BT: Int[Array, "B T"], k: int, end: int) -> Int[Array, "N K"]:
    """Return K targets per position: the next K tokens, with `end` after the sequence."""
    t, later = targets_BT.shape[1], jnp.pad(targets_BT, ((0, 0), (0, k - 1)), constant_values=end)
    return jnp.stack([later[:, i : i + t] for i in range(k)], axis=-1).reshape(-1, k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class KVCache:
    """Keys and values of one block. `attend` replaces the arrays of the object in place.

    Attributes:
        k_BSHD, v_BSHD: keys and values of S positions.
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

    def positions(self, t: int) -> Int[Array, "B T"]:
        """Return the positions of the next T tokens of each sequence."""
        return self.length_B[:, None] + jnp.arange(t)[None]

    def attend(
        self,
        q_BTHD: Float[Array, "B T H D"],
        k_BTHD: Float[Array, "B T K D"],
        v_BTHD: Float[Array, "B T K D"],
        *,
        precision: jax.lax.PrecisionLike,
    ) -> Float[Array, "B T H D"]:
        """Append T keys and values, and return the causal attention of T queries over the cache.

        The query at position length + t attends to positions 0…length + t. With fewer key heads
        than query heads, consecutive query heads share a key head (grouped-query attention).
        """
        append = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        self.k_BSHD = append(self.k_BSHD, k_BTHD, self.length_B)
        self.v_BSHD = append(self.v_BSHD, v_BTHD, self.length_B)
        position_BT = self.positions(q_BTHD.shape[1])
        self.length_B = self.length_B + q_BTHD.shape[1]
        groups = q_BTHD.shape[2] // self.k_BSHD.shape[2]
        q_BTKGD = q_BTHD.reshape(*q_BTHD.shape[:2], -1, groups, q_BTHD.shape[3])
        scores_BKGTS = jnp.einsum(
            "btkgd,bskd->bkgts",
            q_BTKGD,
            self.k_BSHD,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        visible_BTS = jnp.arange(self.k_BSHD.shape[1])[None, None] <= position_BT[:, :, None]
        scores_BKGTS *= q_BTHD.shape[-1] ** -0.5
        scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(self.v_BSHD.dtype)
        y_BTKGD = jnp.einsum("bkgts,bskd->btkgd", weights_BKGTS, self.v_BSHD, precision=precision)
        return y_BTKGD.reshape(q_BTHD.shape)


class PromptCache:
    """Replacement of a block's `KVCache` during the pass over a prompt, which attends to itself
    only.

    Attributes:
        length_B: zeros, as in an empty `KVCache`.
        k_BTHD, v_BTHD: keys and values of the prompt, after `attend`.
    """

    def __init__(self):
        self.length_B = jnp.zeros((1,), jnp.int32)

    def positions(self, t: int) -> Int[Array, "1 T"]:
        """See `KVCache.positions`."""
        return jnp.arange(t)[None]

    def attend(
        self,
        q_BTHD: Float[Array, "B T H D"],
        k_BTHD: Float[Array, "B T K D"],
        v_BTHD: Float[Array, "B T K D"],
        *,
        precision: jax.lax.PrecisionLike,
    ) -> Float[Array, "B T H D"]:
        """Keep the keys and values, and return the causal attention. See `KVCache.attend`."""
        self.k_BTHD, self.v_BTHD = k_BTHD, v_BTHD
        return flash_attention(q_BTHD, k_BTHD, v_BTHD, causal=True, precision=precision)

    def extended(self, s: int, length_B: Int[Array, " B"]) -> KVCache:
        """Return a cache of S positions that begins with the prompt.

        Raises:
            TypeError: `attend` was not called.
        """
        if not hasattr(self, "k_BTHD"):
            raise TypeError(
                "expected the model's hidden(tokens, cache) to call cache[i].attend in block i; a "
                "model without a KV cache defines start_decoding and decode (docs/extending.md)"
            )
        pad = ((0, 0), (0, s - self.k_BTHD.shape[1]), (0, 0), (0, 0))
        return KVCache(jnp.pad(self.k_BTHD, pad), jnp.pad(self.v_BTHD, pad), length_B)
