"""Shares of the numbers that the FP8 operands of each call clip, and that are zero.

    shares(loss) → {"mlp.3.hidden": 0.0, "mlp.3.hidden.zero": 0.01, …}   # fourth call of mlp

A number counts as clipped if its magnitude in FP8 is the largest of the format: after the scale,
from 432 (e4m3) or 53,248 (e5m2), 4 % and 7 % below the largest number. Zeros are the numbers that
underflow, to 2⁻¹⁰ (e4m3) or 2⁻¹⁷ (e5m2), and those that are 0 before the conversion, such as the
gradients of padded logits. The numbers of the kernels themselves are counted, so the choice of back
ends is that of training.

Each call receives a row of zeros as a further input, and its backward pass returns the shares as
the gradient of this row. Outside `shares`, nothing is traced for them.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._types import Array, Float

OPERANDS = ("input", "hidden", "output_gradient", "hidden_gradient")
"""Operands of a call: x, the MLP's activation, the gradients of y and of the activation's input."""
KINDS = ("", ".zero")
"""What is counted of an operand, in the names of `shares`: clipped numbers, zeros."""
MOST_CALLS = 4096


@dataclasses.dataclass
class _Calls:
    """The calls in a loss."""

    zeros: Float[Array, "calls kinds operands"]
    names: list[str] = dataclasses.field(default_factory=list)
    found: dict[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    """"call.operand" and the kind → index in `zeros`."""


_calls: contextvars.ContextVar[_Calls | None] = contextvars.ContextVar("calls", default=None)
_counts: contextvars.ContextVar[dict | None] = contextvars.ContextVar("counts", default=None)


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shares(loss: Callable[[], Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Return the shares of clipped numbers and of zeros of each FP8 operand in the gradient of
    `loss`, fp32.

    Args:
        loss: a function that calls FP8 layers outside loops (`jax.lax.scan`, `jax.vmap`).
    """
    found = {}

    def with_zeros(zeros):
        with _set(_calls, _Calls(zeros, found=found)):
            return loss()

    zeros = jnp.zeros((MOST_CALLS, len(KINDS), len(OPERANDS)), jnp.float32)
    gradient = jax.grad(with_zeros)(zeros)
    return {name: gradient[place] for name, place in sorted(found.items())}


def counted(operation: str, f: jax.custom_vjp) -> Callable:
    """Return f, or inside `shares` f with the counts of its FP8 operands."""
    calls = _calls.get()
    if calls is None:
        return f
    row = len(calls.names)
    call = f"{operation}.{sum(name.startswith(f'{operation}.') for name in calls.names)}"
    calls.names.append(call)

    @contextlib.contextmanager
    def counting() -> Iterator[Callable[[], Array]]:
        counts: dict[str, list] = {}
        with _set(_counts, counts), _set(_calls, None):
            yield lambda: _row(counts)
        for operand in counts:
            for i, kind in enumerate(KINDS):
                calls.found[f"{call}.{operand}{kind}"] = row, i, OPERANDS.index(operand)

    def run(*args):
        static = {i: args[i] for i in f.nondiff_argnums}

        def whole(arrays):
            rest = iter(arrays)
            return [static[i] if i in static else next(rest) for i in range(len(args))]

        def forward(zeros, *arrays):
            del zeros
            with counting() as clipped:
                out, saved = f.fwd(*whole(arrays))
                return out, (saved, clipped())

        def backward(residuals, cotangents):
            saved, before = residuals
            with counting() as clipped:
                gradients = f.bwd(*static.values(), saved, cotangents)
                return before + clipped(), *gradients

        def undifferentiated(zeros, *arrays):
            del zeros
            with _set(_calls, None):  # f may call other FP8 layers here
                return f(*whole(arrays))

        call_f = jax.custom_vjp(undifferentiated)
        call_f.defvjp(forward, backward)
        return call_f(calls.zeros[row], *(x for i, x in enumerate(args) if i not in static))

    return run


def count(part: str, q: Float[Array, "..."]) -> None:
    """Count the clipped numbers and the zeros of an FP8 array, in a rule of a call that `counted`
    wraps."""
    counts = _counts.get()
    if counts is not None:
        size, largest = jnp.abs(q.astype(jnp.float32)), float(jnp.finfo(q.dtype).max)
        found = [is_one.sum(dtype=jnp.float32) for is_one in (size >= largest, size == 0)]
        counts.setdefault(part, []).append((jnp.stack(found), q.size))


def _row(counts: dict[str, list]) -> Float[Array, "kinds operands"]:
    def share(operand):
        parts = counts.get(operand, [])
        total = sum(float(size) for _, size in parts)  # may exceed int32: tokens times vocabulary
        return sum((found for found, _ in parts), jnp.zeros(len(KINDS))) / max(total, 1.0)

    return jnp.stack([share(operand) for operand in OPERANDS], axis=1)
