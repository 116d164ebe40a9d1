"""Loss and bits per byte of a text: every token is scored exactly once.

The text is one stream of tokens. One end-of-text token precedes the stream, so that the first token
is also scored. Windows of at most `length` input tokens end every `stride` tokens and at the end of
the stream; a window scores the tokens that no earlier window has scored. A scored token is
conditioned on all earlier tokens of its window: at least length − stride + 1 tokens, except at the
beginning.

    loss = Σ nats / tokens      bits per byte = Σ nats / ln 2 / bytes

Bits per byte do not depend on the tokenizer. End-of-text tokens inside a prepared dataset are not
part of the text. These tokens count for the loss, but not for the bits per byte.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax import data
from gptjax.data.shards import Shard
from gptjax.evaluation.scoring import EvaluationError, Row, Scorer, read_file


class Stream(NamedTuple):
    """A text as tokens.

    Attributes:
        chunks: integer arrays of shape (tokens,), in order.
        eot: id that precedes the stream.
        tokens: number of tokens in all chunks.
        byte_lengths: UTF-8 bytes of each id, 0 for end-of-text; integers of shape (vocab_size,).
    """

    chunks: Iterable[np.ndarray]
    eot: int
    tokens: int
    byte_lengths: np.ndarray


class TextScore(NamedTuple):
    """Sums over a text.

    Attributes:
        nats: negative log-likelihood of all tokens.
        tokens: number of all tokens.
        text_nats: negative log-likelihood of the tokens except end-of-text.
        bytes: UTF-8 bytes of the text.
    """

    nats: float
    tokens: int
    text_nats: float
    bytes: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token in nats."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the text."""
        return self.text_nats / math.log(2) / self.bytes


def from_file(path: Path, tokenizer: Any) -> Stream:
    """Return the stream of a UTF-8 text file.

    Raises:
        EvaluationError: the file is missing, not a regular file, empty, or not UTF-8.
    """
    try:
        # Not in text mode, which would translate line ends and so change the bytes.
        text = read_file(path, "expected a text file or a folder with shards").decode()
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}"
        ) from None
    if not text:
        raise EvaluationError(f"{path}: expected a text, found an empty file")
    tokens = np.asarray(tokenizer.encode(text))
    return Stream([tokens], tokenizer.eot, len(tokens), tokenizer.byte_lengths())


def from_dataset(dataset: data.Dataset, tokenizer: Any) -> Stream:
    """Return the stream of the validation shards of a prepared dataset.

    Raises:
        EvaluationError: the dataset has loss masks, so its prompts are not part of a text.
        ShardError: a shard is missing or damaged, or changes while it is read.
    """
    if dataset.masked:
        raise EvaluationError(
            f"{dataset.path}: expected a dataset of texts, found loss masks of prompts and answers;"
            " training reports the loss of the answers"
        )
    shards = [Shard(path) for path in dataset.val]
    chunks = (tokens for shard in shards for _, tokens in shard.chunks())
    return Stream(chunks, tokenizer.eot, dataset.val_tokens, tokenizer.byte_lengths())


def score_text(
    scorer: Scorer,
    stream: Stream,
    *,
    stride: int | None = None,
    max_tokens: int | None = None,
    scored: Callable[[int], Any] = lambda count: None,
) -> TextScore:
    """Score every token of a stream once. See the module's docstring.

    Args:
        stride: scored tokens of a window; None for the model's block_size.
        max_tokens: score the first tokens only.
        scored: called with a number of windows after each batch.

    Raises:
        EvaluationError: a stride out of range, or a text without bytes.
    """
    length, byte_lengths = scorer.max_length, stream.byte_lengths
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise EvaluationError(
            f"stride must be at least 1 and at most the model's block_size {length}, got {stride}"
        )
    total = {"tokens": 0, "bytes": 0}

    def rows() -> Iterator[Row]:
        for row in _windows(stream, length, stride, max_tokens):
            targets = row.tokens[row.start :]
            total["tokens"] += len(targets)
            total["bytes"] += int(byte_lengths[targets].sum())
            yield row

    nats = text_nats = 0.0
    for _, row, losses, _ in scorer.losses(rows(), scored=scored):
        is_text = byte_lengths[row.tokens[row.start :]] > 0
        nats += float(losses.sum())
        text_nats += float(losses[is_text].sum())
    if not total["bytes"]:
        raise EvaluationError("expected a text, found end-of-text tokens only")
    return TextScore(nats, total["tokens"], text_nats, total["bytes"])


def _windows(stream: Stream, length: int, stride: int, max_tokens: int | None) -> Iterator[Row]:
    """Yield the windows of a stream; each token is scored in one window."""
    parts, left = [np.array([stream.eot], np.int32)], max_tokens or stream.tokens
    for chunk in stream.chunks:
        parts.append(np.asarray(chunk[:left], np.int32))
        if (left := left - len(chunk)) <= 0:
            break
    tokens = np.concatenate(parts)
    for start in range(1, len(tokens), stride):
        end = min(start + stride, len(tokens))
        begin = max(0, end - length - 1)
        yield Row(tokens[begin:end], start - begin)
