"""The error classes of the weights package."""

from gptjax.terminal import UserError


class WeightsError(UserError, ValueError):
    """A path, file or tree of arrays that cannot be loaded or saved.

    The message says what was expected, what was found and what to do.
    """


class CheckpointError(WeightsError):
    """A checkpoint that cannot be written or read. Earlier complete checkpoints are unchanged."""


class DamagedError(CheckpointError):
    """A checkpoint whose files changed after they were saved."""
