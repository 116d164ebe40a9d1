"""Lookup of architectures and presets by name, in gptjax and in imported modules."""

import sys
from collections.abc import Iterator

from gptjax.models import gpt2, llama3, speedrun
from gptjax.models.base import ModelConfig

PRESETS: dict[str, ModelConfig] = {**gpt2.PRESETS, **llama3.PRESETS, **speedrun.PRESETS}
"""Configs of published models by name: `PRESETS["gpt2-medium"]`."""


def config_class(name: str) -> type[ModelConfig]:
    """Return the config class of an architecture, such as `GPT2Config` for "GPT2Config".

    A checkpoint stores this name. No code is read from a checkpoint: an architecture outside
    gptjax must have been imported.

    Raises:
        LookupError: no class or several classes have this name; the message says what to do.
    """
    known = {kind for kind in _subclasses(ModelConfig) if _is_current(kind)}
    found = [kind for kind in known if kind.__name__ == name]
    if len(found) == 1:
        return found[0]
    if found:
        modules = ", ".join(sorted(kind.__module__ for kind in found))
        raise LookupError(f"expected one class {name}, found one in each of {modules}")
    names = ", ".join(sorted({kind.__name__ for kind in known}))
    raise LookupError(
        f"expected one of the architectures {names}, found {name}; import the Python file that "
        f"defines {name} first (gptjax sample and evaluate: --config FILE; export writes models of "
        "gptjax only)"
    )


def _subclasses(kind: type[ModelConfig]) -> Iterator[type[ModelConfig]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_current(kind: type) -> bool:
    """Return False for a class whose module was executed again, as in a notebook."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
