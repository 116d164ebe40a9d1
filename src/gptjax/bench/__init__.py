"""Measuring: `python -m gptjax.bench`, whose commands --help lists."""

from gptjax.terminal import UserError


class BenchError(UserError, ValueError):
    """The measurement cannot run here, or a result cannot be read; the message says why."""
