"""Measuring: `python -m gptjax.bench kernels`."""
