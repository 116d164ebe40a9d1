"""The config of each optimizer, which builds the transformation of a run."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AbstractMesh, Mesh

from gptjax.fields import (
    DecayRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitFloat,
)
from gptjax.optim.adamw import adamw, matrices_and_adamw
from gptjax.optim.low_precision import with_mantissa
from gptjax.optim.normuon import (
    distributed,
    momentum_schedule,
    normuon_and_adamw,
    scale_by_matrix_shape,
    scale_by_normuon,
)
from gptjax.optim.partition import Group, Matrices, group_of
from gptjax.optim.polar_express import newton_schulz, polar_express
from gptjax.optim.schedules import SCHEDULES, SHAPES, schedule
from gptjax.optim.transforms import ema_nesterov, radial_pin, row_floor, tail_ema

METHODS = {"polar_express": polar_express, "newton_schulz": newton_schulz}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for every parameter, and the options that all algorithms share.

    Configs of other algorithms derive from this class and add only their own options.

    Attributes:
        name: the algorithm, as --optimizer names it.
        changeable: options that --resume with_changes allows to change. The structure of the
            optimizer's state must not depend on these options.
    """

    name: ClassVar[str] = "adamw"
    changeable: ClassVar[frozenset[str]] = frozenset(
        "learning_rate final_fraction schedule_steps clip_norm skip_loss_z skip_grad_norm_z".split()
    )

    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate of AdamW."""
    schedule: Literal[*SCHEDULES] = "cosine"
    """Shape of the cooldown, which follows the warm-up. The cooldown of wsd, 1 − √progress, takes
    the last 20 % of the steps. The cooldown of powercool is (1 − progress)^1.2."""
    warmup_steps: NonNegativeInt = 700
    """Steps of linear warm-up."""
    schedule_steps: PositiveInt | None = None
    """Step at which the schedule ends; max_steps when None."""
    cooldown_steps: PositiveInt | None = None
    """Steps of the cooldown, after a constant learning rate. None: the default of the schedule."""
    powercool_start: UnitFloat = 0.51
    """With powercool and no cooldown_steps, the part of the schedule before AdamW's cooldown."""
    final_steps: NonNegativeInt = 0
    """Steps with the final learning rate, after the cooldown."""
    final_fraction: UnitFloat = 0.0
    """Learning rate at the schedule's end, as a fraction of the peak."""
    b1: DecayRate = 0.9
    """Decay rate of AdamW's first moment."""
    b2: DecayRate = 0.95
    """Decay rate of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, outside the square root."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's decoupled weight decay; norms and biases have none."""
    decay_form: Literal["lr", "lr_squared"] = "lr"
    """AdamW's decay proportional to the learning rate, or to its square."""
    cautious_decay: bool = False
    """With AdamW, decay only where update and weight have the same sign."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; None for no clipping."""
    skip_loss_z: PositiveFloat | None = None
    """Skip an update if its loss exceeds the mean of the last 128 losses by this many standard
    deviations. None: never skip."""
    skip_grad_norm_z: PositiveFloat | None = None
    """Skip an update if its gradient norm exceeds the mean of the last 128 norms by this many
    standard deviations. None: never skip."""
    first_moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which AdamW's first moment is stored. An update computes in fp32."""
    second_moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which AdamW's second moment is stored; bf16 with stochastic rounding. An update
    computes in fp32."""
    param_storage: Literal["fp32", "bf16_mantissa"] = "fp32"
    """Storage of the matrices inside the blocks. bf16_mantissa: the bf16 values that the model
    reads, and the other 16 bits of the fp32 values. An update reads both and computes in fp32.
    Needs a model in bf16."""
    ema_nesterov_beta: NonNegativeFloat = 0.0
    """Look-ahead of all parameters in the direction of the average step, times learning rate/peak;
    0: none. The records of modded-nanogpt use 0.3 and 0.6."""
    ema_nesterov_gamma: DecayRate = 0.99
    """Decay rate of the average step."""
    ema_nesterov_start: UnitFloat = 0.16
    """Part of the schedule before the look-ahead."""
    ema_nesterov_stop: UnitFloat = 0.76
    """Part of the schedule at which the look-ahead ends."""
    tail_ema_weight: UnitFloat = 0.0
    """Weight of the average of the last steps in the parameters that are evaluated, sampled from
    and exported; 0: no average. The records of modded-nanogpt use 0.6."""
    tail_ema_start: UnitFloat = 0.83
    """Part of the schedule before the average."""
    tail_ema_steps: PositiveFloat = 150.0
    """Steps of the exponential average: a step's parameters have the weight 1/tail_ema_steps."""
    tail_ema_exclude: str = ""
    """Regular expression of the paths of parameters without an average, such as wte."""

    @property
    def extensible(self) -> bool:
        """Whether a later end of the schedule changes the learning rates of the cooldown only."""
        return self.schedule in ("constant", "wsd") or self.cooldown_steps is not None

    def schedules(self, total_steps: int) -> dict[str, optax.Schedule]:
        """Return the hyperparameters that change during a run, as functions of the update's index.

        Args:
            total_steps: end of the schedule if `schedule_steps` is None.
        """
        end = self.schedule_steps or total_steps
        relative = self._learning_rate(1.0, total_steps)

        def beta(count):
            start, stop = self.ema_nesterov_start * end, self.ema_nesterov_stop * end
            inside = (start <= count) & (count < stop)
            return self.ema_nesterov_beta * jnp.where(inside, relative(count), 0.0)

        def tail_rate(count):
            return jnp.where(count < self.tail_ema_start * end, 1.0, 1 / self.tail_ema_steps)

        return {
            "learning_rate": self._learning_rate(self.learning_rate, total_steps),
            "ema_nesterov_beta": beta,
            "tail_ema_rate": tail_rate,
        }

    def zero_from(self, total_steps: int) -> int | None:
        """Return the index of the first update with learning rate 0, or None.

        Args:
            total_steps: as in `schedules`.
        """
        if self.final_fraction > 0 or SHAPES[self.schedule] is None:
            return None
        return (self.schedule_steps or total_steps) - self.final_steps

    def build(
        self,
        *,
        total_steps: int,
        groups: Sequence[Group],
        mesh: Mesh | AbstractMesh,
        schedules: Mapping[str, optax.Schedule] | None = None,
    ) -> optax.GradientTransformation:
        """Return the transformation of a run: clipping, optimizer, learning rate and decay.

        Args:
            total_steps: optimizer steps of the run.
            groups: the `Group`s of the model's parameters.
            mesh: the devices of the run.
            schedules: used instead of `self.schedules(total_steps)`, such as those of a run with
                stages.
        """
        return adamw(**self._adamw_options(schedules or self.schedules(total_steps)))

    def completed(
        self,
        tx: optax.GradientTransformation,
        groups: Sequence[Group],
        schedules: Mapping[str, optax.Schedule],
    ) -> optax.GradientTransformation:
        """Return the transformation of `build`, with `tail_ema` and in `ema_nesterov` if the
        options select them, for parameters in `param_storage`."""
        if self.tail_ema_weight:
            exclude = re.compile(self.tail_ema_exclude)
            average = tail_ema(
                schedules["tail_ema_rate"],
                self.tail_ema_weight,
                select=lambda path: not exclude.fullmatch(path),
            )
            tx = optax.named_chain(("optimizer", tx), ("average", average))
        if self.ema_nesterov_beta:
            tx = ema_nesterov(tx, schedules["ema_nesterov_beta"], self.ema_nesterov_gamma)
        if self.param_storage == "fp32":
            return tx
        rules = [group.paths for group in groups if group.matrices is not None]
        return with_mantissa(tx, select=lambda path: any(re.fullmatch(r, path) for r in rules))

    def why_not(self, groups: Sequence[Group]) -> str | None:
        """Return None if the optimizer can train a model with these groups, else the reason why
        not."""
        del groups
        return None

    def describe(self, params: optax.Params, groups: Sequence[Group]) -> list[str]:
        """Describe the optimizer with all options that differ from the defaults, in lines of the
        header.

        Args:
            params: arrays, or `jax.ShapeDtypeStruct`s.
            groups: the `Group`s of the model's parameters.
        """
        del params, groups
        options = [f"lr {self.learning_rate:g}", f"decay {self.weight_decay:g}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in ("learning_rate", "weight_decay"):
                options.append(f"{field.name} {value}")
        return [f"{self.name}: {', '.join(options)}"]

    def _learning_rate(
        self, peak: float, total_steps: int, powercool_start: float | None = None
    ) -> optax.Schedule:
        end, cooldown = self.schedule_steps or total_steps, self.cooldown_steps
        if self.schedule == "powercool" and cooldown is None:
            start = self.powercool_start if powercool_start is None else powercool_start
            cooldown = (1 - start) * (end - self.final_steps)
        return schedule(
            self.schedule,
            peak=float(peak),
            warmup_steps=self.warmup_steps,
            total_steps=end,
            final_fraction=float(self.final_fraction),
            cooldown_steps=cooldown,
            final_steps=self.final_steps,
        )

    def _adamw_options(self, schedules: Mapping[str, optax.Schedule]) -> dict[str, Any]:
        return {
            "learning_rate": schedules["learning_rate"],
            "weight_decay": self.weight_decay,
            "decay_form": self.decay_form,
            "cautious_decay": self.cautious_decay,
            "b1": self.b1,
            "b2": self.b2,
            "eps": self.eps,
            "clip_norm": self.clip_norm,
            "mu_dtype": jnp.bfloat16 if self.first_moment_dtype == "bf16" else None,
            "nu_dtype": jnp.bfloat16 if self.second_moment_dtype == "bf16" else None,
        }


@dataclasses.dataclass(frozen=True)
class MatrixOptimizerConfig(OptimizerConfig):
    """Optimizer of the matrices inside the blocks, with AdamW for all other parameters."""

    changeable: ClassVar[frozenset[str]] = OptimizerConfig.changeable | {"matrix_learning_rate"}

    matrix_learning_rate: PositiveFloat = 0.035
    """Peak learning rate of the matrices; the schedule has the same shape as AdamW's."""
    matrix_powercool_start: UnitFloat = 0.18
    """With powercool and no cooldown_steps, the part of the schedule before the cooldown of the
    matrices."""
    matrix_weight_decay: NonNegativeFloat = 0.025
    """Weight decay of the matrices."""
    momentum: DecayRate = 0.95
    """Momentum of the matrices."""
    adam_every: PositiveInt = 1
    """Apply AdamW every N steps, using the sum of the N gradients. A step that an outlier skips
    adds no gradient; if that step is the Nth, the sum is kept for the next N steps."""

    def why_not(self, groups: Sequence[Group]) -> str | None:
        if all(group.matrices is None for group in groups):
            return (
                "the model has no groups of matrices, such as Group(PATHS, Matrices()) in its "
                "parameter_groups; choose --optimizer adamw"
            )
        return None

    def schedules(self, total_steps: int) -> dict[str, optax.Schedule]:
        matrix_rate = self._learning_rate(
            self.matrix_learning_rate, total_steps, self.matrix_powercool_start
        )
        return super().schedules(total_steps) | {"matrix_learning_rate": matrix_rate}

    def _adamw_options(self, schedules: Mapping[str, optax.Schedule]) -> dict[str, Any]:
        return super()._adamw_options(schedules) | {"every": self.adam_every}


@dataclasses.dataclass(frozen=True)
class NorMuonConfig(MatrixOptimizerConfig):
    """NorMuon for the matrices inside the blocks, AdamW for all other parameters."""

    name: ClassVar[str] = "normuon"

    matrix_weight_decay: NonNegativeFloat = 0.025
    """Weight decay of the matrices, applied where update and weight have the same sign."""
    matrix_decay_form: Literal["lr", "lr_squared"] = "lr"
    """Decay proportional to the learning rate, or to its square."""
    momentum_low: DecayRate = 0.85
    """Momentum at the first and the last step."""
    momentum_warmup_steps: NonNegativeInt = 300
    """Number of first steps in which the momentum rises."""
    momentum_cooldown_steps: NonNegativeInt = 50
    """Steps before the schedule's end in which the momentum falls."""
    neuron_b2: DecayRate = 0.95
    """Decay rate of each neuron's second moment."""
    orthogonalization: Literal[*METHODS] = "polar_express"
    """Iteration that orthogonalizes the matrices."""
    row_floor: NonNegativeFloat = 0.0
    """Least norm of an update of one output's weights, before the learning rate, relative to the
    norm of the weights; 0: none. The records of modded-nanogpt use 0.3825, without decay."""
    radial_damping: UnitFloat = 0.0
    """Damp the component of an update that increases a matrix's norm; 0.5 in the records of
    modded-nanogpt. With row_floor, radial_damping or radial_pin, decay follows the step, and the
    weights decay that the step shrinks."""
    radial_pin: UnitFloat = 0.0
    """Pin a matrix's norm to its first-order change in a step; 1 in the records of
    modded-nanogpt."""

    def schedules(self, total_steps: int) -> dict[str, optax.Schedule]:
        result = super().schedules(total_steps)
        rate, squared = result["matrix_learning_rate"], self.matrix_decay_form == "lr_squared"

        def weight_decay(count):
            return self.matrix_weight_decay * (rate(count) if squared else 1.0)

        momentum = momentum_schedule(
            self.schedule_steps or total_steps,
            low=self.momentum_low,
            high=self.momentum,
            warmup_steps=self.momentum_warmup_steps,
            cooldown_steps=self.momentum_cooldown_steps,
        )
        return result | {"matrix_weight_decay": weight_decay, "momentum": momentum}

    def build(self, *, total_steps, groups, mesh, schedules=None):
        schedules = schedules or self.schedules(total_steps)
        if self.row_floor or self.radial_damping or self.radial_pin:
            matrix = self._controlled(schedules, functools.partial(group_of, tuple(groups)), mesh)
            return matrices_and_adamw(groups, matrix, **self._adamw_options(schedules))
        return normuon_and_adamw(
            groups,
            matrix_learning_rate=schedules["matrix_learning_rate"],
            matrix_weight_decay=schedules["matrix_weight_decay"],
            momentum=schedules["momentum"],
            neuron_b2=self.neuron_b2,
            method=distributed(METHODS[self.orthogonalization], mesh),
            **self._adamw_options(schedules),
        )

    def _controlled(
        self, schedules: Mapping[str, optax.Schedule], of: Callable[[str], Group], mesh: Any
    ) -> optax.GradientTransformation:
        """Return NorMuon with control of the norms of rows and matrices."""
        rate, decay = schedules["matrix_learning_rate"], schedules["matrix_weight_decay"]
        method = distributed(METHODS[self.orthogonalization], mesh)

        def layout(path):
            return of(path).matrices

        step = [optax.scale_by_learning_rate(rate)]
        step = [row_floor(self.row_floor, layout=layout), *step] if self.row_floor else step
        return optax.chain(
            scale_by_normuon(schedules["momentum"], self.neuron_b2, method=method, layout=layout),
            scale_by_matrix_shape(layout=layout, factor=lambda path: of(path).learning_rate),
            radial_pin(
                optax.chain(*step),
                damping=self.radial_damping,
                pin=self.radial_pin,
                decay=lambda count: rate(count) * decay(count),
                decay_factor=lambda path: of(path).learning_rate * of(path).weight_decay,
                layout=layout,
            ),
        )


@dataclasses.dataclass(frozen=True)
class MuonConfig(MatrixOptimizerConfig):
    """optax's Muon (Jordan et al., 2024) for the matrices inside the blocks, AdamW for all other
    parameters.

    Each parameter is one matrix, even if its layout packs several matrices.
    """

    name: ClassVar[str] = "muon"

    def why_not(self, groups: Sequence[Group]) -> str | None:
        plain = Matrices(), 1.0, 1.0
        for group in _unpacked(groups):
            own = group.matrices, group.learning_rate, group.weight_decay
            if group.matrices is not None and own != plain:
                return (
                    f"the group {group.paths!r} is not one matrix of (inputs, outputs) with the "
                    "optimizer's own learning rate and decay; choose --optimizer normuon"
                )
        return super().why_not(groups)

    def build(self, *, total_steps, groups, mesh, schedules=None):
        schedules = schedules or self.schedules(total_steps)
        whole = optax.contrib.MuonDimensionNumbers(0, 1)
        # The AdamW of optax.contrib.muon would have Nesterov momentum, and decay for all
        # parameters. Hence optax.contrib.muon gets matrices only.
        muon = optax.contrib.muon(
            schedules["matrix_learning_rate"],
            beta=self.momentum,
            weight_decay=self.matrix_weight_decay,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: whole, params),
        )
        return matrices_and_adamw(_unpacked(groups), muon, **self._adamw_options(schedules))


def _unpacked(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with one matrix in each parameter."""
    layouts = [g.matrices and dataclasses.replace(g.matrices, packed=1) for g in groups]
    return [dataclasses.replace(g, matrices=x) for g, x in zip(groups, layouts, strict=True)]


ALGORITHMS: dict[str, type[OptimizerConfig]] = {
    "adamw": OptimizerConfig,
    "normuon": NorMuonConfig,
    "muon": MuonConfig,
}
"""The class of `--optimizer NAME` by name."""


def switch_algorithm(config: OptimizerConfig, name: str) -> OptimizerConfig:
    """Return the config of another algorithm; options of both algorithms keep their values.

    Raises:
        ValueError: an unknown name (the message lists them).
    """
    if name == config.name:
        return config
    if name not in ALGORITHMS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {list(ALGORITHMS)}")
    options = {field.name for field in dataclasses.fields(ALGORITHMS[name])}
    kept = {option: value for option, value in vars(config).items() if option in options}
    return ALGORITHMS[name](**kept)
