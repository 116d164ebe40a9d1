"""Progress of a run: metrics of each step are read one step late, checked, logged and shown."""

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gptjax import config as configuration
from gptjax import provenance
from gptjax.config import Config
from gptjax.timeline import Timeline
from gptjax.training.checkpoint import NotFiniteError
from gptjax.training.flops import mfu
from gptjax.training.run_log import RunLog
from gptjax.training.signals import StopRequest
from gptjax.training.status_line import StatusLine
from gptjax.weights.sources import Source

# Number of consecutive updates with NaN or infinity at which the run stops.
MOST_NOT_FINITE = 50
# The metric of each evaluation task on the status line.
EVAL_METRICS = ("hellaswag_acc", "core")


class Progress:
    """Log and status line of a run.

    `submit` only stores the metrics of a step. `read` runs after the next step is dispatched, so
    that the device never waits for the host.

    Args:
        show: prints a line.
        step: first step of the run.
        devices: devices of the run.
        stop: stop request, shared by the processes through the metrics of each step.

    Attributes:
        val_loss, val_step: newest validation loss and its step; None before the first.
        step: the newest submitted step.
    """

    def __init__(
        self,
        config: Config,
        log: RunLog,
        show: Callable[[str], object],
        *,
        step: int,
        devices: list[jax.Device],
        stop: StopRequest,
    ):
        self.val_loss: float | None = None
        self.val_step: int | None = None
        self._read_any, self._stop = False, stop
        self._config, self._log, self._show, self._devices = config, log, show, devices
        self._timeline = Timeline(config)
        self._status = StatusLine(config.max_steps, show, tokens=self._timeline.tokens)
        # The mean time of a step is that of the last intervals between two completed steps. The
        # first step, which compiles, has none.
        self._intervals_ms, self._ended = collections.deque(maxlen=20), None
        self.step = step
        self._unread: dict[str, jax.Array] | None = None
        self._not_finite = 0

    def write(self, kind: str, step: int, **fields) -> None:
        """Write a line of the log; `tokens` follows from the step."""
        self._log.write(kind, step, self._timeline.tokens(step), **fields)

    def started(
        self, kernels: dict[str, str], changes: dict[str, tuple[Any, Any]], source: Source | None
    ) -> None:
        """Log the beginning of the run, or of its continuation.

        Args:
            kernels: back end of each part of the model.
            changes: options changed with --resume with_changes.
            source: the model with the initial parameters, if any.
        """
        for name, (old, new) in changes.items():
            self._show(f"changed     {name}: {old} until step {self.step}, now {new}")
        self.write(
            "event",
            self.step,
            event="start",
            device=self._devices[0].device_kind,
            devices=len(self._devices),
            kernels=kernels,
            **provenance.of_process(),
            config=configuration.to_json(self._config),
            changes=changes,
            init_from=source.identity() if source else None,
        )

    def submit(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Store the metrics of a dispatched step. Call `read` for the previous step first."""
        self.step, self._unread = step, metrics | self._stop.metrics(metrics["loss"])

    def read(self) -> bool:
        """Wait for the submitted metrics, log and show them.

        Returns:
            True at the first step of this process.

        Raises:
            NotFiniteError: the loss or the gradient norm is not finite. A skipped update raises the
                error only after 50 such updates in a row.
            OSError: the log cannot be written.
        """
        if self._unread is None:
            return False
        values = _numbers(jax.device_get(self._unread))
        self._unread = None
        self._stop.read(values)
        first, self._read_any = not self._read_any, True
        span = self._timeline.at(self.step - 1)  # stage of the last update
        if self.step - 1 == span.begin and not first:
            self._intervals_ms.clear()
            self.pause()
        config, stage = span.config, {"stage": span.number} if self._config.stages else {}
        before, self._ended = self._ended, time.perf_counter()
        if before is not None:
            self._intervals_ms.append(1000 * (self._ended - before))
        rates = dict.fromkeys(("ms", "tokens_per_second", "mfu"))
        if intervals := self._intervals_ms:
            rates["ms"] = sum(intervals) / len(intervals)
            rates["tokens_per_second"] = speed = config.batch_tokens / rates["ms"] * 1e3
            model, device = config.model, self._devices[0].device_kind
            flops = model.flops_per_token(config.sequence_length)
            rates["mfu"] = mfu(speed, flops, device, model.precision.name, len(self._devices))
        self.write("train", self.step, **values, **rates, **stage)
        self._check(values)
        if stage:
            self._status.notes["stage"] = f"stage {span.number}/{self._timeline.total}"
        self._status.update(self.step, loss=values["loss"], lr=values["lr"], **rates)
        return first

    def _check(self, values: dict[str, float]) -> None:
        loss, grad_norm = values["loss"], values["grad_norm"]
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self._not_finite = 0 if finite else self._not_finite + 1
        if not finite and not (values["skipped"] and self._not_finite < MOST_NOT_FINITE):
            raise NotFiniteError(f"step {self.step}: loss {loss}, gradient norm {grad_norm}")
        if values["skipped"]:
            self._show(
                f"step {self.step}: update skipped; loss {loss:.4f} (z-score "
                f"{values['loss_z']:.1f}), gradient norm {grad_norm:.4f} (z-score "
                f"{values['grad_norm_z']:.1f})"
            )

    def validated(self, step: int, loss: float) -> None:
        """Log and show a validation loss.

        Raises:
            NotFiniteError: the loss is not finite.
        """
        self.val_loss, self.val_step = loss, step
        self.write("val", step, loss=loss)
        self._show(f"step {step}: validation loss {loss:.4f}")
        self._status.val = f"{loss:.4f}"
        self.check_loss(step, loss)

    @staticmethod
    def check_loss(step: int, loss: float) -> None:
        """Raise NotFiniteError if a validation loss is not finite."""
        if not math.isfinite(loss):
            raise NotFiniteError(f"step {step}: validation loss {loss}; this state was not saved")

    def evaluated(self, step: int, results: dict[str, float]) -> None:
        """Log and show the metrics of the evaluation tasks."""
        self.write("eval", step, **results)
        text = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        self._show(f"step {step}: {text}")
        shown = {n.removesuffix("_acc"): x for n, x in results.items() if n in EVAL_METRICS}
        self._status.notes["eval"] = " · ".join(f"{task} {x:.4f}" for task, x in shown.items())

    def sampled(self, step: int, text: str | None) -> None:
        """Log and show a sampled text, if this process has one."""
        if text is None:
            return
        self.write("sample", step, text=text)
        self._show(f"step {step}: sample ⟨{text}⟩")

    def fp8_clipping(self, step: int, shares: dict[str, float]) -> None:
        """Log the shares of clipped numbers and of zeros of each FP8 operand, and show the greatest
        share of clipped numbers if it is not zero."""
        self.write("clipping", step, **shares)
        clipped = {name: x for name, x in shares.items() if not name.endswith(".zero")}
        name = max(clipped, key=clipped.get, default="")
        clips = any(clipped.values())
        self._status.notes["clip"] = f"FP8 clips {clipped[name]:.1e} ({name})" if clips else ""

    def pause(self) -> None:
        """Exclude the current interval, such as one with a validation, from the time of a step."""
        self._ended = None


def _numbers(metrics: dict[str, np.ndarray]) -> dict[str, float]:
    """Return metrics as numbers: element i of an array "load" is "load.i"."""
    return {
        ".".join([name, *map(str, index)]): x[index].item()
        for name, x in metrics.items()
        for index in np.ndindex(x.shape)
    }
