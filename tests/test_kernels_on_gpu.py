"""Every kernel on a GPU, in addition to the tests of its own file: random shapes, and outputs that
are written completely."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_tools import check

import pallas_kernels as pk
from gptjax.models.base import loss_fn
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision
from pallas_kernels import symmetric
from pallas_kernels.classifier import reference as classifier_reference
from pallas_kernels.feed_forward import reference as linear_reference
from pallas_kernels.norm import reference as layer_norm_reference
from pallas_kernels.norm import rms_reference
from pallas_kernels.row_softmax import reference as softmax_reference

rows, width = st.integers(1, 300), st.integers(1, 2100)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def classifier(n, v, seed):
    vocab = max(1, v - seed % 7)
    targets = jnp.asarray(np.random.default_rng(seed).integers(0, vocab, n), jnp.int32)
    f = lambda x, **how: pk.fused_classifier(x, targets, vocab_size=vocab, **how)[0]
    return (
        f,
        lambda x: classifier_reference(x, targets, vocab_size=vocab)[0],
        (3 * normal(seed, n, v),),
    )


def norm(n, c, seed):
    args = (
        normal(seed, n, c),
        normal(seed + 1, c, dtype=jnp.float32),
        normal(seed + 2, c, dtype=jnp.float32),
        normal(seed + 3, n, c),
    )
    f = lambda x, s, b, r, **how: pk.layer_norm(x, s, b, residual=r, **how)
    return f, lambda x, s, b, r: layer_norm_reference(x, s, b, residual=r), args


def linear(n, i, seed, *, f=pk.linear_gelu, activation="gelu"):
    o = 1 + (7 * seed) % 301
    args = (normal(seed, n, i), normal(seed + 1, i, o) * jnp.bfloat16(i**-0.5), normal(seed + 2, o))
    return f, functools.partial(linear_reference, activation=activation), args


def matrices(n, k, seed, *, f, reference):
    return f, reference, (normal(seed, 1 + seed % 3, n, k % 400 + 1) * jnp.bfloat16(0.1),)


def square(n, k, seed):
    a = normal(seed, 1 + seed % 3, n, n, dtype=jnp.float32)
    a = ((a + jnp.swapaxes(a, -1, -2)) * 0.1).astype(jnp.bfloat16)
    how = {"b": -1.5, "c": 0.7}
    return (
        functools.partial(pk.ba_plus_caa, **how),
        functools.partial(symmetric.ba_plus_caa_reference, **how),
        (a,),
    )


def transposed(n, k, seed):
    return (
        pk.transpose_add,
        lambda dst, src: dst + src.T,
        (normal(seed, k, n), normal(seed + 1, n, k)),
    )


# kernel → (rows, width, seed) → function with `implementation=`, its definition, arrays
KERNELS = {
    "softmax": lambda n, s, seed: (pk.softmax, softmax_reference, (2 * normal(seed, n, s),)),
    "softmax, causal": lambda n, s, seed: (
        functools.partial(pk.softmax, causal=True),
        functools.partial(softmax_reference, causal=True),
        (2 * normal(seed, 2, n, n),),
    ),
    "fused_classifier": classifier,
    "layer_norm": norm,
    "rms_norm": lambda n, c, seed: (pk.rms_norm, rms_reference, (normal(seed, n, c),)),
    "linear_gelu": linear,
    "linear_relu_squared": functools.partial(
        linear, f=pk.linear_relu_squared, activation="relu_squared"
    ),
    "xxt": functools.partial(matrices, f=pk.xxt, reference=symmetric.xxt_reference),
    "xtx": functools.partial(matrices, f=pk.xtx, reference=symmetric.xtx_reference),
    "ba_plus_caa": square,
    "transpose_add": transposed,
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@settings(
    max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(n=rows, c=width, seed=st.integers(0, 1000))
def test_any_shape(kernel, n, c, seed):
    f, reference, args = KERNELS[kernel](n, c, seed)
    gradients = tuple(range(len(args)))
    check(
        functools.partial(f, implementation="triton"),
        functools.partial(f, implementation="xla"),
        reference,
        args,
        argnums=gradients,
        seed=seed,
    )


# What a kernel's tiles do not divide, where it takes that.
POISONED = {
    ("softmax", "triton"): (67, 1001),
    ("softmax, causal", "triton"): (77, 0),
    ("fused_classifier", "triton"): (67, 1001),
    ("layer_norm", "triton"): (67, 769),
    ("rms_norm", "triton"): (67, 769),
    ("linear_gelu", "triton"): (67, 129),
    ("xxt", "triton"): (131, 77),
    ("xtx", "triton"): (131, 77),
    ("ba_plus_caa", "triton"): (131, 77),
    ("transpose_add", "triton"): (131, 77),
    ("xxt", "mosaic"): (192, 127),
    ("ba_plus_caa", "mosaic"): (192, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "implementation"), POISONED)
def test_every_output_is_written(kernel, implementation):
    """The memory that outputs are given was full of NaN before."""
    f, _, args = KERNELS[kernel](*POISONED[kernel, implementation], 8)

    @jax.jit
    def with_gradients(*args):
        out, pull = jax.vjp(functools.partial(f, implementation=implementation), *args)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    compiled = with_gradients.lower(*args).compile()
    for _ in range(3):
        poison = [
            jnp.full(o.shape, jnp.nan, o.dtype)
            for o in jax.tree.leaves(compiled.out_info)
            for _ in range(4)
        ]
        jax.block_until_ready(poison)
        del poison
        for array in jax.tree.leaves(compiled(*args)):
            assert np.isfinite(np.asarray(array, np.float32)).all()


@pytest.mark.gpu
def test_two_gpus():
    """Arrays on one GPU keep their kernels beside an idle second one, arrays on two lose them, and
    a shard_map has the same gradient."""
    gpus = jax.devices("gpu")
    if len(gpus) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    config = GPT2Config(
        vocab_size=500, block_size=128, n_layer=2, n_head=2, n_embd=128, precision=Precision("bf16")
    )
    graphdef, params = nnx.split(GPT2(config, rngs=nnx.Rngs(0)), nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (4, 129), 0, 500)

    def grad(params, tokens):
        return jax.grad(lambda p: loss_fn(nnx.merge(graphdef, p), tokens[:, :-1], tokens[:, 1:]))(
            params
        )

    one = jax.device_put((params, tokens), gpus[1])
    lowered = jax.jit(grad).lower(*one)
    assert "triton" in lowered.as_text()
    expected = jax.device_get(lowered.compile()(*one))

    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=gpus[:2]
    )
    everywhere, split = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",)))
    two = jax.device_put(params, everywhere), jax.device_put(tokens, split)
    assert "triton" not in jax.jit(grad).lower(*two).as_text()

    def mean_grad(params, tokens):
        return jax.lax.pmean(grad(params, tokens), "data")

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    with pytest.raises(ValueError, match="Pass check_vma=False"):
        jax.jit(jax.shard_map(mean_grad, mesh=mesh, **specs)).lower(*two)
    mapped = jax.jit(jax.shard_map(mean_grad, mesh=mesh, check_vma=False, **specs))
    assert "triton" in mapped.lower(*two).as_text()
    for a, b in zip(
        jax.tree.leaves(expected), jax.tree.leaves(jax.device_get(mapped(*two))), strict=True
    ):
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(a) + 1e-6
