"""Multiple choice by the likeliest ending: HellaSwag, scored as llm.c scores it.

A row is the tokens of the context followed by the tokens of " " + ending. Both texts are encoded
separately. No end-of-text token precedes the context. With ℓ the log-probabilities of an ending's
tokens:

    acc       share of the items whose label has the largest Σ ℓ
    acc_norm  share of the items whose label has the largest mean of ℓ

lm-evaluation-harness differs: it edits the text and divides by the characters of the ending.

HellaSwag has 10,042 items: hellaswag_val.jsonl of github.com/rowanz/hellaswag, or the same tokens
in llm.c's hellaswag_val.bin.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.evaluation.scoring import EvaluationError, Row, Scorer, parsing, read_file

HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# llm.c's .bin of questions: header of 256 int32, then uint16.
BIN_MAGIC, BIN_VERSION, HEADER_BYTES = 20240522, 1, 1024


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
        found: dict[str, Any] = {"items": len(self.labels)}
        for name, values in (("acc", self.sums), ("acc_norm", self.means)):
            # The first largest value is the answer.
            right = [x.index(max(x)) == label for x, label in zip(values, self.labels, strict=True)]
            share = sum(right) / len(right)
            found[name] = share
            found[f"{name}_stderr"] = math.sqrt(share * (1 - share) / max(1, len(right) - 1))
        return found


def score_choices(scorer: Scorer, tokenizer: Any, questions: Sequence[Question]) -> Choices:
    """Score every ending of every question. `tokenizer` encodes questions that are texts.

    Raises:
        EvaluationError: no questions, or an item that the model cannot score.
    """
    if not questions:
        raise EvaluationError("expected at least one question, got none")
    found = scorer.score_items(questions, functools.partial(_rows, tokenizer))
    return Choices(
        [tuple(score.log_prob for score in each) for each in found],
        [tuple(score.mean for score in each) for each in found],
        [question.label for question in questions],
    )


def evenly_spaced(items: Sequence, count: int | None) -> list:
    """Return `count` evenly spaced items: a file may be sorted by difficulty."""
    if count is None or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _rows(tokenizer: Any, question: Question) -> list[Row]:
    """Return a row for each ending."""
    context, endings = question.context, question.endings
    if isinstance(context, str):
        context = tokenizer.encode(context)
        endings = [tokenizer.encode(f" {ending}") for ending in endings]
    return [Row(np.concatenate([context, ending]), len(context)) for ending in endings]


# ------------------------------------------------------------------------------------------- files
def read_hellaswag(path: Path) -> list[Question]:
    """Read HellaSwag from a .jsonl or llm.c's .bin.

    Raises:
        EvaluationError: the file is missing or malformed; the message has the line.
    """
    hint = f"{HELLASWAG_URL} is the published file"
    if path.suffix != ".bin":
        return read_jsonl(path, hint, _question)
    content = read_file(path, hint)
    with parsing(str(path)):
        return _read_bin(content)


def _question(fields: dict[str, Any]) -> Question:
    fields["endings"][fields["label"]]  # an error if there is no such ending
    return Question(fields["ctx"], tuple(fields["endings"]), fields["label"])


def _read_bin(content: bytes) -> list[Question]:
    """Return the questions: each is 65535, its bytes, its index, label, count, and the lengths and
    tokens of the context and the endings."""
    magic, version, number, *_ = np.frombuffer(content, "<i4", HEADER_BYTES // 4).tolist()
    if (magic, version) != (BIN_MAGIC, BIN_VERSION):
        raise ValueError(
            f"expected magic {BIN_MAGIC} and version {BIN_VERSION} of llm.c's questions, found "
            f"{magic} and {version}"
        )
    stream, at, questions = np.frombuffer(content, "<u2", offset=HEADER_BYTES), 0, []
    for _ in range(number):
        label, count = stream[at + 3 : at + 5].tolist()
        at, parts = at + 5, []
        for _ in range(count + 1):
            length = int(stream[at])
            parts.append(stream[at + 1 : at + 1 + length])
            at += 1 + length
        context, *endings = parts
        endings[label]  # an error if there is no such ending
        questions.append(Question(context, tuple(endings), label))
    if at != len(stream):
        raise ValueError(f"expected {number} examples of {2 * at} bytes, found {2 * len(stream)}")
    return questions


def read_jsonl[Item](path: Path, hint: str, parse: Callable[[dict], Item]) -> list[Item]:
    """Return `parse` of the object in each line that is not empty.

    Raises:
        EvaluationError: the file is missing, or `parse` raises an error for a line.
    """
    found = []
    for number, line in enumerate(read_file(path, hint).splitlines(), start=1):
        with parsing(f"{path}, line {number}"):
            found += [parse(json.loads(line))] if line.strip() else []
    if not found:
        raise EvaluationError(f"{path}: expected JSON lines, found an empty file")
    return found
