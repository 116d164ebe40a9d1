"""How many numbers does FP8 clip? Train GPT-2 in fp8 and count at every conversion to FP8.

    python benchmarks/experiments/fp8_clipping.py --dataset docs_corpus --out FOLDER

Every conversion is in plain JAX here, followed by a callback with the largest number relative to
the largest number of the format, and with the number of clipped numbers. The custom kernels convert
with the same scales and do not count. A training step is therefore several times slower.

Two gradients are not counted: the classifier's, which is at most 1/112 of the largest e5m2 number,
and that of q, k and v with the scale that Mosaic's attention uses.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from _recorded_runs import finite

from gptjax import cli, data, devices, parallel
from gptjax.bench import results
from gptjax.config import Config, ConfigError
from gptjax.models import gpt2
from gptjax.models.base import graph
from gptjax.precision import Precision
from gptjax.training.step import init_state, make_train_step
from gptjax.user_folders import data_folder
from pallas_kernels import _dispatch
from pallas_kernels.fp8 import conversion, largest


@dataclasses.dataclass(frozen=True)
class Options:
    """Count clipped numbers in a training run in FP8."""

    out: Path
    """Folder for fp8_clipping.json. Created if absent."""
    config: Path = Path("configs/gpt2_124m_docs.py")
    """Config of a GPT-2, with the optimizer. Its batch is replaced."""
    dataset: str = "auto"
    """As for train.py."""
    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of prepared datasets."""
    device: str = "gpu"
    """gpu, cpu or auto."""
    steps: int = 1000
    """Training steps; the learning rate is that of the config's schedule."""
    batch: int = 8
    """Sequences of a step."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    limit_s: float = 300.0
    """End training after this many seconds."""


@dataclasses.dataclass
class Counts:
    """Counts of one place in the code that converts to FP8."""

    conversions: int = 0
    largest: float = 0.0
    """Largest number before the clipping, relative to the largest of the format."""
    clipped: int = 0
    numbers: int = 0

    def add(self, size: int, ratio: float, clipped: int) -> None:
        self.conversions += 1
        self.largest = max(self.largest, float(ratio))
        self.clipped += int(clipped)
        self.numbers += size


def place() -> str:
    """Return the function outside of conversion.py and own_scale.py that is being traced."""
    for frame in inspect.stack()[1:]:
        path = Path(frame.filename)
        if "pallas_kernels" in path.parts and path.stem not in ("conversion", "own_scale"):
            name = path.parent.name if path.stem == "__init__" else path.stem
            return f"{path.parent.name}/{name}: {frame.function}"
    raise ValueError("expected a conversion to FP8 inside pallas_kernels, found none on the stack")


@contextlib.contextmanager
def counting():
    """Yield place and format → `Counts`. Inside, conversions that are traced are counted."""
    counts: defaultdict[tuple[str, str], Counts] = defaultdict(Counts)
    select, convert = _dispatch.select, conversion._quantize_in_xla

    def select_xla(name, *args, **facts):
        return "xla" if name == "quantize" else select(name, *args, **facts)

    def counted(x, scale, dtype, rows, transposed):
        scaled = jnp.abs(x.astype(jnp.float32)) * scale
        clipped = (scaled > largest(dtype)).sum()
        add = functools.partial(counts[place(), jnp.dtype(dtype).name].add, x.size)
        jax.debug.callback(add, scaled.max() / largest(dtype), clipped)
        return convert(x, scale, dtype, rows, transposed)

    _dispatch.select, conversion._quantize_in_xla = select_xla, counted
    # The norms return 16 bits, which the layers convert.
    scale, gpt2.ACTIVATION_SCALE = gpt2.ACTIVATION_SCALE, None
    try:
        yield counts
    finally:
        _dispatch.select, conversion._quantize_in_xla = select, convert
        gpt2.ACTIVATION_SCALE = scale


def config_of(o: Options) -> Config:
    """Return the config of the run: back ends without conversions of their own."""
    config = cli.load(o.config)
    model = dataclasses.replace(
        config.model, precision=Precision("fp8"), attention="xla", norm="xla", mlp="xla"
    )
    return dataclasses.replace(
        config,
        model=model,
        sequence_length=o.sequence_length,
        batch_tokens=o.batch * o.sequence_length,
        micro_batch=o.batch,
        max_steps=o.steps,
        optimizer=dataclasses.replace(config.optimizer, schedule_steps=config.max_steps),
    )


def train(config: Config, o: Options) -> list[float]:
    """Train; return the loss of each step."""
    mesh = parallel.data_mesh(devices.select(o.device)[0][:1])
    tx, losses, began = config.build_optimizer(mesh), [], time.perf_counter()
    step = make_train_step(graph(config.model), tx, config.learning_rate_schedule())
    step = jax.jit(step, donate_argnums=0)
    state = jax.device_put(init_state(config.model, tx, config.seed), parallel.replicated(mesh))
    loader = data.Loader(
        data.find_dataset(o.dataset, o.data_dir).train,
        sequence_length=config.sequence_length,
        batch=config.batch,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
    )
    with loader:
        for i in range(config.max_steps):
            state, metrics = step(state, jnp.asarray(next(loader)[None]))
            losses.append(float(metrics["loss"]))
            if (i + 1) % 50 == 0:
                seconds = time.perf_counter() - began
                print(f"step {i + 1}: loss {losses[-1]:.4f}, {seconds:.0f} s", flush=True)
                if seconds > o.limit_s:
                    break
    jax.effects_barrier()
    return losses


def main(o: Options) -> int:
    with counting() as counts:
        losses = train(config_of(o), o)
    rows = [
        {"place": where, "format": name, **dataclasses.asdict(count)}
        for (where, name), count in counts.items()
    ]
    device = devices.select(o.device)[0][0].device_kind
    command = results.script_command("benchmarks/experiments/fp8_clipping.py")
    result = results.new(
        command,
        rows,
        device=device,
        steps=len(losses),
        batch=o.batch,
        sequence_length=o.sequence_length,
        first_loss=finite(losses[0]),
        last_loss=finite(losses[-1]),
    )
    results.write(o.out / "fp8_clipping.json", result)
    for row in rows:
        print(
            f"{row['place']:48} {row['format']}: largest {row['largest']:.4f} of the range, "
            f"{row['clipped']} of {row['numbers']:,} clipped"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, description=__doc__)))
    except (ConfigError, data.DatasetError, devices.DeviceError) as error:
        sys.exit(f"fp8_clipping: {error}")
