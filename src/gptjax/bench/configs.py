"""The configs that bench measures: options of the command line → `Config`s."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gptjax import cli, optim
from gptjax.bench import BenchError
from gptjax.bench.harness import first_devices
from gptjax.config import Config
from gptjax.models.registry import PRESETS
from gptjax.parallel import Strategy
from gptjax.precision import PRECISIONS, Precision

PrecisionName = Literal[*PRECISIONS]
# The help text itself says which value replaces an option that is not given.
OWN_DEFAULT = tyro.conf.arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model: a config file's, or a preset."""

    config: Annotated[Path | None, OWN_DEFAULT] = None
    """Config file: its model, sequence length, micro-batch and optimizer. The options below
    override the config."""
    preset: Annotated[Literal[*PRESETS] | None, OWN_DEFAULT] = None
    """The model's shape without --config (default: gpt2)."""

    @property
    def name(self) -> str:
        """Name of the model in rows."""
        return self.config.stem if self.config else self.preset or "gpt2"

    def base(self) -> Config:
        """Return the config before the other options; of a preset: bf16, 64 × 1024 tokens.

        Raises:
            ConfigError: no such config file.
        """
        if self.config:
            return cli.load(self.config)
        model = dataclasses.replace(PRESETS[self.preset or "gpt2"], precision=Precision("bf16"))
        return Config(model=model, micro_batch=64, batch_tokens=64 * 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(ModelOptions):
    """A training step. An option with several values makes a config for each value."""

    stage: Annotated[int | None, OWN_DEFAULT] = None
    """Stage of the config, 1 for the first (default: the config's values outside its stages)."""
    sequence_length: Annotated[int | None, OWN_DEFAULT] = None
    """Tokens of a sequence (default: the config's, or 1024). A longer one raises the
    model's block_size."""
    batch: Annotated[tuple[int, ...], OWN_DEFAULT] = ()
    """Sequences of a micro-batch on each device (default: the config's micro-batch, or 64)."""
    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    precision: Annotated[tuple[PrecisionName, ...], OWN_DEFAULT] = ()
    """Precisions of the model (default: the config's, or bf16)."""
    recompute: Annotated[tuple[Literal["none", "block", "sublayer"], ...], OWN_DEFAULT] = ()
    """Activations recomputed in the backward pass, as --model.recompute of train.py (default: the
    config's, or none)."""
    devices: tuple[int, ...] = (1,)
    """Numbers of devices that share the step."""
    parallel: Annotated[tuple[Strategy, ...], OWN_DEFAULT] = ()
    """Strategies for several devices (default: the config's, or data)."""
    reduce_dtype: Annotated[tuple[Literal["fp32", "bf16"], ...], OWN_DEFAULT] = ()
    """Dtypes in which gradients are summed over the devices (default: the config's, or fp32)."""
    optimizer: Annotated[Literal[*optim.ALGORITHMS] | None, OWN_DEFAULT] = None
    """The optimizer (default: the config's, or adamw)."""
    forward: bool = False
    """Run the forward pass and its loss alone."""

    @property
    def name(self) -> str:
        return super().name if self.stage is None else f"{super().name} stage {self.stage}"

    def base(self) -> Config:
        """Return the config of the stage before the other options.

        Raises:
            BenchError: the config does not have the stage.
            ConfigError: no such config file.
        """
        config = super().base()
        if self.stage is None:
            return config
        if not 1 <= self.stage <= len(config.stages):
            raise BenchError(f"--stage {self.stage}: the config has {len(config.stages)} stages")
        return config.of_stage(self.stage)

    def configs(self) -> list[tuple[Config, int]]:
        """Return each config to measure, and its number of devices.

        Raises:
            BenchError: there are fewer devices.
            ConfigError: no such config file, or an invalid config.
        """
        for count in self.devices:
            first_devices(count)
        base, found = self.base(), []
        lists = (self.batch or (None,), self.precision or (None,), self.recompute or (None,))
        for batch, precision, recompute, count in itertools.product(*lists, self.devices):
            model = {"precision": precision and Precision(precision), "recompute": recompute}
            how = {"optimizer": self.optimizer, **model}
            config = one_micro_batch(base, batch, self.sequence_length, **how)
            tokens = self.micro_batches * config.batch_tokens
            # The strategy and the dtype of the sums matter on several devices only.
            used = None if count > 1 else 1
            for strategy in self.parallel[:used] or (config.parallel,):
                for dtype in self.reduce_dtype[:used] or (config.reduce_dtype,):
                    sums = {"parallel": strategy, "reduce_dtype": dtype}
                    found.append((dataclasses.replace(config, batch_tokens=tokens, **sums), count))
        return found


def one_micro_batch(
    base: Config,
    batch: int | None = None,
    sequence_length: int | None = None,
    *,
    optimizer: str | None = None,
    **model: Any,
) -> Config:
    """Return the config with a step of one micro-batch. None keeps the value of `base`.

    A sequence that is longer than block_size raises block_size.

    Args:
        batch: sequences of the micro-batch.
        optimizer: name of another optimizer.
        model: fields of the model to replace.

    Raises:
        ConfigError: the config is invalid.
    """
    batch = base.micro_batch if batch is None else batch
    length = base.sequence_length if sequence_length is None else sequence_length
    model = {field: value for field, value in model.items() if value is not None}
    model["block_size"] = max(base.model.block_size, length)
    return dataclasses.replace(
        base,
        stages=(),
        micro_batch=batch,
        batch_tokens=batch * length,
        sequence_length=length,
        model=dataclasses.replace(base.model, **model),
        optimizer=optim.switch_algorithm(base.optimizer, optimizer or base.optimizer.name),
    )
