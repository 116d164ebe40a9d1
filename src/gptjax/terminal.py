"""Printing of untrusted text on a terminal."""


def printable(text: str) -> str:
    """Replace control characters, except newline and tab, by U+FFFD.

    Names in a dataset, a checkpoint or a sampled text may contain escape sequences, which a
    terminal would execute.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
