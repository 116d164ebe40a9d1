"""Base class of the errors of the evaluation package."""

from gptjax.terminal import printable


class EvaluationError(ValueError):
    """A file, an item or an option of an evaluation that the user can correct.

    Messages quote the contents of files, so `str` replaces control characters.
    """

    def __str__(self) -> str:
        return printable(super().__str__())
