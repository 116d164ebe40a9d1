"""The Triton back end of pallas_kernels.flash_attention in TF32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_triton_tools import (
    NAMES,
    attend,
    check,
    equations,
    inputs,
    set_tiles,
    tf32_product,
    with_gradients,
)
from ptx_tools import to_tf32


@pytest.fixture
def tensor_cores(triton_on_cpu, monkeypatch):
    """Products in TF32 leave out the low 13 bits of their operands, and their only NaN is a
    GPU's."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, *args):
        if not precision.name.startswith("TF32"):
            return multiply(self, a, b, d, precision, *args)
        cut = [
            (np.ascontiguousarray(x.data).view(np.uint32) & 0xFFFFE000).view(np.float32)
            for x in (a, b)
        ]
        product = np.matmul(*cut) + d.data
        product.view(np.uint32)[np.isnan(product)] = 0x7FFFFFFF
        return interpreter.TensorHandle(product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize(
    "shape, how",
    [
        ((1, 1, 1, 1, 1), {}),
        ((3, 77, 2, 1, 5), {}),
        ((1, 64, 2, 2, 16), {"packed": True, "window": 20}),
        ((1, 50, 2, 2, 20), {"packed": True, "segments": 3}),
        ((1, 70, 1, 1, 64), {"causal": False, "scale": -0.2}),
    ],
    ids=str,
)
def test_tf32(shape, how, backward, tensor_cores, monkeypatch):
    """Without rounding to nearest errors are three times as large."""
    set_tiles(monkeypatch, 16, 32, backward)
    check(shape, precision=None, product=tf32_product, **how)


def test_tf32_in_the_tiles_of_the_file(tensor_cores):
    check((1, 150, 1, 1, 64), precision=None, product=tf32_product)


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_tf32_is_not_too_small(backward, tensor_cores, monkeypatch):
    """One operand that is cut off and not rounded makes a product smaller by 2^−11.5 on average."""
    set_tiles(monkeypatch, 32, 32, backward)
    args = inputs((1, 150, 2, 2, 64), jnp.float32)
    found = with_gradients(functools.partial(attend, precision=None), *args)
    for name, ours, true in zip(NAMES, found, equations(*args), strict=True):
        size = np.vdot(ours, true) / np.vdot(true, true)
        assert abs(size - 1) < 2.0**-14, (name, size - 1)


def turned(x_BTHD, rows):
    """Rounded, B·H·D·T′ with zeros from T on, and of 8 columns the even ones first."""
    b, t, h, d = x_BTHD.shape
    x_BHDT = np.zeros((b, h, d, -(-t // rows) * rows), np.float32)
    x_BHDT[..., :t] = to_tf32(np.asarray(x_BTHD)).transpose(0, 2, 3, 1)
    return x_BHDT.reshape(b, h, d, -1, 4, 2).swapaxes(-1, -2).reshape(x_BHDT.shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t, d", [(128, 16), (70, 5), (1, 20)])
def test_copies_in_tf32(t, d, packed, triton_on_cpu):
    """Blocks are of 64 rows there; those of 128 and 16 rows, for which the turned copies are, end
    elsewhere."""
    from pallas_kernels.attention.triton import _inputs, _shape
    from pallas_kernels.attention.triton_tf32 import tf32_copies, tf32_copies_of_dout

    q, k, v, _, dout, _ = inputs((2, t, 4, 4 if packed else 2, d), jnp.float32)
    operands = (jnp.stack([q, k, v], 2),) if packed else (q, k, v)
    shape = _shape(operands, None, True, 1.0, None, False, {})
    held = _inputs(operands, None)[:3]
    backward = sum(tf32_copies(*held, shape, straight="qkv", transposed={"q": 128, "k": 16}), ())
    _, k_straight, _, _, _, v_transposed = sum(
        tf32_copies(*held, shape, straight="k", transposed={"v": 16}), ()
    )
    dout_straight, dout_transposed, delta = tf32_copies_of_dout(dout, q, shape, transposed=128)
    found = (*backward[:5], k_straight, v_transposed, dout_straight, dout_transposed)
    wanted = [to_tf32(np.asarray(x)) for x in (q, k, v)]
    wanted += [turned(q, 128), turned(k, 16), to_tf32(np.asarray(k)), turned(v, 16)]
    wanted += [to_tf32(np.asarray(dout)), turned(dout, 128)]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    # Of numbers that are not rounded: those would be off by 2^−12 or so of the largest products.
    products = np.asarray(dout, np.float64) * np.asarray(q, np.float64)
    error = np.abs(delta - products.sum(-1).swapaxes(1, 2))
    assert (error <= d * 2.0**-24 * np.abs(products).sum(-1).swapaxes(1, 2)).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_not_a_number_stays_so_in_tf32(bits, tensor_cores, monkeypatch):
    set_tiles(monkeypatch, 16, 16)
    not_a_number(bits)


def not_a_number(bits):
    """Numbers that are rounded by adding to their bits could become finite."""
    q, k, v, _, dout, dlse = inputs((1, 40, 1, 1, 8), jnp.float32)
    bad = np.array(q)
    bad.view(np.uint32)[0, 20, 0, 3] = bits
    f = jax.jit(functools.partial(with_gradients, functools.partial(attend, precision=None)))
    rows = np.arange(40)
    for name, ours, clean in zip(
        NAMES,
        f(jnp.asarray(bad), k, v, None, dout, dlse),
        f(q, k, v, None, dout, dlse),
        strict=True,
    ):
        ours, clean = (
            np.moveaxis(np.asarray(x), 2, 1) if name == "lse" else np.asarray(x)
            for x in (ours, clean)
        )
        touched = rows <= 20 if name in ("dk", "dv") else rows == 20
        assert np.isnan(ours[:, touched]).all(), name
        if name != "dk":  # there 0·NaN comes through to later keys of the block
            np.testing.assert_array_equal(ours[:, ~touched], clean[:, ~touched])


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_not_a_number_stays_so_in_tf32_on_the_gpu(bits):
    not_a_number(bits)
