"""GPT-2 weights in the two formats that others read and write: Hugging Face's safetensors and llm.c's `.bin`."""

from gptjax.weights.hf import load_hf, save_hf
from gptjax.weights.llmc import load_llmc, save_llmc

__all__ = ["load_hf", "load_llmc", "save_hf", "save_llmc"]
