"""PyTorch's step on several devices, as seen by the process that measures: `torchrun` starts a
process for each device, which runs `torch_worker`."""

import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch_worker
from torch_worker import Spec

from gptjax.bench import BenchError
from gptjax.training.memory import GIB

# For each process: a CUDA context, NCCL's buffers, and gaps of the allocator.
OVERHEAD_BYTES = 3 * GIB


class TorchSeveral:
    """A training step, or the forward pass alone, on several devices.

    Each run starts new processes: between two turns they hold no memory. Later runs compile from
    Inductor's cache.

    Attributes:
        peak: the most bytes that PyTorch held in a step, on the device with the most; None before
            the first run, and on a CPU.
        loss: mean over the devices, before the last update.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.peak: int | None = None
        self.loss: float | None = None

    def run(self, steps: int) -> float:
        """Return the seconds of this number of consecutive steps on the slowest device, with their
        compilation. Raises the errors of `rounds`."""
        return self._run(steps=steps)[0]

    def rounds(self, seconds: float) -> list[float]:
        """Return the seconds of a step on the slowest device in each of several consecutive rounds.

        Raises:
            BenchError: a process failed. All have ended.
        """
        return self._run(seconds=seconds)

    def has_room(self) -> bool:
        """Return whether a step can run in the free memory of every device."""
        if not self.peak:
            return True
        needed = self.peak + OVERHEAD_BYTES
        devices = range(self.spec.devices)
        return all(torch.cuda.mem_get_info(device)[0] >= needed for device in devices)

    def _run(self, **how: Any) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="gptjax-bench-") as folder:
            request, reply = Path(folder, "request"), Path(folder, "reply")
            request.write_bytes(pickle.dumps((self.spec, how)))
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command = [sys.executable, *launch, self.spec.devices, torch_worker.__file__]
            command += [request, reply]
            done = subprocess.run([*map(str, command)], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                # The first one, because the other processes fail after it.
                lines = done.stderr.splitlines()
                errors = [line for line in lines if line.startswith(torch_worker.ERROR)]
                found = (errors or lines[-1:] or ["no output"])[0]
                raise BenchError(f"PyTorch's processes: {found.removeprefix(torch_worker.ERROR)}")
            answer = json.loads(reply.read_text())
        self.peak, self.loss = answer["peak"], answer["loss"]
        return answer["seconds"]
