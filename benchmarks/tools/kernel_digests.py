"""Digests of the results and gradients of every operation, in every precision and on every back end
of this machine, to compare two commits bit for bit.

    python benchmarks/tools/kernel_digests.py --out before.json       # in a checkout of one commit
    python benchmarks/tools/kernel_digests.py --compare before.json   # in a checkout of the other

The calls are the examples of the registry and the layers with FP8 matmuls, with random arrays. A
result that differs between two runs has no digest. On a GPU, set
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false": autotuning may select
other kernels in each process.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import pallas_kernels as pk
from gptjax.doctor.kernels import complete
from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Example

DTYPES = (jnp.float32, jnp.bfloat16)
ONE_THREAD = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Options:
    """Print or compare digests of the results and gradients of every operation."""

    operations: tuple[str, ...] = ()
    """Only these operations; all if none is named."""
    rows: int = 1024
    """Rows (tokens) of each call; Mosaic's tiles divide the default."""
    out: Path | None = None
    """JSON file for the digests."""
    compare: Path | None = None
    """JSON file of another commit. Exit with status 1 if a call of both has other digests."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An example of an operation, in a back end."""

    title: str
    operation: str
    example: Example
    back_end: str

    @property
    def name(self) -> str:
        """Name of the case, unique."""
        return f"{self.title}, {self.example.shapes[0].dtype} {self.back_end}"

    @functools.cached_property
    def arrays(self) -> list[jax.Array]:
        rng = np.random.default_rng(zlib.crc32(self.name.rpartition(" ")[0].encode()))
        return [jnp.asarray(_drawn(rng, x)) for x in self.example.shapes]

    def compiled(self) -> Callable[[], list[jax.Array]] | None:
        """Return the compiled call with its gradients. None if the back end refuses the call."""
        # Mosaic's compiler ended the process in two threads.
        with ONE_THREAD if self.back_end == "mosaic" else contextlib.nullcontext():
            try:
                f = complete(self.example, self.back_end)
                executable = jax.jit(f).lower(*self.arrays).compile()
            except ValueError as error:
                if "implementation" not in str(error):
                    raise
                print(f"{self.name}: refused", file=sys.stderr, flush=True)
                return None
        return lambda: jax.tree.leaves(executable(*self.arrays))


def _drawn(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return rng.standard_normal(shape.shape, np.float32).astype(shape.dtype)
    return rng.integers(0, 11, shape.shape).astype(shape.dtype)


def cases(rows: int) -> Iterator[Case]:
    """Yield every example of the registry, and the layers in FP8, for each dtype and back end."""
    for dtype in DTYPES:
        found = [
            (f"{operation}, {_dispatch.title(make)}", operation, example)
            for operation, entry in _dispatch.OPERATIONS.items()
            for make in entry.examples
            if (example := make(rows, dtype)) is not None
        ]
        for title, operation, call, sizes in fp8_calls(rows):
            shapes = tuple(jax.ShapeDtypeStruct(size, dtype) for size in sizes)
            found.append((title, operation, Example(call, call, shapes)))
        for title, operation, example in found:
            registered = "flash_attention" if operation == "projected_attention" else operation
            for back_end in _dispatch.OPERATIONS[registered].back_ends:
                yield Case(title, operation, example, back_end.name)


def fp8_calls(rows: int) -> Iterator[tuple[str, str, Callable, list[tuple]]]:
    """Yield title, operation, function and sizes of the arrays of each layer with FP8 matmuls."""
    x, precision = (rows, 768), {"numerics": "fp8"}

    def weights(f, *indices):
        """Weights of a size that keeps the results near 1."""

        def call(*arrays, **how):
            small = [w * w.shape[0] ** -0.5 if i in indices else w for i, w in enumerate(arrays)]
            return f(*small, **precision, **how)

        return call

    yield "FP8 linear", "linear", weights(pk.linear, 1), [x, (768, 768), (768,)]
    yield "FP8 mlp", "mlp", weights(pk.mlp, 1, 3), [x, (768, 3072), (3072,), (3072, 768)]
    yield (
        "FP8 swiglu",
        "swiglu",
        weights(pk.swiglu, 1, 2, 3),
        [x, (768, 2048), (768, 2048), (2048, 768)],
    )
    attend = weights(functools.partial(pk.projected_attention, heads=12), 1)
    yield "FP8 projected_attention", "projected_attention", attend, [(1, *x), (768, 2304), (2304,)]

    def norm_and_mlp(x, scale, bias, w, b, w2, **how):
        rows = pk.layer_norm(x, scale, bias, numerics="fp8")
        return pk.mlp(rows, w * 768**-0.5, b, w2 * 3072**-0.5, numerics="fp8", **how)

    yield (
        "FP8 layer_norm and mlp",
        "mlp",
        norm_and_mlp,
        [x, (768,), (768,), (768, 3072), (3072,), (3072, 768)],
    )
    targets = jnp.arange(rows, dtype=jnp.int32) % 1000

    def losses(x, w, **how):
        how |= {"vocab_size": 1000, "numerics": "fp8"}
        return pk.linear_cross_entropy(x, w * 0.04, targets, **how)

    yield "FP8 linear_cross_entropy", "linear_cross_entropy", losses, [x, (1024, 768)]


def digests(options: Options) -> dict[str, list[str]]:
    """Return the digest of each result and gradient, by the name of the case."""
    named = options.operations or _dispatch.OPERATIONS
    chosen = [case for case in cases(options.rows) if case.operation in named]
    found = {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for case, run in zip(chosen, pool.map(Case.compiled, chosen), strict=True):
            if run is None:
                continue
            first, second = (jax.device_get(run()) for _ in range(2))
            found[case.name] = [
                _digest(x) if x.tobytes() == y.tobytes() else "varies"
                for x, y in zip(first, second, strict=True)
            ]
            print(f"{case.name}: {' '.join(found[case.name])}", file=sys.stderr, flush=True)
    return found


def _digest(x: np.ndarray) -> str:
    if x.dtype == jax.dtypes.float0:
        return "integer"
    return hashlib.sha256(x.tobytes() + str(x.dtype).encode()).hexdigest()[:12]


def main() -> int:
    """Run the command line; return 1 if a call of both commits has other digests."""
    options = tyro.cli(Options, description=__doc__)
    before = json.loads(options.compare.read_text()) if options.compare else {}
    found = digests(options)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    both = [name for name in found if name in before]
    other = [name for name in both if found[name] != before[name]]
    for name in other:
        print(f"differs: {name}: {before[name]} → {found[name]}")
    if options.compare is not None:
        missing = sorted({*before} - {*found}) if not options.operations else []
        print(f"{len(both) - len(other)} calls equal, {len(other)} differ, missing: {missing}")
    return 1 if other else 0


if __name__ == "__main__":
    raise SystemExit(main())
