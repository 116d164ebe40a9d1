"""Errors for options of other names or at wrong positions."""

import functools
import inspect
from collections.abc import Callable, Mapping

import jax


def with_hints[**P, R](
    hints: Mapping[str, str], compiled: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: unknown options, and options passed by position, raise a TypeError that
    says what to write; so do traced numbers.

    Args:
        hints: texts for options of other libraries, by name.
        compiled: names of the options that are compiled into kernels.
    """

    def wrap(f: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(f).parameters
        arrays = sum(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters.values())
        names = [*parameters][arrays:]

        @functools.wraps(f)
        def call(*args: P.args, **options: P.kwargs) -> R:
            for name in sorted(options.keys() - parameters.keys()):
                hint = hints.get(name, f"expected one of {names}")
                raise TypeError(f"{f.__name__}: unknown option {name}: {hint}")
            if len(args) > arrays:
                raise TypeError(
                    f"{f.__name__}: options are passed by name, such as {names[0]}=…, after "
                    f"{arrays} arrays"
                )
            for name in compiled:
                if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(options.get(name))):
                    why = "is compiled into the kernel: pass a Python number, not a traced array"
                    raise TypeError(f"{f.__name__}: {name} {why}")
            return f(*args, **options)

        return call

    return wrap
