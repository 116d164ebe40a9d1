"""Evaluation tasks, HellaSwag and CORE, and sampled texts of the current parameters."""

import jax
from flax import nnx

from gptjax import data
from gptjax.config import Config
from gptjax.evaluation import Scorer, tasks
from gptjax.generation.stream import complete
from gptjax.models.base import ModelConfig, graph
from gptjax.parallel import Parallel
from gptjax.training.step import TrainState

# Maximum number of tokens of a batch on each device, as in `Scorer` on a GPU.
MOST_TOKENS = 65536
# Tokens of a sample, or fewer with a smaller block size.
SAMPLE_TOKENS = 128


class Evaluations:
    """The tasks of `config.eval_tasks`, read before training begins, and samples.

    All processes call each method together.

    Args:
        tokenizer: the dataset's tokenizer; None if the run has neither tasks nor samples.

    Raises:
        EvaluationError: a file of a task is missing or malformed.
    """

    def __init__(self, config: Config, tokenizer: data.Tokenizer | None, parallel: Parallel):
        self._config, self._tokenizer, self._parallel = config, tokenizer, parallel
        names = config.eval_tasks.split(",") if config.eval_every else []
        self._items = {task: tasks.read(task, config.data_dir) for task in names}

    def results(self, state: TrainState, model: ModelConfig) -> dict[str, float]:
        """Return the metrics of each task: {"hellaswag_acc": 0.29, "core": 0.1, …}.

        Raises:
            EvaluationError: an item that the model cannot score.
        """
        tokens = min(MOST_TOKENS, self._config.micro_batch * self._config.sequence_length)
        params = state.evaluation_params()
        scorer, results = Scorer(model, params, self._parallel, tokens), {}
        for task, items in self._items.items():
            for name, values in tasks.score(task, items, scorer, self._tokenizer).items():
                if task == "hellaswag":
                    results |= {f"{name}_{each}": values[each] for each in ("acc", "acc_norm")}
                else:
                    results[name.replace("/", "_")] = values.get("value", values.get("acc"))
        return results

    def sample(self, model: ModelConfig, state: TrainState, step: int) -> str | None:
        """Sample a text after the end-of-text token; return None except in process 0."""
        assert self._tokenizer is not None
        params, rng = self._parallel.whole((state.evaluation_params(), state.rng))
        if jax.process_index():
            return None
        key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
        length = min(SAMPLE_TOKENS, model.block_size - 1)
        how = {"max_new_tokens": length, "key": key, "stop_at_eot": False}
        merged = nnx.merge(graph(model.for_evaluation()), params)
        begin = [self._tokenizer.eot, *self._tokenizer.prefix]
        *_, (completion,) = complete(merged, self._tokenizer, [begin], **how)
        return completion.text
