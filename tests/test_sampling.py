"""pallas_kernels.sample_token: the kernel draws the tokens of the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import triton_kernels

from pallas_kernels.sampling import Filters, sample_token

FILTERS = {
    "greedy": Filters(),
    "all": Filters(jnp.float32(0.7)),
    "top_k": Filters(jnp.float32(1.3), jnp.int32(5)),
    "top_k of all": Filters(jnp.float32(1), jnp.int32(99)),
    "top_p": Filters(jnp.float32(1), None, jnp.float32(0.6)),
    "both": Filters(jnp.float32(0.9), jnp.int32(9), jnp.float32(0.8)),
}


def inputs(rows, vocab, dtype):
    """Coarse logits, of which many tie, with a row of equal ones and one with −∞."""
    logits_BV = jnp.round(jax.random.normal(jax.random.key(0), (rows, vocab)) * 3)
    logits_BV = logits_BV.at[0].set(0).at[1, ::2].set(-jnp.inf)
    return logits_BV.astype(dtype), jax.random.uniform(jax.random.key(1), (rows,))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype, few", [("float32", 16), ("bfloat16", 128)])
def test_the_kernel_draws_the_tokens_of_the_definition(
    filters, dtype, few, triton_on_cpu, monkeypatch
):
    from pallas_kernels.sampling import triton

    # Several tiles a row.
    monkeypatch.setattr(triton, "BLOCK", 32)
    # With 16, the candidates are too many in some rows.
    monkeypatch.setattr(triton, "FEW", few)
    args = (*inputs(6, 99, jnp.dtype(dtype)), FILTERS[filters])
    found, expected = (
        np.asarray(sample_token(*args, implementation=name)) for name in ("triton", "reference")
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [1, 64])
def test_compiled_for_an_h200(rows):
    """Loads of the row are 16 bytes wide in both passes, where a row starts at an odd id, too."""
    args = jax.eval_shape(lambda: inputs(max(rows, 2), 50257, jnp.bfloat16))
    args = [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in args]
    f = functools.partial(sample_token, implementation="triton")
    (kernel,) = triton_kernels(f, *args, FILTERS["both"])
    assert kernel.spill_bytes == 0
    # 6 full tiles of 16 logits a thread, and the loop of the second pass.
    assert kernel.ptx.count("ld.global.v4") == 2 * 6 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rows", [1, 64])
def test_gpt2s_vocabulary_on_a_gpu(rows, filters):
    """Uniforms at which a rounding may choose the next token are few."""
    logits_BV, uniform_B = inputs(max(rows, 2), 50257, jnp.bfloat16)
    args = (logits_BV[-rows:], uniform_B[-rows:], FILTERS[filters])
    found = np.asarray(sample_token(*args, implementation="triton"))
    expected = np.asarray(sample_token(*args, implementation="reference"))
    assert (found != expected).sum() <= (1 if filters in ("all", "top_p") else 0) * rows // 8
