"""Model weights: runs and checkpoints, Hugging Face's safetensors, and llm.c's `.bin`.

A path, a file or arrays that cannot be used raise `WeightsError`, which is a ValueError. A wrong
option is a plain ValueError.
"""

from gptjax.weights.errors import CheckpointError, DamagedError, WeightsError
from gptjax.weights.hf import save_hf
from gptjax.weights.llmc import save_llmc
from gptjax.weights.loading import Loaded, load, load_hf, load_llmc
from gptjax.weights.params import model_from_params

__all__ = [
    "CheckpointError",
    "DamagedError",
    "Loaded",
    "WeightsError",
    "load",
    "load_hf",
    "load_llmc",
    "model_from_params",
    "save_hf",
    "save_llmc",
]
