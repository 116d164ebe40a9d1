"""`python -m gptjax.bench step`: one configuration's training step (or forward pass), beside
PyTorch's in the same run.

How a time comes about: random tokens lie on the device, the state is donated, and the step is
called many times in a row, so that the host runs ahead and only the device is measured. An H200
that multiplies matrices without a pause reaches its 700 W and slows down, so each side first warms
up for `WARM_UP_SECONDS` and is then measured as it goes on: for `--seconds`, in `ROUNDS` rounds.
The sides take turns, `TURNS` each; the median round counts.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro

from gptjax import config as configuration
from gptjax import sharding
from gptjax.bench.kernels import BenchError
from gptjax.bench.table import Row, print_table
from gptjax.config import Config
from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision
from gptjax.training import optimizer
from gptjax.training.checkpoint import versions
from gptjax.training.compilation import compiler_options
from gptjax.training.flops import mfu
from gptjax.training.memory import GIB, available_bytes, needed_bytes, peak_bytes
from gptjax.training.step import graph, init_state, make_eval_step, make_train_step

TURNS = 2
ROUNDS = 5
WARM_UP_SECONDS = 1.0
REST_SECONDS = 0.3

Preset = Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


# The help texts say what is taken in place of an option that is not given.
OWN_DEFAULT = tyro.conf.arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Time, memory and MFU of one configuration's training step, on one device; several --batch or
    --recompute: a row for each."""

    config: Annotated[Path | None, OWN_DEFAULT] = None
    """An experiment card: its model, sequence length, micro-batch and optimizer. The options below
    override it."""
    preset: Annotated[Preset | None, OWN_DEFAULT] = None
    """The model's shape, where there is no card (default: gpt2)."""
    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "bf16_residual_fp32"] | None, OWN_DEFAULT
    ] = None
    """Default: the card's, or bf16."""
    batch: Annotated[tuple[int, ...], OWN_DEFAULT] = ()
    """Sequences a step, in one micro-batch (default: the card's micro-batch, or 64)."""
    sequence_length: Annotated[int | None, OWN_DEFAULT] = None
    """Default: the card's, or 1024."""
    attention: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of attention, as --model.attention of train.py (default: the card's, or auto)."""
    loss: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of the head and its loss, as --model.loss (default: the card's, or auto)."""
    norm: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of LayerNorm, as --model.norm (default: the card's, or auto)."""
    mlp: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of the MLP, as --model.mlp (default: the card's, or auto)."""
    recompute: Annotated[tuple[Literal["none", "block", "sublayer"], ...], OWN_DEFAULT] = ()
    """Activations recomputed in the backward pass, as --model.recompute (default: the card's, or
    none)."""
    algorithm: Annotated[Literal["adamw", "normuon", "muon"] | None, OWN_DEFAULT] = None
    """The optimizer (default: the card's, or adamw); PyTorch's is AdamW all the same."""
    forward: bool = False
    """The forward pass and its loss alone."""
    largest: bool = False
    """Take the largest batch that fits (1, 2, or a multiple of 4), in place of --batch."""
    torch: bool = False
    """Measure PyTorch beside every row, with the same batch: compile (not on a CPU),
    scaled_dot_product_attention, fused AdamW, padded vocabulary."""
    seconds: float = 3.0
    """How long each side is measured in each of its two turns; without PyTorch there is one
    turn."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results."""

    def run(self) -> None:
        device = one_device()
        if self.torch:
            need_torch(device)
        rows = []
        for config in self.configs():
            rows += self._measure(config, device)
        if self.out:  # before the table: standard output may be closed
            write(self.out, result(command_line("step", self), rows, device, torch=self.torch))
        show(rows, device)
        if self.out:
            print(f"wrote {self.out}")
        raise_failures(rows)

    def configs(self) -> list[Config]:
        """The configurations asked for: every recomputation of every batch.

        Raises:
            BenchError: options that contradict each other.
            ConfigError: no such card, or a configuration that cannot be.
        """
        if self.config and self.preset:
            raise BenchError("--config and --preset both name a model: give one of them")
        if self.largest and self.batch:
            raise BenchError(
                "--largest looks for the batch, and --batch names it: give one of them"
            )
        if self.forward and self.recompute:
            raise BenchError(
                "--forward has no backward pass to recompute for: leave out --recompute"
            )
        base = base_config(self.config, self.preset)
        return [
            one_micro_batch(
                base,
                batch or base.micro_batch,
                self.sequence_length or base.sequence_length,
                algorithm=self.algorithm or base.optimizer.algorithm,
                precision=Precision(self.precision) if self.precision else base.model.precision,
                recompute=recompute or base.model.recompute,
                **{
                    part: name
                    for part in ("attention", "loss", "norm", "mlp")
                    if (name := getattr(self, part))
                },
            )
            for batch in self.batch or (None,)
            for recompute in self.recompute or (None,)
        ]

    def _measure(self, config: Config, device: jax.Device) -> list[dict]:
        name = self.config.stem if self.config else self.preset or "gpt2"
        row, sides = describe(name, config, forward=self.forward), {}
        try:
            ours = (
                self._largest(config, device)
                if self.largest
                else OurStep(config, device, forward=self.forward)
            )
            config = ours.config
            row = describe(name, config, forward=self.forward)
            say(f"{label(row)}: compiling")
            ours.compile()
            row |= {"compile_s": ours.compile_s, "needed_gib": needed_bytes(ours.compiled) / GIB}
            row |= {"kernels": config.kernels(), "program": count(ours.compiled.as_text())}
            ours.check_memory()
            sides["gptjax"] = ours
        except Exception as error:  # one row that fails must not cost the others their figures
            row["error"] = first_line(error)
        rows = [row]
        if self.torch:
            from gptjax.bench.torch_gpt2 import How, free_torch

            how = How(
                precision=config.model.precision.name.split("_")[0],
                compiled=device.platform == "gpu",
            )
            asked = {
                key: row[key] for key in ("model", "precision", "batch", "sequence_length", "pass")
            }
            rows.append({"system": "torch"} | asked | {"kernels": str(how)})
            say(f"{label(rows[1])}: compiling")
            try:
                theirs = torch_step(config, how, device, forward=self.forward)
                rows[1]["compile_s"] = theirs.run(1)
                # First: what it does not use it hands back, and JAX takes from what is left.
                sides = {"torch": theirs} | sides
            except Exception as error:
                rows[1]["error"] = first_line(error)
            if "torch" not in sides:
                theirs = None  # what it holds, JAX could not have
                free_torch()
        found = take_turns(sides, seconds=self.seconds)
        rows = [
            complete(row, config, sides.get(row["system"]), found.get(row["system"]))
            for row in rows
        ]
        if len(rows) == 2 and all("ms" in row for row in rows):
            rows[0]["of_torch"] = rows[1]["ms"] / rows[0]["ms"]
        return rows

    def _largest(self, config: Config, device: jax.Device) -> "OurStep":
        made = {}

        def needs(batch: int) -> int:
            step = OurStep(
                one_micro_batch(config, batch, config.sequence_length), device, forward=self.forward
            )
            step.compile()
            made[batch], needed = step, needed_bytes(step.compiled)
            say(
                f"a batch of {batch} needs {needed / GIB:.2f} GiB, compiled in "
                f"{step.compile_s:.1f} s"
            )
            return needed

        available = available_bytes(device)
        if self.torch:
            # PyTorch's step needs more than ours: its parameters and moments, say, and the CUDA
            # contexts 1 GiB.
            available -= 3 * 4 * config.model.num_params + GIB
        return made[largest_batch(needs, available)]


class OurStep:
    """A training step of ours, or the forward pass alone, on random tokens.

    Args:
        config: one micro-batch a step.
        device: where it runs.
        forward: the loss alone, without gradients.
        jit: False runs the same function operation by operation; those that JAX itself wraps in
            `jit` stay compiled.

    Attributes:
        compiled: the program; None before `compile`.
        compile_s: seconds that tracing, lowering and compiling took.
    """

    def __init__(
        self, config: Config, device: jax.Device, *, forward: bool = False, jit: bool = True
    ):
        self.config, self.device, self.forward, self.jit = config, device, forward, jit
        self.compiled: jax.stages.Compiled | None = None
        self.compile_s = 0.0
        self._mesh = sharding.data_mesh([device])
        self._call: Callable | None = None
        self._state = None

    def compile(self, **options: bool | str) -> None:
        """Makes the program; once.

        Args:
            options: for XLA, beside those of a training run.

        Raises:
            ConfigError: a named back end cannot run here.
        """
        if self.compiled is not None:
            return
        self.config.kernels()
        started = time.perf_counter()
        replicated = sharding.replicated(self._mesh)

        def abstract(tree):
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree
            )

        state = abstract(jax.eval_shape(self._init))
        windows = abstract(jax.eval_shape(self._windows))
        program = jax.jit(
            self._function(), donate_argnums=() if self.forward else 0, out_shardings=replicated
        )
        lowered = program.lower(state.params if self.forward else state, windows)
        self.compiled = lowered.compile(compiler_options=compiler_options() | options)
        self.compile_s = time.perf_counter() - started

    def check_memory(self) -> None:
        """Raises BenchError where the compiled program needs more than the device has."""
        needed, available = needed_bytes(self.compiled), available_bytes(self.device)
        if needed > available:
            raise BenchError(
                f"needs {needed / GIB:.1f} GiB of {available / GIB:.1f}; nothing was allocated"
            )

    def run(self, steps: int) -> float:
        """Seconds that so many steps take on the device, one after the other."""
        if self._state is None:
            if self.jit:
                self.compile()
            replicated = sharding.replicated(self._mesh)
            self._state = jax.device_put(self._init(), replicated)
            self._batch = jax.device_put(self._windows(), replicated)
            self._call = self.compiled or self._function()
        # Without jit nothing is donated, and a state that is held would stay.
        state, self._state = self._state, None
        jax.block_until_ready(state)
        started = time.perf_counter()
        for _ in range(steps):
            if self.forward:
                last = self._call(state.params, self._batch)
            else:
                state, last = self._call(state, self._batch)
        jax.block_until_ready((state, last))
        taken = time.perf_counter() - started
        self._state = state
        return taken

    def free(self) -> None:
        """Lets go of the state and the program."""
        self.compiled = self._call = self._state = self._batch = None

    @property
    def room(self) -> int:
        """Bytes that the device must have for the program, beside those that JAX has already. JAX's
        allocator takes memory in pieces, which do not fit without a gap: a program that needed
        106.6 GiB, 89 of them in one piece, found no room in some 119."""
        stats = self.device.memory_stats() or {}
        held = stats.get("pool_bytes", 0) - stats.get("bytes_in_use", 0)
        return round(1.15 * needed_bytes(self.compiled)) - max(held, 0)

    @property
    def peak(self) -> int | None:
        """The most bytes that JAX has had on the device since the process began; None on a CPU."""
        return peak_bytes(self.device)

    @functools.cached_property
    def _tx(self):
        return optimizer.build(self.config, self._mesh)

    def _init(self):
        return init_state(self.config.model, self._tx, seed=0)

    def _windows(self):
        shape = (self.config.micro_batch, self.config.sequence_length + 1)
        tokens = jax.random.randint(
            jax.random.key(1), shape, 0, self.config.model.vocab_size, jnp.int32
        )
        return tokens if self.forward else tokens[None]

    def _function(self) -> Callable:
        graphdef, o = graph(self.config.model), self.config.optimizer
        if self.forward:
            return make_eval_step(graphdef)
        skip = {"skip_loss_z": o.skip_loss_z, "skip_grad_norm_z": o.skip_grad_norm_z}
        return make_train_step(graphdef, self._tx, self.config.learning_rate_schedule(), **skip)


# --------------------------------------------------------------------------------- what is measured


def one_device() -> jax.Device:
    """The device of every figure.

    Raises:
        BenchError: several GPUs, among which the model would not take its own kernels.
    """
    if jax.default_backend() == "gpu" and len(jax.devices()) > 1:
        raise BenchError(
            f"one GPU is measured, and JAX sees {len(jax.devices())}: CUDA_VISIBLE_DEVICES=0 "
            "python -m gptjax.bench …"
        )
    return jax.config.jax_default_device or jax.devices()[0]


def has_torch(device: jax.Device) -> bool:
    """Whether PyTorch is installed and can use the same kind of device."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return device.platform != "gpu" or torch.cuda.is_available()


def need_torch(device: jax.Device) -> None:
    """Raises BenchError where `has_torch` is false."""
    if not has_torch(device):
        raise BenchError(
            "--torch needs PyTorch with CUDA, and there is none: pip install torch, or leave it out"
        )


def base_config(card: Path | None, preset: str | None) -> Config:
    """A card's config, or that of a preset: bf16, 64 sequences of 1024.

    Raises:
        ConfigError: no such card.
    """
    if card:
        return configuration.load(card)
    model = dataclasses.replace(PRESETS[preset or "gpt2"], precision=Precision("bf16"))
    return Config(model=model, micro_batch=64, batch_tokens=64 * 1024)


def one_micro_batch(
    base: Config, batch: int, sequence_length: int, *, algorithm: str | None = None, **model: Any
) -> Config:
    """The config with a step of one micro-batch of so many sequences, and fields of the model
    changed."""
    return dataclasses.replace(
        base,
        micro_batch=batch,
        batch_tokens=batch * sequence_length,
        sequence_length=sequence_length,
        model=dataclasses.replace(base.model, **model),
        optimizer=dataclasses.replace(
            base.optimizer, algorithm=algorithm or base.optimizer.algorithm
        ),
    )


def torch_step(config: Config, how, device: jax.Device, **more: Any):
    """The `TorchStep` of a config, on the same kind of device."""
    from gptjax.bench.torch_gpt2 import TorchStep

    return TorchStep(
        config.model,
        how,
        batch=config.micro_batch,
        sequence_length=config.sequence_length,
        device="cuda" if device.platform == "gpu" else "cpu",
        **more,
    )


def largest_batch(needs: Callable[[int], int], available: int) -> int:
    """The largest batch of 1, 2, 4, 8, 12, 16, … that fits. Memory grows with the batch, almost in
    proportion.

    Args:
        needs: batch → bytes; slow, since it compiles.
        available: bytes.

    Raises:
        BenchError: not even one sequence fits.
    """
    below, above = [(0, 0)], None  # sizes that fit, and the smallest that does not: (batch, bytes)
    batch = 16
    while True:
        size = needs(batch)
        if size <= available:
            below.append((batch, size))
        else:
            above = (batch, size)
        least = _up(below[-1][0])
        if above and above[0] <= least:
            break
        # Where the line through two sizes reaches what there is; logits come in chunks, so near
        # sizes tell more than the first.
        (n0, size0), (n1, size1) = (below[-1], above) if above else below[-2:]
        batch = n1 + int((available - size1) * (n1 - n0) / (size1 - size0))
        if above is None and len(below) == 2:
            batch = min(batch, 2 * n1)
        batch = max(least, _floor(min(batch, above[0] - 1) if above else batch))
    if not below[-1][0]:
        needed, has = size / GIB, available / GIB
        raise BenchError(
            f"not one sequence fits: it needs {needed:.1f} GiB of {has:.1f}; --recompute block "
            "needs less"
        )
    return below[-1][0]


def _floor(n: int) -> int:
    return n // 4 * 4 if n >= 4 else min(n, 2)


def _up(n: int) -> int:
    return {0: 1, 1: 2, 2: 4}.get(n, n + 4)


def take_turns(
    sides: dict[str, Any], *, seconds: float, turns: int | None = None
) -> dict[str, list[float] | Exception]:
    """Seconds a step in every round of each side, or the error that ended it.

    JAX keeps what it has allocated. Where PyTorch's step then has no room for a second turn, there
    is one turn each; and where JAX's has none beside what PyTorch keeps, PyTorch lets go of it
    after its own.

    Args:
        sides: name → `OurStep` or `TorchStep`, in the order of their turns.
        seconds: measured each turn.
        turns: of each; `TURNS` when None, or one where there is one side.
    """
    found: dict[str, list[float] | Exception] = {name: [] for name in sides}
    turns = turns or (TURNS if len(sides) > 1 else 1)
    for turn in range(turns):
        for name, side in sides.items():
            if isinstance(found[name], Exception):
                continue
            if turn and name == "torch" and not side.has_room():
                return found
            say(f"{name}: measuring, turn {turn + 1} of {turns}")
            time.sleep(REST_SECONDS)
            try:
                if not turn and name == "gptjax" and "torch" in sides:
                    sides["torch"].make_room(side.room)
                found[name] += sustained(side.run, seconds=seconds)
                if name == "torch":
                    side.rest()
            except Exception as error:
                found[name] = error
    return found


def sustained(run: Callable[[int], float], *, seconds: float) -> list[float]:
    """Seconds a step in each of some rounds that follow on one another, after a warm-up.

    Args:
        run: number of steps → seconds they took.
        seconds: of all rounds together.
    """
    run(1)  # whatever happens once
    once = run(1)
    warm_up = max(1, round(WARM_UP_SECONDS / once))
    once = run(warm_up) / warm_up
    rounds = max(1, min(ROUNDS, round(seconds / once)))
    steps = max(1, round(seconds / once / rounds))
    return [run(steps) / steps for _ in range(rounds)]


def count(text: str) -> dict[str, Any]:
    """What an optimized program launches: fusions, custom calls by target, and CUDA graphs where
    the text has them.

    Args:
        text: `compiled.as_text()`.
    """
    calls: dict[str, int] = {}
    for target in re.findall(r'custom-call\(.*?custom_call_target="([^"]+)"', text):
        calls[target] = calls.get(target, 0) + 1
    graphs = len(re.findall(r"to_apply=%?command_buffer", text))
    return {
        "fusions": len(re.findall(r" fusion\(", text)),
        "custom_calls": calls,
        "command_buffers": graphs or None,
    }


# ----------------------------------------------------------------------------------- rows and files


def describe(name: str, config: Config, *, forward: bool) -> dict:
    """The part of a row that says what was asked for."""
    model = config.model
    parts = {part: getattr(model, part, "auto") for part in ("attention", "loss", "norm", "mlp")}
    asked = {part: value for part, value in parts.items() if value != "auto"}
    if model.loss_chunk:
        asked["loss_chunk"] = model.loss_chunk
    row = {
        "system": "gptjax",
        "model": name,
        "precision": model.precision.name,
        "batch": config.micro_batch,
    }
    row |= {"sequence_length": config.sequence_length, "pass": "forward" if forward else "train"}
    return (
        row
        | (
            {}
            if forward
            else {"algorithm": config.optimizer.algorithm, "recompute": model.recompute}
        )
        | {"asked": asked}
    )


def complete(row: dict, config: Config, side, found: list[float] | Exception | None) -> dict:
    """The row with what was measured on a side, or with its error; the same row where nothing was
    measured."""
    if isinstance(found, Exception):
        return row | {"error": first_line(found)}
    if not found:
        return row
    seconds = statistics.median(found)
    tokens = config.micro_batch * config.sequence_length / seconds
    flops = config.model.flops_per_token(config.sequence_length) / (
        3 if row["pass"] == "forward" else 1
    )
    row = row | {
        "ms": 1e3 * seconds,
        "ms_lowest": 1e3 * min(found),
        "ms_highest": 1e3 * max(found),
        "tokens/s": tokens,
    }
    row["mfu"] = mfu(tokens, flops, one_device().device_kind, row["precision"], 1)
    row["peak_gib"] = side.peak / GIB if side.peak else None
    return row


def label(row: dict) -> str:
    parts = [
        row["system"],
        row.get("rung", ""),
        row["model"],
        row["precision"],
        f"{row['batch']} × {row['sequence_length']}",
    ]
    parts += [
        row["pass"] if row["pass"] == "forward" else "",
        row.get("algorithm", ""),
        row.get("recompute", ""),
    ]
    return " · ".join(part for part in parts if part and part not in ("adamw", "none"))


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def say(line: str) -> None:
    """Progress, beside the results."""
    print(line, file=sys.stderr, flush=True)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def kernel_names(row: dict) -> str:
    """The kernels of a row in words."""
    kernels = row["kernels"]
    if isinstance(kernels, str):
        return kernels
    return ", ".join(f"{part}: {name}" for part, name in kernels.items())


def show(rows: list[dict], device: jax.Device) -> None:
    """Print a row for each configuration and system."""
    table = []
    for row in rows:
        if "error" in row:
            table.append(Row(label(row), note=row["error"]))
            continue
        figures = (
            number(row["ms"], ".2f"),
            number(row["tokens/s"], ",.0f"),
            number(row["mfu"], ".1%"),
            number(row.get("needed_gib"), ".2f"),
            number(row["peak_gib"], ".2f"),
            number(row["compile_s"], ".1f"),
            str(row["program"]["fusions"]) if "program" in row else "",
            number(row["of_torch"], ".3f") + " ×" if "of_torch" in row else "",
        )
        table.append(Row(label(row), figures, kernel_names(row)))
    columns = ("ms", "tokens/s", "MFU", "needs GiB", "peak GiB", "compile s", "fusions", "of torch")
    print_table(device.device_kind, columns, table)


def result(command: str, rows: list[dict], device: jax.Device, *, torch: bool) -> dict:
    """The rows with what they depend on, as they are written."""
    others = ("jax-triton", "triton") + ("torch",) * torch
    return {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "versions": versions()
        | {name: importlib.metadata.version(name) for name in others if _is_installed(name)},
        "rows": rows,
    }


def read(path: Path, *fields: str) -> dict:
    """Read a result of step, ladder or kernels.

    Args:
        fields: texts or numbers that every row must have.

    Raises:
        OSError: the file cannot be read.
        BenchError: it is not a regular file, or its contents are not such a result.
    """
    if path.exists() and not path.is_file():
        raise BenchError(f"{path}: expected a JSON file of bench, found a folder or a device")
    try:
        result = json.loads(path.read_text())
        _check(result, fields)
    except (ValueError, RecursionError) as error:
        raise BenchError(
            f"{path}: expected JSON of bench step, ladder or kernels ({error})"
        ) from error
    return result


def _check(result: Any, fields: Sequence[str]) -> None:
    """Raise ValueError if a result read from a file has another form."""
    if not isinstance(result, dict) or not isinstance(rows := result.get("rows"), list) or not rows:
        raise ValueError("no rows")
    for name, kind in (("date", str), ("device", str), ("versions", dict)):
        if not isinstance(result.get(name), kind):
            raise ValueError(f"no {name}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not ("ms" in row or isinstance(row.get("error"), str)):
            raise ValueError(f"row {number} has neither ms nor error")
        if missing := [field for field in fields if not isinstance(row.get(field), str | int)]:
            raise ValueError(f"row {number} has no {missing[0]}")
        for name in {"ms", "tokens/s", "ceiling", "factor"} & row.keys():
            if not isinstance(row[name], int | float) or not 0 < row[name] < math.inf:
                raise ValueError(
                    f"row {number} has {name} {row[name]!r}, expected a positive number"
                )
        if not isinstance(row.get("asked", {}), dict):
            raise ValueError(f"row {number} has options that are not an object")


def write(path: Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def command_line(name: str, options: Any) -> str:
    """The command that gives these options; those at their defaults, and the files to write, are
    left out."""
    words = ["python", "-m", "gptjax.bench", name]
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default or field.name in ("out", "picture"):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [
                f"--{flag}",
                *(str(v) for v in (value if isinstance(value, tuple) else (value,))),
            ]
    return shlex.join(words)


def raise_failures(rows: list[dict]) -> None:
    """Raises BenchError naming the rows that have an error."""
    if failed := [f"{label(row)}: {row['error']}" for row in rows if "error" in row]:
        raise BenchError("\n".join(["did not run:", *failed]))
