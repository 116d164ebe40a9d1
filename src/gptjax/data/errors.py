"""Base class of the errors of the data package."""

from gptjax.terminal import printable


class DataError(Exception):
    """Data that is missing, damaged or unsuitable: an error that the user can correct.

    Base class of CorpusError, DatasetError, PrepareError, ShardError and TokenizerUnavailable.
    Messages quote file names and contents, so `str` replaces control characters.
    """

    def __str__(self) -> str:
        return printable(super().__str__())
