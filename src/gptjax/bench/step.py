"""`python -m gptjax.bench step`: the training step (or forward pass) of one config, compared with
PyTorch's or llm.c's in the same run. `measuring` describes the method."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

from gptjax.bench import results
from gptjax.bench.batch_size import largest_batch
from gptjax.bench.configs import (
    OWN_DEFAULT,
    ModelOptions,
    PrecisionName,
    one_micro_batch,
    with_moments,
)
from gptjax.bench.errors import BenchError
from gptjax.bench.jax_step import JaxStep
from gptjax.bench.llmc_side import LlmcStep, find_program, require_gpu, why_no_llmc
from gptjax.bench.measuring import first_devices, one_device, take_turns
from gptjax.bench.rows import (
    complete,
    describe,
    first_line,
    kernel_names,
    label,
    number,
    raise_failures,
    say,
)
from gptjax.bench.table import Row, print_table
from gptjax.bench.torch_side import (
    how_of,
    require_torch,
    strategy_fields,
    torch_several,
    torch_step,
    why_no_step,
)
from gptjax.config import Config
from gptjax.parallel import Strategy
from gptjax.ranges import NonNegativeFloat
from gptjax.training.memory import GIB, available_bytes, needed_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(ModelOptions):
    """Measure time, memory and MFU of one config's training step. Print a row for each combination
    of --devices, --parallel, --reduce-dtype, --overlap-reduce, --batch, --precision, --recompute
    and --moment-dtype."""

    batch: Annotated[tuple[int, ...], OWN_DEFAULT] = ()
    """Sequences per step, in one micro-batch (default: the config's micro-batch, or 64)."""
    precision: Annotated[tuple[PrecisionName, ...], OWN_DEFAULT] = ()
    """Precisions of the model (default: the config's, or bf16)."""
    recompute: Annotated[tuple[Literal["none", "block", "sublayer"], ...], OWN_DEFAULT] = ()
    """Activations recomputed in the backward pass, as --model.recompute (default: the config's, or
    none)."""
    moment_dtype: Annotated[tuple[Literal["fp32", "bf16"], ...], OWN_DEFAULT] = ()
    """Dtypes of both of AdamW's moments, as --optimizer.first-moment-dtype and
    --optimizer.second-moment-dtype of train.py (default: the config's)."""
    devices: tuple[int, ...] = (1,)
    """Numbers of devices that share the step. --batch counts the sequences of each device."""
    parallel: Annotated[tuple[Strategy, ...], OWN_DEFAULT] = ()
    """Strategies for several devices, as --parallel of train.py (default: the config's, or
    data)."""
    reduce_dtype: Annotated[tuple[Literal["fp32", "bf16"], ...], OWN_DEFAULT] = ()
    """Dtypes in which gradients are summed over the devices (default: the config's, or fp32)."""
    overlap_reduce: Annotated[tuple[bool, ...], OWN_DEFAULT] = ()
    """Whether gradients are summed during the backward pass, as --overlap-reduce of train.py
    (default: the config's)."""
    largest: bool = False
    """Search for the largest batch that fits: 1, 2 or a multiple of 4. Not with --batch."""
    torch: bool = False
    """Also measure PyTorch for every row, with the same batch: torch.compile (not on a CPU),
    scaled_dot_product_attention, fused AdamW, padded vocabulary, and torch._scaled_mm for FP8. On
    several devices, DDP is measured for data, and FSDP2 for zero1 and fsdp."""
    llmc: Annotated[Path | None, OWN_DEFAULT] = None
    """Path of llm.c's train_gpt2cu, or its folder: also measure llm.c for every row. Needs one GPU,
    GPT-2, AdamW and the precision of llm.c's build. Not with --torch."""
    seconds: NonNegativeFloat = 3.0
    """Seconds of each measurement. With --torch or --llmc, each program is measured twice."""
    out: Annotated[Path | None, OWN_DEFAULT] = None
    """JSON file for the results."""

    def run(self) -> None:
        if self.out:
            results.check_file(self.out)
        device = one_device()
        self._check_devices()
        if self.llmc:
            self._check_llmc(self.llmc, device)
        if self.torch:
            require_torch(device)
        rows = []
        for config in self.configs():
            for count in self.devices:
                for several in self._strategies(config, count):
                    rows += self._measure(several, device, count)
        compare_with_one_device(rows)
        try:
            if self.out:  # before the table: standard output may be closed
                command = results.bench_command("step", self)
                results.write(self.out, timed_result(command, rows, device, torch=self.torch))
        finally:  # the table shows the measurement even if it cannot be written
            show(rows, device)
        if self.out:
            print(f"wrote {self.out}")
        raise_failures(rows)

    def configs(self) -> list[Config]:
        """Return the configs to measure: one for each combination of batch, precision,
        recomputation and dtype of the moments.

        Raises:
            BenchError: options that contradict each other, or that the model does not have.
            ConfigError: no such config file, or an invalid config.
        """
        base = self.base()
        if self.largest and self.batch:
            raise BenchError("--largest searches for the batch that --batch sets: give one of them")
        if self.torch and (why := why_no_step(base)):
            raise BenchError(why)
        configs = [
            with_moments(
                self.with_options(base, batch=batch, precision=precision, recompute=recompute),
                moments,
            )
            for batch in self.batch or (None,)
            for precision in self.precision or (None,)
            for recompute in self.recompute or (None,)
            for moments in self.moment_dtype or (None,)
        ]
        for config in configs:
            if self.llmc and (why := why_no_llmc(config)):
                raise BenchError(why)
        return configs

    def _check_devices(self) -> None:
        if not self.devices:
            raise BenchError("--devices must be numbers of at least 1, got none")
        for count in self.devices:
            first_devices(count)
        if max(self.devices) > 1 and self.largest:
            raise BenchError("--largest measures one device: set --devices 1")

    def _check_llmc(self, path: Path, device: jax.Device) -> None:
        if self.torch:
            raise BenchError(
                "--torch and --llmc both name a program to compare with: give one of them"
            )
        if self.forward:
            raise BenchError("llm.c measures whole training steps: leave out --forward or --llmc")
        if max(self.devices) > 1:
            raise BenchError("--llmc measures one device: set --devices 1")
        require_gpu(device)
        find_program(path)

    def _strategies(self, config: Config, count: int) -> list[Config]:
        """Return the config with every strategy and dtype that differs on this many devices."""
        if count == 1:
            return [config]
        return [
            dataclasses.replace(
                config, parallel=strategy, reduce_dtype=dtype, overlap_reduce=overlap
            )
            for strategy in self.parallel or (config.parallel,)
            for dtype in self.reduce_dtype or (config.reduce_dtype,)
            for overlap in self.overlap_reduce or (config.overlap_reduce,)
        ]

    def _measure(self, config: Config, device: jax.Device, count: int) -> list[dict]:
        """Return gptjax's row and, with --torch or --llmc, the row of the other program. A failure
        is a row with its error."""
        row, ours = self._compile(config, device, count)
        if ours:
            config = ours.config
        rows = [row]
        sides: dict[str, Any] = {"gptjax": ours} if ours else {}
        # The other side first: it frees the memory that it does not use, and JAX does not.
        if self.torch:
            torch_row, theirs = self._compile_torch(row, config, device, count)
            rows.append(torch_row)
            sides = ({"torch": theirs} if theirs else {}) | sides
        elif self.llmc:
            llmc_row, theirs = self._start_llmc(self.llmc, row, config, device)
            rows.append(llmc_row)
            sides = ({"llm.c": theirs} if theirs else {}) | sides
        times = take_turns(sides, seconds=self.seconds)
        rows = [
            complete(row, config, sides.get(row["system"]), times.get(row["system"]))
            for row in rows
        ]
        if len(rows) == 2 and all("ms" in row for row in rows):
            rows[0]["of_torch" if self.torch else "of_llmc"] = rows[1]["ms"] / rows[0]["ms"]
        return rows

    def _compile(
        self, config: Config, device: jax.Device, count: int
    ) -> tuple[dict, JaxStep | None]:
        row = describe(self.name, config, forward=self.forward, devices=count)
        try:
            if self.largest:
                step = self._largest(config, device)
                config = step.config
                row = describe(self.name, config, forward=self.forward)
            else:
                parallel = config.parallel_on(first_devices(count))
                step = JaxStep(config, device, parallel=parallel, forward=self.forward)
            say(f"{label(row)}: compiling")
            step.compile()
            row |= {"compile_s": step.compile_s, "needed_gib": needed_bytes(step.compiled) / GIB}
            row |= {"kernels": config.kernels(), "program": launches(step.compiled.as_text())}
            step.check_memory()
            return row, step
        except Exception as error:  # a failure must not lose the other rows
            return row | {"error": first_line(error)}, None

    def _compile_torch(self, asked: dict, config: Config, device: jax.Device, count: int):
        """Return PyTorch's row and its compiled step, or None if that failed."""
        from gptjax.bench.torch_gpt2 import free_torch

        how = how_of(config, device)
        same = ("model", "precision", "batch", "sequence_length", "pass")
        row = (
            {"system": "torch", "devices": count}
            | {key: asked[key] for key in same}
            | (strategy_fields(config) if count > 1 else {})
            | {"kernels": str(how)}
        )
        say(f"{label(row)}: compiling")
        step = None
        try:
            if count > 1:
                step = torch_several(config, how, device, count, forward=self.forward)
            else:
                step = torch_step(config, how, device, forward=self.forward)
            return row | {"compile_s": step.run(1)}, step
        except Exception as error:
            row["error"] = first_line(error)
        del step  # JAX needs the memory that it holds
        free_torch()
        return row, None

    def _start_llmc(
        self, path: Path, asked: dict, config: Config, device: jax.Device
    ) -> tuple[dict, LlmcStep | None]:
        """Return llm.c's row and its step, or None if its first run failed."""
        same = ("devices", "model", "precision", "batch", "sequence_length", "pass")
        row = {"system": "llm.c"} | {key: asked[key] for key in same}
        step = LlmcStep(find_program(path), config, device)
        row["kernels"] = " ".join([step.program.name, *step.options])
        say(f"{label(row)}: first run")
        try:
            step.start()
        except Exception as error:
            return row | {"error": first_line(error)}, None
        return row, step

    def _largest(self, config: Config, device: jax.Device) -> JaxStep:
        """Return the compiled step of the largest batch that fits."""
        steps = {}

        def needs(batch: int) -> int:
            smaller = one_micro_batch(config, batch, config.sequence_length)
            step = steps[batch] = JaxStep(smaller, device, forward=self.forward)
            step.compile()
            needed = needed_bytes(step.compiled)
            say(
                f"a batch of {batch} needs {needed / GIB:.2f} GiB, compiled in "
                f"{step.compile_s:.1f} s"
            )
            return needed

        available = available_bytes(device)
        if self.torch:
            # PyTorch's step needs more: its parameters and moments, and 1 GiB of CUDA contexts.
            available -= 3 * 4 * config.model.num_params + GIB
        return steps[largest_batch(needs, available)]


def compare_with_one_device(rows: list[dict]) -> None:
    """Add to each row of N devices its tokens/s divided by N times the tokens/s of one device.

    The row of one device has the same model, precision, batch and optimizer, in the same run.
    """
    same = ("system", "model", "precision", "batch", "sequence_length", "algorithm", "recompute")
    same += ("moments",)
    one = {tuple(r.get(key) for key in same): r for r in rows if r.get("devices", 1) == 1}
    for row in rows:
        single = one.get(tuple(row.get(key) for key in same), {})
        if row.get("devices", 1) > 1 and "tokens/s" in row and "tokens/s" in single:
            row["scaling"] = row["tokens/s"] / (row["devices"] * single["tokens/s"])


def timed_result(command: str, rows: list[dict], device: jax.Device, *, torch: bool) -> dict:
    """Return a result of a command that times steps.

    Args:
        torch: whether PyTorch was measured too.
    """
    packages = ("jax-triton", "triton") + ("torch",) * torch
    return results.new(command, rows, device=device.device_kind, packages=packages)


def launches(text: str) -> dict[str, Any]:
    """Count what an executable launches: fusions, custom calls by target, and CUDA graphs if the
    text has them.

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


def show(rows: list[dict], device: jax.Device) -> None:
    """Print a row for each config and system."""
    table, scaling = [], any("scaling" in row for row in rows)
    other = "llmc" if any(row["system"] == "llm.c" for row in rows) else "torch"
    ratio = f"of_{other}"
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
            number(row.get("compile_s"), ".1f"),
            str(row["program"]["fusions"]) if "program" in row else "",
            number(row[ratio], ".3f") + " ×" if ratio in row else "",
        )
        if scaling:
            figures += (number(row["scaling"], ".1%") if "scaling" in row else "",)
        table.append(Row(label(row), figures, kernel_names(row)))
    columns = ("ms", "tokens/s", "MFU", "needs GiB", "peak GiB", "compile s", "fusions")
    columns += ("of llm.c" if other == "llmc" else "of torch",)
    columns += ("of n × one",) * scaling
    print_table(device.device_kind, columns, table)
