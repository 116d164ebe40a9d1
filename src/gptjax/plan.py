"""Plan a run without its GPU: `gptjax plan gpt2_124m --gpu h100 --count 8`."""

import contextlib
import dataclasses
import importlib.util
import json as json_module
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gptjax import cli
from gptjax.config import Config, ConfigError
from gptjax.data import Batch
from gptjax.models.base import graph
from gptjax.parallel import REDUCE_DTYPES, Parallel
from gptjax.terminal import exit_code
from gptjax.timeline import Timeline
from gptjax.training import liveness
from gptjax.training.flops import peak_flops
from gptjax.training.memory import GIB
from gptjax.training.step import init_state, make_train_step
from pallas_kernels.extend import tracing_for

RESERVED = 0.92
"""Share of a GPU's memory that train.py reserves."""


class Gpu(NamedTuple):
    """A GPU: `jax.Device.device_kind`, memory in GiB, compute capability and SMs.

    The memory is the total that CUDA reports (`cudaMemGetInfo`, PyTorch's errors), rounded down.
    The total of nvidia-smi, in the comments, includes what the driver reserves.
    """

    kind: str
    memory: float
    capability: tuple[int, int]
    sms: int


GPUS = {
    # SXM, 80 GB in NVIDIA's data sheet; nvidia-smi: 81559 MiB, 79.6 GiB.
    "h100": Gpu("NVIDIA H100", 79.1, (9, 0), 132),
    # SXM, 141 GB in the data sheet; nvidia-smi: 143771 MiB, 140.4 GiB.
    "h200": Gpu("NVIDIA H200", 139.7, (9, 0), 132),
    # 80 GB in the data sheet; nvidia-smi: 81920 MiB, 80.0 GiB.
    "a100": Gpu("NVIDIA A100", 79.1, (8, 0), 108),
    # 40 GB in the data sheet; nvidia-smi: 40960 MiB, 40.0 GiB.
    "a100-40gb": Gpu("NVIDIA A100", 39.3, (8, 0), 108),
    # 48 GB with ECC in the data sheet; nvidia-smi: 46068 MiB, 45.0 GiB.
    "l40s": Gpu("NVIDIA L40S", 44.4, (8, 9), 142),
    # 24 GB in the data sheet; nvidia-smi: 24564 MiB, 24.0 GiB.
    "rtx4090": Gpu("NVIDIA RTX 4090", 23.6, (8, 9), 128),
}


class Rate(NamedTuple):
    """Measured MFU of a training step on H200s, and its file in benchmarks/results/step."""

    model: str
    preset: str
    params: float
    precision: str
    devices: int
    mfu: float
    file: str


RATES = (
    Rate("GPT2Config", "gpt2", 124e6, "fp32", 1, 0.666, "fp32_8.json"),
    Rate("GPT2Config", "gpt2", 124e6, "tf32", 1, 0.429, "tf32_32.json"),
    Rate("GPT2Config", "gpt2", 124e6, "bf16", 1, 0.531, "bf16_64_alone.json"),
    Rate("GPT2Config", "gpt2", 124e6, "bf16", 2, 0.501, "devices_bf16_64.json"),
    Rate("GPT2Config", "gpt2-medium", 355e6, "bf16", 1, 0.555, "gpt2_medium_96.json"),
    Rate("GPT2Config", "gpt2-large", 774e6, "bf16", 1, 0.556, "gpt2_large_64.json"),
    Rate("GPT2Config", "gpt2-xl", 1558e6, "bf16", 1, 0.559, "gpt2_xl_36.json"),
    Rate("GPT2Config", "gpt2-xl", 1558e6, "bf16", 2, 0.530, "devices_gpt2_xl_32_fsdp.json"),
    Rate("GPT2Config", "gpt2", 124e6, "fp8", 1, 0.664, "fp8_64_torch.json"),
    Rate("GPT2Config", "gpt2-large", 774e6, "fp8", 1, 0.780, "fp8_gpt2_large_64.json"),
    Rate("GPT2Config", "gpt2-xl", 1558e6, "fp8", 1, 0.746, "fp8_gpt2_xl_36.json"),
    Rate("Llama3Config", "llama3-124m", 124e6, "bf16", 1, 0.488, "llama3_124m_64_torch.json"),
    Rate("Llama3Config", "llama3-1b", 1076e6, "bf16", 1, 0.564, "llama3_1b_16_torch.json"),
)


def rate(config: Config, count: int) -> Rate | None:
    """Return the measured rate of the model's class and precision that is nearest in size, then in
    the number of GPUs; None if there is none."""
    model = config.model
    name, precision = type(model).__name__, model.precision.name
    rows = [row for row in RATES if (row.model, row.precision) == (name, precision)]
    size = math.log(model.num_params)
    # Several GPUs are slower than one: prefer a measurement with as many.
    return min(
        rows,
        key=lambda row: ((row.devices > 1) != (count > 1), abs(math.log(row.params) - size)),
        default=None,
    )


@contextlib.contextmanager
def tracing_on(gpu: Gpu) -> Iterator[AbstractDevice]:
    """Select kernels as on a GPU, in traces; nothing can run."""
    device = AbstractDevice(device_kind=gpu.kind, num_cores=gpu.sms, platform="cuda")
    mesh = AbstractMesh((), (), abstract_device=device)
    with tracing_for(gpu.capability), jax.sharding.use_abstract_mesh(mesh):
        yield device


def memory(config: Config, gpu: Gpu, count: int) -> tuple[int, int]:
    """Return the bytes of the state on each GPU, and the peak of a training step.

    Within 5 % of the measured steps. In TF32, up to 22 % more than XLA needs for some other
    micro-batches.
    """
    with tracing_on(gpu) as device:
        mesh = AbstractMesh((count,), ("data",), (AxisType.Auto,), abstract_device=device)
        parallel = Parallel(mesh, config.parallel, REDUCE_DTYPES[config.reduce_dtype])

        def size(x: Any) -> int:
            sharded = hasattr(x, "shape") and parallel.axis_of(x) is not None
            return liveness.bytes_of(x) // (count if sharded else 1)

        tx = config.build_optimizer(mesh)
        state = jax.eval_shape(lambda: init_state(config.model, tx, config.seed))
        shape = config.micro_batches(count), config.micro_batch * count, config.sequence_length
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        how = {"parallel": parallel, **config.step_options()}
        step = make_train_step(graph(config.model), tx, **how)
        batch = Batch(ids, ids, ids if config.separate_documents else None)
        jaxpr = jax.make_jaxpr(step)(state, batch)
    return sum(map(size, jax.tree.leaves(state))), liveness.peak(jaxpr, size)


def largest(config: Config, gpu: Gpu, count: int) -> int | None:
    """Return the largest micro-batch that fits; None if none fits.

    The optimizer step keeps batch_tokens: a micro-batch must divide its sequences on a GPU, and the
    number of accumulated micro-batches follows.
    """
    per_gpu, chunk = config.batch // count, config.model.loss_chunk or 1
    sizes = [
        n
        for n in range(1, per_gpu + 1)
        if per_gpu % n == 0 and n * config.sequence_length % chunk == 0
    ]
    low, high = 0, len(sizes)
    while low < high:  # memory grows with the micro-batch
        middle = (low + high) // 2
        changed = dataclasses.replace(config, micro_batch=sizes[middle])
        if memory(changed, gpu, count)[1] <= RESERVED * gpu.memory * GIB:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


def plan(config: Config, name: str, count: int, price: float | None = None) -> dict[str, Any]:
    """Return the plan of a run: memory and rate of each stage, hours, and cost with a price.

    Raises:
        ConfigError: the batch is not divisible by the GPUs.
    """
    gpu, stages, seconds = GPUS[name], [], 0.0
    for span in Timeline(config).spans:
        own = span.config
        state, peak = memory(own, gpu, count)
        stage: dict[str, Any] = {"steps": span.end - span.begin, "micro_batch": own.micro_batch}
        stage |= {"state_gib": state / GIB, "activations_gib": (peak - state) / GIB}
        stage |= {"peak_gib": peak / GIB, "largest_micro_batch": largest(own, gpu, count)}
        measured, per_gpu = rate(own, count), peak_flops(gpu.kind, own.model.precision.name)
        if measured and per_gpu:
            flops = own.model.flops_per_token(own.sequence_length)
            stage["tokens_per_s"] = count * measured.mfu * per_gpu / flops
            stage["mfu"], stage["measured"] = measured.mfu, measured._asdict()
            seconds += stage["steps"] * own.batch_tokens / stage["tokens_per_s"]
        else:
            seconds = math.nan
        stages.append(stage)
    result = {"gpu": name, "count": count, "usable_gib": RESERVED * gpu.memory, "stages": stages}
    hours = None if math.isnan(seconds) else seconds / 3600
    cost = None if hours is None or price is None else hours * count * price
    return result | {"hours": hours, "cost_usd": cost}


def show(result: dict[str, Any]) -> None:
    """Print a plan."""
    print(f"{result['count']} × {result['gpu']}, {result['usable_gib']:.1f} GiB usable on each")
    for number, stage in enumerate(result["stages"], 1):
        if len(result["stages"]) > 1:
            print(f"stage {number}, {stage['steps']} steps")
        fits = "fits" if stage["peak_gib"] <= result["usable_gib"] else "DOES NOT FIT"
        print(
            f"memory       {stage['peak_gib']:.2f} GiB on each GPU, from shapes: state "
            f"{stage['state_gib']:.2f}, activations and temporaries {stage['activations_gib']:.2f}"
        )
        print(
            f"micro-batch  {stage['micro_batch']} {fits}; largest that fits: "
            f"{stage['largest_micro_batch'] or 'none'}"
        )
        if measured := stage.get("measured"):
            print(
                f"speed        {stage['tokens_per_s']:,.0f} tokens/s: MFU {stage['mfu']:.1%} of "
                f"{measured['preset']} on {measured['devices']} × H200, {measured['file']}"
            )
        else:
            print("speed        not known: no measured rate of this model and precision")
    if result["hours"] is not None:
        cost = result["cost_usd"]
        print(
            f"run          {result['hours']:.2f} hours of training steps"
            + ("" if cost is None else f", {cost:,.2f} USD")
        )


def main(
    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")],
    gpu: Literal[*GPUS] = "h100",
    count: int = 1,
    price: float | None = None,
    json: bool = False,
) -> int:
    """Estimate memory, speed and time of a run on GPUs that this machine does not need to have.

    Args:
        config: Config file of the run, or the name of a config of gptjax.
        gpu: Name of the GPU.
        count: Number of GPUs.
        price: USD for a GPU and hour; adds the cost of the run.
        json: Print the plan as JSON.
    """

    def command() -> None:
        if count < 1:
            raise ConfigError(f"expected --count 1 or more, got {count}")
        if price is not None and price < 0:
            raise ConfigError(f"expected --price 0 or more, got {price}")
        if importlib.util.find_spec("jax_triton") is None:
            raise ConfigError(
                "plan traces the Triton kernels: pip install jax-triton; no GPU is needed"
            )
        jax.config.update("jax_platforms", "cpu")
        result = plan(cli.load(config), gpu, count, price)
        print(json_module.dumps(result)) if json else show(result)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="gptjax plan"))
