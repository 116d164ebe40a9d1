"""Give each process of xdist one GPU; import this module before JAX starts."""

import os
from pathlib import Path


def _gpus() -> list[str]:
    """Return the indices of the GPUs that CUDA may use, without starting CUDA."""
    present = Path("/proc/driver/nvidia/gpus")
    count = len(list(present.iterdir())) if present.exists() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else named.split(",")


GPUS = _gpus()
# Without processes (-n 0) a test may use all GPUs.
if GPUS and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[int(worker.removeprefix("gw")) % len(GPUS)]
