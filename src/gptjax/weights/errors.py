"""The error classes of the weights package."""

from gptjax.terminal import printable


class WeightsError(ValueError):
    """A path, file or tree of arrays that cannot be loaded or saved.

    The message says what was expected, what was found and what to do. Messages quote names and
    values in files, so `str` replaces control characters.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class CheckpointError(WeightsError):
    """A checkpoint that cannot be written or read. Earlier complete checkpoints are unchanged."""


class DamagedError(CheckpointError):
    """A checkpoint whose files changed after they were saved."""
