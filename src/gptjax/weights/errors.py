"""The error class of the weights package."""


class WeightsError(ValueError):
    """A path, file or tree of arrays that cannot be loaded or saved.

    The message says what was expected, what was found and what to do.
    """
