"""The command line of train.py: a config file, and options that override its fields."""

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import sys
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gptjax import scripts, stages
from gptjax.config import Config, ConfigError
from gptjax.optim import ALGORITHMS, switch_algorithm
from gptjax.precision import PRECISIONS, Precision
from gptjax.terminal import docstrings

# Without those of config files.
_PRECISIONS = frozenset(PRECISIONS)

# Boxes of --help with their options. Everyday options are first; the rest is in the box "training".
BOXES = {
    "": "name max_steps dataset sequence_length batch_tokens micro_batch model.n_layer "
    "model.n_head model.n_embd model.precision optimizer.learning_rate device parallel resume "
    "init_from",
    "training": "seed",
    "devices": "reduce_dtype distributed deterministic",
    "data": "data_dir separate_documents max_document_length data_order",
    "evaluation": "val_every val_tokens eval_tasks eval_every sample_every",
    "checkpoint": "checkpoint_every keep_last keep_every",
    "log": "runs_dir wandb",
    "model": "",
    "optimizer": "",
}
_BOX_OF = {name: box for box, names in BOXES.items() for name in names.split()}


def from_command_line(argv: list[str] | None = None) -> Config:
    """Return the config of `--config FILE`, with the values of all other options.

    `--optimizer NAME` selects another optimizer. Options of both optimizers keep the file's values.

    Raises:
        ConfigError: `--config` is missing or repeated, the file is not a config, or a value is out
            of range.
        SystemExit: an unknown or ill-typed option (code 2, with the choices), or `--help` (code 0).
    """
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, action="append", default=[])
    first.add_argument("--optimizer", action="append", default=[])
    given, rest = first.parse_known_args(argv)
    for name, values in vars(given).items():
        if len(values) > 1:
            raise ConfigError(f"expected one --{name}, got {', '.join(map(str, values))}")
    if not given.config and not {"-h", "--help"} & set(rest):
        raise ConfigError(
            "--config FILE is missing; for a first run: gptjax train --config gpt2_tiny"
        )
    config = load(given.config[0]) if given.config else Config()
    if given.optimizer:
        # A config file may define an algorithm of its own.
        name, known = given.optimizer[0], {**ALGORITHMS, config.optimizer.name: None}
        if name not in known:
            raise ConfigError(f"--optimizer must be one of {', '.join(known)}, got {name!r}")
        config = dataclasses.replace(config, optimizer=switch_algorithm(config.optimizer, name))
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(_rule(config, given.config[0] if given.config else tyro.MISSING))
    values = tyro.cli(
        _CommandLine,
        prog=os.path.basename(sys.argv[0]),  # train.py, or gptjax train
        description="Train a language model."
        + ("" if given.config else " With --config, the defaults are the file's."),
        args=argv,
        registry=registry,
    )
    return _with_values(config, values)


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    """The options that `_fields` does not have."""

    config: Path
    """Python file that defines `config`. A name such as gpt2_tiny: a config of gptjax. The other
    options override its fields; the defaults are the values in the file."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(ALGORITHMS) + "}")]
    """Algorithm of the optimizer. If the file has another algorithm, options of both algorithms
    keep the file's values."""


def _rule(config: Config, file: Any) -> Any:
    """Return the rule that describes the boxes of options to tyro."""
    spec = tyro.constructors.StructFieldSpec
    boxes, texts = {box: [] for box in BOXES}, docstrings(_CommandLine)
    values = {"config": file, "optimizer": config.optimizer.name}
    for name, hint in typing.get_type_hints(_CommandLine, include_extras=True).items():
        boxes[""].append(spec(name, hint, values[name], texts[name]))
    found = {field.name: field for field in _fields(config)}
    for name in [*_BOX_OF, *found]:
        if field := found.pop(name, None):
            box = _BOX_OF.get(name, name.rpartition(".")[0] or "training")
            boxes[box].append(field)
    texts = docstrings(Config)
    kinds: dict[type, list] = {_CommandLine: boxes.pop("")}
    for box, options in boxes.items():
        kind = type(box, (), {})
        kinds[kind] = options
        hint = Annotated[kind, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=box)]
        kinds[_CommandLine].append(spec(f"{box} box", hint, tyro.MISSING, texts.get(box, "")))

    def rule(info: tyro.constructors.StructTypeInfo) -> Any:
        if info.type in kinds:
            return tyro.constructors.StructConstructorSpec(dict, tuple(kinds[info.type]))
        return None

    return rule


def _fields(config: Config) -> Iterator[tyro.constructors.StructFieldSpec]:
    """Yield the options of a config; a field "n_layer" of the model is "model.n_layer"."""
    parts = {"": config, "model.": config.model, "optimizer.": config.optimizer}
    for prefix, part in parts.items():
        hints = typing.get_type_hints(type(part), include_extras=True)
        texts = docstrings(type(part))
        for field in dataclasses.fields(part):
            name, kind, value = prefix + field.name, hints[field.name], getattr(part, field.name)
            if kind is Precision:
                kind, value = Literal[*PRECISIONS], value.name
            elif name == "stages":
                kind = tuple[Annotated[str, tyro.conf.arg(metavar="JSON")], ...]
                value = _texts(config)
            if name not in ("model", "optimizer"):
                text = texts.get(field.name)
                yield tyro.constructors.StructFieldSpec(name, kind, value, text)


def _texts(config: Config) -> tuple[str, ...]:
    """Return the stages of a config as on the command line."""
    return tuple(map(json.dumps, stages.to_json(config.stages)))


def _with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return the config with the values of the options."""
    parts: dict[str, dict[str, Any]] = {"": {}, "model": {}, "optimizer": {}}
    for box in (values, *(values.pop(f"{box} box") for box in BOXES if box)):
        for name, value in box.items():
            prefix, _, field = name.rpartition(".")
            parts[prefix][field] = value
    own = parts[""]
    del own["config"]
    try:
        of_file = dict(zip(_texts(config), config.stages, strict=True))
        own["stages"] = tuple(of_file.get(text) or stages.from_json(text) for text in own["stages"])
        parts["model"]["precision"] = Precision(parts["model"]["precision"])
        own["model"] = dataclasses.replace(config.model, **parts["model"])
        own["optimizer"] = dataclasses.replace(config.optimizer, **parts["optimizer"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Config(**own)


def load(path: Path) -> Config:
    """Return the `config` that a Python file defines.

    Args:
        path: the file, or the name of a config of gptjax, such as gpt2_tiny.

    Raises:
        ConfigError: the file is missing, unreadable or not Python, it raises, or its `config` is
            missing or not a `Config`. The message names the line if it is known.
    """
    path = scripts.config_file(path)
    if not os.path.isfile(path) or path.suffix != ".py":
        known = ", ".join(sorted(map(str, path.parent.glob("*.py"))))
        there = f"; there are: {known}" if known else ""
        raise ConfigError(
            f"--config must be a Python file, NAME.py, got {path}{there}; configs of gptjax: "
            + ", ".join(scripts.config_names())
        )
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # As for a script, the config may import modules in its folder. The folder is removed from
    # sys.path after loading, because a file there could hide a module that is imported later.
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)
    # `config_class` finds the classes of imported modules only.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
        config = getattr(module, "config", None)  # may call a `__getattr__` of the file
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise ConfigError(_why_not_loaded(path, error)) from error
    finally:
        sys.path.remove(folder)
    if not isinstance(config, Config):
        raise ConfigError(
            f"{path} must define `config = gptjax.config.Config(...)`; its `config` is "
            + ("missing" if config is None else f"a {type(config).__name__}")
        )
    return config


def config_option(config: Config) -> str:
    """Return " --config FILE" with this process's file if gptjax does not define the model's class
    or precision: commands need the file to load the model. Else return ""."""
    own = type(config.model).__module__.startswith("gptjax.")
    if own and config.model.precision.name in _PRECISIONS:
        return ""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="FILE")
    return f" --config {shlex.quote(parser.parse_known_args()[0].config)}"


def _why_not_loaded(path: Path, error: BaseException) -> str:
    """Describe an exception from the execution of a config file, with the file's line if known."""
    frames, file = traceback.extract_tb(error.__traceback__), str(path.absolute())
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    where = f"{path}, line {lines[-1]}" if lines and lines[-1] else str(path)
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    said = (said.strip().splitlines() or ["no message"])[0]
    if not isinstance(error, ConfigError):
        said = f"{type(error).__name__}: {said}"
    if "unexpected keyword argument" in said:
        said += "; `gptjax train --help` lists the options"
    return f"{where}: {said}"
