"""Measuring: `python -m gptjax.bench`, whose commands --help lists."""


class BenchError(ValueError):
    """The measurement cannot run here, or a result cannot be read; the message says why."""
