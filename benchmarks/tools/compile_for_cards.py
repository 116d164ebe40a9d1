"""Compile every Triton kernel for other GPUs than this machine's: shared memory, registers, spills.
No GPU is needed, but the packages of the tests are: pip install -e '.[test]'.

    python benchmarks/tools/compile_for_cards.py --out benchmarks/results/cards.json
    python benchmarks/tools/compile_for_cards.py --capabilities 89 --operations layer_norm softmax

The calls are the examples of the registry, forward and backward, with 65,536 tokens in bf16 and in
fp32 (TF32 on the tensor cores). docs/cards.md has the table of the results.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from gptjax.bench import results
from gptjax.bench.results import Row, print_table
from gptjax.doctor.kernels import complete
from pallas_kernels import _dispatch

sys.path.append(str(Path(__file__).parents[2] / "tests"))
ROWS = 65536
DTYPES = ("bfloat16", "float32")
OPERATIONS = tuple(name for name, entry in _dispatch.OPERATIONS.items() if entry.examples)


@dataclasses.dataclass(frozen=True)
class Card:
    """GPUs of one compute capability."""

    names: str
    shared_kb: int
    """Shared memory that a thread block (CTA) can have: CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability"."""


CARDS = {
    80: Card("A100, A30", 163),
    86: Card("RTX 30, A10, A40", 99),
    89: Card("RTX 40, L4, L40, L40S", 99),
    90: Card("H100, H200", 227),
    100: Card("B200", 227),
    120: Card("RTX 50", 99),
}
"""By compute capability without the point, as in sm_80."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile every Triton kernel for other GPUs, without a GPU."""

    capabilities: tuple[Literal[*CARDS], ...] = tuple(CARDS)
    """Compute capabilities without the point."""
    operations: tuple[Literal[*OPERATIONS], ...] = OPERATIONS
    dtypes: tuple[Literal[*DTYPES], ...] = DTYPES
    out: Path | None = None
    """JSON file of the results."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a kernel does not fit a GPU or spills."""
    options = tyro.cli(Options, args=arguments, description=__doc__)
    rows = []
    for row in compiled(options.operations, options.capabilities, options.dtypes):
        rows.append(row)
        print(f"{row['operation']}, {row['example']}, {row['dtype']}, sm_{row['capability']}: "
              f"{row['error'] or 'fits'}", file=sys.stderr, flush=True)  # fmt: skip
    bad = [row for row in rows if row["error"]]
    figures = [
        Row(f"{row['operation']} {row['dtype']} sm_{row['capability']}",
            (f"{row['shared_kb']} KB", f"{row['registers']}", f"{row['spill_bytes']} B"),
            f"{row['example']}; {row['error'] or ', '.join(row['kernels'])}")
        for row in rows
    ]  # fmt: skip
    print_table("Triton kernels", ("shared", "registers", "spills"), figures)
    print(f"{len(rows)} calls compiled, {len(bad)} do not fit")
    if options.out is not None:
        command = results.command("benchmarks/tools/compile_for_cards.py", arguments)
        device = "compiled without a GPU"
        results.write(options.out, results.new(command, rows, device=device, packages=("triton",)))
    return 1 if bad else 0


def compiled(
    operations: Sequence[str], capabilities: Sequence[int], dtypes: Sequence[str]
) -> Iterator[dict]:
    """Compile the examples; yield a row for each operation, example, dtype and capability.

    An example that the Triton back end does not support in a dtype has no row.
    """
    for operation in operations:
        for make in _dispatch.OPERATIONS[operation].examples:
            for dtype in dtypes:
                example = make(ROWS, jnp.dtype(dtype))
                if example is None:
                    continue
                for capability in capabilities:
                    row = _row(example, capability)
                    if row is not None:
                        yield {
                            "operation": operation,
                            "example": _dispatch.title(make),
                            "dtype": dtype,
                            "capability": capability,
                        } | row


def _row(example: _dispatch.Example, capability: int) -> dict | None:
    """Compile the kernels of an example; None if it has none in Triton."""
    import kernel_tools

    # A kernel is recorded when it is traced: a cached trace of another capability has none.
    jax.clear_caches()
    try:
        kernels = kernel_tools.triton_kernels(
            complete(example, "triton"), *example.shapes, capability=capability
        )
    except ValueError as error:
        if "implementation" in str(error):  # refused by the registry
            return None
        raise
    limit = CARDS[capability].shared_kb
    row = {
        "kernels": sorted({kernel.name for kernel in kernels}),
        "shared_kb": round(max(kernel.shared_bytes for kernel in kernels) / 1024, 1),
        "registers": max(kernel.registers for kernel in kernels),
        "spill_bytes": max(kernel.spill_bytes for kernel in kernels),
        "error": "",
    }
    if row["shared_kb"] > limit:
        row["error"] = f"needs {row['shared_kb']} KB of shared memory, the GPU has {limit}"
    elif row["spill_bytes"]:
        spilling = sorted({kernel.name for kernel in kernels if kernel.spill_bytes})
        row["error"] = f"{', '.join(spilling)} spill"
    return row


if __name__ == "__main__":
    sys.exit(main())
