"""Paths of the tasks' files in a data folder."""

from pathlib import Path
from typing import Any

from gptjax.evaluation.choices import read_hellaswag
from gptjax.evaluation.core import read_core

# Task → candidate names in the data folder; the first existing name is used.
PLACES = {
    "hellaswag": ("hellaswag_val.jsonl", "hellaswag_val.bin"),
    "core": ("eval_bundle",),
}
_READERS = {"hellaswag": read_hellaswag, "core": read_core}


def place(task: str, data_dir: Path) -> Path:
    """Return the path of a task's data; the first candidate if no candidate exists."""
    places = [data_dir / name for name in PLACES[task]]
    return next((each for each in places if each.exists()), places[0])


def read(task: str, path: Path) -> Any:
    """Return the questions or the tasks of CORE in a file or folder.

    Raises:
        EvaluationError: the file or folder is missing or malformed.
    """
    return _READERS[task](path)
