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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax import data
from gptjax.data.shards import open_shard
from gptjax.evaluation.scoring import EvaluationError, Row, Scorer, parsing, read_file


class Stream(NamedTuple):
    """A text as tokens.

    Attributes:
        tokens: integers of shape (tokens,).
        eot: id that precedes the stream.
        byte_lengths: UTF-8 bytes of each id, 0 for end-of-text; integers of shape (vocab_size,).
    """

    tokens: np.ndarray
    eot: int
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
        EvaluationError: the file is missing, not a regular file, or not UTF-8.
    """
    content = read_file(path, "expected a text file, or --dataset with a folder of shards")
    with parsing(str(path)):
        text = content.decode()  # not in text mode, which would change the ends of lines
    return Stream(np.asarray(tokenizer.encode(text)), tokenizer.eot, tokenizer.byte_lengths())


def from_dataset(dataset: data.Dataset, tokenizer: Any) -> Stream:
    """Return the stream of the validation shards of a prepared dataset.

    Raises:
        EvaluationError: the dataset has loss masks, so its prompts are not part of a text.
        ShardError: a shard is missing or damaged.
    """
    if dataset.masked:
        raise EvaluationError(
            f"{dataset.path}: expected a dataset of texts, found loss masks of prompts and answers;"
            " training reports the loss of the answers"
        )
    tokens = np.concatenate([open_shard(path) for path in dataset.val])
    return Stream(tokens, tokenizer.eot, tokenizer.byte_lengths())


def score_text(
    scorer: Scorer, stream: Stream, *, stride: int | None = None, max_tokens: int | None = None
) -> TextScore:
    """Score every token of a stream once. See the module's docstring.

    Args:
        stride: scored tokens of a window; None for the model's block_size.
        max_tokens: score the first tokens only.

    Raises:
        EvaluationError: a stride out of range, or a text without bytes.
    """
    length = scorer.max_length
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise EvaluationError(
            f"stride must be at least 1 and at most the model's block_size {length}, got {stride}"
        )
    tokens = np.concatenate([[stream.eot], stream.tokens[:max_tokens]]).astype(np.int32)
    sizes = stream.byte_lengths[tokens[1:]]
    if not (total := int(sizes.sum())):
        raise EvaluationError("expected a text, found end-of-text tokens at most")
    starts = range(1, len(tokens), stride)
    losses = np.empty(len(sizes))
    found = scorer.losses(_window(tokens, start, stride, length) for start in starts)
    for done, (index, _, losses_T, _) in enumerate(found, 1):
        losses[index * stride : index * stride + len(losses_T)] = losses_T
        scorer.progress(done, len(starts))
    return TextScore(float(losses.sum()), len(sizes), float(losses[sizes > 0].sum()), total)


def _window(tokens: np.ndarray, start: int, stride: int, length: int) -> Row:
    """Return the window that scores the tokens from `start` on."""
    end = min(start + stride, len(tokens))
    begin = max(0, end - length - 1)
    return Row(tokens[begin:end], start - begin)
