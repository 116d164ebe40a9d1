"""Generation: draw tokens that continue a prompt, with a KV cache.

One pass over the prompt, then one token a step. The cache has one entry for each block, in the
compute dtype.

Shapes: B batch, T tokens fed at once, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Integer, Key, UInt32

from gptjax.models.base import Model


def generate(
    model: Model,
    prompt_BT: Integer[Array | np.ndarray, "B T"],
    *,
    max_new_tokens: int,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    key: Key[Array, ""] | UInt32[Array, "2"],
) -> Int[Array, "B T+{max_new_tokens}"]:
    """Continue each prompt by `max_new_tokens` tokens.

    Each new token is drawn from softmax(logits / temperature), cut to the `top_k` likeliest tokens,
    then, of what is left and renormalised, to the nucleus: the fewest likeliest tokens whose
    probabilities sum to at least `top_p`.

    The computation is compiled once for each model shape, prompt shape, `max_new_tokens`, and
    choice of which of temperature 0, `top_k` and `top_p` are in use; their values, the weights and
    the key may change freely.

    Args:
        model: weights and shape; not changed.
        prompt_BT: ids in [0, vocab_size) of any integer type, at least one a row. Rows have one
            length: there is no padding.
        max_new_tokens: at least 1; prompt and new tokens together fit into block_size.
        temperature: at least 0; 0 takes the likeliest token (the lowest id of equals) whatever
            filters and key.
        top_k: at least 1; None, or anything from vocab_size up, keeps every token.
        top_p: in (0, 1]; None or 1 keeps every token.
        key: `jax.random.key(seed)`. The token at a position depends on the key and the position
            alone, so a longer generation begins with the shorter one.

    Returns:
        Prompt and new tokens, int32, shape (B, T + max_new_tokens).

    Raises:
        ValueError: an argument of a wrong type or outside its range; more tokens than block_size.
    """
    prompt_BT = _check_prompt(model, prompt_BT)
    _check_length(model, prompt_BT.shape[1], max_new_tokens)
    _check_sampling(temperature, top_k, top_p, key)
    graphdef, params = nnx.split(model)
    return _generate(
        graphdef,
        params,
        jnp.asarray(prompt_BT, jnp.int32),
        # None changes the executable; the value of an array does not.
        None if temperature == 0 else jnp.float32(temperature),
        None if top_k is None else jnp.int32(min(top_k, model.config.vocab_size)),
        None if top_p in (None, 1) else jnp.float32(top_p),
        key,
        max_new_tokens=int(max_new_tokens),
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="max_new_tokens")
def _generate(graphdef, params, prompt_BT, temperature, top_k, top_p, key, *, max_new_tokens):
    model = nnx.merge(graphdef, params)
    b, t = prompt_BT.shape

    def advance(cache, tokens_BT):
        """Feed tokens to the model, and draw the token that follows the last of each row."""
        logits_BV = model.logits(model.hidden(tokens_BT, cache)[:, -1:])[:, 0]
        step_key = jax.random.fold_in(key, cache[0].length)
        return cache, _draw(logits_BV, temperature, top_k, top_p, step_key)[:, None]

    def step(carry, _):
        cache, token_B1 = advance(*carry)
        return (cache, token_B1), token_B1

    carry = advance(model.init_cache(b, t + max_new_tokens), prompt_BT)
    _, rest_NB1 = jax.lax.scan(step, carry, length=max_new_tokens - 1)
    return jnp.concatenate([prompt_BT, carry[1], rest_NB1[:, :, 0].T], axis=1)


def _draw(logits_BV: Float[Array, "B V"], temperature, top_k, top_p, key) -> Int[Array, " B"]:
    """Draw a token for each row. A filter of None is off; a temperature of None is greedy."""
    if temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.float32) / temperature
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits_BV).astype(jnp.int32)
    # Ranks, not thresholds: bf16 logits tie often, and a threshold would keep all tied logits.
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True, stable=True)
    ranked_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    if top_k is not None:
        ranked_BV = jnp.where(jnp.arange(ranked_BV.shape[1])[None, :] < top_k, ranked_BV, -jnp.inf)
    if top_p is not None:
        probs_BV = jax.nn.softmax(ranked_BV, axis=-1)
        likelier_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        # The likeliest is named, since an unlucky rounding or a probability of NaN must not empty
        # the set.
        keep_BV = (likelier_BV < top_p).at[:, 0].set(True)
        ranked_BV = jnp.where(keep_BV, ranked_BV, -jnp.inf)
    choice_B1 = jax.random.categorical(key, ranked_BV)[:, None]
    return jnp.take_along_axis(order_BV, choice_B1, axis=-1)[:, 0].astype(jnp.int32)


def _check_prompt(model: Model, prompt_BT) -> np.ndarray:
    try:
        prompt_BT = np.asarray(prompt_BT)
    except ValueError as error:
        message = f"generate: expected a prompt whose rows have one length: {error}"
        raise ValueError(message) from None
    if prompt_BT.ndim != 2 or (prompt_BT.size and not np.issubdtype(prompt_BT.dtype, np.integer)):
        raise ValueError(
            "generate: expected a prompt of integer ids and shape (batch, time), "
            f"got {prompt_BT.dtype} of shape {prompt_BT.shape}; a single prompt is prompt[None]"
        )
    if not prompt_BT.size:
        raise ValueError(
            f"generate: the prompt is empty, shape {prompt_BT.shape}; give at least one token a row"
        )
    vocab_size = model.config.vocab_size
    low, high = prompt_BT.min(), prompt_BT.max()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"generate: prompt ids must lie in [0, {vocab_size}), got {low}…{high}; "
            "was the prompt encoded with the model's tokenizer?"
        )
    return prompt_BT


def _check_length(model: Model, t: int, max_new_tokens) -> None:
    if not _is_scalar(max_new_tokens, np.integer) or max_new_tokens < 1:
        raise ValueError(
            f"generate: max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}"
        )
    if t + max_new_tokens > (block_size := model.config.block_size):
        raise ValueError(
            f"generate: {t} prompt tokens and {max_new_tokens} new ones are {t + max_new_tokens}, "
            "more than "
            f"block_size={block_size}; shorten the prompt or ask for at most "
            f"{max(block_size - t, 0)}"
        )


def _check_sampling(temperature, top_k, top_p, key) -> None:
    if not _is_scalar(temperature, np.number) or not 0 <= temperature < math.inf:
        raise ValueError(
            "generate: temperature must be a finite number of at least 0 (0 is greedy), "
            f"got {temperature!r}"
        )
    if top_k is not None and (not _is_scalar(top_k, np.integer) or top_k < 1):
        raise ValueError(
            "generate: top_k must be an integer of at least 1, or None to keep every token, "
            f"got {top_k!r}"
        )
    if top_p is not None and (not _is_scalar(top_p, np.number) or not 0 < top_p <= 1):
        raise ValueError(
            "generate: top_p must be a number in (0, 1], or None to keep every token, "
            f"got {top_p!r}"
        )
    is_key = isinstance(key, jax.Array) and (
        (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ())
        or (key.dtype == jnp.uint32 and key.shape == (2,))
    )
    if not is_key:
        found = f"{key.dtype} of shape {key.shape}" if isinstance(key, jax.Array) else repr(key)
        raise ValueError(f"generate: key must be one key, such as jax.random.key(0), got {found}")


def _is_scalar(value, kind: type) -> bool:
    """Return True for a number or a 0-dimensional array of a NumPy type; False for bool."""
    return np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, kind)
