"""pallas_kernels.symmetric against its references and NumPy, by the 2× rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200, on_gpu
from rule_tools import check, refused

from pallas_kernels import _dispatch
from pallas_kernels.symmetric import REFERENCES, ba_plus_caa, xtx, xxt
from pallas_kernels.symmetric.mosaic import schedule

B, C, D = 0.7, -0.45, 1.9
POLYNOMIAL = "ba_plus_caa, d"
COEFFICIENTS = {"xxt": {}, "xtx": {}, "ba_plus_caa": {"b": B, "c": C}}
COEFFICIENTS[POLYNOMIAL] = COEFFICIENTS["ba_plus_caa"] | {"d": D}
FUNCTIONS = {"xxt": xxt, "xtx": xtx, "ba_plus_caa": ba_plus_caa, POLYNOMIAL: ba_plus_caa}
FUNCTIONS = {name: functools.partial(f, **COEFFICIENTS[name]) for name, f in FUNCTIONS.items()}
SHAPES = [
    (2, 16, 8),  # aligned
    (5, 7),  # no leading axis, odd
    (2, 3, 9, 4),  # two leading axes
    (1, 1, 1),
]


def reference(kernel):
    return functools.partial(REFERENCES[kernel.split(",")[0]], **COEFFICIENTS[kernel])


def matrices(kernel, shape, dtype):
    """Random matrices of norms near 1; for `ba_plus_caa` symmetric ones, square on the last
    side."""
    rng = np.random.default_rng(0)
    if not kernel.startswith("ba_plus_caa"):
        return jnp.asarray(rng.standard_normal(shape) * max(shape[-2:]) ** -0.5, dtype)
    a = rng.standard_normal((*shape[:-2], shape[-1], shape[-1])) * (2 * shape[-1]) ** -0.5
    return jnp.asarray(a + a.mT, dtype)


def textbook(kernel, a):
    """In the dtype of a, operation by operation, in NumPy or JAX."""
    if not COEFFICIENTS[kernel]:
        return a @ a.mT if kernel == "xxt" else a.mT @ a
    b, c, d = (np.asarray(x, a.dtype) for x in (B, C, D if kernel == POLYNOMIAL else 0))
    return d * np.broadcast_to(np.eye(a.shape[-1], dtype=a.dtype), a.shape) + (b * a + c * (a @ a))


BF16, FP16 = jnp.bfloat16, jnp.float16
MOSAIC_SHAPES = [
    (2, 128, 64),  # one tile: half of the only product is not stored
    # six: tiles from two rows in one product, and several products for each block of threads
    (2, 384, 192),
]
GPU_SHAPES = [
    (3, 192, 192),  # the last tile is half outside
    (2, 768, 384),  # six tiles a side, as many as in GPT-2's matrices
    (140, 128, 128),  # more pieces of work than multiprocessors, one tile each
]
CASES = [
    # Every shape in bf16, and one in the other dtypes: XLA's code depends on one or the other.
    *itertools.product(["xla"], FUNCTIONS, SHAPES, [BF16]),
    *itertools.product(["xla"], FUNCTIONS, SHAPES[1:2], [jnp.float32, FP16]),
    *itertools.product(["mosaic"], FUNCTIONS, MOSAIC_SHAPES, [BF16]),
    *on_gpu(
        *itertools.product(["mosaic"], ["xxt", POLYNOMIAL], GPU_SHAPES, [BF16]),
        *itertools.product(["mosaic"], ["xtx", "ba_plus_caa"], GPU_SHAPES[:1], [BF16]),
        ("mosaic", "xxt", GPU_SHAPES[0], FP16),
    ),
]


@pytest.mark.parametrize("back_end, kernel, shape, dtype", CASES, ids=str)
def test_output_and_gradient(back_end, kernel, shape, dtype, interpreter):
    """Of Mosaic the output alone: its gradients are the plain products of the other back ends, and
    JAX's interpreter can starve beside them where XLA has only two threads."""
    gradient = back_end == "xla" or (kernel == "ba_plus_caa" and _dispatch.platform() == "gpu")
    if back_end == "mosaic" and kernel != "xxt":
        shape = (shape[0], shape[2], shape[1])
    how = {"implementation": back_end} | ({"precision": "highest"} if back_end == "xla" else {})
    f, a = functools.partial(FUNCTIONS[kernel], **how), matrices(kernel, shape, dtype)
    argnums = None if gradient else ()
    plain = functools.partial(textbook, kernel)
    out, _ = check(f, plain, reference(kernel), (a,), argnums=argnums)
    if (back_end, dtype) != ("xla", jnp.float32):  # XLA's: on some processors only
        np.testing.assert_array_equal(np.float32(out), np.float32(out).mT)


@pytest.mark.parametrize("kernel", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_definition(kernel, shape):
    a = matrices(kernel, shape, jnp.bfloat16)
    exact, found = textbook(kernel, np.asarray(a, np.float64)), reference(kernel)(a)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


# ------------------------------------------------------------------------------------------- Mosaic


@pytest.mark.parametrize("n", [*range(1, 10), 16, 25, 40])
def test_schedule_has_every_tile_once(n):
    work = schedule(n)
    tiles = [tuple(sorted((s, other))) for s, p, q, _ in work for other in (p, q) if other >= 0]
    assert sorted(tiles) == sorted(itertools.combinations_with_replacement(range(n), 2))
    # At most one product of two tiles is half empty.
    assert len(work) == -(-len(tiles) // 2) and (work[:, 2] < 0).sum() <= 1
    for s, p, q, place in work:
        assert (p, q, s)[place] == s and place == (0 if p == s else 1 if q == s else 2)


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        *itertools.product(("ba_plus_caa", POLYNOMIAL), [(48, 768, 768)]),
        *itertools.product(("xxt", POLYNOMIAL), [(2, 1600, 1600), (1, 64, 64)]),
        *itertools.product(("xxt", "xtx"), [(24, 3072, 768)]),
    ],
)
def test_mosaic_lowers_for_an_h200(kernel, shape):
    a = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert "mosaic_gpu" in lower_for_h200(
        functools.partial(FUNCTIONS[kernel], implementation="mosaic"), a
    )


# ------------------------------------------------------------------------------- errors, choice


def test_errors():
    a = matrices("xxt", (2, 4, 3), jnp.bfloat16)
    message = r"ba_plus_caa: expected square matrices \(..., M, M\), got shape \(2, 4, 3\)"
    refused(ba_plus_caa, a, b=1.0, c=1.0, match=message)
    message = r"expected scalars b, c and d, got shapes \(\), \(2,\)"
    refused(ba_plus_caa, a[:, :3], b=1.0, c=jnp.ones(2), match=message)
    refused(xxt, a[0, 0], match=r"xxt: expected .* \(..., M, K\) .* bfloat16 of shape \(3,\)")


def test_what_mosaic_cannot_take_and_auto_counts_rounds(mosaic_on_cpu, monkeypatch):
    """As measured on an H200."""

    def selected(operation, dtype, shape, implementation="auto"):
        return _dispatch.select(operation, implementation, dtype=dtype, shape=shape)

    for dtype, shape, why in [
        ("float32", (2, 128, 128), "bfloat16 or float16, not float32; .*'xla'"),
        ("bfloat16", (2, 128, 96), r"sides are multiples of 64, not \(2, 128, 96\)"),
    ]:
        with pytest.raises(ValueError, match=f"'mosaic' supports .*{why}"):
            selected("xxt", dtype, shape, "mosaic")
    monkeypatch.setattr("pallas_kernels._mosaic.num_sms", lambda: 132)
    for operation, dtype, shape, expected in [
        *(("xxt", "bfloat16", (batch, 768, 768), "mosaic") for batch in (12, 24, 36, 48)),
        *(("xtx", "bfloat16", (batch, 3072, 768), "mosaic") for batch in (12, 24, 36, 48)),
        ("xxt", "bfloat16", (2, 6, 1600, 1600), "mosaic"),
        ("xxt", "bfloat16", (8, 768, 768), "xla"),
        ("xtx", "bfloat16", (6, 3072, 768), "xla"),
        ("xxt", "bfloat16", (1, 1024, 1024), "xla"),
        ("xxt", "bfloat16", (768, 768), "xla"),
        ("xxt", "float32", (48, 768, 768), "xla"),
        ("xxt", "bfloat16", (48, 768, 100), "xla"),
    ]:
        assert selected(operation, dtype, shape) == expected, (operation, dtype, shape)
