"""Evaluation: loss and bits per byte of a text, HellaSwag, CORE, lm-evaluation-harness.

`python -m gptjax.evaluate` is the command. Every error that a user can correct is a
`gptjax.data.DataError`.
"""

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
