"""Generation: draw tokens that continue a prompt, with a KV cache.

One pass over the prompts fills the cache. Then each step computes one token of each sequence.

Shapes: B sequences, T tokens of the longest prompt, V vocabulary, N new tokens.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Integer, Key, UInt32

from gptjax.models.base import Model, check_ids
from gptjax.models.layers import Linear
from pallas_kernels import DecoderCache, DecoderWeights, Filters, sample_token

STEPS = 32
"""Number of tokens in one call of the compiled decoding loop."""
UNROLLED = 4
"""Number of tokens in an iteration of the decoding loop with the Triton back end. XLA's small
operations, such as the loop counter, run once per iteration."""
SHORTEST_PROMPT = 16
"""Prompts are padded to a power of two of at least this length, so that few shapes are compiled."""
NO_TOKEN = -1
"""Padding after the last token of a sequence that has filled block_size."""


def generate(
    model: Model,
    prompt_BT: Integer[Array | np.ndarray, "B T"],
    *,
    max_new_tokens: int,
    lengths_B: Integer[Array | np.ndarray, " B"] | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    key: Key[Array, ""] | UInt32[Array, "2"],
    implementation: str = "auto",
) -> Int[Array, "B T+{max_new_tokens}"]:
    """Continue each prompt by `max_new_tokens` tokens.

    Each new token is drawn from softmax(logits / temperature), cut to the `top_k` likeliest tokens
    and renormalized. The result is cut to the nucleus: the fewest likeliest tokens whose
    probabilities sum to at least `top_p`.

    The computation is compiled once for each model shape, batch size, and power of two of the
    prompt's length and of the final length. Turning greedy decoding, `top_k` or `top_p` on or off
    also compiles. New values of the options, weights or key do not.

    Args:
        model: weights and shape; not changed.
        prompt_BT: ids in [0, vocab_size) of any integer type, at least one a row.
        max_new_tokens: at least 1; prompt and new tokens together fit into block_size.
        lengths_B: length of each prompt; later tokens of the row are ignored. None: T for each. The
            other prompts of a batch do not affect a prompt's continuation.
        temperature: at least 0. With 0, or below fp32's normal range, select the likeliest token,
            the lowest id of equals, for any filters and key.
        top_k: at least 1; None, or a number ≥ vocab_size, keeps every token.
        top_p: in (0, 1]; None or 1 keeps every token.
        key: `jax.random.key(seed)`. The random draw at a position depends on key, row and position
            only, so a longer generation begins with the shorter generation. Keys of other
            implementations than threefry2x32 are converted.
        implementation: back end of the decoding step, of `model.decode_kernel`: "auto", "triton"
            (kernels, GPT-2 only) or "xla".

    Returns:
        Prompt and new tokens, int32, shape (B, T + max_new_tokens). In a row with a shorter prompt,
        the new tokens follow the prompt, and zeros fill the end.

    Raises:
        ValueError: an argument outside its range; more tokens than block_size.
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "key": key}
    options |= {"lengths_B": lengths_B, "implementation": implementation}
    chunks = token_chunks(model, prompt_BT, max_new_tokens=max_new_tokens, **options)
    prompt_BT = np.asarray(prompt_BT)
    b, t = prompt_BT.shape
    if t + max_new_tokens > (block_size := model.config.block_size):
        raise ValueError(
            f"generate: {t} prompt tokens and {max_new_tokens} new ones are {t + max_new_tokens}, "
            f"more than block_size={block_size}; shorten the prompt or ask for at most "
            f"{max(block_size - t, 0)}"
        )
    new_BN, out_BT = np.concatenate([*chunks], axis=1), np.zeros((b, t + max_new_tokens), np.int32)
    for row, length in enumerate([t] * b if lengths_B is None else np.asarray(lengths_B)):
        out_BT[row, :length] = prompt_BT[row, :length]
        out_BT[row, length : length + max_new_tokens] = new_BN[row]
    return jnp.asarray(out_BT)


def token_chunks(
    model: Model,
    prompt_BT: Integer[Array | np.ndarray, "B T"],
    *,
    max_new_tokens: int,
    lengths_B: Integer[Array | np.ndarray, " B"] | None = None,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    key: Key[Array, ""] | UInt32[Array, "2"],
    implementation: str = "auto",
    steps: int = STEPS,
) -> Iterator[np.ndarray]:
    """Return an iterator over the new tokens of `generate`, `steps` at a time.

    The device computes a chunk while the caller uses the previous chunk. The second chunk is the
    exception: its launch would delay the first token, and therefore waits until the caller requests
    the second chunk.

    Args:
        max_new_tokens: at least 1. Unlike in `generate`, prompt and new tokens may exceed
            block_size: a sequence ends there, and the rest of its row is `NO_TOKEN`.
        steps: number of tokens of a chunk. The first chunk has one token; the last may be shorter.
        Others: see `generate`.

    Yields:
        int32, shape (B, N).

    Raises:
        ValueError: an argument outside its range; a prompt of block_size tokens.
    """
    prompt_BT, c = np.asarray(prompt_BT), model.config
    _check_prompt(prompt_BT, c.vocab_size, c.block_size)
    b, t = prompt_BT.shape
    lengths_B = np.full(b, t) if lengths_B is None else np.asarray(lengths_B)
    if lengths_B.shape != (b,) or lengths_B.min() < 1 or lengths_B.max() > t:
        raise ValueError(
            f"generate: expected lengths_B of {b} integers from 1 to {t}, one for each prompt, got "
            f"{lengths_B.tolist()}"
        )
    check_options(max_new_tokens, temperature, top_k, top_p, steps)
    # The shortest prompt has the most positions left.
    new = min(max_new_tokens, c.block_size - int(lengths_B.min()))
    how = {"filters": _filters(c.vocab_size, temperature, top_k, top_p), "key": _threefry(key)}
    how["sampler"] = "xla" if implementation == "xla" else "auto"
    return _chunks(model, prompt_BT, lengths_B, new, steps, implementation, how)


def _check_prompt(prompt_BT: np.ndarray, vocab_size: int, block_size: int) -> None:
    if 0 in (shape := prompt_BT.shape):
        raise ValueError(f"generate: the prompt is empty, shape {shape}; pass at least one token")
    check_ids("generate", prompt_BT)
    if shape[1] >= block_size:
        raise ValueError(
            f"generate: a prompt of {shape[1]} tokens leaves no room for a new one in "
            f"block_size={block_size}"
        )
    low, high = prompt_BT.min(), prompt_BT.max()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"generate: prompt ids must lie in [0, {vocab_size}), got {low}…{high}; "
            "was the prompt encoded with the model's tokenizer?"
        )


def check_options(
    max_new_tokens: int,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    steps: int = STEPS,
) -> None:
    """Raise ValueError for an option of `token_chunks` outside its range."""
    for name, value, valid, expected in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and at least 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or None"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "in (0, 1], or None"),
        ("steps", steps, steps >= 1, "at least 1"),
    ):
        if not valid:
            raise ValueError(f"generate: {name} must be {expected}, got {value!r}")


def _chunks(model, prompt_BT, lengths_B, new, steps, implementation, how) -> Iterator[np.ndarray]:
    """Yield the first new token of each prompt, then `steps` at a time, `new` in all."""
    (b, t), block_size = prompt_BT.shape, model.config.block_size
    padded = min(block_size, max(SHORTEST_PROMPT, _power_of_two(t)))
    # NumPy arrays: each eager JAX operation would call an executable.
    padded_BT = np.zeros((b, padded), np.int32)
    padded_BT[:, :t] = prompt_BT
    kernel = model.decode_kernel(b, implementation)
    params, structure = jax.tree.flatten(model)
    changed, weights = _prepared(structure, params, kernel)
    params = [old if new is None else new for old, new in zip(params, changed, strict=True)]
    own, *state, chunk_BN = _start(
        structure,
        params,
        weights,
        padded_BT,
        lengths_B.astype(np.int32),
        **how,
        positions=min(block_size, max(padded, _power_of_two(t + new))),
        implementation=kernel,
    )
    weights = own if weights is None else weights
    steps, done = min(steps, _power_of_two(new - 1)), 0

    def launch(at: int) -> Array | None:
        """Start the computation of the chunk after `at` tokens; return None at the end."""
        nonlocal state
        if at >= new:
            return None
        *state, chunk_BN = _advance(structure, params, weights, *state, **how, steps=steps)
        return chunk_BN

    while chunk_BN is not None:
        size = chunk_BN.shape[1]
        # The next chunk is launched before the wait for this chunk, except for the first chunk: the
        # launch may take longer than the device needs for the prompts.
        following_BN = launch(done + size) if done else None
        tokens_BN = np.asarray(chunk_BN)[:, : new - done]
        position_BN = lengths_B[:, None] + done + np.arange(tokens_BN.shape[1])[None]
        yield np.where(position_BN < block_size, tokens_BN, np.int32(NO_TOKEN))
        chunk_BN = following_BN if done else launch(size)
        done += size


@functools.partial(jax.jit, static_argnums=(0, 2))
def _prepared(structure, params, kernel):
    """Return the kernels of linear layers in the dtype in which the layers read them, None for
    other parameters, and the weights of `Model.decoding_weights`."""
    model = jax.tree.unflatten(structure, params)
    weights = model.decoding_weights(kernel)
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear):
            read_dtype = layer.kernel.get_metadata()["read_dtype"]
            if layer.kernel[...].dtype != read_dtype:
                layer.kernel.set_value(layer.kernel[...].astype(read_dtype))
    # `jax.jit` would return a copy of an unchanged parameter.
    pairs = zip(params, jax.tree.leaves(model), strict=True)
    return [None if new is old else new for old, new in pairs], weights


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("positions", "implementation", "sampler")
)
def _start(
    structure,
    params,
    weights,
    prompt_BT,
    length_B,
    *,
    filters,
    key,
    sampler,
    positions,
    implementation,
):
    """Return the decoding weights, the cache, the first new tokens, the cache's lengths, and the
    tokens as a column.

    The decoding weights are those of `start_decoding`, or None if the argument `weights` is not
    None.
    """
    model = jax.tree.unflatten(structure, params)
    x_BTC, own, cache = model.start_decoding(prompt_BT, length_B, positions, implementation)
    last_B1C = jnp.take_along_axis(x_BTC, (length_B - 1)[:, None, None], axis=1)
    # `logits` would cast the head: the decoding weights have the head in the compute dtype.
    head = {"head_VC": weights.head_VC} if isinstance(weights, DecoderWeights) else {}
    logits_BV = model.logits(last_B1C, **head)[:, 0]
    token_B = sample_token(
        logits_BV, _uniforms(filters, key, length_B), filters, implementation=sampler
    )
    return own if weights is None else None, cache, token_B, length_B, token_B[:, None]


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("steps", "sampler"),
    donate_argnames=("cache", "length_B"),
)
def _advance(structure, params, weights, cache, token_B, length_B, *, filters, key, sampler, steps):
    """Return the cache, the last tokens, the cache's lengths, and the `steps` new tokens."""
    model = jax.tree.unflatten(structure, params)
    position_NB = length_B[None] + 1 + jnp.arange(steps)[:, None]
    uniform_NB = jax.vmap(functools.partial(_uniforms, filters, key))(position_NB)

    # Trace all steps of an iteration once.
    @jax.jit
    def step(weights, cache, token_B, length_B, uniform_B):
        if filters.temperature is None and isinstance(cache, DecoderCache):
            token_B, cache = model.decode(weights, cache, token_B, length_B, likeliest=True)
            return cache, token_B
        logits_BV, cache = model.decode(weights, cache, token_B, length_B)
        return cache, sample_token(logits_BV, uniform_B, filters, implementation=sampler)

    def several(carry, uniform_NB):
        cache, token_B, length_B = carry
        new_NB = []
        for i in range(len(uniform_NB)):
            cache, token_B = step(weights, cache, token_B, length_B + i, uniform_NB[i])
            new_NB.append(token_B)
        return (cache, token_B, length_B + len(uniform_NB)), jnp.stack(new_NB)

    # Without kernels, XLA would compile each step.
    each = 1 if weights is None else math.gcd(UNROLLED, steps)
    uniform_MNB = uniform_NB.reshape(steps // each, each, -1)
    carry, new_MNB = jax.lax.scan(several, (cache, token_B, length_B), uniform_MNB)
    return *carry, new_MNB.reshape(steps, -1).T


def _filters(vocab_size: int, temperature, top_k, top_p) -> Filters:
    """Return checked options as arrays: new values need no new executable, but None does."""
    # Dividing by a number below fp32's normal range results in NaN.
    greedy = temperature < float(np.finfo(np.float32).tiny)
    return Filters(
        None if greedy else np.float32(temperature),
        None if top_k is None else np.int32(min(top_k, vocab_size)),
        None if top_p in (None, 1) else np.float32(top_p),
    )


def _threefry(key):
    """Return a threefry key: under `jax.vmap`, the draws of other implementations depend on the
    number of keys."""
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key).reshape(-1)[:2], impl="threefry2x32")


def _uniforms(filters, key, position_B):
    """Return a uniform number in [0, 1) for a position of each row."""
    if filters.temperature is None:
        return jnp.zeros(position_B.shape, jnp.float32)
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    row_B = jnp.arange(len(position_B))
    keys_B = jax.vmap(jax.random.fold_in)(fold_in(key, position_B), row_B)
    return jax.vmap(jax.random.uniform)(keys_B)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
