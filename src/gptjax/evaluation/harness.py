"""Interface to lm-evaluation-harness: `gptjax.evaluation.LM` is a model class for the harness.

    lm_eval.simple_evaluate(model=LM(model, tokenizer), tasks=["lambada_openai"])

Log-probabilities are computed on all devices, in batches of a few padded lengths. Texts are
generated on one device, in batches of prompts of similar length.
"""

import collections
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gptjax.evaluation.scoring import EvaluationError, Row, Scorer
from gptjax.generation.stream import complete
from gptjax.models.base import Model

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise EvaluationError(
        "lm-evaluation-harness is not installed: pip install 'gptjax[eval]'"
    ) from error

MAX_NEW_TOKENS = 256


class LM(TemplateLM):
    """A gptjax model for `lm_eval.simple_evaluate(model=…)`.

    Args:
        model: weights and shape.
        tokenizer: tokenizer of the model, with encode, decode and eot.
        batch_size: number of sequences of block_size tokens in a batch of each device, and number
            of prompts in a batch. None: the default of `Scorer`, and 16 prompts.
        devices: devices for scoring; None for all. Generation uses one device.
        seed: seed of sampling, for tasks with a temperature above 0.

    Attributes:
        scorer: computes the log-probabilities; its `progress` is called for every request.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any,
        batch_size: int | None = None,
        *,
        devices: list[jax.Device] | None = None,
        seed: int = 0,
    ):
        super().__init__()
        tokens = None if batch_size is None else batch_size * model.config.block_size
        self.scorer = Scorer.of(model, devices, tokens)
        self._model, self._tokenizer = model, tokenizer
        self._prompts, self._key = batch_size or 16, jax.random.key(seed)

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token, which also precedes texts without a context."""
        return self._tokenizer.eot

    @property
    def max_length(self) -> int:
        """Maximum number of input tokens, block_size."""
        return self.scorer.max_length

    @property
    def max_gen_toks(self) -> int:
        """Default of max_gen_toks, for tasks without this option."""
        return min(MAX_NEW_TOKENS, self.max_length - 1)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text. No special tokens are added."""
        return np.asarray(self._tokenizer.encode(string)).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        def rows(request: tuple[Any, list[int], list[int]]) -> list[Row]:
            _, context, continuation = request
            return [Row(np.array(context + continuation, np.int32), len(context))]

        found = self.scorer.score_items(requests, rows, greedy=True)
        return [(score.log_prob, bool(score.greedy)) for (score,) in found]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in the windows of the harness."""

        def rows(request: Any) -> list[Row]:
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = map(utils.make_disjoint_window, windows)
            return [Row(np.array([*begin, *end], np.int32), len(begin)) for begin, end in pairs]

        found = self.scorer.score_items(requests, rows)
        return [sum(score.log_prob for score in each) for each in found]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt up to the first of its stop texts.

        Supported options are until, max_gen_toks, do_sample, temperature, top_k and top_p. A prompt
        that leaves no room for max_gen_toks loses its first tokens.
        """
        texts = [""] * len(requests)
        groups = collections.defaultdict(list)
        for index, request in enumerate(requests):
            context, options = request.args
            until, length, sampling = _options(dict(options), self.max_gen_toks)
            if not 1 <= length < self.max_length:
                raise EvaluationError(
                    f"expected max_gen_toks in 1..{self.max_length - 1}, got {length}"
                )
            ids = self.tok_encode(context)[length - self.max_length :] or [self.prefix_token_id]
            groups[length, until, *sampling].append((index, ids))
        completed = 0
        for (length, until, *sampling), group in groups.items():
            group.sort(key=lambda each: -len(each[1]))
            for batch in itertools.batched(group, self._prompts):
                self._key, key = jax.random.split(self._key)
                how = {"max_new_tokens": length, "stop": until, "key": key, **dict(sampling)}
                prompts = [ids for _, ids in batch]
                # Always `_prompts` rows: another number of rows would need another executable.
                prompts += [prompts[-1]] * (self._prompts - len(batch))
                *_, done = complete(self._model, self._tokenizer, prompts, **how)
                for (index, _), completion in zip(batch, done, strict=False):
                    texts[index] = completion.text
                completed += len(batch)
                self.scorer.progress(completed, len(requests))
        return texts


def _options(
    given: dict[str, Any], default_length: int
) -> tuple[tuple[str, ...], int, tuple[tuple[str, Any], ...]]:
    """Return stop texts, number of new tokens, and items of arguments of `gptjax.generate`."""
    until = given.pop("until", None) or ()
    length = int(given.pop("max_gen_toks", given.pop("max_new_tokens", default_length)))
    sample = given.pop("do_sample", given.get("temperature", 0) > 0)
    temperature = given.pop("temperature", 1.0)
    sampling: dict[str, Any] = {"temperature": temperature if sample else 0}
    filters = {name: given.pop(name, None) for name in ("top_k", "top_p")}
    sampling |= {name: value for name, value in filters.items() if sample and value}
    if given:
        raise EvaluationError(
            f"unknown options of generation {sorted(given)}; known are until, max_gen_toks, "
            "do_sample, temperature, top_k, top_p"
        )
    texts = tuple(filter(None, (until,) if isinstance(until, str) else until))
    return texts, length, tuple(sampling.items())


def evaluate_tasks(
    lm: LM,
    tasks: Sequence[str],
    *,
    path: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the metrics of each task: {"harness/lambada_openai": {"acc,none": 0.32}, …}.

    Args:
        path: folder with more tasks, as YAML.
        shots: few-shot examples; None for each task's default.
        limit: items of a task; None for all.

    Raises:
        EvaluationError: an unknown task.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if path is None else str(path))
    if unknown := sorted({*tasks} - {*manager.all_tasks}):
        raise EvaluationError(
            f"unknown tasks of lm-evaluation-harness: {', '.join(unknown)}; `lm_eval ls tasks` "
            "lists them, and --harness-path adds a folder"
        )
    found = simple_evaluate(
        model=lm,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=shots,
        limit=limit,
        log_samples=False,
        bootstrap_iters=0,
    )
    assert found is not None  # None except in process 0
    return {
        f"harness/{name}": {
            key: value for key, value in values.items() if isinstance(value, float | int)
        }
        for name, values in found["results"].items()
    }
