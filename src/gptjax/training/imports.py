"""Imports of packages that would import PyTorch, too."""

import contextlib
import contextvars
import sys
from collections.abc import Iterator

_hidden = contextvars.ContextVar("hidden", default=False)


class _NoTorch:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch" and _hidden.get():
            raise ModuleNotFoundError("PyTorch is not needed", name=name)


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Let packages that import PyTorch where it is installed do without: the import takes 1.2 s or
    more and is not needed. Other threads can import PyTorch, unless they have a copy of this
    context."""
    # Not as None in sys.modules: Triton 3.8 looks whether there is such a key.
    sys.meta_path.insert(0, finder := _NoTorch())
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)
        sys.meta_path.remove(finder)
