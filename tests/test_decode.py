"""pallas_kernels.decode_step against the definition in fp32, by the 2× rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, max_abs, rms
from kernel_tools import lower_for_h200, triton_kernels

from pallas_kernels import decode
from pallas_kernels.decode import DecoderCache, DecoderWeights, decode_step

SHAPE_124M = dict(blocks=12, heads=12, head_dim=64, vocab=50257, positions=288)
# Two blocks of the largest GPT-2: a number of channels with a small power of two as a factor.
SHAPE_1558M = SHAPE_124M | dict(blocks=2, heads=25)
TINY = dict(blocks=2, heads=2, head_dim=16, vocab=61, positions=24)


def inputs(dtype, lengths, *, blocks, heads, head_dim, vocab, positions, seed=0):
    """Random weights, a cache that is zero where no sequence has a key, tokens and lengths."""
    b, keys = len(lengths), iter(jax.random.split(jax.random.key(seed), 30))
    sizes = {"V": vocab, "S": positions + 5, "L": blocks, "C": (c := heads * head_dim)}
    sizes |= {"N": 3 * c, "F": 4 * c}

    def draw(field):
        shape = [sizes[axis] for axis in field.rpartition("_")[2]]
        if field in ("qkv_LNC", "proj_LCC", "fc_LFC", "out_LCF", "head_VC"):
            x = jax.random.normal(next(keys), shape) * 1.5 / shape[-1] ** 0.5
            return x.astype(dtype)
        shape[0] += 3 * (field == "wte_VC")
        return float("scale" in field) + 0.3 * jax.random.normal(next(keys), shape)

    names = [field.name for field in dataclasses.fields(DecoderWeights)]
    weights = DecoderWeights(**{name: draw(name) for name in names})
    length_B = jnp.asarray(lengths, jnp.int32)
    filled_1BS11 = (jnp.arange(positions)[None] < length_B[:, None])[None, :, :, None, None]
    shape = (blocks, b, positions, heads, head_dim)
    k, v = (jnp.where(filled_1BS11, jax.random.normal(next(keys), shape, dtype), 0) for _ in "kv")
    token_B = jax.random.randint(next(keys), (b,), 0, vocab)
    return weights, DecoderCache.of(k, v), token_B, length_B


# The arguments are not changed, so that tests share them.
tiny = functools.cache(functools.partial(inputs, **TINY))
one_block = functools.cache(functools.partial(inputs, **TINY | {"blocks": 1}))


def check(args, residual_dtype, steps=1):
    """Logits and cache of the kernel after `steps` tokens, compared with the definition."""
    results = {}
    for name in ("triton", "xla", "reference"):
        residual = jnp.float32 if name == "reference" else residual_dtype
        step = functools.partial(decode_step, residual_dtype=residual, implementation=name)
        weights, cache, token_B, length_B = args
        for _ in range(steps):
            logits_BV, cache = step(weights, cache, token_B, length_B)
            token_B, length_B = (token_B + 1) % logits_BV.shape[1], length_B + 1
        results[name] = (logits_BV, cache.k_LBSHD, cache.v_LBSHD)
    for name, *values in zip(("logits", "k", "v"), *results.values(), strict=True):
        assert values[0].dtype == values[1].dtype
        if residual_dtype == jnp.float32 == values[0].dtype:
            # The same operations as the definition's, in another order.
            atol = 2e-5 * max(1, np.abs(values[2]).max())
            np.testing.assert_allclose(values[0], values[2], rtol=0, atol=atol, err_msg=name)
            continue
        for norm in (rms, max_abs):
            assert_within_twice(*values, norm=norm, name=name)


def check_likeliest(args):
    """The kernel's likeliest token is that of its logits."""
    logits_BV, _ = decode_step(*args, implementation="triton")
    token_B, cache = decode_step(*args, implementation="triton", likeliest=True)
    np.testing.assert_array_equal(token_B, logits_BV.argmax(-1))
    assert np.asarray(cache.k_LBSHD).any() and token_B.dtype == jnp.int32


@pytest.fixture
def one_program(monkeypatch, triton_on_cpu):
    """The exchange needs programs that run at the same time: Triton's interpreter has one."""
    monkeypatch.setattr(decode, "programs", lambda: 1)


# Triton's interpreter multiplies no matrices in bf16. A length of 40 counts as the last position.
@pytest.mark.parametrize(
    "lengths, dtype, residual",
    [
        ((5,), "float32", "float32"),
        ((0,), "bfloat16", "bfloat16"),
        ((0, 23, 7, 40), "float32", "float32"),
    ],
    ids=str,
)
def test_one_token(lengths, dtype, residual, one_program):
    check(tiny(jnp.dtype(dtype), lengths), jnp.dtype(residual))


def test_several_tiles_of_keys(one_program, monkeypatch):
    from pallas_kernels.decode import triton

    monkeypatch.setattr(triton, "KEYS", 16)
    check(one_block(jnp.float32, (35,)), jnp.float32)


def test_likeliest_token(one_program):
    args = one_block(jnp.bfloat16, (5,))
    # Rows 7 and 50 are equal and above the others.
    head_VC = args[0].head_VC
    decisive_C = head_VC[decode_step(*args, implementation="triton")[0][0].argmax()] * 2
    head_VC = head_VC.at[jnp.array([7, 50])].set(decisive_C)
    args = (dataclasses.replace(args[0], head_VC=head_VC), *args[1:])
    check_likeliest(args)
    assert decode_step(*args, implementation="triton", likeliest=True)[0] == 7


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_x64_changes_no_bit(implementation):
    args = tiny(jnp.float32, (5, 0))
    f = functools.partial(decode_step, implementation=implementation)
    expected = jax.jit(f)(*args)
    with jax.enable_x64(True):  # another function, whose trace is not cached
        found = jax.jit(lambda *args: f(*args))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# A wrong shape of each kind: a vector of one element, an embedding with fewer columns or positions,
# and a cache with fewer positions.
SHAPES = {
    "qkv_LNC": (2, 96, 31),
    "qkv_bias_LN": (2, 1),
    "ln_f_bias_C": (1,),
    "wte_VC": (64, 33),
    "wpe_SC": (23, 32),
    "head_VC": (65, 32),
    "v_LBSHD": (2, 1, 23, 2, 16),
    "exchange": (100,),
}


def refuse(args, name, value, message, implementation):
    """Fail unless `decode_step` refuses another value of a field of the weights or the cache."""
    weights, cache, *rest = args
    if hasattr(weights, name):
        weights = dataclasses.replace(weights, **{name: value})
    else:
        cache = dataclasses.replace(cache, **{name: value})
    with pytest.raises(ValueError, match=f"decode_step: expected {message}"):
        decode_step(weights, cache, *rest, implementation=implementation)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_inconsistent_arrays_are_refused(implementation, one_program):
    args = tiny(jnp.float32, (5,))
    for name, shape in SHAPES.items():
        # A head with more rows than the token embedding: the embedding is named.
        message = f".*{'wte_VC' if name == 'head_VC' else name}.* of .*, got "
        refuse(args, name, jnp.zeros(shape, jnp.float32), message, implementation)
    for name in ("proj_LCC", "ln_2_bias_LC", "wpe_SC", "head_VC", "k_LBSHD"):
        value = getattr(args[name == "k_LBSHD"], name).astype(jnp.int32)
        refuse(args, name, value, f"{name} in .*, got int32", implementation)
    mixed = args[0].proj_LCC.astype(jnp.bfloat16)
    message = "proj_LCC in float32 as head_VC, got bfloat16"
    refuse(args, "proj_LCC", mixed, message, implementation)


@pytest.mark.parametrize("lengths", [(5,), (0, 7)], ids=str)
def test_vmap(lengths, one_program):
    """The weights are shared, and the other arguments are mapped."""
    weights, *one = one_block(jnp.float32, lengths)
    other = one_block(jnp.float32, lengths, seed=1)[1:]
    both = jax.tree.map(lambda *x: jnp.stack(x), tuple(one), other)
    step = functools.partial(decode_step, weights, implementation="triton")
    logits_EBV, cache = jax.jit(jax.vmap(step))(*both)
    for i, args in enumerate((one, other)):
        expected_BV, expected = step(*args)
        np.testing.assert_array_equal(logits_EBV[i], expected_BV)
        np.testing.assert_array_equal(cache.v_LBSHD[i], expected.v_LBSHD)


@pytest.mark.parametrize("batch, launches", [(1, 1), (2, 16)])
def test_vmap_lowers_for_an_h200(batch, launches, monkeypatch):
    """A Triton kernel has no rule for vmap."""
    monkeypatch.setattr(decode, "programs", lambda: 132)
    weights, *one = tiny(jnp.float32, (0,) * batch)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), tuple(one))
    step = functools.partial(decode_step, implementation="triton")
    text = lower_for_h200(jax.vmap(step, (None, 0, 0, 0)), weights, *both)
    assert text.count("custom_call @decode") == launches


@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_no_derivative(implementation, one_program):
    weights, *rest = tiny(jnp.float32, (5,))
    f = lambda weights: decode_step(weights, *rest, implementation=implementation)[0].sum()
    with pytest.raises(NotImplementedError, match="decode_step: has no derivative.*stop_gradient"):
        jax.grad(f)(weights)
    jax.grad(lambda weights: f(jax.lax.stop_gradient(weights)))(weights)


@pytest.mark.parametrize("precision", [jax.lax.Precision.HIGH, "high"])
def test_tf32_is_refused_by_triton(triton_on_cpu, precision):
    args = inputs(jnp.float32, (3,), blocks=1, heads=1, head_dim=64, vocab=64, positions=8)
    with pytest.raises(ValueError, match="computes fp32 matmuls in true fp32, not in TF32"):
        decode_step(*args, precision=precision, implementation="triton")


def compiled_for_an_h200(batch, blocks):
    sizes = SHAPE_124M | {"blocks": blocks}
    args = jax.eval_shape(lambda: inputs(jnp.bfloat16, (0,) * batch, **sizes))
    f = functools.partial(decode_step, residual_dtype=jnp.bfloat16, implementation="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "programs", lambda: 132)
        return triton_kernels(f, *args)


def test_one_sequence_compiled_for_an_h200():
    """Weights and the exchange are read 16 bytes at a time; the exchange is stored once a value."""
    (kernel,) = compiled_for_an_h200(1, blocks=12)
    assert kernel.spill_bytes == 0
    assert kernel.ptx.count("ld.global.v4") > 50
    # Polling loads: x, q k v, attention, x, 4 for hidden, x.
    assert kernel.ptx.count("ld.relaxed.gpu.global.v4") == 11


def test_several_sequences_compiled_for_an_h200():
    """Matmuls run on the tensor cores, with copies ahead, and the tiles fit into shared memory."""
    kernels = compiled_for_an_h200(64, blocks=1)
    assert len(kernels) == 9
    for kernel in kernels:
        assert kernel.spill_bytes == 0 and kernel.shared_bytes <= 227 * 1024
        if kernel.name == "decode_matmul_kernel":
            assert "wgmma.mma_async" in kernel.ptx and kernel.shared_bytes > 60 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, lengths, dtype",
    [
        (TINY, (0, 23, 7), "float32"),
        (SHAPE_124M, (287,), "bfloat16"),
        # Blocks are alike: the references of many sequences with few of them.
        (SHAPE_124M | {"blocks": 3}, (0, 160, 255), "float32"),
        (SHAPE_124M | {"blocks": 3}, (100,) * 128, "bfloat16"),
        (SHAPE_1558M, (270,), "bfloat16"),
        (SHAPE_1558M, tuple(range(7, 263, 4)), "bfloat16"),
    ],
    ids=["tiny", "124M, 1", "124M, 3", "124M, 128", "1558M, 1", "1558M, 64"],
)
def test_on_a_gpu(shape, lengths, dtype):
    args = inputs(jnp.dtype(dtype), lengths, **shape)
    check(args, jnp.dtype(dtype), steps=2)
    check_likeliest(args)


@pytest.mark.gpu
def test_ten_thousand_tokens_on_a_gpu():
    """The exchange never hangs, and a step repeats bit for bit."""
    weights, cache, token_B, length_B = inputs(jnp.bfloat16, (100,), **SHAPE_124M)
    step = functools.partial(decode_step, token_B=token_B, length_B=length_B)

    @jax.jit
    def run(weights, cache):
        def one(cache, _):
            logits_BV, cache = step(weights, cache, implementation="triton")
            return cache, logits_BV.argmax()

        return jax.lax.scan(one, cache, length=10_000)

    assert np.unique(np.asarray(run(weights, cache)[1])).size == 1
