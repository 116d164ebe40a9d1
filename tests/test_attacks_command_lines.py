"""Invalid options and config files end in an error of one sentence that names the fault."""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attack_tools import counted, in_a_process

from gptjax.cli import from_command_line
from gptjax.config import ConfigError

IMPORTS = (
    "from gptjax.config import Config, OptimizerConfig\nfrom gptjax.models.gpt2 import GPT2Config\n"
)
CONFIG = f"""{IMPORTS}
config = Config(
    model=GPT2Config(
        vocab_size=257, padded_vocab_size=264, block_size=32, n_layer=1, n_head=2, n_embd=16
    ),
    optimizer=OptimizerConfig(warmup_steps=0),
    sequence_length=32,
    batch_tokens=256,
    micro_batch=4,
    max_steps=1,
)
"""

# Values, separated by blanks, that each option must refuse: a type of number each.
# tests/test_config.py has every range, tests/test_models.py the sizes of a model.
OPTIONS = {
    "--optimizer.learning-rate": "-1e-3 nan fast",
    "--optimizer.schedule-steps": "0 1.5",
    "--optimizer.clip-norm": "nan",
    "--max-steps": "0 many 1e3 99999999999999999999",
    "--sequence-length": "0 -5",
    "--micro-batch": "0",
    "--seed": "-1 0.5",
    "--device": "tpu",
    "--model.n-head": "3 0",
    "--model.padded-vocab-size": "5",
    "--model.block-size": "8",
    "--modl.n-layer": "3",
    "--max-step": "3",
    "--name": "a/b .hidden .. /abs",
}

# Contents of config files, and what the message says after the file's name.
PYTHON = r"--config must be a Python file, NAME.py, got .*"
FILES = {
    "raises.py": (
        r", line 2: RuntimeError: no\ufffd\[31m GPU$",
        "x = 1\nraise RuntimeError('no\x1b[31m GPU\\nsecond line')",
    ),
    "raises_in_a_function.py": (
        ", line 2: KeyError: 'k'$",
        "def f():\n    return {}['k']\nf()",
    ),
    "asserts.py": (", line 1: AssertionError: no message$", "assert False"),
    "syntax.py": (r", line 1: SyntaxError: '\(' was never closed$", "config = Config("),
    "indentation.py": (", line 1: IndentationError", " x = 1\nconfig = 2"),
    "import.py": (", line 1: ModuleNotFoundError", "import no_such_module"),
    "exits.py": (", line 2: SystemExit: 0", "import sys\nsys.exit(0)"),
    "recursion.py": (", line 1: RecursionError", "def f(): f()\nf()"),
    "getattr.py": (
        ", line 2: RuntimeError: c",
        "def __getattr__(name):\n    raise RuntimeError(name)",
    ),
    "zero_bytes.py": (": SyntaxError: source code string cannot contain null bytes", "\0\1"),
    "empty.py": (
        r" must define `config = gptjax.config.Config\(...\)`; its `config` is missing",
        "",
    ),
    "another_config.py": (".*its `config` is a dict$", "config = {'max_steps': 3}"),
    "json.py": (", line 1: NameError", '{"max_steps": 3, "deep": null}'),
    "unknown_field.py": (
        r", line 3: TypeError: .*'learning_rat'.*--help` lists the options$",
        IMPORTS + "config = Config(learning_rat=1)",
    ),
    "width.py": (
        ", line 3: .*",
        IMPORTS + "config = Config(model=GPT2Config(n_embd='768'))",
    ),
    "heads.py": (
        ", line 3: ValueError: GPT2Config: n_embd=768 is not a multiple of n_head=7",
        IMPORTS + "config = Config(model=GPT2Config(n_head=7))",
    ),
    "config.json": None,
    "config": None,
}
# Wrong arguments of Config, and the message.
ARGUMENTS = {
    "max_steps='100'": r"--max-steps must be int, got '100' \(str\)",
    "max_steps=True": r"--max-steps must be int, got True \(bool\)",
    "device=['gpu']": r"--device must be one of auto, gpu, cpu, got \['gpu'\] \(list\)",
    "runs_dir='runs'": r"--runs-dir must be Path, got 'runs' \(str\)",
    "name=3": r"--name must be str, got 3 \(int\)",
    "optimizer={'b1': 1}": r"--optimizer must be OptimizerConfig, got .*\(dict\)",
    "optimizer=None": "--optimizer must be OptimizerConfig, got None",
    "model={'n_layer': 2}": "--model must be ModelConfig, got .*",
    "optimizer=OptimizerConfig(eps=-1.0)": "--optimizer.eps must be above 0 and finite",
    "optimizer=OptimizerConfig(learning_rate='1e-3')": "--optimizer.learning-rate must be float",
    "optimizer=OptimizerConfig(schedule='cos')": "--optimizer.schedule must be one of cosine, li",
    r"dataset='a\0b'": r"--dataset must be valid UTF-8 without control characters, got 'a\\x00b'",
}

# Commands that are valid.
VALID = [
    ["--name", "b]y"],
    ["--name", "with blanks"],
    ["--name", "größe"],
    ["--optimizer", "normuon", "--optimizer.momentum", "0.5"],
    ["--max_steps", "1"],
    ["--val-tokens", "2147483647"],
    ["--val-every", "0", "--sample-every", "0", "--checkpoint-every", "0"],
    ["--resume", "with_changes"],
]

# Bad commands: arguments after a config, and the message.
OTHERS = {
    "--name=": "--name must be a plain folder name, got ''$",
    "--name=" + 101 * "é": "--name must have at most 200 bytes, got 202$",
    "--name=a\x1b[31mb": "--name must be valid UTF-8 without control characters",
    "--name=a\nb": "--name must be valid UTF-8 without control characters",
    "--name=a\udcff": "--name must be valid UTF-8",
    "--runs-dir=a\udcff": "--runs-dir must be valid UTF-8",
    "fast": "fast",
    "--max-steps": "--max-steps",
    "--sequence-length=64": "--sequence-length 64 is longer than the model's block size 32; set",
    "--model.loss-chunk=100": "--model.loss-chunk must divide .*4 × 32 = 128, got 100$",
    "--model.precision=fp4": "fp32.*tf32.*bf16.*fp8",
    "--resume=maybe": "auto.*never.*must",
    "--optimizer.schedule=cos": "cosine.*linear.*constant.*wsd",
    "--model.recompute=all": "none.*block.*sublayer",
    "--optimizer=sgd": "^error: --optimizer must be one of adamw, normuon, muon, got 'sgd'$",
    "--optimizer.adam-every=2": "Unrecognized options: --optimizer.adam-every",
    "--optimizer=muon --optimizer.neuron_b2=0.9": "Unrecognized options: --optimizer.neuron",
    "--optimizer=muon --optimizer=adamw": "expected one --optimizer, got muon, adamw$",
    "--optimizer": "--optimizer",
    "--deterministic": "--deterministic needs",
    "--eval-tasks=hellaswag,piqa": "must be names of hellaswag, .* got 'piqa'",
    "--eval-tasks=mmlu --eval-every=2": "python -m gptjax.evaluate RUN --harness mmlu$",
    "--eval-tasks=core": "--eval-tasks and --eval-every need each other$",
    "--eval-every=5": "--eval-tasks and --eval-every need each other$",
    "--config=other.py": "expected one --config, got .*, other.py$",
    "--stages={}x": r"--stages: expected a JSON object, got '\{\}x'",
    '--stages={"learning_rate_factor":NaN}': "factor must be above 0 and finite in fp32, got nan",
    '--stages={"until":0}': "--stages.until must be at least 1",
}


def cases(folder: Path) -> Iterator[tuple[list[str], str | None]]:
    """Yield commands, and what the message must contain; None for a valid command.

    The folder gets the config files.
    """
    (folder / "config.py").write_text(CONFIG)
    given = ["--config", str(folder / "config.py")]
    for option, values in OPTIONS.items():
        field = option.lstrip("-").rpartition(".")[2].replace("-", "[-_]")
        own = ["--optimizer", "normuon"] if option.startswith("--optimizer.") else []
        for value in values.split():
            yield [*given, *own, option, value], f"{field}|'{value}'"
    for text, says in OTHERS.items():
        yield [*given, *text.split(" ")], says
    for arguments in VALID:
        yield [*given, *arguments], None
    files = folder / "files"
    (files / "folder.py").mkdir(parents=True)
    os.mkfifo(files / "pipe.py")
    (files / "binary.py").write_bytes(bytes(range(128, 256)))
    yield ["--config", str(files / "binary.py")], "binary.py.*SyntaxError"
    for name, content in FILES.items():
        says, text = content or (PYTHON, CONFIG)
        (files / name).write_text(text)
        yield ["--config", str(files / name)], f"{name}{says}" if content else PYTHON
    for number, (text, says) in enumerate(ARGUMENTS.items()):
        (files / f"{number}.py").write_text(f"{IMPORTS}config = Config({text})")
        yield ["--config", str(files / f"{number}.py")], f"{number}.py, line 3: {says}"
    for name in ("folder.py", "pipe.py", "/dev/null", "/dev/zero", 5000 * "x" + ".py"):
        yield ["--config", str(files / name)], PYTHON
    yield ["--config", str(folder / "no.py")], r"got .*no\.py; there are: .*config\.py"
    yield [], r"--config FILE is missing.*gptjax train --config gpt2_tiny"
    yield ["--config"], "--config"


def parse(arguments: list[str], says: str | None) -> tuple[str, str]:
    """Parse a command in this process, as train.py does; return the outcome and the message."""
    code, err = 0, io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            from_command_line(arguments)
        except ConfigError as error:
            code, _ = 1, err.write(f"error: {error}")
        except SystemExit as end:
            code = end.code
        except Exception as error:
            return "traceback", repr(error)
    text = " ".join(err.getvalue().replace("│", " ").split())
    if code not in (0, 1, 2) or "Traceback" in text:
        return "crash", text
    if code == 0 or says is None:
        return "accepted" if not code and not says else "wrong", text
    one_line = code == 2 or "\n" not in err.getvalue()
    return "refused" if one_line and re.search(says, text) else "other message", text


def run() -> list[dict]:
    with tempfile.TemporaryDirectory() as temporary:
        rows = [(arguments, *parse(arguments, says)) for arguments, says in cases(Path(temporary))]
    return [{"case": row[0], "outcome": row[1], "said": row[2][-500:]} for row in rows]


def test_command_lines():
    """In a process of its own: the tests' type checker would refuse wrong types in place of the
    config."""
    found = counted(in_a_process(__file__, 0), {"refused", "accepted"})
    assert found["refused"] > 90 and found["accepted"] == len(VALID)


if __name__ == "__main__":
    print(json.dumps(run()))
