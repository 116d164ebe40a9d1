"""Printing on a terminal, untrusted text, the command line, and the exit code of a command."""

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any


def printable(text: str) -> str:
    """Replace control and other unprintable characters, except newline and tab, by U+FFFD.

    Names in a dataset, a checkpoint or a sampled text may contain escape sequences, which a
    terminal would execute.
    """
    return "".join(c if _is_shown(c) else "\ufffd" for c in text)


def _is_shown(character: str) -> bool:
    # `isprintable` is false for every space but U+0020, such as the no-break space of French text.
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def has_control_characters(text: str) -> bool:
    """Return True for text with control characters or surrogates.

    Python decodes invalid UTF-8 to surrogates.
    """
    return any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Break each line of `text` between words to fit `width`; a longer word stays whole."""
    how = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
    return "\n".join(textwrap.fill(line, width, **how) for line in text.split("\n"))


def command_line(kind: Any, **options: Any) -> Any:
    """Call `tyro.cli`; its --help is wrapped between words to fit the terminal."""
    import tyro

    given = options.get("args")
    helps = {"-h", "--help"} & {*(sys.argv[1:] if given is None else given)}
    # Also without --help, because tyro caches docstrings.
    with _joined_docstrings(), contextlib.ExitStack() as stack:
        if helps:
            stack.enter_context(contextlib.redirect_stdout(_Wrapping(sys.stdout)))
        return tyro.cli(kind, **options)


class _Wrapping:
    """Standard output of tyro, which fits boxes to the terminal, but not usage and description."""

    def __init__(self, out: Any):
        self._out, self._width = out, shutil.get_terminal_size().columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        return self._out.write(text if "│" in text else wrapped(text, self._width))


@contextlib.contextmanager
def _joined_docstrings() -> Iterator[None]:
    """Join the lines of each option's docstring: tyro keeps the breaks before indented lines."""
    import docstring_parser

    def joined(parse: Callable) -> Callable:
        def parsed(*arguments: Any) -> Any:
            found = parse(*arguments)
            for param in found.params:
                param.description = param.description and " ".join(param.description.split())
            return found

        return parsed

    before = {name: getattr(docstring_parser, name) for name in ("parse", "parse_from_object")}
    try:
        for name, parse in before.items():
            setattr(docstring_parser, name, joined(parse))
        yield
    finally:
        for name, parse in before.items():
            setattr(docstring_parser, name, parse)


def interrupt(number: int, frame: object = None) -> None:
    """Raise KeyboardInterrupt, so that partial files are removed. Handler of SIGTERM.

    `exit_code` returns 128 plus the number of the signal.
    """
    raise KeyboardInterrupt(number)


def exit_code(
    command: Callable[[], object],
    errors: tuple[type[Exception], ...],
    interrupted: Callable[[], str] = lambda: "interrupted",
) -> int:
    """Run a command and return its exit code, with a line on standard error for a failure.

    Args:
        command: function to run. Errors of other classes are not caught.
        errors: errors of the user, whose text is the line. The exit code is 1.
        interrupted: returns the line after Ctrl-C, or after a `KeyboardInterrupt` whose argument is
            the number of a signal. The exit code is 128 plus this number.
    """
    try:
        try:
            command()
        finally:
            # From here on, Python would ignore the exception with a traceback and exit with code 0.
            if signal.getsignal(signal.SIGTERM) is interrupt:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.stdout.flush()
    # The reader, such as `head`, has ended. Avoid a second error in the flush at exit.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except errors as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(interrupted(), file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    return 0
