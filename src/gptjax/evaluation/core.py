"""CORE: 22 tasks in context, centred on random guessing (Li et al., "DataComp-LM", 2024).

The folder is nanochat's eval_bundle: core.yaml, eval_data/ and eval_meta_data.csv. For each task:

1. Shuffle the items with the seed 1337.
2. For item i draw the few-shot examples from the other items with the seed 1234 + i.
3. Render prompts: examples and item are joined by an empty line; an end-of-text token precedes the
   prompt. A prompt longer than block_size loses its first tokens.
4. multiple_choice: choose the continuation with the largest mean log-probability of the tokens
   after the common prefix of all prompts. schema: choose the context that gives the common suffix
   of all prompts the largest mean. language_modeling: correct if each token of the continuation is
   the likeliest token.

    centred = (accuracy − baseline) / (1 − baseline)      CORE = mean of centred over the tasks
"""

import csv
import dataclasses
import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.evaluation.choices import check_options, check_types, read_jsonl
from gptjax.evaluation.scoring import EvaluationError, Row, Score, Scorer, read_file
from gptjax.terminal import has_control_characters

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED, FEW_SHOT_SEED = 1337, 1234
_PART = f"it is part of {BUNDLE_URL}"
# Names and types of the fields of a task in core.yaml, and of an item by type of the task.
TASK_FIELDS = {"label": str, "icl_task_type": str, "dataset_uri": str, "num_fewshot": list}
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task of CORE.

    Attributes:
        label: name.
        kind: a key of `FIELDS`.
        items: objects of the file, shuffled.
        shots: number of few-shot examples.
        delimiter: text between a query and its continuation.
        baseline: accuracy of random guessing, in [0, 1).
    """

    label: str
    kind: str
    items: tuple[dict[str, Any], ...]
    shots: int
    delimiter: str
    baseline: float

    def few_shot(self, index: int) -> list[dict[str, Any]]:
        """Return `shots` other items as the few-shot examples of an item."""
        others = range(len(self.items) - 1)  # indices in the list without this item
        chosen = random.Random(FEW_SHOT_SEED + index).sample(others, self.shots)
        return [self.items[i + (i >= index)] for i in chosen]

    def prompts(self, index: int) -> list[str]:
        """Return the prompts of an item: one prompt for each choice.

        For language_modeling: the prompt without the continuation, and the prompt with it.
        """
        shots = "".join(
            f"{self._texts(each)[each.get('gold', 0)]}\n\n" for each in self.few_shot(index)
        )
        prompts = [f"{shots}{text}" for text in self._texts(self.items[index])]
        if self.kind == "language_modeling":
            # The space before the continuation is part of the continuation's first token.
            context = self.items[index]["context"].strip()
            prompts.insert(0, f"{shots}{context}{self.delimiter}".strip())
        return prompts

    def _texts(self, item: dict[str, Any]) -> list[str]:
        """Return an item with each choice."""
        if self.kind == "multiple_choice":
            return [f"{item['query']}{self.delimiter}{choice}" for choice in item["choices"]]
        end = f"{self.delimiter}{item['continuation']}"
        if self.kind == "schema":
            return [f"{context}{end}" for context in item["context_options"]]
        return [f"{item['context'].strip()}{end}"]


def score_core(
    scorer: Scorer,
    tokenizer: Any,
    tasks: Sequence[CoreTask],
    *,
    max_items: int | None = None,
    scored: Callable[[int], Any] = lambda count: None,
) -> dict[str, dict[str, Any]]:
    """Return accuracy, centred accuracy and number of items of each task.

    Args:
        max_items: maximum number of items of a task: the first items after the shuffle.
        scored: called with a number of items after each task.

    Raises:
        EvaluationError: an item that the model cannot score.
    """
    results = {}
    for task in tasks:
        count = len(task.items) if max_items is None else min(max_items, len(task.items))
        right = score_task(scorer, tokenizer, task, count)
        accuracy = sum(right) / count
        results[task.label] = {
            "acc": accuracy,
            "centred": (accuracy - task.baseline) / (1 - task.baseline),
            "items": count,
        }
        scored(count)
    return results


def core_metric(results: dict[str, dict[str, Any]]) -> float:
    """Return CORE: the mean of the centred accuracies."""
    return sum(each["centred"] for each in results.values()) / len(results)


def score_task(scorer: Scorer, tokenizer: Any, task: CoreTask, count: int) -> list[bool]:
    """Return whether the model's answer is correct for each of the first `count` items."""
    items = (_rows(tokenizer, task, index, scorer.max_length) for index in range(count))
    found = scorer.score_items(items, greedy=task.kind == "language_modeling")
    return [_is_right(task, item, scores) for item, scores in zip(task.items, found, strict=False)]


def _is_right(task: CoreTask, item: dict[str, Any], scores: list[Score]) -> bool:
    if task.kind == "language_modeling":
        return bool(scores[0].greedy)
    means = [-score.mean for score in scores]
    # As in nanochat, a choice that is a prefix of another choice has no tokens and the mean NaN.
    return means.index(min(means)) == item["gold"]


def _rows(tokenizer: Any, task: CoreTask, index: int, most: int) -> list[Row]:
    """Return the rows of an item, each of at most `most` tokens."""
    prompts = task.prompts(index)
    if hasattr(tokenizer, "encode_batch"):  # with several threads
        encoded = tokenizer.encode_batch(prompts)
    else:
        encoded = map(tokenizer.encode, prompts)
    sequences = [np.concatenate([[tokenizer.eot], ids]).astype(np.int32) for ids in encoded]
    if task.kind == "language_modeling":
        without, whole = sequences
        begins = np.array_equal(without, whole[: len(without)])
        if not begins or len(whole) <= len(without):
            raise EvaluationError(
                f"{task.label}, item {index} after the shuffle: the tokens of the prompt without "
                "the continuation are not the beginning of the tokens with it"
            )
        rows = [(whole, len(without))]
    elif task.kind == "multiple_choice":
        prefix = _common(sequences)
        rows = [(ids, prefix) for ids in sequences]
    else:
        suffix = _common([ids[::-1] for ids in sequences])
        rows = [(ids, len(ids) - suffix) for ids in sequences]
    crops = [max(0, len(ids) - most) for ids, _ in rows]
    rows = [Row(ids[crop:], start - crop) for (ids, start), crop in zip(rows, crops, strict=True)]
    if any(row.start < 1 for row in rows):
        raise EvaluationError(
            f"{task.label}, item {index} after the shuffle: the scored tokens do not fit into the "
            f"model's block_size {most}"
        )
    return rows


def _common(sequences: list[np.ndarray]) -> int:
    """Return the length of the common prefix."""
    shortest = min(map(len, sequences))
    equal = np.ones(shortest, bool)
    for ids in sequences[1:]:
        equal &= ids[:shortest] == sequences[0][:shortest]
    return shortest if equal.all() else int(np.argmin(equal))


# ------------------------------------------------------------------------------------------- files
def read_core(folder: Path) -> list[CoreTask]:
    """Read the tasks of a bundle.

    Raises:
        EvaluationError: a file is missing or malformed, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise EvaluationError(
            "core.yaml needs PyYAML: pip install -e '.[eval]', or pip install pyyaml"
        ) from None
    file = folder / "core.yaml"
    text = read_file(file, f"unpack {BUNDLE_URL} so that this file exists")
    try:
        config = yaml.safe_load(text)
    except Exception as error:  # PyYAML raises errors of many types
        raise EvaluationError(f"{file}: expected YAML: {' '.join(str(error).split())}") from None
    entries = config.get("icl_tasks") if isinstance(config, dict) else None
    if not isinstance(entries, list) or not entries:
        raise EvaluationError(f"{file}: expected a list icl_tasks, found {entries!r:.60}")
    baselines = _baselines(folder / "eval_meta_data.csv")
    return [_task(folder, entry, baselines) for entry in entries]


def _baselines(file: Path) -> dict[str, float]:
    """Return each task's accuracy of random guessing, read from the percentages in the file."""
    content = read_file(file, _PART)
    try:
        records = csv.DictReader(io.StringIO(content.decode(), newline=""))
        found = {each["Eval Task"]: float(each["Random baseline"]) / 100 for each in records}
    except (csv.Error, ValueError, TypeError, LookupError) as error:
        raise EvaluationError(
            f"{file}: expected CSV with the columns Eval Task and Random baseline: {error}"
        ) from None
    return found


def _task(folder: Path, entry: Any, baselines: dict[str, float]) -> CoreTask:
    where = f"{folder / 'core.yaml'}: {entry!r:.200}"
    fields = entry if isinstance(entry, dict) else {}
    check_types(fields, TASK_FIELDS, where)
    label, kind, uri, shots = (fields[name] for name in TASK_FIELDS)
    shots, delimiter = shots[0] if shots else None, fields.get("continuation_delimiter", " ")
    if has_control_characters(label + uri) or not isinstance(delimiter, str):
        raise EvaluationError(f"{where}: expected label, dataset_uri and delimiter to be texts")
    if kind not in FIELDS:
        raise EvaluationError(f"{where}: expected icl_task_type to be one of {', '.join(FIELDS)}")
    if type(shots) is not int or shots < 0:
        raise EvaluationError(f"{where}: expected num_fewshot to be a list with a number")
    if not 0 <= baselines.get(label, -1) < 1:
        raise EvaluationError(f"{where}: expected a Random baseline below 100 % of {label}")
    path = folder / "eval_data" / uri
    if not path.resolve().is_relative_to(folder.resolve()):
        raise EvaluationError(f"{where}: expected dataset_uri inside of {folder}")
    items = []
    for where, fields in read_jsonl(path, _PART):
        check_types(fields, FIELDS[kind], where)
        if kind != "language_modeling":
            options = fields["choices" if kind == "multiple_choice" else "context_options"]
            check_options(options, fields["gold"], where)
        items.append(fields)
    if shots >= len(items):
        raise EvaluationError(f"{path}: {shots} examples and an item need more lines")
    random.Random(SHUFFLE_SEED).shuffle(items)
    return CoreTask(label, kind, tuple(items), shots, delimiter, baselines[label])
