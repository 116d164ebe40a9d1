"""The configs that bench measures: options of the command line → `Config`s of one micro-batch."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gptjax import cli, optim
from gptjax.bench.errors import BenchError
from gptjax.config import Config
from gptjax.models.registry import PRESETS
from gptjax.precision import NAMES, Precision
from gptjax.stages import stage_config

Preset = Literal[*PRESETS]

PrecisionName = Literal[*NAMES]

# The help text itself says which value replaces an option that is not given.
OWN_DEFAULT = tyro.conf.arg(help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelName:
    """The model: a config file's, or a preset."""

    config: Annotated[Path | None, OWN_DEFAULT] = None
    """Config file: its model, sequence length, micro-batch and optimizer. The options below
    override the config."""
    preset: Annotated[Preset | None, OWN_DEFAULT] = None
    """The model's shape if there is no --config (default: gpt2)."""

    @property
    def name(self) -> str:
        """Name of the model in rows."""
        return self.config.stem if self.config else self.preset or "gpt2"

    def base(self) -> Config:
        """Return the config before the other options.

        Raises:
            BenchError: a config file and a preset are both given.
            ConfigError: no such config file.
        """
        if self.config and self.preset:
            raise BenchError("--config and --preset both name a model: give one of them")
        return base_config(self.config, self.preset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOptions(ModelName):
    """The model, and the length of its sequences."""

    sequence_length: Annotated[int | None, OWN_DEFAULT] = None
    """Tokens of a sequence (default: the config's, or 1024)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(BaseOptions):
    """The model and how its step is computed."""

    stage: Annotated[int | None, OWN_DEFAULT] = None
    """Stage of the config, 1 for the first (default: the config's values outside its stages)."""
    attention: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of attention, as --model.attention of train.py (default: the config's, or auto)."""
    loss: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of the head and its loss, as --model.loss (default: the config's, or auto)."""
    norm: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of the norms, as --model.norm (default: the config's, or auto)."""
    mlp: Annotated[str | None, OWN_DEFAULT] = None
    """Back end of the MLP, as --model.mlp (default: the config's, or auto)."""
    optimizer: Annotated[Literal[*optim.ALGORITHMS] | None, OWN_DEFAULT] = None
    """The optimizer (default: the config's, or adamw). PyTorch always uses AdamW."""
    forward: bool = False
    """Run the forward pass and its loss alone."""

    @property
    def name(self) -> str:
        return super().name if self.stage is None else f"{super().name} stage {self.stage}"

    def base(self) -> Config:
        """Return the config of the stage before the other options.

        Raises:
            BenchError: the config does not have the stage, or a config file and a preset are both
                given.
            ConfigError: no such config file.
        """
        config = super().base()
        if self.stage is None:
            return config
        if not 1 <= self.stage <= len(config.stages):
            raise BenchError(f"--stage {self.stage}: the config has {len(config.stages)} stages")
        return stage_config(config, self.stage)

    def with_options(
        self,
        base: Config,
        *,
        batch: int | None = None,
        precision: str | None = None,
        recompute: str | None = None,
    ) -> Config:
        """Return the base config with these options and one micro-batch per step.

        Raises:
            BenchError: the model does not have one of the options, options contradict each other,
                or a number is below 1.
            ConfigError: the config is invalid.
        """
        if self.forward and recompute:
            raise BenchError(
                "--forward has no backward pass that recomputes: leave out --recompute"
            )
        parts = ("attention", "loss", "norm", "mlp")
        return one_micro_batch(
            base,
            at_least_one("--batch", batch, base.micro_batch),
            at_least_one("--sequence-length", self.sequence_length, base.sequence_length),
            optimizer=self.optimizer,
            precision=Precision(precision) if precision else base.model.precision,
            recompute=recompute or base.model.recompute,
            **{part: name for part in parts if (name := getattr(self, part))},
        )


def at_least_one(option: str, value: int | None, default: int) -> int:
    """Return the value of an option, or the default if the option is not given.

    Raises:
        BenchError: the value is below 1.
    """
    if value is None:
        return default
    if value < 1:
        raise BenchError(f"{option} must be at least 1, got {value}")
    return value


def base_config(file: Path | None, preset: str | None) -> Config:
    """Return the config of a file, or of a preset: bf16, 64 sequences of 1024 tokens.

    Raises:
        ConfigError: no such file.
    """
    if file:
        return cli.load(file)
    model = dataclasses.replace(PRESETS[preset or "gpt2"], precision=Precision("bf16"))
    return Config(model=model, micro_batch=64, batch_tokens=64 * 1024)


def one_micro_batch(
    base: Config, batch: int, sequence_length: int, *, optimizer: str | None = None, **model: Any
) -> Config:
    """Return the config with a step of one micro-batch.

    Args:
        batch: sequences of the micro-batch.
        optimizer: name of another optimizer.
        model: fields of the model to replace.

    Raises:
        BenchError: the model does not have one of the fields.
        ConfigError: the config is invalid.
    """
    if unknown := [field for field in model if not has_field(base.model, field)]:
        name = type(base.model).__name__
        raise BenchError(f"{name} has no option {unknown[0]}: leave out --{unknown[0]}")
    return dataclasses.replace(
        base,
        stages=(),
        micro_batch=batch,
        batch_tokens=batch * sequence_length,
        sequence_length=sequence_length,
        model=dataclasses.replace(base.model, **model),
        optimizer=optim.switch_algorithm(base.optimizer, optimizer or base.optimizer.name),
    )


def with_moments(config: Config, dtype: Literal["fp32", "bf16"] | None) -> Config:
    """Return the config with both of AdamW's moments in a dtype; None: the config itself."""
    if dtype is None:
        return config
    moments = {"first_moment_dtype": dtype, "second_moment_dtype": dtype}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **moments))


def has_field(model: Any, name: str) -> bool:
    """Return whether a model's config has a field."""
    return any(field.name == name for field in dataclasses.fields(model))
