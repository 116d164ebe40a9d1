"""The command line of train.py: a config file, and options that override its fields."""

import argparse
import dataclasses
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated

import tyro

from gptjax import stages
from gptjax.config import Config, ConfigError
from gptjax.optim import ALGORITHMS, OptimizerConfig, switch_algorithm
from gptjax.precision import NAMES as PRECISIONS
from gptjax.precision import Precision
from gptjax.stages import Stage
from gptjax.terminal import command_line, printable


def from_command_line(argv: list[str] | None = None) -> Config:
    """Return the config of `--config FILE`, with the values of all other options.

    `--optimizer NAME` selects another optimizer. Options of both optimizers keep the file's values.

    Raises:
        ConfigError: `--config` is missing or repeated, the file is not a config, an option belongs
            to another optimizer, or a value is out of range.
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
            "--config FILE is missing; for a first run: python train.py --config "
            "configs/gpt2_tiny.py"
        )
    config = load(given.config[0]) if given.config else Config()
    if given.optimizer:
        config = _with_optimizer(config, given.optimizer[0])
    _check_optimizer_options(config.optimizer, rest)
    _check_stages(rest)
    file = given.config[0] if given.config else tyro.MISSING
    return command_line(
        _CommandLine,
        prog="train.py",
        description="Train a language model."
        + ("" if given.config else " With --config, the defaults are the file's."),
        args=argv,
        default=_CommandLine(file, config.optimizer.name, config),
        registry=_registry,
    ).options


def _check_stages(argv: list[str]) -> None:
    """Raise ConfigError if a stage is malformed: tyro's message does not have the reason."""
    if "--stages" not in argv:
        return
    for text in argv[argv.index("--stages") + 1 :]:
        if text.startswith("--"):
            return
        try:
            stages.from_json(text)
        except ValueError as error:
            raise ConfigError(f"--stages: {error}") from error


def given_for_model(argv: list[str] | None = None) -> frozenset[str]:
    """Return the names that follow `--model.` on the command line, as names of fields."""
    argv = sys.argv[1:] if argv is None else argv
    flags = [argument.partition("=")[0] for argument in argv if argument.startswith("--model.")]
    names = {flag.removeprefix("--model.").replace("-", "_") for flag in flags}
    return frozenset(names | {name.removeprefix("no_") for name in names})


def load(path: Path) -> Config:
    """Return the `config` that a Python file defines.

    Raises:
        ConfigError: the file is missing, unreadable or not Python, it raises, or its `config` is
            missing or not a `Config`. The message names the line if it is known.
    """
    _check_is_python(path)
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    # As for a script, the config may import modules in its folder. The folder is removed from
    # sys.path after loading, because a file there could hide a module that is imported later.
    folder = str(path.parent.absolute())
    sys.path.insert(0, folder)
    sys.modules[module.__name__] = (
        module  # `config_class` finds the classes of imported modules only
    )
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


def _check_is_python(path: Path) -> None:
    """Check that a path is a Python file.

    Raises:
        ConfigError: the path is not a Python file.
    """
    try:
        is_file, is_folder, exists = path.is_file(), path.is_dir(), path.exists()
        known = sorted(map(str, path.parent.glob("*.py"))) if path.parent.is_dir() else []
    except OSError as error:  # the name is too long, or a folder is not readable
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    if not exists:
        there = f"; there are: {', '.join(known)}" if known else ""
        raise ConfigError(f"no config file {path}{there}")
    if not is_file or path.suffix != ".py":
        found = "a folder" if is_folder else "another file" if is_file else "not a regular file"
        raise ConfigError(f"--config must be a Python file, NAME.py, but {path} is {found}")


def _why_not_loaded(path: Path, error: BaseException) -> str:
    """Describe an exception from the execution of a config file, with the file's line if known."""
    frames, file = traceback.extract_tb(error.__traceback__), str(path.absolute())
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    where = f"{path}, line {lines[-1]}" if lines and lines[-1] else str(path)
    if isinstance(error, SystemExit):
        return f"{where}: expected a definition of `config`, but it exits with {error.code!r}"
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    said = (said.strip().splitlines() or ["no message"])[0]
    if not isinstance(error, ConfigError):
        said = f"{type(error).__name__}: {said}"
    if "unexpected keyword argument" in said:
        said += "; `python train.py --help` lists the options"
    return printable(f"{where}: {said}")


def _with_optimizer(config: Config, name: str) -> Config:
    """Return the config with the named algorithm, or unchanged if the config already has this
    algorithm.

    Raises:
        ConfigError: an unknown name.
    """
    known = _algorithms(config.optimizer)
    if name not in known:
        raise ConfigError(f"--optimizer must be one of {', '.join(known)}, got {name!r}")
    return dataclasses.replace(config, optimizer=switch_algorithm(config.optimizer, name))


def _check_optimizer_options(optimizer: OptimizerConfig, arguments: list[str]) -> None:
    """Check that no argument is an option of another algorithm only.

    Raises:
        ConfigError: an argument is such an option; the message names the algorithms that have the
            option.
    """
    options = {
        name: {field.name for field in dataclasses.fields(kind)}
        for name, kind in _algorithms(optimizer).items()
    }
    for argument in arguments:
        flag = argument.partition("=")[0]
        option = flag.removeprefix("--optimizer.").replace("-", "_")
        having = [name for name in options if option in options[name]]
        if flag.startswith("--optimizer.") and having and optimizer.name not in having:
            raise ConfigError(
                f"{flag} is an option of {' and '.join(having)}, but the optimizer is "
                f"{optimizer.name}; set --optimizer {having[0]} too, or leave out {flag}"
            )


def _algorithms(optimizer: OptimizerConfig) -> dict[str, type[OptimizerConfig]]:
    """Return the known algorithms, and the algorithm that a config file defines itself."""
    return ALGORITHMS | {optimizer.name: type(optimizer)}


_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _precision_rule(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parse a precision from its name."""
    if info.type is not Precision:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(PRECISIONS) + "}",
        instance_from_str=lambda args: Precision(args[0]),
        is_instance=lambda value: isinstance(value, Precision),
        str_from_instance=lambda precision: [precision.name],
        choices=PRECISIONS,
    )


@_registry.primitive_rule
def _stage_rule(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parse a stage from JSON."""
    if info.type is not Stage:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: stages.from_json(args[0]),
        is_instance=lambda value: isinstance(value, Stage),
        str_from_instance=lambda stage: [json.dumps(stages.to_json([stage])[0])],
    )


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    config: Path
    """Python file that defines `config`. The options below override the fields of `config`; the
    defaults are the values in the file."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(ALGORITHMS) + "}")]
    """Algorithm of the optimizer. If the config file has another algorithm, options of both
    algorithms keep the file's values. The options of the chosen algorithm are listed below."""
    options: Annotated[Config, tyro.conf.arg(name="")]
