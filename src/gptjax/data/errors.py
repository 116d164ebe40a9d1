"""Base class of the data package's errors."""

from gptjax.terminal import printable


class DataError(Exception):
    """Data that is missing, damaged or unsuitable: an error that the user can correct.

    Messages quote file names and file contents, so control characters are replaced when an error
    is shown.
    """

    def __str__(self) -> str:
        return printable(super().__str__())
