"""Print a page with all options of train.py, from the dataclasses that define them.

python benchmarks/tools/document_options.py > FOLDER/configuration.md
"""

import argparse
import dataclasses
import re
import types
import typing

from gptjax.config import Config
from gptjax.fields import ranges
from gptjax.models.base import ModelConfig
from gptjax.models.gpt2 import GPT2Config
from gptjax.models.llama3 import Llama3Config
from gptjax.models.speedrun import SpeedrunConfig
from gptjax.optim import MuonConfig, NorMuonConfig, OptimizerConfig
from gptjax.precision import PRECISIONS, Precision
from gptjax.stages import Stage
from gptjax.terminal import docstrings

HEADER = """# All options

Each field of a config is a command-line option of `train.py`. An option of type bool has a negative
form, such as `--no-deterministic`.
"""
# Heading, option prefix, class, and the classes whose options another table has.
SECTIONS = [
    ("Run", "--", Config, ()),
    ("Model: all architectures", "--model.", ModelConfig, ()),
    ("Model: GPT-2", "--model.", GPT2Config, (ModelConfig,)),
    ("Model: Llama 3", "--model.", Llama3Config, (ModelConfig,)),
    ("Model: speedrun", "--model.", SpeedrunConfig, (ModelConfig,)),
    ("Optimizer: all algorithms", "--optimizer.", OptimizerConfig, ()),
    ("Optimizer: NorMuon", "--optimizer.", NorMuonConfig, (OptimizerConfig,)),
    ("Optimizer: Muon", "--optimizer.", MuonConfig, (OptimizerConfig,)),
    ("Fields of a stage", "", Stage, ()),
]
# Fields whose options are tables of their own.
SUBCLASSES = {Config: ("model", "optimizer")}


def type_name(hint: object) -> str:
    """Return a field's type: its choices, or the names of its classes."""
    if hint is Precision:
        return ", ".join(f"`{name}`" for name in PRECISIONS)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"tuple of {type_name(typing.get_args(hint)[0])}"
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    return " or ".join("None" if p is types.NoneType else p.__name__ for p in parts)


def default(field: dataclasses.Field) -> str:
    """Return the default of a field; the user's folders are not named."""
    if len(str(field.default)) > 60 and field.default is not dataclasses.MISSING:
        return f"`{type(field.default).__name__}(…)`"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default}`" if field.default != "" else "empty"
    factory = field.default_factory.__name__
    return "`~/.cache/gptjax/data`" if factory == "data_folder" else "empty"


def table(prefix: str, kind: type, others: tuple[type, ...]) -> list[str]:
    """Return the rows of the options of a class, except those of `others`."""
    known = {(f.name, f.default) for other in others for f in dataclasses.fields(other)}
    hints, texts, allowed = typing.get_type_hints(kind), docstrings(kind), ranges(kind)
    rows = ["| option | meaning | default | type |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        if (field.name, field.default) in known or field.name in SUBCLASSES.get(kind, ()):
            continue
        flag = prefix + field.name.replace("_", "-") if prefix else field.name
        meaning = texts[field.name]
        if field.name in allowed:
            limits = re.sub(
                " and at most [0-9]+$| and finite in fp32| in fp32$", "", allowed[field.name].text
            )
            meaning += f" Range: {limits}."
        cells = (f"`{flag}`", meaning, default(field), type_name(hints[field.name]))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def page() -> str:
    """Return the content of the page."""
    lines = [HEADER]
    for title, prefix, kind, others in SECTIONS:
        rows = table(prefix, kind, others)
        lines += [f"## {title}", "", *rows, ""] if len(rows) > 2 else []
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page())
