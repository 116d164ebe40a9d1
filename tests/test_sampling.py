"""pallas_kernels.sample_token: the kernel draws the tokens of the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200, triton_kernels, unchecked

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

    monkeypatch.setattr(triton, "BLOCK", 32)  # several tiles a row
    monkeypatch.setattr(triton, "FEW", few)  # with 16, the candidates are too many in some rows
    args = (*inputs(6, 99, jnp.dtype(dtype)), FILTERS[filters])
    found, expected = (sample_token(*args, implementation=b) for b in ("triton", "reference"))
    np.testing.assert_array_equal(found, expected)


def test_inputs_that_are_refused(triton_on_cpu):
    """A NumPy scalar is known when the function is traced."""
    for shape, dtype, uniform, got in (
        ((2, 5), "float32", (3,), r"\(2, 5\) in float32 and \(3,\) in float32"),
        ((2, 0), "float32", (2,), r"\(2, 0\) in float32"),
        ((5,), "float32", (5,), r"\(5,\) in float32"),
        ((2, 5), "int32", (2,), r"\(2, 5\) in int32"),
        ((2, 5), "float8_e4m3fn", (2,), r"\(2, 5\) in float8_e4m3fn"),
    ):
        arrays = jnp.zeros(shape, dtype), jnp.zeros(uniform)
        for implementation in ("triton", "xla"):
            with pytest.raises(ValueError, match=f"sample_token: expected .*, got {got}"):
                unchecked(sample_token)(*arrays, FILTERS["all"], implementation=implementation)
    args = inputs(2, 5, jnp.float32)
    for name, dtype, values in (
        ("temperature", np.float32, (0.0, -1.0, np.nan)),
        ("top_k", np.int32, (0, -3)),
        ("top_p", np.float32, (0.0, 1.5, np.nan)),
    ):
        of = lambda value, name=name: dataclasses.replace(Filters(np.float32(1)), **{name: value})
        for value in values:
            with pytest.raises(ValueError, match=f"sample_token: expected .*{name}.*, got {value}"):
                sample_token(*args, of(dtype(value)))
        with pytest.raises(ValueError, match=rf"{name} to be a scalar, got shape \(1,\)"):
            sample_token(*args, of(jnp.ones(1, dtype)))


def test_vmap(triton_on_cpu):
    """Over the logits, the uniforms and the temperature."""
    logits_BV, uniform_B = inputs(6, 99, jnp.float32)

    def at(logits_BV, uniform_B, temperature):
        filters = dataclasses.replace(FILTERS["both"], temperature=temperature)
        return sample_token(logits_BV, uniform_B, filters, implementation="triton")

    arrays = logits_BV.reshape(2, 3, 99), uniform_B.reshape(2, 3), jnp.array([0.5, 2.0])
    expected_EB = [at(*(x[i] for x in arrays)) for i in range(2)]
    np.testing.assert_array_equal(jax.jit(jax.vmap(at))(*arrays), expected_EB)


def test_vmap_lowers_for_an_h200():
    """A Triton kernel has no rule for vmap."""
    f = lambda *arrays: sample_token(*arrays, FILTERS["both"], implementation="triton")
    args = jax.ShapeDtypeStruct((3, 2, 99), jnp.bfloat16), jax.ShapeDtypeStruct((3, 2), jnp.float32)
    assert lower_for_h200(jax.vmap(f), *args).count("custom_call @sample_kernel") == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1.2e-38])
@pytest.mark.parametrize("how", [(), (np.int32(2),), (None, np.float32(0.9))], ids=str)
def test_a_small_temperature_draws_the_likeliest_token(temperature, how):
    logits_BV = jax.random.normal(jax.random.key(0), (5, 99)) * 30 + 100
    logits_BV = logits_BV.at[1, ::2].set(-jnp.inf)
    filters = Filters(jnp.float32(temperature), *how)
    # Compiled: XLA may then contract multiplications and subtractions.
    draw = jax.jit(functools.partial(sample_token, implementation="xla"))
    found = draw(logits_BV, jnp.full((5,), 0.5), filters)
    np.testing.assert_array_equal(found, logits_BV.argmax(axis=-1))


@pytest.mark.parametrize(
    "how, allowed",
    [
        ((), [0, 1, 3, 6]),
        ((jnp.int32(2),), [3, 6]),
        ((jnp.int32(7),), [0, 1, 3, 6]),
        ((None, jnp.float32(0.7)), [1, 3, 6]),
        ((jnp.int32(3), jnp.float32(0.6)), [3, 6]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "implementation, few", [("triton", 1), ("triton", 128), ("xla", 128), ("reference", 128)]
)
def test_an_infinite_temperature_draws_uniformly_from_the_tokens_that_the_filters_keep(
    implementation, few, how, allowed, triton_on_cpu, monkeypatch
):
    """Never a token of probability 0, such as one with a logit of −∞. The filters keep the largest
    logits."""
    from pallas_kernels.sampling import triton

    monkeypatch.setattr(triton, "FEW", few)
    inf = np.inf
    logits_BV = jnp.array([[-3e38, 2, -inf, 3e38, -inf, -inf, 2.5]] * 4, jnp.float32)
    uniform_B = (jnp.arange(4, dtype=jnp.float32) + 0.5) / 4
    expected = np.array(allowed)[np.floor(uniform_B * len(allowed)).astype(int)]
    for temperature in (3e38, np.inf):
        filters = Filters(jnp.float32(temperature), *how)
        found = sample_token(logits_BV, uniform_B, filters, implementation=implementation)
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
@pytest.mark.parametrize(
    "rows, filters", [*((64, name) for name in FILTERS), (1, "greedy"), (1, "both")]
)
def test_gpt2s_vocabulary_on_a_gpu(rows, filters):
    """Uniforms at which a rounding may choose the next token are few."""
    logits_BV, uniform_B = inputs(max(rows, 2), 50257, jnp.bfloat16)
    args = (logits_BV[-rows:], uniform_B[-rows:], FILTERS[filters])
    found, expected = (sample_token(*args, implementation=b) for b in ("triton", "reference"))
    differences = (np.asarray(found) != np.asarray(expected)).sum()
    assert differences <= (1 if filters in ("all", "top_p") else 0) * rows // 8


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_tokens_are_the_same_with_x64(implementation):
    """The ranks are int32, as `top_k` is, also where JAX's default integer is int64."""
    arrays = inputs(4, 50, jnp.float32)
    draw = functools.partial(sample_token, implementation=implementation)
    expected = draw(*arrays, FILTERS["both"])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draw(*arrays, FILTERS["both"]), expected)
