"""The checkpoints of a run: `python -m gptjax.checkpoints RUN list | average`."""

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from gptjax.terminal import command_line, exit_code, interrupt, printable
from gptjax.training.checkpoint import Checkpoints, NotFiniteError, silence_orbax
from gptjax.training.run_log import LogError, read_log
from gptjax.weights import CheckpointError, WeightsError, checkpoint_files
from gptjax.weights.files import check_new, created
from gptjax.weights.sources import CHECKPOINTS, checkpoint_folder


@dataclasses.dataclass(frozen=True)
class List:
    """List the steps: validation loss from the log, size on disk, intact or damaged.

    Every file is read and compared with its digest.
    """

    def run(self, run: Path) -> None:
        folder = _folder(run)
        losses = _val_losses(run)
        print(f"{'step':>10}  {'val loss':>8}  {'MiB':>9}  state")
        for step in checkpoint_files.steps(folder):
            path, loss, state = folder / str(step), losses.get(step), "intact"
            try:
                checkpoint_files.verify(path)
            except CheckpointError as error:
                state = str(error).removeprefix(f"{path} is ")
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shown = "-" if loss is None else f"{loss:.4f}"
            print(f"{step:>10}  {shown:>8}  {size / 2**20:>9.2f}  {printable(state)}")


@dataclasses.dataclass(frozen=True)
class Average:
    """Average the parameters of several steps into a new run folder.

    gptjax.load, train.py --init-from and `python -m gptjax.export` read the folder. It has no
    optimizer state: a run cannot resume from it.
    """

    out: Path
    """The folder to create."""
    steps: tuple[int, ...]
    """The steps to average."""

    def run(self, run: Path) -> None:
        check_new(self.out)
        folder = _folder(run)
        known = checkpoint_files.steps(folder)
        if len({*self.steps}) < len(self.steps) or not {*self.steps} <= {*known}:
            raise WeightsError(f"expected different steps of {known}, found {[*self.steps]}")
        average(folder, [*self.steps], self.out)
        print(printable(f"{self.out}: the average of the steps {sorted(self.steps)} of {run}"))


def average(folder: Path, steps: list[int], out: Path) -> None:
    """Write a run folder with one checkpoint: the mean of the parameters of several steps.

    The sums are computed in fp64. The folder appears when it is complete.

    Args:
        folder: folder of the checkpoints.
        steps: steps to average. The result has the newest step and the config of this checkpoint.
        out: the run folder to create.

    Raises:
        CheckpointError: a checkpoint is damaged, the checkpoints have different parameters, or
            writing fails.
        WeightsError: `out` exists.
    """
    newest = max(steps)
    saved = checkpoint_files.read_meta(folder / str(newest))
    like, total = checkpoint_files.params_like(saved), None
    for step in steps:
        params = checkpoint_files.read_params(folder / str(step), like)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        total = params if total is None else jax.tree.map(np.add, total, params)
    mean = jax.tree.map(lambda x, y: jax.numpy.asarray(x / len(steps), y.dtype), total, like)
    meta = {name: saved[name] for name in ("config", "data") if name in saved}
    with created(out) as temporary:
        checkpoints = Checkpoints(temporary / CHECKPOINTS)
        try:
            checkpoints.save(
                newest, {checkpoint_files.PARAMS: mean}, meta | {"averaged": sorted(steps)}
            )
            checkpoints.wait()
        finally:
            # Also after Ctrl-C: threads of Orbax would write to the removed folder again.
            checkpoints.close()


def _folder(run: Path) -> Path:
    folder = checkpoint_folder(run)
    if folder is None or folder == run:
        raise WeightsError(f"{run}: expected a run's folder, with checkpoints in {CHECKPOINTS}/")
    return folder


def _val_losses(run: Path) -> dict[int, float]:
    """Return the validation losses in the log by step; empty without a log."""
    try:
        log = read_log(run / "log.jsonl")
    except FileNotFoundError:
        return {}
    values = {row["step"]: row.get("loss") for row in log if row["kind"] == "val"}
    return {step: loss for step, loss in values.items() if isinstance(loss, float)}


type _Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Average, tyro.conf.subcommand("average")]
)


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    run: tyro.conf.Positional[Path]
    """The run's folder, such as runs/gpt2_tiny."""
    command: tyro.conf.OmitArgPrefixes[_Command]


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    description = "List or average the checkpoints of a run."

    def command() -> None:
        line = command_line(
            _CommandLine,
            prog="python -m gptjax.checkpoints",
            description=description,
            args=args,
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
        line.command.run(line.run)

    return exit_code(command, (WeightsError, LogError, NotFiniteError, OSError))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    silence_orbax()
    sys.exit(main())
