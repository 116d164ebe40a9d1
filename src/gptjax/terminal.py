"""Text from files, made safe to print."""


def printable(text: str) -> str:
    """Replace control characters, except newline and tab, by U+FFFD.

    Names in a dataset, a checkpoint or a sampled text may contain escape sequences, which would act
    on the terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
