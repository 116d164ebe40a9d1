"""gptjax: GPT-2 training in JAX on CUDA GPUs."""

__version__ = "0.1.0"

_PUBLIC = {
    "GPT2": "gptjax.models.gpt2",
    "GPT2Config": "gptjax.models.gpt2",
    "PRESETS": "gptjax.models.gpt2",
    "loss_fn": "gptjax.models.gpt2",
    "Precision": "gptjax.precision",
    "generate": "gptjax.sampling",
    "load_hf": "gptjax.weights",
    "save_hf": "gptjax.weights",
    "load_llmc": "gptjax.weights",
    "save_llmc": "gptjax.weights",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str):
    # Loaded on first use: `python -m gptjax.data` and `gptjax.plot` need no JAX, and start in a tenth of the time.
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name == "optim":
        return importlib.import_module("gptjax.optim")
    raise AttributeError(f"module 'gptjax' has no attribute {name!r}")
