"""Header of a run: the selected options, printed before compilation."""

from collections.abc import Iterator

from gptjax.config import Config
from gptjax.models.base import abstract_params
from gptjax.parallel import Parallel
from gptjax.timeline import Timeline
from gptjax.training.inputs import Inputs
from gptjax.training.resume import Resume
from gptjax.training.run_log import has_tensorboard
from gptjax.weights.sources import Source


def header(
    config: Config,
    inputs: Inputs,
    parallel: Parallel,
    idle_gpu: str | None,
    kernels: dict[str, str],
    start: Resume,
    processes: list[str],
    source: Source | None,
) -> Iterator[tuple[str, object]]:
    """Yield name and text of each line.

    Args:
        parallel: the devices and the strategy.
        idle_gpu: reason why a GPU of this machine is not used; None if all are used.
        kernels: back ends of each operation.
        start: the checkpoint to resume from, if any.
        processes: a line for each process.
        source: the model with the initial parameters, if any.
    """
    model, dataset = config.model, inputs.dataset
    begin = "from the beginning" if start.step is None else f"resuming from step {start.step}"
    yield "run", f"{config.run_dir}, {begin}"
    idle = f"; A GPU STAYS IDLE: {idle_gpu}" if idle_gpu else ""
    yield "device", f"{parallel.devices} × {parallel.mesh.devices.flat[0].device_kind}{idle}"
    if len(processes) > 1:
        for i, line in enumerate(processes):
            yield "" if i else "processes", line
    if parallel.devices > 1:
        yield "parallel", f"{config.parallel}, gradients summed in {config.reduce_dtype}"
    precision = model.precision
    yield "precision", f"{precision}: {precision.parts}, parameters {precision.param_dtype}"
    yield "kernels", ", ".join(f"{operation}: {names}" for operation, names in kernels.items())
    padded = model.num_allocated_params != model.num_params
    padding = f" ({model.num_allocated_params:,} with padding)" if padded else ""
    yield (
        "model",
        f"{type(model).__name__.removesuffix('Config')}, {model.num_params:,} parameters{padding}: "
        f"{model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads",
    )
    if not has_tensorboard():
        yield "tensorboard", "off: pip install 'gptjax[tensorboard]'"
    if source is not None:
        yield "weights", f"{source}; new optimizer state"
    yield (
        "data",
        f"{dataset.path}, {dataset.train_tokens:,} tokens ({dataset.tokenizer}), "
        f"{inputs.epochs:.2f} epochs",
    )
    if (counted := dataset.counted_train_tokens) is not None:
        yield "", f"loss on {counted:,} of these tokens: the others are prompts"
    if inputs.eot is not None:
        yield "", f"documents do not see each other: each begins with token {inputs.eot}"
    for line in _packed(inputs):
        yield "", line
    if dataset.note:
        yield "", dataset.note
    recompute = f", recompute {model.recompute}"
    if not config.stages:
        yield "batch", _batch(config, parallel.devices) + recompute
    yield from _stages(inputs.timeline, kernels, parallel.devices, recompute)
    lines = config.optimizer.describe(abstract_params(model), model.parameter_groups())
    for i, line in enumerate(lines):
        yield "" if i else "optimizer", line
    if (warmup := config.optimizer.warmup_steps) > config.max_steps:
        peak = f"the learning rate does not reach its peak: {warmup} steps of warm-up"
        yield "", f"{peak}, {config.max_steps} of the run"


def _packed(inputs: Inputs) -> Iterator[str]:
    """Yield a line for each order of windows of a run that packs documents."""
    orders = {span.order: span for span in reversed(inputs.timeline.spans)}  # the first of each
    for order, span in sorted(orders.items()) if inputs.packed else ():
        begin = f"from step {span.begin}: " if len(orders) > 1 else ""
        if order not in inputs.packed:
            yield f"{begin}sequences are contiguous text"
            continue
        read = inputs.packed[order] * (span.config.sequence_length + 1)
        yield (
            f"{begin}sequences begin with a document, and documents are cut to "
            f"{span.config.max_document_length} tokens: {read / inputs.dataset.train_tokens:.1%} "
            "of the tokens are read"
        )


def _batch(config: Config, devices: int) -> str:
    return (
        f"{config.batch_tokens:,} tokens: {config.micro_batches(devices)} × {config.micro_batch} "
        f"sequences of {config.sequence_length} on each device"
    )


def _stages(
    timeline: Timeline, kernels: dict[str, str], devices: int, recompute: str
) -> Iterator[tuple[str, str]]:
    """Yield a line for each stage of a run that has stages.

    Args:
        kernels: back ends with the run's options. If the model's options name back ends, a line
            lists those that differ from these.

    Raises:
        ConfigError: a named back end cannot run with the options of a stage.
    """
    whole = timeline.config
    for span in timeline.spans if whole.stages else ():
        stage = whole.stages[span.number - 1]
        factor = stage.learning_rate_factor
        factor = f", lr × {factor:g}" if factor != 1 else ""
        # A trace of the speedrun's step takes half a second. The default back ends always run.
        chosen = span.config.kernels() if span.config.model.names_back_ends else {}
        own = [
            f", {operation}: {names}"
            for operation, names in chosen.items()
            if names != kernels.get(operation)
        ]
        own[:0] = [f", {name} {value}" for name, value in stage.model.items()]
        first = span.number == 1
        yield (
            "stages" if first else "",
            f"{span.number}: steps {span.begin}–{span.end - 1}, {_batch(span.config, devices)}"
            f"{factor}{''.join(own)}{recompute if first else ''}",
        )
    if (left := timeline.total - len(timeline.spans)) > 0:
        yield "", f"the run ends before the last {left} of {timeline.total} stages"
