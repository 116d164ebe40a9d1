"""PyTorch's side of a comparison: whether it can run here, and its model and step for a config.

PyTorch is imported only where it is asked for.
"""

import importlib.util
from typing import Any, Literal

import jax

from gptjax.bench import BenchError
from gptjax.config import Config
from gptjax.models.base import ModelConfig

# By the name of the architecture's config class: module and class of PyTorch's model.
MODELS = {"GPT2Config": ("torch_gpt2", "GPT2"), "Llama3Config": ("torch_llama", "Llama3")}


def require_torch(device: jax.Device) -> None:
    """Raise BenchError if PyTorch is not installed or cannot use the same kind of device."""
    if importlib.util.find_spec("torch"):
        import torch

        if device.platform != "gpu" or torch.cuda.is_available():
            return
    raise BenchError("PyTorch with CUDA is not installed: pip install torch")


def why_no_rival(config: Config) -> str | None:
    """Return why PyTorch has no step to compare with, or None."""
    name = type(config.model).__name__
    if name in MODELS:
        return None
    return f"PyTorch's models are those of {', '.join(MODELS)}, not {name}"


def why_no_step(config: Config) -> str | None:
    """Return why PyTorch has no training step to compare with, or None."""
    if config.separate_documents:
        return "PyTorch's step does not separate documents"
    return why_no_rival(config)


def torch_model(config: ModelConfig, how):
    """Return PyTorch's model with its loss, on PyTorch's default device.

    It maps (tokens_BT, targets_BT) to the loss. It has `blocks`; `head_loss`, the function of the
    last norm, the head and the loss; and `initialize`, which fills a parameter by its name.
    """
    module, name = MODELS[type(config).__name__]
    return getattr(importlib.import_module(module), name)(config, how)


def how_of(config: Config, device: jax.Device):
    """Return the `How` of PyTorch's fastest step in the precision of a config."""
    from torch_gpt2 import How

    precision = config.model.precision
    name = precision.name if precision.fp8_head else precision.plain.split("_")[0]
    return How(precision=name, compiled=device.platform == "gpu")


def torch_step(config: Config, how, device: jax.Device, **more: Any):
    """Return the `TorchStep` of a config, on the same kind of device."""
    from torch_gpt2 import TorchStep

    return TorchStep(
        config.model,
        how,
        batch=config.micro_batch,
        sequence_length=config.sequence_length,
        device=kind(device),
        **more,
    )


def torch_several(config: Config, how, device: jax.Device, devices: int, *, forward: bool):
    """Return the `TorchSeveral` of a config: DDP for the strategy data, and FSDP2 for the others.

    As gptjax's zero1, FSDP2 then gathers the parameters once a step.
    """
    from torch_several import Spec, TorchSeveral

    spec = Spec(
        model=config.model,
        how=how,
        strategy="ddp" if config.parallel == "data" else "fsdp2",
        devices=devices,
        batch=config.micro_batch,
        sequence_length=config.sequence_length,
        device=kind(device),
        reshard_after_forward=config.parallel == "fsdp",
        reduce_dtype=config.reduce_dtype,
        forward=forward,
    )
    return TorchSeveral(spec)


def kind(device: jax.Device) -> Literal["cuda", "cpu"]:
    """Return PyTorch's name of a kind of device."""
    return "cuda" if device.platform == "gpu" else "cpu"
