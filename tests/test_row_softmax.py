"""pallas_kernels.softmax against the equations in fp64, by the 2× rule."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import on_gpu, triton_kernels
from rule_tools import check as check_rule
from rule_tools import refused

from pallas_kernels.row_softmax import reference, softmax

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
BACKENDS = ["xla", "triton", "reference"]

SHAPES = [
    (4, 128),  # aligned
    (2, 3, 77),  # all odd: no row starts where a 16-byte load may
    (3, 1),  # one column: the output is 1, its gradient 0
    (130,),  # a single row
    (2, 20000),  # a long row: several blocks, and a part of one
]
SCALED, CAUSAL = {"scale": 0.7}, {"causal": True, "scale": 0.3}
BF16, FP32 = jnp.bfloat16, jnp.float32
# The dtype changes loads and stores, and the blocks of a long row.
CASES = [
    *((shape, BF16, SCALED) for shape in SHAPES),
    *((shape, FP32, SCALED) for shape in (SHAPES[1], SHAPES[4])),
    (SHAPES[1], jnp.float16, SCALED),
    *((shape, FP32, CAUSAL) for shape in ((2, 16, 16), (1, 2, 21, 21), (1, 1), (70, 70))),
    ((1, 2, 21, 21), BF16, CAUSAL),
    *(((3, 33), FP32, {"scale": scale}) for scale in (-1.5, 0, 2)),
]
GPU_CASES = [
    ((100, 1024), BF16, SCALED),
    ((3, 1024, 1024), BF16, {"causal": True, "scale": 0.125}),
    ((2, 77, 77), BF16, {"causal": True}),  # no row starts where a 16-byte load may
    ((40, 50304), BF16, {}),
    ((21, 50257), BF16, {}),
    ((5, 131072), FP32, {}),
    ((20, 333), jnp.float16, {}),
]


def inputs(shape, dtype, causal=False, seed=0):
    """x and the cotangent of y, which hold NaN where a causal y is 0."""
    rng = np.random.default_rng(seed)
    x, dy = 3 * rng.standard_normal(shape), rng.standard_normal(shape)
    future = np.triu(np.ones(shape[-2:], bool), 1) if causal else np.zeros(shape, bool)
    return [jnp.asarray(np.where(future, np.nan, a), dtype) for a in (x, dy)], future


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def plain(x, scale, causal):
    """The textbook: fp32 between a forward and a backward pass that hand over y in the dtype of x,
    as PyTorch's do."""
    return reference(x, scale=scale, causal=causal).astype(x.dtype)


def plain_backward(scale, causal, y, dy):
    y32 = y.astype(jnp.float32)
    dy32 = jnp.where(y == 0, 0, dy.astype(jnp.float32)) if causal else dy.astype(jnp.float32)
    return ((scale * y32 * (dy32 - (dy32 * y32).sum(-1, keepdims=True))).astype(y.dtype),)


plain.defvjp(lambda *args: (plain(*args),) * 2, plain_backward)


def check(implementation, shape, dtype, scale=1.0, causal=False, seed=0):
    (x, dy), future = inputs(shape, dtype, causal, seed)
    how = {"scale": scale, "causal": causal}
    definition = functools.partial(reference, **how)
    if causal:  # the definition's own gradient is NaN where dy is
        visible = np.broadcast_to(~future, shape)
        definition = lambda x: jnp.where(visible, reference(x, **how), 0.0)
    found = check_rule(
        functools.partial(softmax, implementation=implementation, **how),
        lambda x: plain(x, scale, causal),
        definition,
        (x,),
        directions=dy,
    )
    for ours in jax.tree.leaves(found):
        hidden = np.broadcast_to(future, shape)
        np.testing.assert_array_equal(np.asarray(ours, np.float32)[hidden], 0)


@pytest.fixture
def long_rows(monkeypatch):
    """Every row is a long one, in blocks of 32 · 4 or 32 · 8 columns, some kept in registers and
    some read again."""
    from pallas_kernels.row_softmax import triton

    sizes = {"LONGEST_SHORT_ROW": 0, "TWO_ROWS_FIT": 0, "FORWARD_KEPT": 2, "MOST_KEPT": 2}
    for name, value in (sizes | {"FORWARD_WARPS": 1, "BACKWARD_WARPS": 1}).items():
        monkeypatch.setattr(triton, name, value)


@pytest.mark.parametrize(
    "back_end, shape, dtype, how",
    [
        *((back_end, *case) for back_end in ("xla", "triton") for case in CASES),
        *(("reference", *case) for case in CASES[-3:]),  # in 16 bits its gradient is that of fp32
        *on_gpu(*(("triton", *case) for case in GPU_CASES)),
    ],
    ids=str,
)
def test_output_and_gradient(back_end, shape, dtype, how, interpreter):
    check(back_end, shape, dtype, **how)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape, causal", [((3, 1111), False), ((1, 150, 150), True)], ids=str)
def test_long_rows(dtype, shape, causal, triton_on_cpu, long_rows):
    check("triton", shape, dtype, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_the_definition(causal):
    x = 3 * np.random.default_rng(0).standard_normal((2, 21, 21))
    z = 0.7 * np.where(np.triu(np.ones((21, 21), bool), 1), -np.inf, x) if causal else 0.7 * x
    y = np.exp(z - z.max(-1, keepdims=True))
    found = reference(jnp.asarray(x, jnp.float32), scale=0.7, causal=causal)
    np.testing.assert_allclose(found, y / y.sum(-1, keepdims=True), rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_rows(dtype, long, implementation, triton_on_cpu, request):
    """−∞ is a weight of 0, only −∞ is NaN, the lowest finite number everywhere is a uniform row."""
    if long:
        request.getfixturevalue("long_rows")
    low, inf = float(jnp.finfo(dtype).min), np.inf
    rows = [[-inf, 0, 0, -inf], [low] * 4, [-low, low, low, low], [-inf] * 4, [np.nan, 0, 0, 0]]
    wanted = [[0, 0.5, 0.5, 0], [0.25] * 4, [1, 0, 0, 0], [np.nan] * 4, [np.nan] * 4]
    found = softmax(jnp.asarray(rows, dtype), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


def test_errors():
    x = jnp.zeros((2, 3, 4))
    refused(softmax, x, causal=True, match=r"\(..., T, T\) for a causal .* got \(2, 3, 4\)")
    refused(softmax, x, scale=float("nan"), match="expected a finite scale, got nan")
    refused(softmax, jnp.zeros(()), match="expected")


def test_causal_kernels_compile():
    """Without spills; every load and store is one of 16 bytes."""
    x = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.bfloat16)
    f = functools.partial(softmax, causal=True, implementation="triton")
    for kernel in triton_kernels(lambda x, dy: jax.vjp(f, x)[1](dy), x, x):
        assert kernel.spill_bytes == 0
        assert all("v4" in x for x in re.findall(r"(?:ld|st)\.global\S*", kernel.ptx))
