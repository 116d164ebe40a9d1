"""Errors of a run as sentences for the user."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import jax

from gptjax import processes
from gptjax.config import ConfigError
from gptjax.data import DataError
from gptjax.terminal import UserError, printable
from gptjax.training.checkpoint import Checkpoints, NotFiniteError
from gptjax.training.memory import is_full
from gptjax.training.progress import Progress
from gptjax.weights.errors import CheckpointError


class StoppedError(UserError, RuntimeError):
    """Error that ended training and that the user can correct."""


@contextlib.contextmanager
def of_training(progress: Progress, checkpoints: Checkpoints) -> Iterator[None]:
    """Wait for the save in progress, and name step, reason and newest checkpoint of an error.

    Raises:
        NotFiniteError: the loss, its gradient or the state is not finite.
        StoppedError: another error that the user can correct.
    """
    try:
        yield
        checkpoints.wait()
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        checkpoints.wait()
        if isinstance(error, NotFiniteError):
            with contextlib.suppress(OSError):
                progress.write("event", progress.step, event="not finite", message=str(error))
            raise NotFiniteError(
                f"{error}; stopped; {checkpoints.newest()}. To continue, run the same command with "
                "--resume with_changes and a lower --optimizer.learning-rate, or with "
                "--optimizer.skip-loss-z 5 --optimizer.skip-grad-norm-z 5, which also skip updates "
                "that are not finite."
            ) from error
        if isinstance(error, jax.errors.JaxRuntimeError) and is_full(error):
            # Of 30.8 GiB on an H200, a step of 21.36 GiB failed: most of it is one block.
            reason = (
                "out of device memory: the free memory is fragmented. Choose a smaller "
                "--micro-batch, or set the environment variable TF_GPU_ALLOCATOR=cuda_malloc_async"
            )
        elif isinstance(error, BrokenPipeError):
            reason = "the terminal or pipe that reads the output is closed"
        elif isinstance(error, (OSError, DataError, ConfigError)):
            reason = getattr(error, "strerror", None) or error
        else:
            raise
        raise StoppedError(
            f"stopped at step {progress.step}: {reason}; {checkpoints.newest()}; the same command "
            "resumes the run"
        ) from error


def run(command: Callable[[], int]) -> int:
    """Run `train.py` and return the exit code; an error ends all processes of the run.

    Errors that the user can correct are printed as one sentence. Other exceptions are bugs.
    """
    try:
        code = command()
        sys.stdout.flush()
        processes.finish()
        return code
    except (UserError, OSError) as error:
        pipe = BrokenPipeError in (type(error), type(error.__cause__))
        code, text = 128 + signal.SIGPIPE if pipe else 1, f"error: {printable(str(error))}"
    except Exception:
        code, text = 1, traceback.format_exc().rstrip()
    if processes.is_initialized():
        text += f"\n{processes.ENDED}"
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    # Exit at once: threads of a failed save or restore would print tracebacks, and a normal exit of
    # one of several processes would wait for the others.
    os._exit(code)
