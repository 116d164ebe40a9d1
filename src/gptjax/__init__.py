"""gptjax: GPT-2 training in JAX on CUDA GPUs."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The public names occur twice. Type checkers read these imports; `__getattr__` imports the module
# of a name at the first use of the name. `python -m gptjax.data` and `gptjax.plot` need no JAX, so
# they start in a tenth of the time.
if TYPE_CHECKING:
    from gptjax.config import Config as Config
    from gptjax.data import Batch as Batch
    from gptjax.generation import generate as generate
    from gptjax.models.base import loss_fn as loss_fn
    from gptjax.models.gpt2 import GPT2 as GPT2
    from gptjax.models.gpt2 import GPT2Config as GPT2Config
    from gptjax.models.llama3 import Llama3 as Llama3
    from gptjax.models.llama3 import Llama3Config as Llama3Config
    from gptjax.models.registry import PRESETS as PRESETS
    from gptjax.models.speedrun import Speedrun as Speedrun
    from gptjax.models.speedrun import SpeedrunConfig as SpeedrunConfig
    from gptjax.optim import OptimizerConfig as OptimizerConfig
    from gptjax.parallel import Parallel as Parallel
    from gptjax.precision import Precision as Precision
    from gptjax.stages import Stage as Stage
    from gptjax.training.step import init_state as init_state
    from gptjax.training.step import make_train_step as make_train_step
    from gptjax.weights import load as load
    from gptjax.weights import load_hf as load_hf
    from gptjax.weights import load_llmc as load_llmc
    from gptjax.weights import save_hf as save_hf
    from gptjax.weights import save_llmc as save_llmc

_MODULE_OF = {
    "Batch": "data",
    "Config": "config",
    "OptimizerConfig": "optim",
    "Parallel": "parallel",
    "PRESETS": "models.registry",
    "loss_fn": "models.base",
    "Precision": "precision",
    "Stage": "stages",
    "generate": "generation",
    **dict.fromkeys(("GPT2", "GPT2Config"), "models.gpt2"),
    **dict.fromkeys(("Llama3", "Llama3Config"), "models.llama3"),
    **dict.fromkeys(("Speedrun", "SpeedrunConfig"), "models.speedrun"),
    **dict.fromkeys(("init_state", "make_train_step"), "training.step"),
    **dict.fromkeys(("load", "load_hf", "load_llmc", "save_hf", "save_llmc"), "weights"),
}
__all__ = [*_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]
_MODULES = (
    "bench cli config data devices evaluation generation models optim parallel plot precision "
    "processes stages training weights"
).split()


def __getattr__(name: str):
    import importlib

    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"gptjax.{_MODULE_OF[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"gptjax.{name}")
    raise AttributeError(f"module 'gptjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])
