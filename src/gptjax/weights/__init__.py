"""Model weights: Hugging Face's safetensors, llm.c's `.bin`, and the arrays of a checkpoint.

A path, a file or arrays that cannot be used raise `WeightsError`, which is a ValueError. A wrong
option is a plain ValueError.
"""

from gptjax.weights.errors import WeightsError
from gptjax.weights.hf import load_hf, save_hf
from gptjax.weights.llmc import load_llmc, save_llmc
from gptjax.weights.params import model_from_params

__all__ = ["WeightsError", "load_hf", "load_llmc", "model_from_params", "save_hf", "save_llmc"]
