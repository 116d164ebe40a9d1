"""Streaming generation: the tokens of `gptjax.generate` and their texts, in chunks.

Shapes: B sequences, T tokens of the longest prompt, N new tokens.
"""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Integer, Key, UInt32

from gptjax import generation
from gptjax.data.tokenizers import Tokenizer
from gptjax.models.base import Model

type StopReason = Literal["end-of-text", "stop-text", "max-new-tokens", "block-size"]

NO_TOKEN = -1
"""Padding after the last token of a sequence that has filled block_size."""
INCOMPLETE = "\ufffd"
"""Result of decoding the first bytes of an incomplete character."""


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
    steps: int = generation.STEPS,
) -> Iterator[np.ndarray]:
    """Return an iterator over the new tokens of `gptjax.generate`, `steps` at a time.

    The device computes a chunk while the caller uses the previous chunk. The second chunk is the
    exception: its launch would delay the first token, and therefore waits until the caller requests
    the second chunk.

    Args:
        max_new_tokens: at least 1. Unlike in `gptjax.generate`, prompt and new tokens may exceed
            block_size: a sequence ends there, and the rest of its row is `NO_TOKEN`.
        steps: number of tokens of a chunk. The first chunk has one token; the last may be shorter.
        Others: see `gptjax.generate`.

    Yields:
        int32, shape (B, N).

    Raises:
        ValueError: an argument of a wrong type or outside its range; a prompt of block_size tokens.
    """
    prompt_BT = generation._check_prompt(model, prompt_BT)
    lengths_B = generation._check_lengths(prompt_BT, lengths_B)
    generation._check_count(max_new_tokens)
    generation._check_length(model, prompt_BT.shape[1], 1)
    generation._check_sampling(temperature, top_k, top_p, key)
    if not generation._is_scalar(steps, np.integer) or steps < 1:
        raise ValueError(f"token_chunks: steps must be an integer of at least 1, got {steps!r}")
    block_size = model.config.block_size
    # The shortest prompt has the most positions left.
    new = min(int(max_new_tokens), block_size - int(lengths_B.min()))
    chunks = generation.new_tokens(
        model,
        prompt_BT,
        lengths_B,
        new=new,
        steps=int(steps),
        filters=generation._filters(model, temperature, top_k, top_p),
        key=key,
        implementation=implementation,
    )
    return _on_host(chunks, lengths_B, new, block_size)


def _on_host(
    chunks: Iterator[Array], lengths_B: np.ndarray, new: int, block_size: int
) -> Iterator[np.ndarray]:
    """Yield chunks with a total of `new` tokens, and `NO_TOKEN` from block_size on."""
    done, chunk_BN = 0, next(chunks)
    while chunk_BN is not None:
        # The next chunk is launched before the wait for this chunk, except for the first chunk: the
        # launch may take longer than the device needs for the prompts.
        following_BN = next(chunks, None) if done else None
        tokens_BN = np.asarray(chunk_BN)[:, : new - done]
        position_BN = lengths_B[:, None] + done + np.arange(tokens_BN.shape[1])[None]
        yield np.where(position_BN < block_size, tokens_BN, np.int32(NO_TOKEN))
        chunk_BN = following_BN if done else next(chunks, None)
        done += tokens_BN.shape[1]


class Completion:
    """Continuation of a prompt. `append` adds one token at a time.

    Args:
        limit: maximum number of tokens, and the reason to stop at this number.
        stop: texts that end the completion.
        stop_at_eot: whether the end-of-text token ends the completion.

    Attributes:
        tokens: new tokens, including the end-of-text token or the tokens of the stop text.
        text: text of the tokens before the end-of-text token or the stop text. While the completion
            grows, `text` only grows: the first bytes of a character, and characters that may begin
            a stop text, are held back. Ids outside the tokenizer's vocabulary are left out.
        stopped: the reason for the end; None while the completion grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limit: tuple[int, StopReason],
        stop: Sequence[str] = (),
        stop_at_eot: bool = True,
    ):
        self.tokens: list[int] = []
        self.text = ""
        self.stopped: StopReason | None = None
        self._tokenizer, self._limit, self._stop = tokenizer, limit, tuple(stop)
        self._eot = tokenizer.eot if stop_at_eot else None
        self._decoded, self._held = "", []  # text; ids that may end with an incomplete character

    def append(self, token: int) -> None:
        """Add a token to a completion that has not stopped."""
        assert self.stopped is None
        self.tokens.append(token)
        if token == self._eot:
            self._end("end-of-text")
            return
        decoded = self._decode(token)
        if found := [at for text in self._stop if (at := decoded.find(text)) >= 0]:
            self.text, self.stopped = decoded[: min(found)], "stop-text"
        elif len(self.tokens) == self._limit[0]:
            self._end(self._limit[1])
        else:
            self.text = decoded[: len(decoded) - _overlap(decoded, self._stop)]

    def _end(self, reason: StopReason) -> None:
        self.text = self._decoded + self._tokenizer.decode(self._held)
        self.stopped = reason

    def _decode(self, token: int) -> str:
        """Return the text that later tokens do not change."""
        if token < self._tokenizer.vocab_size:
            self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith(INCOMPLETE):
            return self._decoded + text[:-1]
        self._decoded, self._held = self._decoded + text, []
        return self._decoded


def _overlap(text: str, stop: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that may begin a stop text."""
    longest = max(map(len, stop), default=1) - 1
    ends = (n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in stop))
    return min(next(ends, 0), len(text))


def complete(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    stop_at_eot: bool = True,
    **options: Any,
) -> Iterator[list[Completion]]:
    """Continue prompts, all in one pass, until each completion has stopped.

    The tokens equal the tokens of `gptjax.generate` with the same key.

    Args:
        prompts: token ids of each prompt, at least one and fewer than block_size.
        max_new_tokens, options: see `token_chunks`.
        stop, stop_at_eot: see `Completion`.

    Yields:
        The completions of all prompts, always the same list, after each chunk of tokens.

    Raises:
        ValueError: the errors of `token_chunks`, prompts that are no ids, or a stop text that is
            empty or no text.
    """
    _check_stop(stop)
    rows = [_ids(prompt) for prompt in prompts]
    lengths_B = np.array([len(row_T) for row_T in rows], np.int64)
    # int64: `token_chunks` checks the ids.
    prompt_BT = np.zeros((len(rows), lengths_B.max(initial=0)), np.int64)
    for padded_T, row_T in zip(prompt_BT, rows, strict=True):
        padded_T[: len(row_T)] = row_T
    options |= {"max_new_tokens": max_new_tokens, "lengths_B": lengths_B}
    chunks = token_chunks(model, prompt_BT, **options)
    rooms = [model.config.block_size - int(length) for length in lengths_B]
    limits: list[tuple[int, StopReason]] = [
        (max_new_tokens, "max-new-tokens") if max_new_tokens <= room else (room, "block-size")
        for room in rooms
    ]
    completions = [Completion(tokenizer, limit, stop, stop_at_eot) for limit in limits]
    for chunk_BN in chunks:
        for completion, row_N in zip(completions, chunk_BN.tolist(), strict=True):
            for token in row_N:
                if completion.stopped is None:
                    completion.append(token)
        yield completions
        if all(completion.stopped for completion in completions):
            return


def _check_stop(stop) -> None:
    if isinstance(stop, str):
        raise ValueError(f"complete: stop must be a list of texts, got {stop!r}; pass [{stop!r}]")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"complete: stop must have texts of at least one character, got {text!r}"
            )


def _ids(prompt) -> np.ndarray:
    """Return the ids of a prompt, in any integer dtype."""
    ids_T = np.asarray(prompt)
    if ids_T.ndim != 1 or (ids_T.size and not np.issubdtype(ids_T.dtype, np.integer)):
        raise ValueError(
            f"complete: expected prompts of token ids, got {reprlib.repr(prompt)}; encode texts "
            "with the tokenizer"
        )
    return ids_T
