"""Texts of the tokens of `gptjax.generate`, while the tokens are generated.

Shapes: B sequences, T tokens of the longest prompt, N new tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from gptjax.data.tokenizers import Tokenizer
from gptjax.generation import token_chunks
from gptjax.models.base import Model

type StopReason = Literal["end-of-text", "stop-text", "max-new-tokens", "block-size"]

INCOMPLETE = "\ufffd"
"""Result of decoding the first bytes of an incomplete character."""


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
        ValueError: the errors of `token_chunks`, prompts that are no ids, or an empty stop text.
    """
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"complete: expected a list of texts that are not empty, got {stop!r}")
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows or any(row_T.ndim != 1 or row_T.dtype.kind not in "iu" for row_T in rows):
        raise ValueError("complete: expected prompts of token ids; encode texts with the tokenizer")
    lengths_B = np.array([len(row_T) for row_T in rows], np.int64)
    # int64: `token_chunks` checks the ids.
    prompt_BT = np.zeros((len(rows), lengths_B.max()), np.int64)
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
