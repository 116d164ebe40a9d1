"""Multiple choice by the likeliest ending: HellaSwag, scored as llm.c scores it.

A row is the tokens of the context followed by the tokens of " " + ending. Both texts are encoded
separately. No end-of-text token precedes the context. With ℓ the log-probabilities of an ending's
tokens:

    acc       share of the items whose label has the largest Σ ℓ
    acc_norm  share of the items whose label has the largest mean of ℓ

lm-evaluation-harness differs: it edits the text and divides by the characters of the ending.

| task | file | context | items |
| --- | --- | --- | --- |
| HellaSwag | hellaswag_val.jsonl of github.com/rowanz/hellaswag | ctx | 10,042 |
| HellaSwag | hellaswag_val.bin of llm.c, which has the same tokens | | 10,042 |
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.evaluation.errors import EvaluationError
from gptjax.evaluation.scoring import Row, Scorer, ahead

HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# llm.c's .bin of questions: header of 256 int32, then uint16.
BIN_MAGIC, BIN_VERSION, HEADER_INTS, START = 20240522, 1, 256, 65535
# Number of questions that a thread tokenizes while the device scores earlier questions.
_BLOCK = 512
# The largest published file has 50 MB.
_MAX_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Question:
    """An item with endings, as texts or as token ids.

    Attributes:
        endings: texts without the space that precedes them, or token ids.
        label: index of the correct ending.
    """

    context: str | np.ndarray
    endings: tuple[str, ...] | tuple[np.ndarray, ...]
    label: int


@dataclasses.dataclass(frozen=True)
class Choices:
    """Result of questions, in their order.

    Attributes:
        sums: log-probability of each ending, a tuple for each question.
        means: log-probability per token of each ending.
        labels: index of the correct ending of each question.
    """

    sums: list[tuple[float, ...]]
    means: list[tuple[float, ...]]
    labels: list[int]

    def metrics(self) -> dict[str, Any]:
        """Return items, acc, acc_norm and their standard errors."""
        right = [_best(s) == label for s, label in zip(self.sums, self.labels, strict=True)]
        normed = [_best(s) == label for s, label in zip(self.means, self.labels, strict=True)]
        found: dict[str, Any] = {"items": len(right)}
        for name, each in (("acc", right), ("acc_norm", normed)):
            share = sum(each) / len(each)
            found[name] = share
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(each) - 1))
        return found


def score_choices(
    scorer: Scorer,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    scored: Callable[[int], Any] = lambda count: None,
) -> Choices:
    """Score every ending of every question.

    Args:
        tokenizer: encodes questions that are texts.
        scored: called with a number of endings after each batch.

    Raises:
        EvaluationError: no questions, or an item that the model cannot score.
    """
    if not questions:
        raise EvaluationError("expected at least one question, got none")
    rows = itertools.chain.from_iterable(ahead(_rows(tokenizer, questions)))
    scores = iter(scorer.score(rows, scored=scored))
    of_each = [tuple(itertools.islice(scores, len(q.endings))) for q in questions]
    return Choices(
        [tuple(score.log_prob for score in each) for each in of_each],
        [tuple(score.mean for score in each) for each in of_each],
        [question.label for question in questions],
    )


def evenly_spaced(items: Sequence, count: int | None) -> list:
    """Return `count` evenly spaced items: a file may be sorted by difficulty."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _rows(tokenizer: Any, questions: Sequence[Question]) -> Iterator[list[Row]]:
    """Yield the rows of a block of questions, one row for each ending."""
    for block in itertools.batched(questions, _BLOCK):
        texts = [
            text
            for question in block
            if isinstance(question.context, str)
            for text in (question.context, *(f" {ending}" for ending in question.endings))
        ]
        encoded = iter(encode_batch(tokenizer, texts))
        rows = []
        for question in block:
            context, endings = question.context, question.endings
            if isinstance(context, str):
                context, endings = next(encoded), [next(encoded) for _ in endings]
            rows += [Row(np.concatenate([context, end]), len(context)) for end in endings]
        yield rows


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each text, with several threads if the tokenizer supports threads."""
    if hasattr(tokenizer, "encode_batch"):
        return tokenizer.encode_batch(texts)
    return [np.asarray(tokenizer.encode(text)) for text in texts]


def _best(values: Sequence[float]) -> int:
    """Return the index of the first largest value."""
    return max(range(len(values)), key=values.__getitem__)


# ------------------------------------------------------------------------------------------- files
def read_hellaswag(path: Path) -> list[Question]:
    """Read HellaSwag from a .jsonl or llm.c's .bin.

    Raises:
        EvaluationError: the file is missing or malformed; the message has the line or the offset.
    """
    check_file(path, f"{HELLASWAG_URL} is the published file")
    if path.suffix == ".bin":
        return _read_bin(path)
    return [_hellaswag(fields, where) for where, fields in read_jsonl(path)]


def _hellaswag(fields: dict, where: str) -> Question:
    context, endings, label = (fields.get(name) for name in ("ctx", "endings", "label"))
    if not isinstance(context, str) or not context:
        raise EvaluationError(f"{where}: expected ctx to be a text, found {context!r:.60}")
    texts = isinstance(endings, list) and all(isinstance(ending, str) for ending in endings)
    if not texts or len(endings) < 2:
        raise EvaluationError(f"{where}: expected endings to be texts, found {endings!r:.60}")
    if type(label) is not int or not 0 <= label < len(endings):
        raise EvaluationError(
            f"{where}: expected label in 0..{len(endings) - 1}, found {label!r:.60} (the test "
            "split has no labels)"
        )
    return Question(context, tuple(endings), label)


def _read_bin(path: Path) -> list[Question]:
    content = path.read_bytes()
    head = np.frombuffer(content[: 4 * HEADER_INTS], "<i4")
    if len(head) < HEADER_INTS or head[0] != BIN_MAGIC or head[1] != BIN_VERSION:
        found = head[:2].tolist() if len(head) >= 2 else f"{len(content)} bytes"
        raise EvaluationError(
            f"{path}: expected magic {BIN_MAGIC} and version {BIN_VERSION} of llm.c's questions at "
            f"offset 0, found {found}"
        )
    if len(content) % 2:
        raise EvaluationError(f"{path}: expected uint16 tokens, found {len(content)} bytes")
    stream, at, questions = np.frombuffer(content, "<u2", offset=4 * HEADER_INTS), 0, []
    for index in range(int(head[2])):
        try:
            question, at = _bin_question(stream, at)
        except (IndexError, ValueError) as error:
            raise EvaluationError(
                f"{path}: example {index} at offset {4 * HEADER_INTS + 2 * at} of {len(content)} "
                f"bytes is malformed: {error}"
            ) from None
        questions.append(question)
    if at != len(stream):
        raise EvaluationError(
            f"{path}: expected {head[2]} examples, found more bytes at offset "
            f"{4 * HEADER_INTS + 2 * at}"
        )
    return questions


def _bin_question(stream: np.ndarray, at: int) -> tuple[Question, int]:
    """Return the example at an index of the stream, and the index of the next example.

    Raises:
        IndexError, ValueError: the example is malformed or cut short.
    """
    start, size, _, label, count = (int(stream[at + i]) for i in range(5))
    if start != START or count < 2 or label >= count:
        raise ValueError(f"found start {start}, label {label}, {count} completions")
    parts, position = [], at + 5
    for _ in range(count + 1):
        length = int(stream[position])
        part = stream[position + 1 : position + 1 + length]
        if not length or len(part) < length:
            raise ValueError(f"expected {length} tokens, at least 1, found {len(part)}")
        parts.append(part)
        position += 1 + length
    if 2 * (position - at) != size:
        raise ValueError(f"expected {size} bytes, found {2 * (position - at)}")
    return Question(parts[0], tuple(parts[1:]), label), position


def check_file(path: Path, hint: str) -> None:
    """Raise EvaluationError unless a path is a regular file of a plausible size."""
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no file"
            raise EvaluationError(f"{path}: expected a file, found {found}; {hint}")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise EvaluationError(f"{path}: expected at most {_MAX_BYTES} bytes, found {size}")
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_jsonl(path: Path) -> list[tuple[str, dict]]:
    """Return the object of each line that is not empty, and "FILE, line N" for messages.

    Raises:
        EvaluationError: a line is not a JSON object.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            if line.strip():
                found.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise EvaluationError(f"{where}: expected a JSON object: {error}") from None
        if found and not isinstance(found[-1][1], dict):
            raise EvaluationError(f"{where}: expected a JSON object, found {line[:60]!r}")
    if not found:
        raise EvaluationError(f"{path}: expected JSON lines, found an empty file")
    return found
