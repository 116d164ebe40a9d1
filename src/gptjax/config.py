"""Configuration of a run: options, checks, and conversion to JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from gptjax import stages as staging
from gptjax.fields import NonNegativeInt, PositiveInt, Seed, check_fields, fields_from_json, flag
from gptjax.models.base import ModelConfig, why_no_segments
from gptjax.models.gpt2 import PRESETS
from gptjax.optim import ALGORITHMS, OptimizerConfig, Scheduled
from gptjax.parallel import Parallel, Strategy
from gptjax.precision import Precision
from gptjax.stages import Stage
from gptjax.terminal import UserError
from gptjax.user_folders import data_folder

# Options of a `Stage` that replace options of the config.
_OF_STAGE = ("batch_tokens", "sequence_length", "max_document_length", "micro_batch")
# Evaluation tasks during training.
EVAL_TASKS = ("hellaswag", "core")


class ConfigError(UserError, ValueError):
    """Invalid or contradictory options, raised before anything is allocated."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or values contradict each other.
    """

    name: str = "gpt2"
    """Folder of the run inside runs_dir. A second command with this name resumes the run."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    max_steps: PositiveInt = 19560
    """Optimizer steps in the whole run."""
    resume: Literal["auto", "never", "must", "with_changes"] = "auto"
    """auto: resume from the newest checkpoint, if any; never: refuse a run that has a checkpoint;
    must: refuse a run that has none; with_changes: as auto, and learning rates, the schedule's
    end, final_fraction, clip_norm and skip options may differ from the checkpoint's config."""
    init_from: Path | None = None
    """Model with the initial parameters: a run, a checkpoint's folder, a Hugging Face folder or an
    llm.c file. The shape of this model replaces the defaults of --model. A run with a checkpoint
    resumes from the checkpoint instead."""
    device: Literal["auto", "gpu", "cpu"] = "gpu"
    """gpu: all NVIDIA GPUs, or an error. cpu: the CPU. auto: GPUs if there are any, else the
    CPU."""
    parallel: Strategy = "data"
    """Strategy for several devices. data: each device stores all parameters and optimizer state.
    zero1: each device stores a shard of both; parameters are gathered once per step. fsdp: each
    device stores a shard of both; the parameters of a block are gathered when the block runs."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are summed over the devices."""
    distributed: Literal["off", "auto"] = "off"
    """auto: this process is one of several that train one model, each process on its visible
    devices. JAX_COORDINATOR_ADDRESS (HOST:PORT of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID describe the group, else Slurm or Open MPI."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the data and the samples."""

    model: ModelConfig = PRESETS["gpt2"]
    """The model: its shape, precision and kernels."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, its learning-rate schedule, and when an update is skipped."""

    dataset: str = "auto"
    """auto (FineWeb if it is prepared and its ids fit the model, else stdlib), stdlib (the source
    files of Python's standard library; stdlib_byte: as bytes), the name of a prepared dataset, or a
    folder of .bin shards."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of the datasets that `python -m gptjax.data` prepares."""
    sequence_length: PositiveInt = 1024
    """Tokens of a sequence; at most model.block_size."""
    batch_tokens: PositiveInt = 524_288
    """Tokens of an optimizer step, over all devices and micro-batches."""
    separate_documents: bool = False
    """Attend within a document only, and count positions from the beginning of each document.
    Documents begin with the tokenizer's end-of-text token."""
    max_document_length: PositiveInt | None = None
    """Pack documents: each training sequence begins with a document, and each document is cut to
    this number of tokens. Needs separate_documents. None: contiguous text."""
    data_order: Literal["shuffled", "sequential"] = "shuffled"
    """shuffled: another random order of all training sequences in each epoch. sequential: each
    token once, in the order of the shards, also across stages; validation reads the first
    val_tokens. With max_document_length, the documents at the end of a shard that do not fill a
    step are left out."""
    loss_reduction: Literal["mean", "sequence_sum"] = "mean"
    """mean: the gradient of the mean loss. sequence_sum: of the sum over the tokens of a sequence,
    averaged over the sequences: the gradient grows with the sequence length of a stage."""
    micro_batch: PositiveInt = 64
    """Sequences on each device at a time; gradients are accumulated over the batch."""
    stages: tuple[Stage, ...] = ()
    """Stages of training, each as JSON: '{"until": 500, "batch_tokens": 131072}' '{}'. More fields:
    sequence_length, max_document_length, micro_batch, learning_rate_factor, model. The last stage
    needs no until."""

    val_every: NonNegativeInt = 250
    """Steps between validations; 0 for none."""
    val_tokens: PositiveInt = 1_048_576
    """Approximate number of tokens in a validation. Every validation has the same tokens."""
    eval_tasks: str = ""
    """Tasks of gptjax.evaluate, separated by commas: hellaswag, core. Their files are in
    data_dir."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations of eval_tasks; 0 for none."""
    sample_every: NonNegativeInt = 1000
    """Steps between samples; 0 for none."""
    checkpoint_every: NonNegativeInt = 500
    """Steps between checkpoints; 0 for none. A checkpoint is also saved at the end, and on SIGTERM
    or Ctrl-C."""
    keep_last: PositiveInt = 2
    """Number of the newest checkpoints that are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted."""
    wandb: str | None = None
    """Project on Weights & Biases to which the run is logged too (pip install 'gptjax[wandb]')."""
    deterministic: bool = False
    """Make training on a GPU bitwise reproducible, through XLA's deterministic operations, which
    are slow. Refused if a kernel of the model is nondeterministic. A CPU is always
    deterministic."""

    def __post_init__(self):
        try:
            check_fields(self)
            check_fields(self.optimizer, "optimizer.")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.sequence_length > (longest := self.model.block_size):
            # The block size of a model at --init-from cannot be raised.
            other = "" if self.init_from else ", or raise --model.block-size"
            raise ConfigError(
                f"--sequence-length {self.sequence_length} is longer than the model's block size "
                f"{longest}; set --sequence-length {longest} or less{other}"
            )
        chunk, tokens = self.model.loss_chunk, self.micro_batch * self.sequence_length
        if chunk is not None and (chunk < 1 or tokens % chunk):
            raise ConfigError(
                f"--model.loss-chunk must divide the tokens of a micro-batch, {self.micro_batch} × "
                f"{self.sequence_length} = {tokens}, got {chunk}"
            )
        if self.separate_documents and (why := why_no_segments(self.model)):
            raise ConfigError(
                f"--separate-documents needs a model with segment ids, and {why}; leave the option "
                "out"
            )
        if self.max_document_length is not None and not self.separate_documents:
            raise ConfigError(
                f"--max-document-length {self.max_document_length} needs --separate-documents"
            )
        if self.deterministic and (reason := self.model.nondeterministic()):
            raise ConfigError(f"--deterministic {reason}")
        self._check_optimizer()
        self._check_eval_tasks()
        self._check_stages()
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"--name must be a plain folder name, got {self.name!r}")
        if (size := len(self.name.encode())) > 200:
            raise ConfigError(f"--name must have at most 200 bytes, got {size}")

    def _check_optimizer(self) -> None:
        storage, precision = self.optimizer.param_storage, self.model.precision
        groups = self.model.parameter_groups()
        if (why := self.optimizer.why_not(groups)) is not None:
            raise ConfigError(
                f"--optimizer {self.optimizer.name} cannot train {type(self.model).__name__}: {why}"
            )
        if storage == "fp32":
            return
        if precision.compute_dtype != jnp.bfloat16:
            raise ConfigError(
                f"--optimizer.param-storage {storage} needs matmuls in bf16, and "
                f"--model.precision {precision} reads all 32 bits of a matrix; choose "
                "--model.precision bf16, or leave the option out"
            )
        if all(group.matrices is None for group in groups):
            raise ConfigError(
                f"--optimizer.param-storage {storage} needs a model with groups of matrices, and "
                f"{type(self.model).__name__} has none; leave the option out"
            )

    def _check_eval_tasks(self) -> None:
        tasks = self.eval_tasks.split(",") if self.eval_tasks else []
        if wrong := [task for task in tasks if task not in EVAL_TASKS]:
            raise ConfigError(
                f"--eval-tasks must be names of {', '.join(EVAL_TASKS)}, separated by commas, got "
                f"{wrong[0]!r}; other tasks: python -m gptjax.evaluate RUN --harness mmlu"
            )
        if bool(tasks) != bool(self.eval_every):
            raise ConfigError("--eval-tasks and --eval-every need each other")

    def _check_stages(self) -> None:
        try:
            for stage in self.stages:
                check_fields(stage, "stages.")
            self.schedules()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_rates()
        if not self.stages:
            return
        ends, last = [stage.until for stage in self.stages[:-1]], self.stages[-1].until
        ends += [] if last is None else [last]
        known = [end for end in ends if end is not None]
        if known != ends or known != sorted({*known}):
            raise ConfigError(
                "expected an increasing until, the step at which a stage ends, in all stages but "
                f"the last, which needs none; got {ends}"
            )
        if last is not None and last < self.max_steps:
            raise ConfigError(
                f"the last stage ends at step {last}, before --max-steps {self.max_steps}; leave "
                "its until out, or add a stage"
            )
        parts = [self.of_stage(number) for number, _ in enumerate(self.stages, start=1)]
        packs = {part.max_document_length is None for part in parts}
        if self.data_order == "sequential" and len(packs) > 1:
            raise ConfigError(
                "--data-order sequential needs max_document_length in all stages, or in none"
            )

    def _check_rates(self) -> None:
        """Raise ConfigError if steps at the end of the run have the learning rate 0."""
        optimizer, steps = self.optimizer, self.max_steps
        zero_from = optimizer.zero_from(steps)
        if zero_from is None or zero_from >= steps:
            return
        raise ConfigError(
            f"--max-steps {steps} with --optimizer.schedule-steps {optimizer.schedule_steps} and "
            f"--optimizer.final-steps {optimizer.final_steps} trains with learning rate 0 from "
            f"step {zero_from} on; change one of them, or choose an --optimizer.final-fraction "
            "above 0; a run whose schedule has ended continues with --resume with_changes, or as a "
            "new run with --init-from"
        )

    def kernels(self) -> dict[str, str]:
        """Return the back ends of the operations of a training step on the default device.

        Raises:
            ConfigError: a named back end does not exist or cannot run here.
        """
        try:
            segments = self.separate_documents
            return self.model.kernels(self.sequence_length, self.micro_batch, segments)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.runs_dir / self.name

    def of_stage(self, number: int) -> "Config":
        """Return the config with the options of stage `number`, and without stages.

        Raises:
            ConfigError: the stage's options do not fit the config's.
        """
        stage = self.stages[number - 1]
        own = {name: value for name in _OF_STAGE if (value := getattr(stage, name)) is not None}
        try:
            model = staging.with_changes(self.model, stage.model)
            return dataclasses.replace(self, stages=(), model=model, **own)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"stage {number}: {error}") from error

    def schedules(self) -> dict[str, optax.Schedule]:
        """Return the optimizer's hyperparameters that change during the run, by the update's
        index."""
        return staging.schedules(self.optimizer, self.stages, self.max_steps)

    def build_optimizer(self, mesh: Mesh | AbstractMesh) -> Scheduled:
        """Return the optimizer for the model's parameters, with its learning rate, on the devices
        of the run."""
        groups, schedules = self.model.parameter_groups(), self.schedules()
        how = {"groups": groups, "mesh": mesh, "schedules": schedules}
        tx = self.optimizer.build(total_steps=self.max_steps, **how)
        tx = self.optimizer.completed(tx, groups, schedules)
        return Scheduled.of(tx, schedules["learning_rate"])

    def step_options(self) -> dict[str, Any]:
        """Return the options of `gptjax.make_train_step`, except `parallel`."""
        o = self.optimizer
        skip = {"skip_loss_z": o.skip_loss_z, "skip_grad_norm_z": o.skip_grad_norm_z}
        return {"loss_reduction": self.loss_reduction, **skip}

    def parallel_on(self, devices: list[Any]) -> Parallel:
        """Return the mesh and the strategy of the run. `devices` is a list of `jax.Device`."""
        return Parallel.of(devices, self.parallel, self.reduce_dtype)

    def micro_batches(self, devices: int) -> int:
        """Return the number of micro-batches of a step on `devices` devices.

        Raises:
            ConfigError: batch_tokens is not a multiple of a micro-batch's tokens; the message names
                choices that are.
        """
        tokens = self.micro_batch * self.sequence_length * devices
        if self.batch_tokens % tokens:
            nearest = self.batch_tokens // tokens * tokens
            choices = [str(n) for n in (nearest + tokens, nearest) if n]
            per_device, rest = divmod(self.batch_tokens, self.sequence_length * devices)
            if not rest:
                choices.append(f"--micro-batch {math.gcd(self.micro_batch, per_device)}")
            raise ConfigError(
                f"--batch-tokens {self.batch_tokens} is not a multiple of micro_batch × "
                f"sequence_length × devices = {self.micro_batch} × {self.sequence_length} × "
                f"{devices} = {tokens}; choose {' or '.join(choices)}"
            )
        return self.batch_tokens // tokens

    @property
    def batch(self) -> int:
        """Sequences of an optimizer step, over all devices."""
        return self.batch_tokens // self.sequence_length


# Fields of Config that may differ between a checkpoint and the command that resumes it: these
# fields do not change what the model learns. The model's config adds its own.
_OPERATIONAL = frozenset(
    "name runs_dir data_dir dataset resume init_from device parallel distributed max_steps "
    "micro_batch val_every val_tokens eval_tasks eval_every sample_every checkpoint_every "
    "keep_last keep_every wandb deterministic".split()
)
# Such options of older checkpoints, which no longer exist. The data have the tokenizer.
_FORMER = frozenset(
    "resume_with_changes overlap_reduce coordinator process_count process_index connect_timeout "
    "tokenizer eval_items sample_tokens log_every peak_tflops fp8_clipping_every compilation_cache "
    "executable_cache".split()
)
# Last commit with all options of older checkpoints.
_READS_OLDER = "6811bb8"


def changeable(config: Config) -> frozenset[str]:
    """Return the fields that may also differ with --resume with_changes."""
    return frozenset(f"optimizer.{name}" for name in config.optimizer.changeable)


def to_json(config: Config) -> dict[str, Any]:
    """Return the config as flat JSON: {"max_steps": 100, "model.n_layer": 12, …}.

    "model" is the name of the model's config class, "optimizer.algorithm" the name of the
    optimizer. "optimizer.schedule_steps" is never None.
    """
    return _flat(config, config.model, config.optimizer)


def model_from_json(
    flat: Mapping[str, Any], kind: type[ModelConfig], **changes: Any
) -> ModelConfig:
    """Return the model config in the JSON of `to_json`.

    Args:
        kind: the class that flat["model"] names. A field that is missing in the JSON gets its
            default.
        changes: values that replace fields of the JSON.

    Raises:
        ConfigError: a field that the class does not have, or a wrong value.
    """
    fields = {name[6:]: value for name, value in flat.items() if name.startswith("model.")}
    try:
        return kind(**fields_from_json(kind, fields) | changes)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _flat(config: Config, model: ModelConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {"optimizer.algorithm": optimizer.name}
    for prefix, part in (("", config), ("model.", model), ("optimizer.", optimizer)):
        flat |= {prefix + f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    del flat["optimizer"]
    flat["model"], flat["stages"] = type(model).__name__, staging.to_json(config.stages)
    flat["optimizer.schedule_steps"] = optimizer.schedule_steps or config.max_steps
    flat = {name: str(v) if isinstance(v, (Path, Precision)) else v for name, v in flat.items()}
    # Tuples become lists, as in the JSON of a checkpoint.
    return json.loads(json.dumps(flat))


def differences(saved: Any, config: Config) -> list[str]:
    """Describe the fields in which a checkpoint's config differs from `config`, one line per field.

    Operational fields may differ, and the end of an `extensible` schedule that ends with the run
    may be later. With `--resume with_changes`, `changeable` fields may also differ. If all lines
    are about changeable fields, a last line names this option.

    Raises:
        ConfigError: `saved` is not a config's JSON.
    """
    pairs, allowed = _differences(saved, config), changeable(config)
    old, new = pairs.get("optimizer.schedule_steps", (0, 0))
    if config.resume == "with_changes":
        refused = pairs.keys() - allowed
    elif new > old and config.optimizer.schedule_steps is None and config.optimizer.extensible:
        refused = pairs.keys() - {"optimizer.schedule_steps"}
    else:
        refused = pairs.keys()
    lines = [_difference(name, *pairs[name], config) for name in sorted(refused)]
    if refused and refused <= allowed:
        lines.append("--resume with_changes allows such changes")
    return lines


def _difference(name: str, old: Any, new: Any, config: Config) -> str:
    """Describe a field that differs."""
    if name == "optimizer.schedule_steps" and config.optimizer.schedule_steps is None:
        return (
            f"--max-steps {new}: the checkpoint's {config.optimizer.schedule} schedule ends at "
            f"step {old}; add --resume with_changes to end it at step {new}, or "
            f"--optimizer.schedule-steps {old} to keep it, or choose --max-steps {old}, or start a "
            f"new run: --name NEW --init-from {config.run_dir}"
        )
    if name not in to_json(config):
        new = f"(no such option); gptjax of commit {_READS_OLDER} may resume the run"
    option = "--optimizer" if name == "optimizer.algorithm" else flag(name)
    return f"{option}: the checkpoint has {old}, now {new}"


def changes(saved: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return {name: (old, new)} of the `changeable` fields in which a checkpoint's config differs.

    Raises:
        ConfigError: `saved` is not a config's JSON.
    """
    pairs = _differences(saved, config)
    return {name: pairs[name] for name in sorted(pairs.keys() & changeable(config))}


def _differences(saved: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return {name: (old, new)} of the fields that differ, except operational ones.

    An option that the checkpoint lacks counts as the option's default, for the classes of the
    config's model and optimizer. Options that only other algorithms have are left out: they have no
    effect.
    """
    if not isinstance(saved, dict):
        raise ConfigError(f"expected the checkpoint's config as a JSON object, got {saved}")
    now = to_json(config)
    kinds = (*ALGORITHMS.values(), type(config.optimizer))
    options = {f"optimizer.{f.name}" for kind in kinds for f in dataclasses.fields(kind)}
    default = _flat(Config(), type(config.model)(), type(config.optimizer)())
    saved = {**default, "optimizer.algorithm": OptimizerConfig.name, **saved}
    if saved.get("overfit_one_batch") is False:  # former option
        del saved["overfit_one_batch"]
    for flat in (saved, now):
        flat["stages"] = [{**stage, "micro_batch": None} for stage in flat["stages"]]
    operational = {f"model.{name}" for name in config.model.operational}
    compared = saved.keys() - _OPERATIONAL - _FORMER - operational - (options - now.keys())
    pairs = {name: (saved[name], now.get(name)) for name in compared}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}
