"""llm.c's side of a comparison: runs of the user's own build of train_gpt2.cu, on random tokens.

https://github.com/karpathy/llm.c: the options and the output are those of train_gpt2.cu. llm.c
prints the time of each step between two CUDA events, from reading the batch to the update.
"""

import re
import shutil
import statistics
import subprocess
import tempfile
import weakref
from pathlib import Path

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
MIB = 2**20
# Steps of the run that shows whether llm.c can run, and how long a step is.
FIRST_STEPS = 10
# Micro-batches in the token file. llm.c shuffles them, and opens the file again after the last one.
BATCHES = 64
# For the start of a run.
START_SECONDS = 900.0
# CUDA context and workspaces of the process.
OVERHEAD_BYTES = GIB
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
    """Return the absolute path of llm.c's executable, from the path of the file or its folder.

    Raises:
        BenchError: there is no such file.
    """
    program = (path / PROGRAM if path.is_dir() else path).absolute()
    if not program.is_file():
        raise BenchError(
            f"--llmc: no file {program}: run `make {PROGRAM} USE_CUDNN=1` in llm.c's folder"
        )
    return program


def why_no_llmc(config: Config) -> str | None:
    """Return why llm.c has no training step to compare with, or None."""
    model, precision = config.model, config.model.precision.name
    reasons = (
        # A subclass may compute something else.
        (type(model) is GPT2Config, f"GPT-2, not {type(model).__name__}"),
        (precision in PRECISIONS, f"{', '.join(PRECISIONS)}, not {precision}"),
        (config.optimizer.name == "adamw", f"AdamW, not {config.optimizer.name}"),
        (model.recompute == "none", f"no recomputation of a {model.recompute}"),
        (not config.separate_documents, "no separate documents"),
        (
            model.padded_vocab_size % 128 == 0,
            f"a padded_vocab_size that is a multiple of 128, not {model.padded_vocab_size}",
        ),
    )
    return next((f"llm.c has {reason}: leave out --llmc" for ok, reason in reasons if not ok), None)


class LlmcStep:
    """llm.c's training step, with the options that reproduce the step of a config.

    Each run is a process, which holds no memory between two turns.

    Args:
        program: the executable, as an absolute path.
        config: with one micro-batch per step; `why_no_llmc` of the config is None.

    Attributes:
        options: options of llm.c that decide how a step is computed.
        peak: bytes that llm.c allocated, as it prints them; None before the first run.
    """

    def __init__(self, program: Path, config: Config, device: jax.Device):
        self.program, self.config, self.device = program, config, device
        self.precision, how, self.dtype = PRECISIONS[config.model.precision.name]
        self.options = ["-e", "model.bin", *how, "-r", "0"]  # -r 0: no activation is recomputed
        self.peak: int | None = None

    def start(self) -> None:
        """Write the weights and the tokens, and run a few steps: the length of a turn follows from
        their time.

        Raises:
            BenchError: llm.c failed, or computes in another precision.
        """
        self._folder = folder = Path(tempfile.mkdtemp(prefix="gptjax-llmc-"))
        weakref.finalize(self, shutil.rmtree, folder)
        model = self.config.model
        count = BATCHES * self.config.micro_batch * self.config.sequence_length + 1
        tokens = np.random.default_rng(1).integers(model.vocab_size, size=count, dtype=np.uint16)
        write_shard(folder / "tokens.bin", tokens)
        # The memory that JAX allocates on the GPU stays allocated, and llm.c needs it.
        with jax.default_device(jax.devices("cpu")[0]):
            save_llmc(GPT2(model, rngs=nnx.Rngs(0)), folder / "model.bin", dtype=self.dtype)
        self._step_s = statistics.median(self._run(FIRST_STEPS)[1:])

    def rounds(self, seconds: float) -> list[float]:
        """Return the mean seconds of a step in each of several consecutive rounds of one run, after
        a warm-up; the rounds last about `seconds` together. Call it after `start`.

        Raises:
            BenchError: llm.c failed.
        """
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
        batch, length = self.config.micro_batch, self.config.sequence_length
        arguments = {"-i": "tokens.bin", "-j": "tokens.bin", "-b": batch, "-t": length}
        # The validation cannot be turned off: one batch before the first step and after the last.
        # -s and -g: no sampled tokens, in older versions too, which divide by -s.
        arguments |= {"-d": batch * length, "-x": steps, "-v": steps + 1, "-m": 1}
        arguments |= {"-s": steps + 1, "-g": 1}
        done = subprocess.run(
            [self.program, *self.options, *(str(x) for pair in arguments.items() for x in pair)],
            # There llm.c finds its inputs by names without special characters of a pattern.
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_SECONDS + 10 * seconds,
            check=False,
        )
        errors, text = (output.decode(errors="replace") for output in (done.stderr, done.stdout))
        found = _PRECISION.search(text)
        if found and found[1] != self.precision:
            raise BenchError(
                f"this build of llm.c computes in {printable(found[1])}, expected "
                f"{self.precision}: run `make {PROGRAM} PRECISION={self.dtype.upper()}`"
            )
        if "Fell back to cudaMallocManaged" in text:
            raise BenchError(
                "llm.c needs more memory than the GPU has free, and used the host's, which is "
                "slower: give a smaller --batch"
            )
        times = [(int(step), float(ms) / 1e3) for step, ms in _STEP.findall(text)]
        if done.returncode or [step for step, _ in times] != list(range(1, steps + 1)):
            raise BenchError(
                f"llm.c ended with exit code {done.returncode} and the times of {len(times)} of "
                f"{steps} steps: {_reason(errors + text)}"
            )
        self.peak = MIB * sum(map(int, _ALLOCATED.findall(text))) or None
        return [seconds for _, seconds in times]


def _reason(text: str) -> str:
    """Return the first line about an error and the line after it, or the last lines."""
    lines = [line.strip() for line in text.splitlines()]
    at = next((i for i, line in enumerate(lines) if "error" in line.lower()), -2)
    return printable(" / ".join(lines[at:][:2]))[-200:] or "no output"
