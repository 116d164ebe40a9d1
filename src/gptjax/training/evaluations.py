"""Evaluation tasks during training: HellaSwag and CORE on the current parameters."""

from typing import Any

from jaxtyping import PyTree

from gptjax import data
from gptjax.config import Config, ConfigError
from gptjax.evaluation import EvaluationError, Scorer, tasks
from gptjax.models.base import ModelConfig
from gptjax.parallel import Parallel

# Maximum number of tokens of a batch on each device, as in `Scorer` on a GPU.
MOST_TOKENS = 65536


class Evaluations:
    """The tasks of `config.eval_tasks`, read before training begins.

    Args:
        tokenizer: name of the dataset's tokenizer.

    Raises:
        ConfigError: a file is missing or malformed.
        TokenizerUnavailable: the tokenizer's files are neither cached nor downloadable.
    """

    def __init__(self, config: Config, tokenizer: str, parallel: Parallel):
        self._config, self._parallel = config, parallel
        self._items: dict[str, Any] = {}
        if config.eval_every:
            self._tokenizer = data.get_tokenizer(tokenizer)
            for task in config.eval_tasks.split(","):
                try:
                    self._items[task] = tasks.read(task, config.data_dir)
                except EvaluationError as error:
                    raise ConfigError(f"--eval-tasks {task}: {error}") from error

    def results(self, params: PyTree, model: ModelConfig) -> dict[str, float]:
        """Return the metrics of each task: {"hellaswag_acc": 0.29, "core": 0.1, …}.

        All processes call this function together.

        Raises:
            DataError: an item that the model cannot score.
        """
        c, found = self._config, {}
        tokens = min(MOST_TOKENS, c.micro_batch * c.sequence_length)
        scorer = Scorer(model, params, self._parallel, tokens)
        try:
            for task, items in self._items.items():
                for name, values in tasks.score(task, items, scorer, self._tokenizer).items():
                    if "value" in values:
                        found[name] = values["value"]
                    elif task == "core":
                        found[name.replace("/", "_")] = values["acc"]
                    else:
                        found |= {f"{name}_{each}": values[each] for each in ("acc", "acc_norm")}
        except EvaluationError as error:
            raise data.DataError(str(error)) from error
        return found
