"""The error of every bench command."""


class BenchError(ValueError):
    """The measurement cannot run here, or a result cannot be read; the message says why."""
