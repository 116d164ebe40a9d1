"""GPT-2 weights: Hugging Face's safetensors, llm.c's `.bin`, and a checkpoint's arrays.

Every refusal of a path, a file or arrays is a `WeightsError`, which is a ValueError. Wrong options
are plain ValueErrors.
"""

from gptjax.weights._params import WeightsError, model_from_params
from gptjax.weights.hf import load_hf, save_hf
from gptjax.weights.llmc import load_llmc, save_llmc

__all__ = ["WeightsError", "load_hf", "load_llmc", "model_from_params", "save_hf", "save_llmc"]
