"""Options of the commands that compute with a saved model, and loading of the model."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from gptjax import cli, devices, weights
from gptjax.config import ConfigError
from gptjax.data.tokenizers import Tokenizer
from gptjax.models.base import Model
from gptjax.precision import PRECISIONS, Precision
from gptjax.training.compilation import Compiler
from gptjax.user_folders import cache_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, its tokenizer, precision and device."""

    path: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PATH")]]
    """A run's folder, one of its checkpoints, a Hugging Face folder, or llm.c's .bin."""
    tokenizer: str = "auto"
    """auto: the model's tokenizer. gpt2, byte, or the path of a tokenizer.json."""
    precision: Literal[*PRECISIONS] | None = None
    """Precision of the computation. None: the run's precision, or fp32."""
    step: int | None = None
    """Step of a run's checkpoint. None: the newest."""
    config: Path | None = None
    """Config file of a run whose model is not part of gptjax. The file is executed first."""
    device: Literal["auto", "gpu", "cpu"] = "auto"
    """gpu: NVIDIA GPUs, or an error. cpu: the CPU. auto: GPUs if there are any, else the CPU."""

    def select_devices(self, note: Callable[[str], object]) -> list[jax.Device]:
        """Return the devices of the command; `note` is called with each note for the user.

        Raises:
            DeviceError: no such device.
        """
        # No preallocation: the GPU may be shared with a training run.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        used, about = devices.select(self.device)
        # Call after `select`, because JAX's caches depend on the platform.
        for sentence in (about, Compiler(cache_folder()).note):
            if sentence:
                note(f"NOTE: {sentence}")
        return used

    def load(self) -> tuple[Model, Tokenizer]:
        """Return the model and its tokenizer.

        Raises:
            ConfigError: the tokenizer is not known.
            WeightsError, DataError: the errors of `gptjax.load`.
        """
        if self.config is not None:
            cli.load(self.config)  # `weights.load` then finds the model's class by name
        precision = None if self.precision is None else Precision(self.precision)
        model, tokenizer = weights.load(
            self.path, precision=precision, step=self.step, tokenizer=self.tokenizer
        )
        if tokenizer is None:
            raise ConfigError(
                f"{self.path}: the tokenizer is not known; set --tokenizer gpt2 or --tokenizer "
                "byte, or to the path of a tokenizer.json"
            )
        return model, tokenizer
