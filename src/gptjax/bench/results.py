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
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptjax.bench.errors import BenchError
from gptjax.files import output, write_atomically
from gptjax.provenance import commit, versions


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


def report(result: dict, out: Path | None, show: Callable[[dict], None]) -> None:
    """Write a result to `out`, if given, then print its table with `show`: standard output may be
    closed."""
    if out:
        write(out, result)
    show(result)
    if out:
        print(f"wrote {out}")


def check_file(path: Path | None) -> None:
    """Create the folder of a file, if the file is given. Called before a measurement.

    Raises:
        OSError: the folder cannot be created, or the path is not a regular file.
    """
    if path:
        output(path).parent.mkdir(parents=True, exist_ok=True)


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


def read(path: Path, *, times: bool = False) -> dict:
    """Read a result.

    Args:
        times: require a time or an error in every row, as of step, ladder and kernels.

    Raises:
        OSError: the file cannot be read.
        BenchError: the path is not a regular file, or the contents do not have the schema.
    """
    if path.exists() and not path.is_file():
        raise BenchError(f"{path}: expected a JSON file of bench, found a folder or a device")
    try:
        result = json.loads(path.read_text())
        _check(result, times)
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a result of gptjax.bench or benchmarks/"
        raise BenchError(f"{path}: expected {expected} ({error})") from error
    return result


def bench_command(name: str, options: Any) -> str:
    """Return the command line of a bench command: the options that differ from their defaults,
    without the files to write."""
    words = ["python", "-m", "gptjax.bench", name]
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or field.name == "out":
            continue
        if isinstance(field.default, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, str):
            words.append(f"--{flag}={value}")
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


def _check(result: Any, times: bool) -> None:
    """Raise ValueError if a result does not have the fields of the schema."""
    kinds = {"date": str, "device": str, "versions": dict, "command": str, "rows": list}
    for name, kind in kinds.items():
        if not isinstance(result, dict) or not isinstance(result.get(name), kind):
            raise ValueError(f"no {name}")
    for number, row in enumerate(result["rows"] or [None]):
        if not isinstance(row, dict) or (times and not {"ms", "error"} & row.keys()):
            raise ValueError(f"row {number} has neither ms nor error")
        if times and not 0 < row.get("ms", 1) < math.inf:
            raise ValueError(f"row {number} has ms {row['ms']!r}, not a positive number")
