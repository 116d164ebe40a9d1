"""PyTorch's step on several devices, as seen by the process that measures: one process for each
device, which `torch_worker` runs."""

import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch_worker import Spec, work

from gptjax.bench import BenchError
from gptjax.training.memory import GIB

# For one reply: the first one includes the start of the processes and the compilation.
REPLY_SECONDS = 900.0
END_SECONDS = 20.0
# For each process: a CUDA context, NCCL's buffers, and gaps of the allocator.
OVERHEAD_BYTES = 3 * GIB


class TorchSeveral:
    """A training step, or the forward pass alone, on several devices.

    The processes start at the first `run` and end in `rest`: between two turns they hold no memory.
    The next turn compiles again, from Inductor's cache.

    Attributes:
        peak: the most bytes that PyTorch held in a step, on the device with the most; None before
            the first `rest`, and on a CPU.
        loss: mean over the devices, before the last update.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.peak: int | None = None
        self.loss: float | None = None
        self._workers: list[tuple[BaseProcess, connection.Connection]] = []

    def run(self, steps: int) -> float:
        """Return the seconds of this number of consecutive steps on the slowest device.

        Raises:
            BenchError: a process failed, ended, or did not reply in time. All have ended.
        """
        if not self._workers:
            self._start()
        reply = self._ask(steps)[0]
        self.loss = reply["loss"]
        return reply["seconds"]

    def rest(self) -> None:
        """Between two turns: measure the peak of one more step, and end the processes."""
        peaks = [reply["peak"] for reply in self._ask(None)]
        self.peak = max(peaks) if all(peaks) else None
        self.end()

    def make_room(self, needed: int) -> None:
        """Do nothing: the processes have ended and hold no memory."""

    def has_room(self) -> bool:
        """Return whether a step can run in the free memory of every device; call it after
        `rest`."""
        if not self.peak:
            return True
        needed = self.peak + OVERHEAD_BYTES
        devices = range(self.spec.devices)
        return all(torch.cuda.mem_get_info(device)[0] >= needed for device in devices)

    def end(self, *, kill: bool = False) -> None:
        """End the processes.

        Args:
            kill: without waiting for them.
        """
        deadline = time.monotonic() + (0 if kill else END_SECONDS)
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(max(0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        if self._workers:
            self._folder.cleanup()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
        self._folder = tempfile.TemporaryDirectory(prefix="gptjax-bench-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.spec.devices):
            pipe, other_end = context.Pipe()
            process = context.Process(
                target=work, args=(other_end, self.spec, rank, store), daemon=True
            )
            process.start()
            other_end.close()  # so that the end of the process is the end of the pipe
            self._workers.append((process, pipe))

    def _ask(self, request: int | None) -> list[dict[str, Any]]:
        try:
            for _, pipe in self._workers:
                with contextlib.suppress(OSError):  # a process that has ended: found below
                    pipe.send(request)
            return self._replies()
        except BaseException:
            self.end(kill=True)
            raise

    def _replies(self) -> list[dict[str, Any]]:
        """Return the reply of every process.

        Raises:
            BenchError: one failed: the first one, because the others fail after it.
        """
        deadline, replies = time.monotonic() + REPLY_SECONDS, {}
        while len(replies) < len(self._workers):
            waiting = {
                rank: pipe for rank, (_, pipe) in enumerate(self._workers) if rank not in replies
            }
            left = deadline - time.monotonic()
            if not connection.wait(list(waiting.values()), left):
                raise BenchError(
                    f"PyTorch's processes {list(waiting)} of {len(self._workers)} did not reply "
                    f"within {REPLY_SECONDS:g} s: all were ended"
                )
            # Twice: a cause was sent before its consequence, but to a pipe that may come earlier.
            for rank in [*waiting, *waiting]:
                if rank not in replies and waiting[rank].poll():
                    replies[rank] = self._receive(rank)
            if failed := [(r["at"], rank) for rank, r in replies.items() if "error" in r]:
                rank = min(failed)[1]
                raise BenchError(
                    f"PyTorch's process {rank} of {len(self._workers)}: {replies[rank]['error']}"
                )
        return [replies[rank] for rank in range(len(self._workers))]

    def _receive(self, rank: int) -> dict[str, Any]:
        process, pipe = self._workers[rank]
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(END_SECONDS)
            return {"error": f"ended with exit code {process.exitcode}", "at": 0.0}
