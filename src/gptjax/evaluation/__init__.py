"""Evaluation: loss and bits per byte of a text, HellaSwag, CORE, lm-evaluation-harness.

`python -m gptjax.evaluate` is the command. Every error that a user can correct is a
`gptjax.data.DataError`.
"""

from typing import TYPE_CHECKING

from gptjax.evaluation.choices import (
    Choices,
    Question,
    evenly_spaced,
    read_hellaswag,
    score_choices,
)
from gptjax.evaluation.core import CoreTask, core_metric, read_core, score_core
from gptjax.evaluation.scoring import EvaluationError, Row, Score, Scorer
from gptjax.evaluation.text import Stream, TextScore, from_dataset, from_file, score_text

if TYPE_CHECKING:
    from gptjax.evaluation.harness import LM as LM

__all__ = [
    "Choices",
    "CoreTask",
    "EvaluationError",
    "Question",
    "Row",
    "Score",
    "Scorer",
    "Stream",
    "TextScore",
    "core_metric",
    "evenly_spaced",
    "from_dataset",
    "from_file",
    "read_core",
    "read_hellaswag",
    "score_choices",
    "score_core",
    "score_text",
]


def __getattr__(name: str):
    # Only LM needs lm_eval. LM is not in `__all__`: `import *` must work without lm_eval.
    if name == "LM":
        from gptjax.evaluation.harness import LM

        return LM
    raise AttributeError(f"module 'gptjax.evaluation' has no attribute {name!r}")
