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
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.evaluation.scoring import EvaluationError, Row, Scorer, read_file

HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# llm.c's .bin of questions: header of 256 int32, then uint16.
BIN_MAGIC, BIN_VERSION, HEADER_BYTES, START = 20240522, 1, 1024, 65535


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
    found = scorer.score_items((_rows(tokenizer, q) for q in questions), scored=scored)
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
        EvaluationError: the file is missing or malformed; the message has the line or the offset.
    """
    hint = f"{HELLASWAG_URL} is the published file"
    if path.suffix == ".bin":
        return _read_bin(path, read_file(path, hint))
    return [_hellaswag(fields, where) for where, fields in read_jsonl(path, hint)]


def _hellaswag(fields: dict, where: str) -> Question:
    check_types(fields, {"ctx": str, "endings": list, "label": int}, where)
    check_options(fields["endings"], fields["label"], where)
    return Question(fields["ctx"], tuple(fields["endings"]), fields["label"])


def _read_bin(path: Path, content: bytes) -> list[Question]:
    """Return the questions: each is START, its bytes, its index, label, count, and the lengths and
    tokens of the context and the endings."""
    head = np.frombuffer(content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), "<i4")
    if head[0] != BIN_MAGIC or head[1] != BIN_VERSION:
        raise EvaluationError(
            f"{path}: expected magic {BIN_MAGIC} and version {BIN_VERSION} of llm.c's questions at "
            f"offset 0, found {head[:2].tolist()}"
        )
    stream = np.frombuffer(content[HEADER_BYTES : len(content) // 2 * 2], "<u2")
    at, questions = 0, []
    for index in range(int(head[2])):
        begin, parts = at, []
        header = stream[at : at + 5].tolist()
        start, size, _, label, count = header if len(header) == 5 else (0, 0, 0, 0, 0)
        at += 5
        for _ in range(count + 1 if start == START else 0):
            length = int(stream[at]) if at < len(stream) else 0
            parts.append(stream[at + 1 : at + 1 + length])
            at += 1 + length
        if label >= count or not all(map(len, parts)) or 2 * (at - begin) != size:
            raise EvaluationError(
                f"{path}: example {index} at offset {HEADER_BYTES + 2 * begin} of {len(content)} "
                "bytes is malformed"
            )
        questions.append(Question(parts[0], tuple(parts[1:]), label))
    if HEADER_BYTES + 2 * at != len(content):
        raise EvaluationError(
            f"{path}: expected {head[2]} examples of {HEADER_BYTES + 2 * at} bytes, found "
            f"{len(content)}"
        )
    return questions


def read_jsonl(path: Path, hint: str) -> list[tuple[str, dict]]:
    """Return the object of each line that is not empty, and "FILE, line N" for messages.

    Raises:
        EvaluationError: the file is missing, or a line is not a JSON object.
    """
    found = []
    for number, line in enumerate(read_file(path, hint).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EvaluationError(f"{path}, line {number}: expected JSON: {error}") from None
        if not isinstance(fields, dict):
            raise EvaluationError(f"{path}, line {number}: expected a JSON object")
        found.append((f"{path}, line {number}", fields))
    if not found:
        raise EvaluationError(f"{path}: expected JSON lines, found an empty file")
    return found


def check_types(fields: dict[str, Any], types: dict[str, type], where: str) -> None:
    """Raise EvaluationError unless each field of `types` is present and of its type."""
    for name, expected in types.items():
        if type(fields.get(name)) is not expected:
            raise EvaluationError(
                f"{where}: expected {name} to be {expected.__name__}, found "
                f"{fields.get(name)!r:.60}"
            )


def check_options(options: list, label: int, where: str) -> None:
    """Raise EvaluationError unless the options are texts and `label` is the index of one."""
    texts = all(isinstance(option, str) for option in options)
    if not texts or not 0 <= label < len(options) or len(options) < 2:
        raise EvaluationError(
            f"{where}: expected several options that are texts, and the index of the correct one, "
            f"found {label} of {options!r:.60}"
        )
