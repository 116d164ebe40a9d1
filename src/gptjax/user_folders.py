"""Folders in the home of the user: compiled executables and prepared datasets."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the user's folder for compiled executables: $XDG_CACHE_HOME/gptjax or ~/.cache/gptjax.

    None if the environment and the password database have no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # XDG's specification: ignore a relative path
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "gptjax") if os.path.isabs(base) else None


def data_folder() -> Path:
    """Return the user's folder for prepared datasets: `data` in `cache_folder()`.

    Without a home folder, return `data` in the current folder.
    """
    cache = cache_folder()
    return Path("data") if cache is None else cache / "data"
