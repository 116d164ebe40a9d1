"""Every back end of every operation on its examples, with random odd numbers of rows, compared with
the definition in fp64: plain, and under each transformation of JAX.

Custom kernels run on a GPU only. Their own tests compare them by the 2× rule.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import extend

DTYPES = (jnp.float32, jnp.bfloat16)
PLAIN = ("xla", "reference", "fused")
"""Back ends that run on a CPU, too."""
ROWS = sorted(2 * np.random.default_rng(20261124).integers(64, 200, 2) + 1)


def cases():
    """Yield a parameter for each back end, example and dtype."""
    for name, operation in extend.OPERATIONS.items():
        for make, dtype in itertools.product(operation.examples, DTYPES):
            if make(int(ROWS[0]), dtype) is None:
                continue
            for back_end in operation.back_ends:
                marks = [] if back_end.name in PLAIN else [pytest.mark.gpu]
                label = f"{name}-{back_end.name}-{make.__name__}-{jnp.dtype(dtype).name}"
                values = name, back_end.name, make, dtype
                yield pytest.param(*values, marks=marks, id=label)


def limit(dtype, on_gpu):
    """Return the largest relative error: that of doctor; fp32 matmuls are in TF32 on a GPU."""
    return 1e-5 if dtype == jnp.float32 and not on_gpu else 0.02


def relative(found, expected):
    found, expected = (np.asarray(x).astype(np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)


def with_gradients(f, differentiable):
    """Return f with the gradients of the inner product of its results and fixed directions."""

    def direction(i, out):
        values = np.random.default_rng(i).standard_normal(out.shape).astype(jnp.bfloat16)
        return jnp.asarray(values).astype(out.dtype)

    def both(*arrays):
        if not differentiable:
            return jax.tree.leaves(f(*arrays))
        out, pull = jax.vjp(f, *arrays)
        leaves, structure = jax.tree.flatten(out)
        directions = [direction(i, leaf) for i, leaf in enumerate(leaves)]
        gradients = pull(jax.tree.unflatten(structure, directions))
        return leaves + [g for g in jax.tree.leaves(gradients) if g.dtype != jax.dtypes.float0]

    return both


def exact(example, arrays, monkeypatch):
    """Return results and gradients of the definition in fp64: it computes in `jnp.float32`, which
    is another dtype here."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), monkeypatch.context() as m:
        m.setattr(jnp, "float32", jnp.float64)
        wide = [jnp.asarray(np.asarray(x).astype(np.float64)) for x in arrays]
        found = jax.jit(with_gradients(example.reference, example.differentiable))(*wide)
        assert all(x.dtype == jnp.float64 for x in found if jnp.issubdtype(x.dtype, jnp.floating))
        return [np.asarray(x) for x in found]


def everything(f, differentiable):
    """Return the results under each transformation, as one function of pairs of arrays."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    replicated = PartitionSpec()
    how = {"mesh": mesh, "in_specs": replicated, "out_specs": replicated, "check_vma": False}

    def run(*pairs):
        arrays = [pair[0] for pair in pairs]
        plain = with_gradients(f, differentiable)
        return {
            "plain": plain(*arrays),
            "remat": with_gradients(jax.checkpoint(f), differentiable)(*arrays),
            "vmap": [x[0] for x in jax.vmap(plain)(*pairs)],
            "scan": [x[0] for x in jax.lax.scan(lambda _, a: (None, plain(*a)), None, pairs)[1]],
            "shard_map": jax.shard_map(plain, **how)(*arrays),
        }

    return run


@pytest.mark.parametrize("name, back_end, make, dtype", [*cases()])
def test_results_and_gradients_under_every_transformation(name, back_end, make, dtype, monkeypatch):
    on_gpu = jax.default_backend() == "gpu"
    for seed, rows in enumerate(ROWS if on_gpu else ROWS[:1]):
        example = make(int(rows), dtype)
        rng = np.random.default_rng(seed)
        # The second of each pair differs: vmap and scan must keep them apart.
        pairs = [
            jnp.asarray(np.stack([rng.standard_normal(x.shape) for _ in range(2)]), x.dtype)
            for x in example.shapes
        ]
        arrays = [pair[0] for pair in pairs]
        f = functools.partial(example.call, implementation=back_end)
        try:
            found = jax.jit(everything(f, example.differentiable))(*pairs)
        except ValueError as error:
            if f"implementation {back_end!r}" not in str(error):
                raise
            pytest.skip(str(error))
        with jax.enable_x64(True):
            found["x64"] = jax.jit(with_gradients(f, example.differentiable))(*arrays)
        expected = exact(example, arrays, monkeypatch)
        most = limit(dtype, on_gpu)
        for transform, results in found.items():
            assert len(results) == len(expected)
            for i, (ours, true) in enumerate(zip(results, expected, strict=True)):
                error = relative(ours, true)
                assert error <= most, f"{transform}, {rows} rows, result {i}: {error:.1e}"
