"""Tasks of `--task` and `--eval-tasks` by name: their files in a data folder, and their metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptjax.evaluation.choices import evenly_spaced, read_hellaswag, score_choices
from gptjax.evaluation.core import core_metric, read_core, score_core
from gptjax.evaluation.scoring import Scorer

# Task → reader, and candidate names in the data folder; the first existing name is used.
TASKS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "hellaswag": (read_hellaswag, ("hellaswag_val.jsonl", "hellaswag_val.bin")),
    "core": (read_core, ("eval_bundle",)),
}


def read(task: str, data_dir: Path, path: Path | None = None) -> Any:
    """Return the items of a task.

    Args:
        path: file or folder of the task; None to find it in `data_dir`.

    Raises:
        EvaluationError: the file or folder is missing or malformed.
    """
    reader, names = TASKS[task]
    places = [data_dir / name for name in names]
    return reader(path or next((each for each in places if each.exists()), places[0]))


def score(
    task: str, items: Any, scorer: Scorer, tokenizer: Any, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return the metrics: {"hellaswag": {"acc": …, …}}, or those of each task of CORE and of CORE.

    Args:
        items: from `read`.
        limit: number of items of each task; None for all.

    Raises:
        EvaluationError: an item that the model cannot score.
    """
    if task == "hellaswag":
        return {task: score_choices(scorer, tokenizer, evenly_spaced(items, limit)).metrics()}
    found = score_core(scorer, tokenizer, items, max_items=limit)
    total = sum(each["items"] for each in found.values())
    metrics = {f"{task}/{label}": values for label, values in found.items()}
    return metrics | {task: {"value": core_metric(found), "items": total}}
