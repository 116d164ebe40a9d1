"""pallas_kernels.symmetric against its references and NumPy, by the 2× rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200
from rule_tools import check, refused

from pallas_kernels import _dispatch
from pallas_kernels.symmetric import (
    ba_plus_caa,
    ba_plus_caa_reference,
    xtx,
    xtx_reference,
    xxt,
    xxt_reference,
)
from pallas_kernels.symmetric.mosaic import schedule

B, C = 0.7, -0.45
D = 1.9
POLYNOMIAL = "ba_plus_caa, d"
FUNCTIONS = {
    "xxt": xxt,
    "xtx": xtx,
    "ba_plus_caa": functools.partial(ba_plus_caa, b=B, c=C),
    POLYNOMIAL: functools.partial(ba_plus_caa, b=B, c=C, d=D),
}
REFERENCES = {
    "xxt": xxt_reference,
    "xtx": xtx_reference,
    "ba_plus_caa": functools.partial(ba_plus_caa_reference, b=B, c=C),
    POLYNOMIAL: functools.partial(ba_plus_caa_reference, b=B, c=C, d=D),
}
SHAPES = [
    (2, 16, 8),  # aligned
    (5, 7),  # no leading axis, odd
    (2, 3, 9, 4),  # two leading axes
    (1, 1, 1),
]


def matrices(kernel, shape, dtype, seed=0):
    """Random matrices of norms near 1; for `ba_plus_caa` symmetric ones, square on the last
    side."""
    rng = np.random.default_rng(seed)
    if not kernel.startswith("ba_plus_caa"):
        return jnp.asarray(rng.standard_normal(shape) * max(shape[-2:]) ** -0.5, dtype)
    a = rng.standard_normal((*shape[:-2], shape[-1], shape[-1])) * (2 * shape[-1]) ** -0.5
    return jnp.asarray(a + a.swapaxes(-1, -2), dtype)


def plain(kernel):
    """The textbook in the inputs' own dtype, operation by operation."""
    if kernel == "xxt":
        return lambda a: jnp.matmul(a, a.swapaxes(-1, -2), precision="highest")
    if kernel == "xtx":
        return lambda a: jnp.matmul(a.swapaxes(-1, -2), a, precision="highest")

    def polynomial(a):
        b, c, d = (jnp.asarray(x, a.dtype) for x in (B, C, D if kernel == POLYNOMIAL else 0))
        one = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
        return d * one + (b * a + c * jnp.matmul(a, a, precision="highest"))

    return polynomial


def check_kernel(kernel, shape, dtype, gradient=True, **keywords):
    """Output and gradient, or the output alone."""
    a = matrices(kernel, shape, dtype)
    function = functools.partial(FUNCTIONS[kernel], **keywords)
    argnums = None if gradient else ()
    out, _ = check(function, plain(kernel), REFERENCES[kernel], (a,), argnums=argnums)
    out = np.asarray(out, np.float32)
    assert np.array_equal(out, out.swapaxes(-1, -2))


@pytest.mark.parametrize("kernel", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_definition(kernel, shape):
    a = matrices(kernel, shape, jnp.bfloat16)
    x = np.asarray(a, np.float64)
    exact = {
        "xxt": lambda: np.einsum("...mk,...nk->...mn", x, x),
        "xtx": lambda: np.einsum("...mk,...mn->...kn", x, x),
        "ba_plus_caa": lambda: B * x + C * np.einsum("...mk,...kn->...mn", x, x),
        POLYNOMIAL: lambda: (
            D * np.eye(x.shape[-1]) + B * x + C * np.einsum("...mk,...kn->...mn", x, x)
        ),
    }[kernel]()
    found = REFERENCES[kernel](a)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


# Every shape in bf16, and one in the other dtypes: XLA's code depends on one or the other.
@pytest.mark.parametrize("kernel", FUNCTIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, jnp.bfloat16) for shape in SHAPES),
        (SHAPES[1], jnp.float32),
        (SHAPES[1], jnp.float16),
    ],
)
def test_xla_output_and_gradient(kernel, shape, dtype):
    check_kernel(kernel, shape, dtype, implementation="xla", precision="highest")


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_gradient_of_the_coefficients(implementation, triton_on_cpu):
    a = matrices("ba_plus_caa", (2, 6, 6), jnp.float16)
    direction = jnp.cos(jnp.arange(72.0)).reshape(2, 6, 6)

    def gradient(f):
        loss = lambda b, c, d: jnp.vdot(f(a, b=b, c=c, d=d).astype(jnp.float32), direction)
        return jax.grad(loss, (0, 1, 2))(*map(jnp.float32, (0.7, -1.1, 0.3)))

    found = gradient(functools.partial(ba_plus_caa, implementation=implementation))
    np.testing.assert_allclose(found, gradient(ba_plus_caa_reference), rtol=2e-3)


# ------------------------------------------------------------------------------------------- Triton

# Triton's interpreter multiplies bf16 as if it were integers: fp16 here, bf16 on a GPU.
TRITON_SHAPES = [
    (2, 128, 64),  # one whole tile
    (1, 1, 3),  # less than a tile every way
    (2, 130, 70),  # two rows, six columns past a tile: edges in both
    (1, 257, 129),  # one past two tiles; tiles off the diagonal
    (3, 77, 40),
    (2, 20, 80),
]


@pytest.mark.parametrize("kernel", FUNCTIONS)
@pytest.mark.parametrize("shape", TRITON_SHAPES)
def test_triton_output_and_gradient(triton_on_cpu, kernel, shape):
    check_kernel(kernel, shape, jnp.float16, implementation="triton")


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


# Without gradients: they are the plain products that the other back ends have too, and JAX's
# interpreter can starve beside them where XLA has only two threads.
@pytest.mark.parametrize("kernel", FUNCTIONS)
@pytest.mark.parametrize(
    "n, k",
    [
        (128, 64),  # one tile: half of the only product is not stored
        # six: tiles from two rows in one product, and several products for each block of threads
        (384, 192),
    ],
)
def test_mosaic_output(mosaic_on_cpu, kernel, n, k):
    shape = (2, n, k) if kernel == "xxt" else (2, k, n)
    check_kernel(kernel, shape, jnp.bfloat16, gradient=False, implementation="mosaic")


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        *itertools.product(FUNCTIONS, [(48, 768, 768)]),
        *itertools.product(("xxt", POLYNOMIAL), [(2, 1600, 1600), (1, 64, 64)]),
        *(("xxt", (24, 3072, 768)), ("xtx", (24, 3072, 768))),
    ],
)
def test_mosaic_lowers_for_an_h200(kernel, shape):
    a = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert "mosaic_gpu" in lower_for_h200(
        functools.partial(FUNCTIONS[kernel], implementation="mosaic"), a
    )


def test_64_bit_offsets(triton_on_cpu, monkeypatch):
    """The code of matrices beyond 2³¹ elements, on one that fits here."""
    import triton.language as tl

    from pallas_kernels import _triton

    call, seen = _triton.call, []

    def with_64_bits(*args, **options):
        seen.append(options["INDEX"])
        return call(*args, **options | {"INDEX": tl.int64})

    monkeypatch.setattr(_triton, "call", with_64_bits)
    launch = functools.partial(xxt, implementation="triton")
    for shape, index in (((1, 46340, 8), tl.int32), ((1, 46341, 8), tl.int64)):
        jax.eval_shape(launch, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        assert seen.pop() == index
    a = matrices("xxt", (2, 65, 33), jnp.float16)
    for f in (xxt, xtx):
        found, expected = (f(a, implementation=name) for name in ("triton", "xla"))
        np.testing.assert_allclose(
            *(np.float32(x) for x in (found, expected)), rtol=2e-3, atol=2e-3
        )


# ------------------------------------------------------------------------------- errors, choice


def test_errors():
    a = matrices("xxt", (2, 4, 3), jnp.bfloat16)
    how = {"b": 1.0, "c": 1.0}
    message = r"ba_plus_caa: expected square matrices \(..., M, M\), got shape \(2, 4, 3\)"
    refused(ba_plus_caa, a, **how, match=message)
    message = r"expected scalars b, c and d, got shapes \(\), \(2,\)"
    refused(ba_plus_caa, a[:, :3], b=1.0, c=jnp.ones(2), match=message)
    refused(xxt, a[0, 0], match=r"xxt: expected .* \(..., M, K\) .* bfloat16 of shape \(3,\)")


def test_what_the_kernels_cannot_take_and_auto_counts_rounds(
    triton_on_cpu, mosaic_on_cpu, monkeypatch
):
    """As measured on an H200."""

    def selected(operation, dtype, shape, implementation="auto"):
        return _dispatch.select(operation, implementation, dtype=dtype, shape=shape)

    for name, dtype, shape, why in [
        ("triton", "float32", (2, 128, 128), "bfloat16 or float16, not float32; .*'xla'"),
        ("mosaic", "float32", (2, 128, 128), "bfloat16 or float16, not float32"),
        ("mosaic", "bfloat16", (2, 128, 96), r"sides are multiples of 64, not \(2, 128, 96\)"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}' supports .*{why}"):
            selected("xxt", dtype, shape, name)
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


# ---------------------------------------------------------------------------------------------- GPU

GPU_SHAPES = [
    (3, 192, 192),  # the last tile is half outside
    (2, 768, 384),  # six tiles a side, as many as in GPT-2's matrices
    (140, 128, 128),  # more pieces of work than multiprocessors, one tile each
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel, shape, dtype, implementation",
    [
        *itertools.product(["xxt", POLYNOMIAL], GPU_SHAPES, [jnp.bfloat16], ["mosaic", "triton"]),
        *itertools.product(["xtx", "ba_plus_caa"], GPU_SHAPES[:1], [jnp.bfloat16], ["mosaic"]),
        *itertools.product(["xxt", "xtx"], [(2, 131, 131)], [jnp.bfloat16], ["triton"]),
        *itertools.product(["xxt"], GPU_SHAPES[:1], [jnp.float16], ["mosaic", "triton"]),
    ],
    ids=str,
)
def test_on_the_gpu(kernel, shape, dtype, implementation):
    shape = (shape[0], shape[2], shape[1]) if kernel != "xxt" else shape
    gradient = kernel == "ba_plus_caa"
    check_kernel(kernel, shape, dtype, gradient, implementation=implementation)
