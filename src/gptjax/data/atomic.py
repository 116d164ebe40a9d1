"""Dataset folders that are either complete or not there.

A dataset is made in a hidden sibling (`data/.NAME.partial`) and renamed when it is done, so no
reader ever meets half of one, however the maker died. A lock beside it (`data/.NAME.lock`, dropped
by the kernel with its process) lets eight processes of one job ask for the same dataset at once:
one makes it, seven wait.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gptjax.data.errors import DataError
from gptjax.data.manifest import MANIFEST


class PrepareError(DataError, ValueError):
    """A dataset that cannot be prepared as asked."""


def dataset_folder(data_dir: str | os.PathLike, name: str) -> Path:
    """`data_dir/name`. Raises PrepareError for a name that is a path or hidden."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise PrepareError(
            f"expected a plain folder name as the dataset's name, found {name!r}; put folders in "
            "--data-dir"
        )
    return Path(data_dir) / name


def partial_folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def is_partial(folder: Path) -> bool:
    return folder.name.startswith(".") and folder.name.endswith((".partial", ".old"))


@contextlib.contextmanager
def locked(final: Path, log: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock of the dataset `final`, waiting for whoever has it, and undo what a killed
    `commit` left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f".{final.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that is preparing {final}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        old = _old_folder(final)
        if old.exists() and not final.exists():
            os.replace(old, final)
        shutil.rmtree(old, ignore_errors=True)
        yield


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """An empty temporary folder that becomes `final` if the block ends well and vanishes if it does
    not.

    Call it under `locked`. An existing `final` is replaced; a temporary folder left by a killed
    process is removed.
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
    """Rename `partial` to `final`, in place of what is there."""
    if final.exists():
        if not (final / MANIFEST).exists():
            raise PrepareError(
                f"{final} exists and was not made by gptjax (no {MANIFEST}); choose another --name"
            )
        os.replace(final, _old_folder(final))
    os.replace(partial, final)
    shutil.rmtree(_old_folder(final), ignore_errors=True)


def _old_folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")
