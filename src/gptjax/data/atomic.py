"""Atomic creation of dataset folders.

A dataset is written to a hidden sibling folder (`data/.NAME.partial`) and renamed at the end, so a
partial dataset is never visible. A lock file (`data/.NAME.lock`) serializes the processes that
request the same dataset: one process prepares the dataset, and the other processes wait. The
operating system releases the lock when a process ends.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gptjax.data.errors import DataError
from gptjax.data.manifest import MANIFEST
from gptjax.terminal import has_control_characters


class PrepareError(DataError, ValueError):
    """A dataset that cannot be prepared with the given options."""


def dataset_folder(data_dir: str | os.PathLike, name: str) -> Path:
    """Return `data_dir/name`, or the target of this path if it is a symbolic link.

    Raises:
        PrepareError: the name is empty, hidden or a path, or has control characters.
    """
    plain = name and not name.startswith(".") and Path(name).name == name
    if not plain or has_control_characters(name):
        raise PrepareError(
            "expected a plain folder name without control characters as the dataset's name, found "
            f"{name!r}; put folders in --data-dir"
        )
    folder = Path(data_dir) / name
    return folder.resolve() if folder.is_symlink() else folder


def partial_folder(final: Path) -> Path:
    """Return the folder in which the dataset `final` is prepared."""
    return final.with_name(f".{final.name}.partial")


def is_partial(folder: Path) -> bool:
    """Return whether a folder is a dataset in preparation."""
    return folder.name.startswith(".") and folder.name.endswith(".partial")


@contextlib.contextmanager
def locked(final: Path, log: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock of the dataset `final`. Waits while another process holds the lock.

    Raises:
        PrepareError: the folder of the datasets is a file.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise PrepareError(
            f"{final.parent}: expected a folder, or a path where one can be created, found a file; "
            "choose another --data-dir"
        ) from error
    with final.with_name(f".{final.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that is preparing {final}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield an empty temporary folder, and rename it to `final` at the end.

    The folder is removed if the block raises. The caller holds `locked`. An existing `final` is
    replaced; a temporary folder of a killed process is removed.
    """
    partial = partial_folder(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        commit(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def commit(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`. An existing dataset is replaced.

    Raises:
        PrepareError: `final` exists and is not a dataset of gptjax.
    """
    if final.exists():
        if not (final / MANIFEST).exists():
            raise PrepareError(
                f"{final} exists and was not made by gptjax (no {MANIFEST}); choose another --name"
            )
        shutil.rmtree(final)
    os.replace(partial, final)
