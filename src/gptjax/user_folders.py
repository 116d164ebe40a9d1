"""Folders in the home of the user: compiled executables and prepared datasets."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder of JAX's compilation cache: $JAX_COMPILATION_CACHE_DIR, else the user's.

    None if the variable is empty, or there is no home folder.
    """
    if (folder := os.environ.get("JAX_COMPILATION_CACHE_DIR")) is not None:
        return Path(folder) if folder else None
    return _user_folder()


def _user_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/gptjax or ~/.cache/gptjax; None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # XDG's specification: ignore a relative path
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "gptjax") if os.path.isabs(base) else None


def data_folder() -> Path:
    """Return the user's folder for prepared datasets: `data` in $XDG_CACHE_HOME/gptjax or
    ~/.cache/gptjax, or in the current folder without a home folder."""
    return (_user_folder() or Path()) / "data"
