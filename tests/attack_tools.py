"""Damage files, and judge what reads the files."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from process_tools import python

from gptjax.terminal import printable

SECONDS = 10
"""The longest time of a trial."""


class Hang(BaseException):
    """A trial that does not end."""


def flip_bits(content: bytes, rng: random.Random, stop: int | None = None) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice((1, 1, 2, 100))):
        changed[rng.randrange(stop or len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def resize(content: bytes, rng: random.Random) -> bytes:
    sizes = (0, 1, 7, 8, 1023, 1024, 1025, rng.randrange(len(content) + 1))
    sizes += tuple(len(content) + more for more in (1, 2, 4, 1024, 5000))
    return (content + rng.randbytes(5000))[: rng.choice(sizes)]


def zero_block(content: bytes, rng: random.Random) -> bytes:
    at, zeros = rng.randrange(len(content) + 1), bytes(rng.choice((2, 64, 512, 4096)))
    return (content[:at] + zeros + content[at + len(zeros) :])[: len(content)]


def not_a_file(path: Path, rng: random.Random) -> None:
    """Nothing, a directory, a FIFO, or a link to a copy, a device, itself, nothing or another
    file."""
    copy = path.rename(path.with_suffix(".moved"))
    others = [*sorted(path.parent.glob("*.bin")), "/dev/zero", "/dev/full", "/dev/tty", "nowhere"]
    link = rng.choice([copy, copy, path, *others])
    make = (lambda path: None, os.mkdir, os.mkfifo, *(5 * (lambda path: path.symlink_to(link),)))
    rng.choice(make)(path)


def damage(path: Path, change: Callable, rng: random.Random) -> None:
    """Apply a change of a content, or `not_a_file`, to a file."""
    if change is not_a_file:
        change(path, rng)
    else:
        path.write_bytes(change(path.read_bytes(), rng))


def judged(read: Callable[[], str], refusal: type[Exception]) -> tuple[str, str]:
    """Return the outcome of a trial, and the message of its error.

    The outcome is that of `read`, `refused` in printable characters, `control characters`, `crash`
    or `hang`.
    """

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    # Repeated: an exception in a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
    try:
        return read(), ""
    except refusal as error:
        said = str(error)
        return ("refused" if said == printable(said) else "control characters"), said
    except Hang:
        return "hang", ""
    except Exception as error:  # the failure that is looked for
        return "crash", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def in_a_process(file: str, trials: int) -> list[dict]:
    """Run a file of attacks as a script; return the rows that it prints."""
    return json.loads(python(file, str(trials)))


def counted(rows: list[dict], right: set[str]) -> Counter:
    """Return the number of rows with each outcome; fail if one is not among the right ones."""
    assert [row for row in rows if row["outcome"] not in right] == []
    return Counter(row["outcome"] for row in rows)
