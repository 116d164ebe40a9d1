"""Printing of untrusted text on a terminal."""

import unicodedata


def printable(text: str) -> str:
    """Replace control and other unprintable characters, except newline and tab, by U+FFFD.

    Names in a dataset, a checkpoint or a sampled text may contain escape sequences, which a
    terminal would execute.
    """
    return "".join(c if _is_shown(c) else "\ufffd" for c in text)


def _is_shown(character: str) -> bool:
    # `isprintable` is false for every space but U+0020, such as the no-break space of French text.
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
