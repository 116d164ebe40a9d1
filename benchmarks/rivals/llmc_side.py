"""llm.c's side of a comparison: runs of the user's own build of train_gpt2.cu, on random tokens.

https://github.com/karpathy/llm.c: the options and the output are those of train_gpt2.cu. llm.c
prints the time of each step between two CUDA events, from reading the batch to the update.
"""

import os
import re
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np
from flax import nnx

from gptjax.bench import BenchError, harness
from gptjax.config import Config
from gptjax.data.shards import write_shard
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.terminal import printable
from gptjax.training.memory import GIB
from gptjax.weights.llmc import save_llmc

PROGRAM = "train_gpt2cu"
BUILD = f"make {PROGRAM} USE_CUDNN=1"
MIB = 2**20
# Steps of the run that shows whether llm.c can run, and how long a step is.
FIRST_STEPS = 10
# Micro-batches in the token file. llm.c shuffles them, and opens the file again after the last one.
BATCHES = 64
# For the start of a run: llm.c draws the weights of the largest GPT-2 on one core of the host.
START_SECONDS = 900.0
# CUDA context and workspaces of the process.
OVERHEAD_BYTES = GIB
# The shapes that llm.c builds by name, with `GPT2Config`'s vocabulary and block size.
DESCRIPTORS = {
    (12, 12, 768): "d12",
    (24, 16, 1024): "d24",
    (36, 20, 1280): "d36",
    (48, 25, 1600): "d48",
}
# By precision: what llm.c prints, its options, and the dtype of the build and its checkpoints.
# -w: fp32 master weights, a copy that a build in fp32 does not need. -f: TF32.
PRECISIONS = {
    "bf16": ("BF16", ("-w", "1"), "bf16"),
    "tf32": ("TF32", ("-w", "0", "-f", "1"), "fp32"),
    "fp32": ("FP32", ("-w", "0", "-f", "0"), "fp32"),
}
_PRECISION = re.compile(r"^\| precision +\| (\S+)", re.MULTILINE)
_STEP = re.compile(r"^step +(\d+)/\d+ \|.*\| +([\d.]+) ms \|", re.MULTILINE)
_ALLOCATED = re.compile(r"^alloca(?:ting|ted) (\d+) MiB for ", re.MULTILINE)


def find_program(path: Path) -> Path:
    """Return the absolute path of llm.c's executable.

    Args:
        path: the executable or its folder.

    Raises:
        BenchError: there is no such executable.
    """
    program = (path / PROGRAM if path.is_dir() else path).absolute()
    if not program.is_file():
        raise BenchError(f"--llmc: no file {program}: run `{BUILD}` in llm.c's folder")
    if not os.access(program, os.X_OK):
        raise BenchError(
            f"--llmc: {program} is not executable: expected the {PROGRAM} that `{BUILD}` writes"
        )
    return program


def require_gpu(device: jax.Device) -> None:
    """Raise BenchError if JAX does not run on a GPU."""
    if device.platform != "gpu":
        raise BenchError("--llmc: llm.c needs a GPU, and JAX sees none here: leave out --llmc")


def why_no_llmc(config: Config) -> str | None:
    """Return why llm.c has no training step to compare with, or None."""
    model, precision = config.model, config.model.precision.name
    if type(model) is not GPT2Config:  # a subclass may compute something else
        return f"llm.c trains GPT-2, not {type(model).__name__}: leave out --llmc"
    if precision not in PRECISIONS:
        return f"llm.c has {', '.join(PRECISIONS)}, not {precision}: give another --precision"
    if config.optimizer.name != "adamw":
        return f"llm.c has AdamW, not {config.optimizer.name}: set --optimizer adamw"
    if model.recompute != "none":
        return f"llm.c does not recompute a {model.recompute}: set --recompute none"
    if config.separate_documents:
        return "llm.c's step does not separate documents: leave out --llmc"
    if model.vocab_size > 2**16:
        return f"llm.c's tokens are uint16: vocab_size {model.vocab_size} is too large for --llmc"
    if cast(int, model.padded_vocab_size) % 128:
        return (
            f"llm.c needs a padded_vocab_size that is a multiple of 128, got "
            f"{model.padded_vocab_size}: change it, or leave out --llmc"
        )
    return None


def descriptor(model: GPT2Config) -> str | None:
    """Return llm.c's name of a model's shape, or None if llm.c needs a checkpoint for it."""
    standard = (50257, 50304, 1024)
    if (model.vocab_size, model.padded_vocab_size, model.block_size) != standard:
        return None
    return DESCRIPTORS.get((model.n_layer, model.n_head, model.n_embd))


class LlmcStep:
    """llm.c's training step, with the options that reproduce the step of a config.

    Each run is a process, which holds no memory between two turns.

    Args:
        program: the executable, as an absolute path.
        config: with one micro-batch per step; `why_no_llmc` of the config is None.

    Attributes:
        peak: bytes that llm.c allocated, as it prints them; None before the first run.
    """

    def __init__(self, program: Path, config: Config, device: jax.Device):
        self.program, self.config, self.device = program, config, device
        self.peak: int | None = None
        self._step_s = 0.0

    @property
    def _model(self) -> GPT2Config:
        return cast(GPT2Config, self.config.model)

    @property
    def options(self) -> list[str]:
        """Options of llm.c that decide how a step is computed."""
        model = descriptor(self._model) or "model.bin"
        # -r 0: no activation is recomputed.
        return ["-e", model, *PRECISIONS[self._model.precision.name][1], "-r", "0"]

    def start(self) -> None:
        """Run a few steps: the length of a turn follows from their time.

        Raises:
            BenchError: llm.c failed, or computes in another precision.
        """
        self._step_s = statistics.median(self._run(FIRST_STEPS)[1:])

    def rounds(self, seconds: float) -> list[float]:
        """Return the mean seconds of a step in each of several consecutive rounds of one run, after
        a warm-up; the rounds last about `seconds` together.

        Raises:
            BenchError: llm.c failed.
        """
        if not self._step_s:
            self.start()
        warm_up = max(1, round(harness.WARM_UP_SECONDS / self._step_s))
        steps = max(1, round(seconds / self._step_s))
        times = self._run(warm_up + steps, seconds)[warm_up:]
        rounds = np.array_split(times, min(harness.SUSTAINED_ROUNDS, steps))
        return [float(np.mean(each)) for each in rounds]

    def has_room(self) -> bool:
        """Return whether the memory that JAX does not hold suffices for a run."""
        stats = self.device.memory_stats() or {}
        if not self.peak or "bytes_limit" not in stats:
            return True
        free = stats["bytes_limit"] - stats.get("pool_bytes", stats["bytes_in_use"])
        return free >= self.peak + OVERHEAD_BYTES

    def _run(self, steps: int, seconds: float = 0.0) -> list[float]:
        """Run llm.c and return the seconds of each step."""
        with tempfile.TemporaryDirectory(prefix="gptjax-llmc-") as name:
            folder = Path(name)
            self._write_inputs(folder)
            try:
                # There llm.c finds its inputs by names without special characters of a pattern.
                done = subprocess.run(
                    [str(self.program), *self._arguments(steps)],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=START_SECONDS + 10 * seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise BenchError(
                    f"llm.c did not end within {error.timeout:g} s: it was stopped"
                ) from error
            except OSError as error:
                raise BenchError(f"{self.program} cannot run: {error.strerror}") from error
        text, errors = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
        if done.returncode:
            self._check_precision(text)  # a likely reason
            code = done.returncode
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            raise BenchError(f"llm.c ended with {how}: {_reason(text, errors)}")
        self._check(text)
        times = step_seconds(text, steps)
        allocated = [int(number) for number in _ALLOCATED.findall(text)]
        self.peak = MIB * sum(allocated) or None
        return times

    def _arguments(self, steps: int) -> list[str]:
        batch, length = self.config.micro_batch, self.config.sequence_length
        arguments = {
            "-i": "tokens.bin",
            "-j": "tokens.bin",
            "-b": batch,
            "-t": length,
            "-d": batch * length,
            "-x": steps,
            # The validation cannot be turned off: one batch before the first step and after the
            # last. -s and -g: no sampled tokens, in older versions too, which divide by -s.
            "-v": steps + 1,
            "-m": 1,
            "-s": steps + 1,
            "-g": 1,
        }
        return [*self.options, *(str(word) for pair in arguments.items() for word in pair)]

    def _write_inputs(self, folder: Path) -> None:
        model = self._model
        count = BATCHES * self.config.micro_batch * self.config.sequence_length + 1
        tokens = np.random.default_rng(1).integers(model.vocab_size, size=count, dtype=np.uint16)
        write_shard(folder / "tokens.bin", tokens)
        if descriptor(model) is None:
            dtype = PRECISIONS[model.precision.name][2]
            # The memory that JAX allocates on the GPU stays allocated, and llm.c needs it.
            with jax.default_device(jax.devices("cpu")[0]):
                save_llmc(GPT2(model, rngs=nnx.Rngs(0)), folder / "model.bin", dtype=dtype)

    def _check(self, text: str) -> None:
        """Raise BenchError if llm.c did not run the requested step."""
        if not self._check_precision(text):
            raise _unreadable("a line with its precision", text)
        if "Fell back to cudaMallocManaged" in text:
            raise BenchError(
                "llm.c needs more memory than the GPU has free, and used the host's, which is "
                "slower: give a smaller --batch"
            )

    def _check_precision(self, text: str) -> bool:
        """Return whether the output names the precision; raise BenchError for another one."""
        name, _, dtype = PRECISIONS[self._model.precision.name]
        build = f"{BUILD} PRECISION=BF16" if dtype == "bf16" else f"make {PROGRAM} PRECISION=FP32"
        found = _PRECISION.search(text)
        if found and found[1] != name:
            raise BenchError(
                f"this build of llm.c computes in {printable(found[1])}, expected {name}: run "
                f"`{build}`, or give another --precision"
            )
        return found is not None


def step_seconds(text: str, steps: int) -> list[float]:
    """Return the seconds of each step in llm.c's output.

    Raises:
        BenchError: the output does not have the time of every step.
    """
    found = _STEP.findall(text)
    if [int(step) for step, _ in found] != list(range(1, steps + 1)):
        raise _unreadable(f"a line with the time of each of {steps} steps", text)
    try:
        times = [float(ms) / 1e3 for _, ms in found]
    except ValueError:
        times = [0.0]
    if min(times) <= 0:
        raise _unreadable("positive times of steps", text)
    return times


def _unreadable(expected: str, text: str) -> BenchError:
    found = _one_line(text.splitlines()[-3:])
    return BenchError(f"expected {expected} in the output of llm.c, found: {found}")


def _reason(text: str, errors: str) -> str:
    """Return why a program failed: the first line about an error and the line after it, or the last
    lines.

    Args:
        text: standard output; llm.c prints CUDA's errors there.
        errors: standard error.
    """
    lines = errors.splitlines() + text.splitlines()
    for at, line in enumerate(lines):
        if "error" in line.lower():
            return _one_line(lines[at : at + 2])
    return _one_line((errors or text).splitlines()[-3:])


def _one_line(lines: Sequence[str]) -> str:
    shown = " / ".join(line.strip() for line in lines if line.strip())
    return printable(shown)[-200:] or "no output"
