"""The table of back ends in docs/cards.md, from the registry of pallas_kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels.extend import OPERATIONS, recorded, select, tracing_for

# Compute capability and SMs.
GPUS = {
    "A100": ((8, 0), 108),
    "L40S": ((8, 9), 142),
    "H100, H200": ((9, 0), 132),
    "B200": ((10, 0), 148),
}
PRECISION = {"fp32": jax.lax.Precision.HIGHEST, "tf32": jax.lax.Precision.HIGH, "bf16": None}
ROWS = 4096
# Facts of the operations without an example: GPT-2 124M, one sequence.
SIZES = {"sequences": 1, "channels": 768, "head_dim": 64}


def table() -> tuple[list[str], list[list[str]]]:
    """Return head and lines: the back ends of each operation, in each numerics, on each GPU.
    Operations that are alike share a line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for operation in (name for name in OPERATIONS if name in pallas_kernels.__all__):
        for numerics in ("fp32", "tf32", "bf16", "fp8"):
            if (facts := facts_of(operation, numerics)) is not None:
                cells = tuple(back_ends(operation, facts, *gpu) for gpu in GPUS.values())
                rows.setdefault((f"`{operation}`", *cells), []).append(numerics)
    head = ["operation", "numerics"]
    head += [f"{names} ({a}.{b})" for names, ((a, b), _) in GPUS.items()]
    alike: dict[tuple[str, ...], list[str]] = {}
    for (name, *cells), numerics in rows.items():
        alike.setdefault((", ".join(numerics), *cells), []).append(name)
    return head, sorted([", ".join(sorted(names)), *cells] for cells, names in alike.items())


def facts_of(operation: str, numerics: str) -> dict[str, Any] | None:
    """Return the facts that the first example of an operation reads off its arguments; None if the
    operation does not have the numerics."""
    dtype = jnp.float32 if numerics in ("fp32", "tf32") else jnp.bfloat16
    precision = {"precision": PRECISION[numerics]} if numerics in PRECISION else {}
    entry = OPERATIONS[operation]
    if not entry.examples:
        own = SIZES | {"dtype": dtype, "numerics": numerics} | precision
        names = entry.facts.__dataclass_fields__
        known = {"numerics", "precision"} & {*names} or numerics in ("fp32", "bf16")
        return {name: own[name] for name in names} if known and {*names} <= {*own} else None
    options = [{"numerics": numerics}, *([precision] if precision else [])]
    options += [{}] if numerics in ("fp32", "bf16") else []
    example = next(filter(None, (make(ROWS, dtype) for make in entry.examples)), None)
    for how in options if example else ():
        try:
            with recorded() as choices:
                call = functools.partial(example.call, implementation="auto", **how)
                jax.eval_shape(call, *example.shapes)
        except (TypeError, ValueError):  # no such argument, or no such numerics
            continue
        return vars(next(c.facts for c in choices if c.operation == operation))
    return None


def back_ends(operation: str, facts: dict[str, Any], capability: tuple[int, int], sms: int) -> str:
    """Return the back ends that can run on a GPU, the one that auto selects first, in bold."""
    usable, gpu = [], AbstractDevice(device_kind="GPU", num_cores=sms, platform="cuda")
    mesh = AbstractMesh((), (), abstract_device=gpu)
    with tracing_for(capability), jax.sharding.use_abstract_mesh(mesh):
        for name in ("auto", *(back_end.name for back_end in OPERATIONS[operation].back_ends)):
            try:
                usable.append(select(operation, name, **facts))
            except ValueError:
                continue
    if not usable:
        return "–"
    auto, *others = dict.fromkeys(usable)
    return ", ".join([f"**{auto}**", *(name for name in others if name != "reference")])
