"""Tasks of `--task` and `--eval-tasks` by name: their files in a data folder, and their metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from gptjax import data
from gptjax.config import Config
from gptjax.evaluation.choices import evenly_spaced, read_hellaswag, score_choices
from gptjax.evaluation.core import core_metric, read_core, score_core
from gptjax.evaluation.scoring import Scorer
from gptjax.models.base import ModelConfig
from gptjax.parallel import Parallel

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


class Evaluations:
    """The tasks of `config.eval_tasks` during training, read before training begins.

    Args:
        tokenizer: name of the dataset's tokenizer.

    Raises:
        EvaluationError: a file is missing or malformed.
        TokenizerUnavailable: the tokenizer's files are neither cached nor downloadable.
    """

    def __init__(self, config: Config, tokenizer: str, parallel: Parallel):
        self._config, self._parallel = config, parallel
        names = config.eval_tasks.split(",") if config.eval_every else []
        self._tokenizer = data.get_tokenizer(tokenizer) if names else None
        self._items = {task: read(task, config.data_dir) for task in names}

    def results(self, params: PyTree, model: ModelConfig) -> dict[str, float]:
        """Return the metrics of each task: {"hellaswag_acc": 0.29, "core": 0.1, …}.

        All processes call this function together.

        Raises:
            EvaluationError: an item that the model cannot score.
        """
        tokens = min(65536, self._config.micro_batch * self._config.sequence_length)
        scorer, results = Scorer(model, params, self._parallel, tokens), {}
        for task, items in self._items.items():
            for name, values in score(task, items, scorer, self._tokenizer).items():
                if task == "hellaswag":
                    results |= {f"{name}_{each}": values[each] for each in ("acc", "acc_norm")}
                else:
                    results[name.replace("/", "_")] = values.get("value", values.get("acc"))
        return results
