"""One typed description of a run. A config file exposes one as `config`; every field can be
overridden on the command line."""

import argparse
import dataclasses
import importlib.util
import os
import sys
import traceback
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import tyro

from gptjax import optim
from gptjax.models.gpt2 import GPT2Config
from gptjax.precision import NAMES as PRECISIONS
from gptjax.precision import Precision
from gptjax.terminal import printable

_FP32, _INT32 = np.finfo(np.float32), np.iinfo(np.int32)
# Ranges of the numbers of Config and OptimizerConfig, both ends included: (text, lowest, highest).
# A step computes in fp32: there a number below fp32's smallest becomes 0, and one between 1 − 2⁻²⁴
# and 1 becomes 1. It counts in int32.
RANGES = {
    name: allowed
    for *allowed, names in (
        (
            *("above 0 and finite in fp32", float(_FP32.tiny), float(_FP32.max)),
            "optimizer.learning_rate optimizer.matrix_learning_rate optimizer.eps "
            "optimizer.clip_norm optimizer.skip_loss_z optimizer.skip_grad_norm_z",
        ),
        (
            *("at least 0 and finite in fp32", 0.0, float(_FP32.max)),
            "optimizer.weight_decay optimizer.matrix_weight_decay",
        ),
        (
            *("at least 0 and below 1 in fp32", 0.0, 1 - 2**-24),
            "optimizer.b1 optimizer.embedding_b1 optimizer.vector_b1 "
            "optimizer.b2 optimizer.embedding_b2 optimizer.vector_b2 "
            "optimizer.momentum optimizer.momentum_low optimizer.neuron_b2",
        ),
        (*("in [0, 1]", 0.0, 1.0), "optimizer.final_fraction"),
        (
            *(f"at least 1 and at most {_INT32.max}", 1, int(_INT32.max)),
            "max_steps sequence_length batch_tokens micro_batch val_tokens sample_tokens "
            "keep_last keep_every log_every optimizer.schedule_steps optimizer.adam_every",
        ),
        (
            *(f"at least 0 and at most {_INT32.max}", 0, int(_INT32.max)),
            "val_every sample_every checkpoint_every optimizer.warmup_steps "
            "optimizer.momentum_warmup_steps optimizer.momentum_cooldown_steps",
        ),
        (*(f"at least 0 and at most {2**32 - 1}", 0, 2**32 - 1), "seed"),
    )
    for name in names.split()
}


class ConfigError(ValueError):
    """A run that cannot be, found out before anything is allocated."""


def cache_folder() -> Path | None:
    """Return the user's folder for compiled executables: $XDG_CACHE_HOME/gptjax or ~/.cache/gptjax.

    None if the environment and the password database have no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # such a value is to be ignored, by XDG's specification
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "gptjax") if os.path.isabs(base) else None


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    algorithm: Literal["adamw", "normuon", "muon"] = "adamw"
    """What the matrices inside the blocks take: AdamW, NorMuon, or optax's Muon. Everything else
    takes AdamW."""
    learning_rate: float = 6e-4
    """AdamW's peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; wsd decays over the last 20 % of the steps as 1 − √progress."""
    warmup_steps: int = 700
    """Steps of linear warm-up."""
    schedule_steps: int | None = None
    """Step at which the schedule ends; max_steps when None."""
    final_fraction: float = 0.0
    """Learning rate at the schedule's end, as a fraction of the peak."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon, outside the square root."""
    weight_decay: float = 0.1
    """Decoupled decay of tensors with two or more dimensions."""
    matrix_learning_rate: float = 0.035
    """Peak learning rate of NorMuon and Muon; the schedule has the same shape."""
    matrix_weight_decay: float = 0.025
    """Weight decay of NorMuon and Muon, whose own is where update and weight have one sign."""
    matrix_decay_form: Literal["lr", "lr_squared"] = "lr"
    """NorMuon's decay goes as the learning rate, or as its square."""
    momentum: float = 0.95
    """Momentum of NorMuon and Muon."""
    momentum_low: float = 0.85
    """NorMuon's momentum at the first and the last step."""
    momentum_warmup_steps: int = 300
    """Steps in which NorMuon's momentum rises."""
    momentum_cooldown_steps: int = 50
    """Steps before the schedule's end in which it falls."""
    neuron_b2: float = 0.95
    """NorMuon's decay of each neuron's second moment."""
    orthogonalization: Literal["polar_express", "newton_schulz"] = "polar_express"
    """NorMuon's way to orthogonal matrices."""
    adam_every: int = 1
    """Beside NorMuon and Muon, AdamW moves its parameters at every so many steps only, by the sum
    of their gradients."""
    embedding_b1: float | None = None
    """Beside NorMuon and Muon, the embeddings' own b1; None for b1."""
    embedding_b2: float | None = None
    """Their b2."""
    vector_b1: float | None = None
    """Beside NorMuon and Muon, the norms' and biases' own b1; None for b1."""
    vector_b2: float | None = None
    """Their b2."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None for no clipping."""
    skip_loss_z: float | None = None
    """Skip an update whose loss is this many deviations above its last 128 values; None never
    skips."""
    skip_grad_norm_z: float | None = None
    """The same for the gradient norm."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A training run.

    Raises:
        ConfigError: a value has the wrong type or is out of range, or values contradict each other.
    """

    name: str = "gpt2"
    """Folder of the run inside runs_dir. The same name again resumes the run."""
    runs_dir: Path = Path("runs")
    """Where runs are kept."""
    max_steps: int = 19560
    """Optimizer steps in the whole run."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest checkpoint, if any; never: refuse a run that has one; must:
    refuse a run that has none."""
    resume_with_changes: bool = False
    """Allow other learning rates, final_fraction, clip_norm and skip options at resume than the
    checkpoint's config has; the change is recorded in the log."""
    device: Literal["auto", "gpu", "cpu"] = "gpu"
    """gpu: every NVIDIA GPU, or an error; cpu; auto: GPUs where there are some, else the CPU."""
    seed: int = 0
    """Of the initial weights, the order of the data and the samples."""

    model: GPT2Config = GPT2Config()
    """The model's shape and how it is computed."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer, its learning-rate schedule, and when an update is skipped."""

    dataset: str = "auto"
    """auto (prepared FineWeb, else the embedded corpus), stdlib, the name of a prepared dataset, or
    a folder of .bin shards."""
    data_dir: Path = Path("data")
    """Where `python -m gptjax.data` puts prepared datasets."""
    tokenizer: Literal["auto", "gpt2", "byte"] = "auto"
    """Must be the one that made the dataset; auto takes whichever that is."""
    sequence_length: int = 1024
    """Tokens a sequence; at most model.block_size."""
    batch_tokens: int = 524_288
    """Tokens an optimizer step, over all devices and micro-batches."""
    micro_batch: int = 64
    """Sequences on each device at a time; the rest of the batch is accumulated."""
    overfit_one_batch: bool = False
    """Train on the first batch again and again: the loss must go to almost nothing."""

    val_every: int = 250
    """Steps between validations; 0 for none."""
    val_tokens: int = 1_048_576
    """About how many validation tokens each time; always the same ones."""
    sample_every: int = 1000
    """Steps between samples; 0 for none."""
    sample_tokens: int = 128
    """Tokens of a sample."""
    checkpoint_every: int = 500
    """Steps between checkpoints; one is also made at the end and on SIGTERM or Ctrl-C. 0 for the
    last only."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are kept for ever."""
    log_every: int = 10
    """Steps between printed lines where there is no terminal; log.jsonl has every step."""

    deterministic: bool = False
    """Repeat bit for bit on a GPU, by XLA's deterministic operations; needs --model.attention xla,
    and is slow. A CPU always repeats."""
    compilation_cache: Path | None = dataclasses.field(default_factory=cache_folder)
    """Folder of compiled executables, loaded if nothing that they are compiled from has changed.
    Loading runs their code: no other user may own or be able to write it. None to compile at each
    start."""

    def __post_init__(self):
        _check_fields(self)
        _check_fields(self.optimizer, "optimizer.")
        if self.sequence_length > self.model.block_size:
            raise ConfigError(
                f"--sequence-length {self.sequence_length} is longer than the model's block size "
                f"{self.model.block_size}; shorten it or raise --model.block-size"
            )
        chunk, tokens = self.model.loss_chunk, self.micro_batch * self.sequence_length
        if chunk is not None and (chunk < 1 or tokens % chunk):
            raise ConfigError(
                f"--model.loss-chunk must divide the tokens of a micro-batch, {self.micro_batch} × "
                f"{self.sequence_length} = {tokens}, got {chunk}"
            )
        if self.deterministic and self.model.attention != "xla":
            raise ConfigError(
                f"--deterministic needs --model.attention xla, got {self.model.attention}: "
                "the backward pass of cuDNN's attention adds in any order"
            )
        o = self.optimizer
        apart = ("adam_every", "embedding_b1", "embedding_b2", "vector_b1", "vector_b2")
        if o.algorithm == "adamw" and any(
            getattr(o, name) != getattr(OptimizerConfig, name) for name in apart
        ):
            raise ConfigError(
                f"{', '.join(_flag('optimizer.' + name) for name in apart)} are of AdamW beside "
                "NorMuon or Muon; "
                "--optimizer.algorithm adamw treats all parameters alike"
            )
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError(f"--name must be a plain folder name, got {self.name!r}")
        if (size := len(self.name.encode())) > 200:
            raise ConfigError(f"--name must have at most 200 bytes, got {size}")

    def kernels(self) -> dict[str, str]:
        """The back end of each part of the model on the default device.

        Raises:
            ConfigError: a named one does not exist or cannot run here.
        """
        try:
            return self.model.kernels(self.sequence_length, self.micro_batch)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    def learning_rate_schedule(self, peak: float | None = None):
        """The optax schedule of the learning rate.

        Args:
            peak: optimizer.learning_rate when None.
        """
        o = self.optimizer
        return optim.schedule(
            o.schedule,
            peak=o.learning_rate if peak is None else peak,
            warmup_steps=o.warmup_steps,
            total_steps=o.schedule_steps or self.max_steps,
            final_fraction=o.final_fraction,
        )

    def micro_batches(self, devices: int) -> int:
        """Micro-batches a step on this many devices.

        Raises:
            ConfigError: batch_tokens is not a whole number of them; the message names the nearest
                that is.
        """
        tokens = self.micro_batch * self.sequence_length * devices
        if self.batch_tokens % tokens:
            below = self.batch_tokens // tokens * tokens
            raise ConfigError(
                f"--batch-tokens {self.batch_tokens} is not a multiple of micro_batch × "
                "sequence_length × devices = "
                f"{self.micro_batch} × {self.sequence_length} × {devices} = {tokens}; "
                f"take {below + tokens}{f' or {below}' if below else ''}, or another --micro-batch"
            )
        return self.batch_tokens // tokens

    @property
    def batch(self) -> int:
        """Sequences an optimizer step, over all devices."""
        return self.batch_tokens // self.sequence_length


def _check_fields(options: Config | OptimizerConfig, prefix: str = "") -> None:
    """Check the type of each field, and the range of each number.

    Raises:
        ConfigError: the message names the option, the allowed values and the value.
    """
    for field in dataclasses.fields(options):
        name, value, kind = prefix + field.name, getattr(options, field.name), field.type
        flag = _flag(name)
        if not _has_type(value, kind):
            choices = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else kind
            wanted = kind.__name__ if isinstance(kind, type) else choices
            raise ConfigError(f"{flag} must be {wanted}, got {value!r} ({type(value).__name__})")
        if isinstance(value, (str, Path)) and _is_unprintable(str(value)):
            raise ConfigError(
                f"{flag} must be valid UTF-8 without control characters, got {str(value)!r}"
            )
        wanted, low, high = RANGES.get(name, ("", None, None))
        if wanted and value is not None and not low <= value <= high:  # NaN too
            raise ConfigError(f"{flag} must be {wanted}, got {value}")


def _is_unprintable(text: str) -> bool:
    """True for control characters and for surrogates, to which Python decodes invalid UTF-8."""
    return any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def _has_type(value: Any, kind: Any) -> bool:
    """True for an instance of the annotation `kind`; an int is a float too, a bool is neither."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    kinds = get_args(kind) or (kind,)
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


# Fields that may differ between a checkpoint and the command that resumes it: they do not change
# what is learned.
OPERATIONAL = {
    *(
        "name",
        "runs_dir",
        "data_dir",
        "dataset",
        "resume",
        "device",
        "max_steps",
        "micro_batch",
        "log_every",
    ),
    "resume_with_changes",
    *(
        "val_every",
        "val_tokens",
        "sample_every",
        "sample_tokens",
        "checkpoint_every",
        "keep_last",
        "keep_every",
    ),
    *(
        "deterministic",
        "compilation_cache",
        "model.attention",
        "model.norm",
        "model.mlp",
        "model.loss",
    ),
    *("model.loss_chunk", "model.recompute"),
}


# Fields that may differ too where --resume-with-changes is given.
CHANGEABLE = {
    *("optimizer.learning_rate", "optimizer.matrix_learning_rate", "optimizer.final_fraction"),
    *("optimizer.clip_norm", "optimizer.skip_loss_z", "optimizer.skip_grad_norm_z"),
}


# Fields that no compiled program depends on. max_steps is where a schedule ends that has no end of
# its own, and that is in optimizer.schedule_steps as `to_json` fills it in; of val_tokens a program
# has the shape alone.
OUTSIDE_PROGRAMS = {
    *(
        "name",
        "runs_dir",
        "max_steps",
        "resume",
        "seed",
        "dataset",
        "data_dir",
        "tokenizer",
        "overfit_one_batch",
    ),
    *(
        "val_every",
        "val_tokens",
        "sample_every",
        "sample_tokens",
        "checkpoint_every",
        "keep_last",
        "keep_every",
    ),
    *("log_every", "compilation_cache", "resume_with_changes"),
}


def made_into_programs(config: Config) -> dict[str, Any]:
    """What of the config the compiled programs are made from, as flat JSON."""
    return {name: value for name, value in to_json(config).items() if name not in OUTSIDE_PROGRAMS}


def to_json(config: Config) -> dict[str, Any]:
    """The config as flat JSON: {"max_steps": 100, "model.n_layer": 12, …}, with what it leaves open
    filled in."""
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, (GPT2Config, OptimizerConfig)):
            flat |= {
                f"{field.name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)
            }
        else:
            flat[field.name] = value
    flat["optimizer.schedule_steps"] = config.optimizer.schedule_steps or config.max_steps
    return {name: str(v) if isinstance(v, (Path, Precision)) else v for name, v in flat.items()}


def differences(saved: Any, config: Config) -> list[str]:
    """Describe the fields in which a checkpoint's config differs from `config`, a line each.

    Fields of `OPERATIONAL` may differ, and with `config.resume_with_changes` those of `CHANGEABLE`.
    If all lines are of fields in `CHANGEABLE`, one more line names --resume-with-changes.

    Raises:
        ConfigError: `saved` is not a config's JSON.
    """
    found = _differences(saved, config)
    refused = found.keys() - CHANGEABLE if config.resume_with_changes else found.keys()
    lines = [
        printable(f"{_flag(name)}: the checkpoint has {found[name][0]}, now {found[name][1]}")
        for name in sorted(refused)
    ]
    if refused and refused <= CHANGEABLE:
        lines.append("--resume-with-changes allows such changes")
    return lines


def changes(saved: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return {name: (old, new)} of the fields of `CHANGEABLE` in which a checkpoint's config
    differs.

    Raises:
        ConfigError: `saved` is not a config's JSON.
    """
    found = _differences(saved, config)
    return {name: found[name] for name in sorted(found.keys() & CHANGEABLE)}


def _differences(saved: Any, config: Config) -> dict[str, tuple[Any, Any]]:
    """Fields, operational ones left out, whose values differ: {name: (old, new)}.

    An option that is younger than the checkpoint had what is now its default.
    """
    if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
        raise ConfigError(
            "the checkpoint's config is damaged: expected a JSON object, found "
            f"{type(saved).__name__}; resume from another checkpoint, or choose another --name"
        )
    now, missing = to_json(config), "(no such option)"
    saved = to_json(Config()) | saved
    pairs = {name: (saved[name], now.get(name, missing)) for name in saved.keys() - OPERATIONAL}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def load(path: Path) -> Config:
    """The `config` of a Python file.

    Raises:
        ConfigError: the file is missing, unreadable or not Python, it raises, or it does not define
            a `Config` under the name `config`; the message names the line where one is known.
    """
    _check_is_python(path)
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(_why_not_loaded(path, error)) from error
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ConfigError(
            f"{path} must define `config = gptjax.config.Config(...)`; its `config` is "
            + ("missing" if config is None else f"a {type(config).__name__}")
        )
    return config


def _check_is_python(path: Path) -> None:
    try:
        is_file, is_folder, exists = path.is_file(), path.is_dir(), path.exists()
        known = sorted(map(str, path.parent.glob("*.py"))) if path.parent.is_dir() else []
    except OSError as error:  # the name is too long, or a folder may not be read
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    if not exists:
        there = f"; there are: {', '.join(known)}" if known else ""
        raise ConfigError(f"no config file {path}{there}")
    if not is_file or path.suffix != ".py":
        found = "a folder" if is_folder else "another file" if is_file else "not a regular file"
        raise ConfigError(f"--config must be a Python file, NAME.py, but {path} is {found}")


def _why_not_loaded(path: Path, error: BaseException) -> str:
    """Describe an exception from the execution of a config file, with the file's line if known."""
    frames, file = traceback.extract_tb(error.__traceback__), str(path.absolute())
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    where = f"{path}, line {lines[-1]}" if lines and lines[-1] else str(path)
    if isinstance(error, SystemExit):
        return f"{where}: expected a definition of `config`, but it exits with {error.code!r}"
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    said = (said.strip().splitlines() or ["no message"])[0]
    if not isinstance(error, ConfigError):
        said = f"{type(error).__name__}: {said}"
    if "unexpected keyword argument" in said:
        said += "; `python train.py --help` lists the options"
    return printable(f"{where}: {said}")


_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _precision_rule(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """On the command line a precision is its name."""
    if info.type is not Precision:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(PRECISIONS) + "}",
        instance_from_str=lambda args: Precision(args[0]),
        is_instance=lambda value: isinstance(value, Precision),
        str_from_instance=lambda precision: [precision.name],
        choices=PRECISIONS,
    )


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    config: Path
    """Python file that defines `config`. The options below override its fields; their defaults are
    its values."""
    options: Annotated[Config, tyro.conf.arg(name="")]


def from_command_line(argv: list[str] | None = None) -> Config:
    """The config that `--config FILE` names, with every other option laid over it.

    Raises:
        ConfigError: `--config` is missing or repeated, the file is not a config, or an option is
            out of range.
        SystemExit: an unknown or ill-typed option (code 2, with the choices), or `--help` (code 0).
    """
    argv = sys.argv[1:] if argv is None else argv
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, action="append", default=[])
    chosen, rest = first.parse_known_args(argv)
    if len(chosen.config) > 1:
        raise ConfigError(f"expected one --config, got {', '.join(map(str, chosen.config))}")
    if not chosen.config and not {"-h", "--help"} & set(rest):
        raise ConfigError(
            "--config FILE is missing; for a first run: python train.py --config "
            "configs/gpt2_tiny.py"
        )
    file = chosen.config[0] if chosen.config else tyro.MISSING
    return tyro.cli(
        _CommandLine,
        prog="train.py",
        description="Train a GPT-2."
        + ("" if chosen.config else " Defaults shown: no config file."),
        args=argv,
        default=_CommandLine(file, load(file) if chosen.config else Config()),
        registry=_registry,
    ).options
