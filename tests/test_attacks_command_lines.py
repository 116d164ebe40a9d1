"""Invalid options, config files and folders end in an error of one sentence.

`refused`: exit code 1 or 2 and a message that names the fault. `accepted`: a valid command.
Failures: `silent wrong` (an invalid command that is accepted), `other message` (the fault is not
named), `traceback`, `crash` (another exit code), `wrongly refused` (a valid command).
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path

from attack_tools import counted, in_a_process

from gptjax.cli import from_command_line
from gptjax.config import ConfigError

IMPORTS = (
    "from gptjax.config import Config, OptimizerConfig\nfrom gptjax.models.gpt2 import GPT2Config\n"
)
MODEL = """GPT2Config(
        vocab_size=257, padded_vocab_size=264, block_size=32, n_layer=1, n_head=2, n_embd=16
    )"""
CONFIG = f"""{IMPORTS}
config = Config(
    device="cpu",
    model={MODEL},
    optimizer=OptimizerConfig(warmup_steps=0),
    dataset="corpus",
    sequence_length=32,
    batch_tokens=256,
    micro_batch=4,
    max_steps=1,
    val_tokens=256,
)
"""

# Values, separated by blanks, that each option must refuse; tests/test_config.py has every range.
OPTIONS = {
    "--optimizer.learning-rate": "-1e-3 0 nan inf 1e-46 1e39 fast",
    "--optimizer.schedule-steps": "-5 0 1.5",
    "--optimizer.b1": "1.5 1 -0.1 nan",
    "--optimizer.b2": "1 0.999999999",
    "--optimizer.momentum": "1 -1",
    "--optimizer.clip-norm": "-1 0 nan",
    "--optimizer.skip-loss-z": "-1 0 nan",
    "--optimizer.schedule": "cos",
    "--optimizer": "sgd",
    "--max-steps": "0 -1 many 1e3 99999999999999999999",
    "--sequence-length": "0 -5 4096",
    "--batch-tokens": "0",
    "--micro-batch": "0",
    "--seed": "-1 4294967296 0.5",
    "--val-every": "-1",
    "--val-tokens": "0 -7",
    "--device": "tpu",
    "--resume": "maybe",
    "--model.loss-chunk": "100 0 -1",
    "--model.n-head": "3 0",
    "--model.n-layer": "0 -1",
    "--model.n-embd": "0",
    "--model.vocab-size": "0",
    "--model.padded-vocab-size": "5",
    "--model.block-size": "8",
    "--model.precision": "fp4",
    "--model.recompute": "all",
    "--modl.n-layer": "3",
    "--max-step": "3",
    "--name": "a/b .hidden .. /abs",
}

# Config files and what is in them. All must be refused.
FILES = {
    "raises.py": "x = 1\nraise RuntimeError('no')",
    "raises_in_a_function.py": "def f():\n    return {}['k']\nf()",
    "asserts.py": "assert False",
    "syntax.py": "config = Config(",
    "indentation.py": " x = 1\nconfig = 2",
    "import.py": "import no_such_module",
    "unknown_field.py": IMPORTS + "config = Config(learning_rat=1)",
    "unknown_optimizer_field.py": IMPORTS + "config = Config(optimizer=OptimizerConfig(lr=1))",
    "text_for_a_number.py": IMPORTS + "config = Config(max_steps='many')",
    "text_for_a_rate.py": IMPORTS
    + "config = Config(optimizer=OptimizerConfig(learning_rate='1e-3'))",
    "bool_for_a_number.py": IMPORTS + "config = Config(max_steps=True)",
    "number_for_text.py": IMPORTS + "config = Config(name=3)",
    "text_for_a_folder.py": IMPORTS + "config = Config(runs_dir='runs')",
    "dict_for_the_model.py": IMPORTS + "config = Config(model={'n_layer': 2})",
    "none_for_the_optimizer.py": IMPORTS + "config = Config(optimizer=None)",
    "text_for_a_width.py": IMPORTS + "config = Config(model=GPT2Config(n_embd='768'))",
    "unknown_choice.py": IMPORTS + "config = Config(device='tpu')",
    "out_of_range.py": IMPORTS + "config = Config(optimizer=OptimizerConfig(eps=-1))",
    "exits.py": "import sys\nsys.exit(0)",
    "recursion.py": "def f(): f()\nf()",
    "no_config.py": "learning_rate = 3",
    "another_config.py": "config = {'max_steps': 3}",
    "empty.py": "",
    "json.py": '{"max_steps": 3, "deep": null}',
    "config.json": '{"max_steps": 3}',
    "config.yaml": "max_steps: 3\n",
    "config": CONFIG,
    "zero_bytes.py": "\0\0\0",
    "control_character.py": IMPORTS + "config = Config(name='a\\x1b[31mb')",
    "zero_in_a_path.py": IMPORTS + "config = Config(dataset='a\\0b')",
}

# Commands that are valid.
VALID = [
    ["--name", "b]y"],
    ["--name", "with blanks"],
    ["--name", "größe"],
    ["--optimizer.clip-norm", "None"],
    ["--optimizer.weight-decay", "0"],
    ["--optimizer", "normuon", "--optimizer.momentum", "0.5"],
    ["--optimizer", "muon"],
    ["--optimizer", "adamw"],
    ["--seed", "4294967295"],
    ["--max_steps", "1"],
    ["--val-tokens", "2147483647"],
    ["--val-every", "0", "--sample-every", "0", "--checkpoint-every", "0"],
    ["--resume", "with_changes"],
    ["--help"],
]

# Bad commands: what the message must contain, and the arguments.
OTHERS = {
    "no name": ("--name must", ["--name", ""]),
    "a name of 201 bytes": ("at most 200 bytes", ["--name", "x" * 201]),
    "an escape sequence in the name": ("control characters", ["--name", "a\x1b[31mb"]),
    "a line break in the name": ("control characters", ["--name", "a\nb"]),
    "a name that is not UTF-8": ("--name must be valid UTF-8", ["--name", "a\udcff"]),
    "a folder that is not UTF-8": ("--runs-dir must be valid UTF-8", ["--runs-dir", "{}/a\udcff"]),
    "a stray word": ("fast", ["fast"]),
    "an option without its value": ("--max-steps", ["--max-steps"]),
    "an option of other algorithms": (
        "option of normuon and muon",
        ["--optimizer.adam-every", "2"],
    ),
    "an option that Muon does not have": (
        "option of normuon, but",
        ["--optimizer", "muon", "--optimizer.neuron-b2", "0.9"],
    ),
    "two optimizers": ("one --optimizer", ["--optimizer", "muon", "--optimizer", "adamw"]),
    "an optimizer without a name": ("--optimizer", ["--optimizer"]),
    "deterministic, attention auto": ("--deterministic needs", ["--deterministic"]),
    "config twice": ("one --config", ["--config", "{}/config.py"]),
    "a stage that is not JSON": ("--stages: expected a JSON object", ["--stages", "{}"]),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command; {} stands for the folder that `prepare` fills."""

    name: str
    says: str | None
    """Regular expression that the message must contain; None for a valid command."""
    arguments: list[str]
    config: str | None = "{}/config.py"


def cases() -> list[Case]:
    found = []
    for flag, values in OPTIONS.items():
        field = flag.lstrip("-").rpartition(".")[2].replace("-", "[-_]")
        own = ["--optimizer", "normuon"] if flag.startswith("--optimizer.") else []
        found += [Case(f"{flag} {v}", f"{field}|'{v}'", [*own, flag, v]) for v in values.split()]
    kinds = (
        "binary.py",
        "folder.py",
        "pipe.py",
        "missing.py",
        "/dev/null",
        "/dev/zero",
        "x" * 5000,
    )
    for name in (*FILES, *kinds):
        found.append(Case(f"config file {name}", name, [], config=os.path.join("{}/files", name)))
    found += [Case(name, says, arguments) for name, (says, arguments) in OTHERS.items()]
    found += [Case("no config", "--config FILE is missing", [], config=None)]
    found += [Case("config without a file", "--config", ["--config"], config=None)]
    return found + [Case(" ".join(arguments), None, arguments) for arguments in VALID]


def prepare(folder: Path) -> None:
    """Write the configs, and the folders that the commands name."""
    (folder / "config.py").write_text(CONFIG)
    (folder / "files" / "folder.py").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / "files" / name).write_text(text)
    (folder / "files" / "binary.py").write_bytes(bytes(range(128, 256)))
    os.mkfifo(folder / "files" / "pipe.py")


def command(case: Case, number: int, folder: Path) -> list[str]:
    given = [] if case.config is None else ["--config", case.config]
    for option, value in (
        ("--name", f"run{number}"),
        ("--runs-dir", "{}/runs"),
        ("--data-dir", "{}/data"),
    ):
        if case.config and option not in case.arguments:
            given += [option, value]
    return [argument.replace("{}", str(folder)) for argument in given + case.arguments]


def parse(case: Case, arguments: list[str]) -> tuple[str, str]:
    """Parse the command in this process, as train.py does; return the outcome and the message."""
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
    return outcome(case, code, err.getvalue()), err.getvalue()[-500:]


def outcome(case: Case, code: int, err: str) -> str:
    if "Traceback" in err:
        return "traceback"
    if code not in (0, 1, 2):
        return "crash"
    if code == 0:
        return "silent wrong" if case.says else "accepted"
    if case.says is None:
        return "wrongly refused"
    if not re.search(case.says, err):
        return "other message"
    return "refused"


def run(trials: int, seed: int = 1) -> list[dict]:
    """Parse `trials` of the commands, a random choice."""
    numbered = [*enumerate(cases())]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        for number, case in random.Random(seed).sample(numbered, min(trials, len(numbered))):
            result, said = parse(case, command(case, number, Path(temporary)))
            rows.append({"case": case.name[:80], "outcome": result, "said": said})
    return rows


def test_command_lines():
    """In a process of its own: the tests' type checker would refuse wrong types in place of the
    config."""
    rows = in_a_process(__file__, 40)
    assert {*counted(rows, {"refused", "accepted"})} == {"refused", "accepted"} and len(rows) == 40
    assert any("config file" in row["case"] for row in rows)


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
