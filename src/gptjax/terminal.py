"""Untrusted text on a terminal, errors of the user, help texts, and the exit code of a command."""

import ast
import dataclasses
import inspect
import io
import itertools
import os
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Callable


def printable(text: str) -> str:
    """Replace control and other unprintable characters, except newline and tab, by U+FFFD.

    Names in a dataset, a checkpoint or a sampled text may contain escape sequences, which a
    terminal would execute.
    """
    return "".join(c if _is_shown(c) else "\ufffd" for c in text)


def print_line(text: str) -> None:
    """Print a line of progress at once, with `printable` text."""
    print(printable(text), flush=True)


class UserError(Exception):
    """An error that the user can correct: a command prints the text instead of a traceback.

    Texts quote file names and contents, so `str` replaces control characters.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, at most 300 characters."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def dimmed(text: str, stream: io.TextIOBase) -> str:
    """Return a text that a terminal shows dimmed; the text itself if the stream is no terminal."""
    plain = not stream.isatty() or os.environ.get("TERM") == "dumb"
    return text if plain or not text else f"\x1b[2m{text}\x1b[0m"


def hint(*commands: str, piped: bool = True) -> None:
    """Print the next commands to try, dimmed.

    Args:
        piped: print also if standard output is no terminal. False: a program may read the output.
    """
    if piped or sys.stdout.isatty():
        text = printable("next: " + "\n      ".join(commands))
        print(dimmed(text, sys.stdout), flush=True)


def _is_shown(character: str) -> bool:
    # `isprintable` is false for every space but U+0020, such as the no-break space of French text.
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def has_control_characters(text: str) -> bool:
    """Return True for text with control characters or surrogates.

    Python decodes invalid UTF-8 to surrogates.
    """
    return any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and its bases, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            try:
                body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
            except (OSError, TypeError):  # defined in an interpreter
                continue
            for field, after in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def interrupt(number: int, frame: object = None) -> None:
    """Raise KeyboardInterrupt, so that partial files are removed. Handler of SIGTERM.

    `exit_code` returns 128 plus the number of the signal.
    """
    raise KeyboardInterrupt(number)


def exit_code(
    command: Callable[[], object],
    errors: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted",
) -> int:
    """Run a command and return its exit code, with a line on standard error for a failure.

    Args:
        command: function to run. The line for a `UserError` or an OSError is its text, and the
            exit code is 1. Errors of other classes are not caught.
        errors: classes of further such errors.
        interrupted: the line after Ctrl-C, or after a `KeyboardInterrupt` whose argument is the
            number of a signal. The exit code is 128 plus this number.
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
    except (UserError, OSError, *errors) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(interrupted, file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)
    return 0
