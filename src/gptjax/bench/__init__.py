"""Measuring: `python -m gptjax.bench`, whose commands --help lists."""
