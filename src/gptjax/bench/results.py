"""Result files: the schema of every JSON file that bench and the benchmarks write.

A result is an object with these fields:

    date      YYYY-MM-DD
    device    kind of the device, in JAX's words
    versions  package → version
    commit    Git commit of the measured sources, "-dirty" appended if a tracked file differs from
              it; null outside a checkout
    command   the command line, typed in the repository's root
    rows      list of objects, one for each measurement

Further fields belong to one command, such as the `ceilings` of `kernels`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptjax.bench.errors import BenchError
from gptjax.files import output, write_atomically
from gptjax.provenance import commit, versions

# Options that name files to write: they do not change what is measured.
OUTPUTS = ("out", "picture")


def new(
    command: str, rows: Sequence[dict], *, device: str, packages: Sequence[str] = (), **fields: Any
) -> dict:
    """Return a result with the current date, versions and commit.

    Args:
        packages: names whose versions matter too, where they are installed.
        fields: further fields, of the command itself.
    """
    installed = {name: importlib.metadata.version(name) for name in packages if is_installed(name)}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": versions() | installed,
        "commit": commit(),
        "command": command,
        **fields,
        "rows": list(rows),
    }


def write(path: Path, result: dict) -> None:
    """Write a result, atomically; create the folder if it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{compact_json(result)}\n".encode())


def check_file(path: Path) -> None:
    """Raise BenchError if `path` cannot be written. Called before a measurement."""
    try:
        target = output(path)
    except OSError as error:
        raise BenchError(str(error)) from error
    check_folder(target.parent)


def check_folder(path: Path) -> None:
    """Raise BenchError if files cannot be written into the folder, or it cannot be created."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        raise BenchError(
            f"{path}: expected a folder to write into, and {there} is not a folder: give another "
            "name"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise BenchError(
            f"{path}: expected a folder to write into, and {there} does not permit it: give "
            "another name"
        )


def compact_json(value: Any, depth: int = 0) -> str:
    """Return JSON in which objects and lists without nested ones are on one line."""
    if not isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    inner = list(value.values()) if isinstance(value, dict) else value
    if not any(isinstance(each, dict | list) and each for each in inner):
        return json.dumps(value, ensure_ascii=False)
    texts = [compact_json(each, depth + 1) for each in inner]
    if isinstance(value, dict):
        names = (json.dumps(str(name), ensure_ascii=False) for name in value)
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + " " * depth
    return begin + ",".join(f"{indent} {text}" for text in texts) + indent + end


def read(path: Path) -> dict:
    """Read a result.

    Raises:
        OSError: the file cannot be read.
        BenchError: the path is not a regular file, or the contents do not have the schema.
    """

    def check(result: Any) -> None:
        _check(result)
        for number, row in enumerate(result["rows"]):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object")

    return _read(path, "a result of gptjax.bench or benchmarks/", check)


def read_times(path: Path, *fields: str) -> dict:
    """Read a result of step, ladder, kernels or generate, whose rows have a time or an error.

    Args:
        fields: strings or numbers that every row must have.

    Raises:
        OSError: the file cannot be read.
        BenchError: the path is not a regular file, or the contents are not such a result.
    """

    def check(result: Any) -> None:
        _check(result)
        for number, row in enumerate(result["rows"]):
            _check_time(number, row, fields)

    return _read(path, "JSON of bench step, ladder, kernels or generate", check)


def bench_command(name: str, options: Any) -> str:
    """Return the command line of a bench command: the options that differ from their defaults,
    without the files to write."""
    words = ["python", "-m", "gptjax.bench", name]
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or field.name in OUTPUTS:
            continue
        # An option without a default of its own, such as `bool | None`, has a value.
        if isinstance(field.default, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{flag}", *(str(v) for v in values)]
    return shlex.join(words)


def script_command(script: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command line of a script.

    Args:
        script: its path from the repository's root.
        arguments: the arguments of this process if None.
    """
    return shlex.join(["python", script, *(sys.argv[1:] if arguments is None else arguments)])


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def _read(path: Path, expected: str, check: Callable[[Any], None]) -> dict:
    if path.exists() and not path.is_file():
        raise BenchError(f"{path}: expected a JSON file of bench, found a folder or a device")
    try:
        result = json.loads(path.read_text())
        check(result)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path}: expected {expected} ({error})") from error
    return result


def _check(result: Any) -> None:
    """Raise ValueError if a result does not have the fields of the schema."""
    if not isinstance(result, dict) or not isinstance(rows := result.get("rows"), list) or not rows:
        raise ValueError("no rows")
    for name, kind in (("date", str), ("device", str), ("versions", dict), ("command", str)):
        if not isinstance(result.get(name), kind):
            raise ValueError(f"no {name}")
    if not isinstance(result.get("commit"), str | None):
        raise ValueError("a commit that is not a string")


def _check_time(number: int, row: Any, fields: Sequence[str]) -> None:
    """Raise ValueError if a row has neither a time nor an error, or lacks a field."""
    if not isinstance(row, dict) or not ("ms" in row or isinstance(row.get("error"), str)):
        raise ValueError(f"row {number} has neither ms nor error")
    if missing := [field for field in fields if not isinstance(row.get(field), str | int)]:
        raise ValueError(f"row {number} has no {missing[0]}")
    for name in {"ms", "tokens/s", "ceiling", "factor"} & row.keys():
        if not isinstance(row[name], int | float) or not 0 < row[name] < math.inf:
            raise ValueError(f"row {number} has {name} {row[name]!r}, expected a positive number")
    if not isinstance(row.get("asked", {}), dict):
        raise ValueError(f"row {number} has options that are not an object")
