"""CORE: 22 tasks in context, centred on random guessing (Li et al., "DataComp-LM", 2024).

The folder is nanochat's eval_bundle: core.yaml, eval_data/ and eval_meta_data.csv. For each task:

1. Shuffle the items with the seed 1337.
2. For item i draw the few-shot examples from the other items with the seed 1234 + i.
3. Render prompts: examples and item are joined by an empty line; the tokenizer's begin-of-text or
   end-of-text token precedes the prompt. A prompt longer than block_size loses its first tokens.
4. multiple_choice: choose the continuation with the largest mean log-probability of the tokens
   after the common prefix of all prompts. schema: choose the context that gives the common suffix
   of all prompts the largest mean. language_modeling: correct if each token of the continuation is
   the likeliest token.

    centred = (accuracy − baseline) / (1 − baseline)      CORE = mean of centred over the tasks
"""

import csv
import dataclasses
import functools
import io
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.evaluation.choices import read_jsonl
from gptjax.evaluation.scoring import EvaluationError, Row, Scorer, parsing, read_file

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED, FEW_SHOT_SEED = 1337, 1234
_PART = f"it is part of {BUNDLE_URL}"
KINDS = ("multiple_choice", "schema", "language_modeling")


@dataclasses.dataclass(frozen=True)
class CoreTask:
    """A task of CORE.

    Attributes:
        label: name.
        kind: an entry of `KINDS`.
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
        shots = "".join(f"{self.right(each)}\n\n" for each in self.few_shot(index))
        prompts = [f"{shots}{text}" for text in self._texts(self.items[index])]
        if self.kind == "language_modeling":
            # The space before the continuation is part of the continuation's first token.
            context = self.items[index]["context"].strip()
            prompts.insert(0, f"{shots}{context}{self.delimiter}".strip())
        return prompts

    def right(self, item: dict[str, Any]) -> str:
        """Return an item with the correct choice."""
        return self._texts(item)[item["gold"] if self.kind != "language_modeling" else 0]

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
) -> dict[str, dict[str, Any]]:
    """Return accuracy, centred accuracy and number of items of each task.

    Args:
        max_items: maximum number of items of a task: the first items after the shuffle.

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
    return results


def core_metric(results: dict[str, dict[str, Any]]) -> float:
    """Return CORE: the mean of the centred accuracies."""
    return sum(each["centred"] for each in results.values()) / len(results)


def score_task(scorer: Scorer, tokenizer: Any, task: CoreTask, count: int) -> list[bool]:
    """Return whether the model's answer is correct for each of the first `count` items."""
    greedy = task.kind == "language_modeling"
    rows_of = functools.partial(_rows, tokenizer, task, scorer.max_length)
    right = []
    for index, scores in enumerate(scorer.score_items(range(count), rows_of, greedy=greedy)):
        means = [-score.mean for score in scores]
        # As in nanochat, a choice that begins another choice has no tokens and the mean NaN.
        best = means.index(min(means))
        right.append(bool(scores[0].greedy) if greedy else best == task.items[index]["gold"])
    return right


def _rows(tokenizer: Any, task: CoreTask, most: int, index: int) -> list[Row]:
    """Return the rows of an item, each of at most `most` tokens."""
    encoded = tokenizer.encode_batch(task.prompts(index))
    begin = [*tokenizer.prefix] or [tokenizer.eot]
    sequences = [[*begin, *map(int, ids)] for ids in encoded]
    if task.kind == "language_modeling":
        without, whole = sequences
        starts, sequences = [len(without)], [whole]
    elif task.kind == "multiple_choice":
        starts = len(sequences) * [len(os.path.commonprefix(sequences))]
    else:
        suffix = len(os.path.commonprefix([ids[::-1] for ids in sequences]))
        starts = [len(ids) - suffix for ids in sequences]
    crops = [max(0, len(ids) - most) for ids in sequences]
    rows = zip(sequences, starts, crops, strict=True)
    return [Row(np.array(ids[crop:], np.int32), start - crop) for ids, start, crop in rows]


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
            "core.yaml needs PyYAML: pip install 'gptjax[eval]', or pip install pyyaml"
        ) from None
    file = folder / "core.yaml"
    text = read_file(file, f"unpack {BUNDLE_URL} so that this file exists")
    baselines = _baselines(folder / "eval_meta_data.csv")
    with parsing(str(file)):
        return [_task(folder, entry, baselines) for entry in yaml.safe_load(text)["icl_tasks"]]


def _baselines(file: Path) -> dict[str, float]:
    """Return each task's accuracy of random guessing, read from the percentages in the file."""
    content = read_file(file, _PART)
    with parsing(str(file)):
        records = csv.DictReader(io.StringIO(content.decode(), newline=""))
        return {each["Eval Task"]: float(each["Random baseline"]) / 100 for each in records}


def _task(folder: Path, entry: dict[str, Any], baselines: dict[str, float]) -> CoreTask:
    label, kind, shots = entry["label"], entry["icl_task_type"], entry["num_fewshot"][0]
    if kind not in KINDS:
        raise ValueError(f"expected icl_task_type to be one of {', '.join(KINDS)}, found {kind!r}")
    delimiter = entry.get("continuation_delimiter", " ")
    task = CoreTask(label, kind, (), shots, delimiter, baselines[label])

    def parse(item: dict[str, Any]) -> dict[str, Any]:
        task.right(item)  # an error for a missing field
        return item

    items = read_jsonl(folder / "eval_data" / entry["dataset_uri"], _PART, parse)
    random.Random(SHUFFLE_SEED).shuffle(items)
    return dataclasses.replace(task, items=tuple(items))
