"""GPT2 against the PyTorch reference from the same weights; its dtypes, size and initial state."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison_tools import assert_within_twice, flatten, max_abs, rms
from flax import nnx
from gpt2_tools import (
    SHAPES,
    assert_parity,
    batch_of,
    config_of,
    random_of,
    run,
    run_torch,
    split,
)
from jax.sharding import AbstractMesh
from kernel_tools import OPTIMIZED, h200

from gptjax import GPT2, PRESETS, GPT2Config, Precision, loss_fn
from gptjax.models.base import init_params
from gptjax.models.blocks import Norm, PendingResidual
from gptjax.models.layers import Linear
from gptjax.training.compilation import compiler_options

# Blocks of the 124M model and its vocabulary.
WIDE = (50257, 50304, 256, 3, 12, 768, 2)


# -------------------------------------------------------------------------------------- parity, CPU


REFERENCES = {"norm": "reference", "mlp": "reference"}
CASES = {name: (shape, {}) for name, shape in SHAPES.items()}
CASES |= {"references": (SHAPES["wide head"], REFERENCES)}
CASES |= {"short": (SHAPES["odd"], {"block_size": 20})}  # a sequence shorter than the block


@pytest.mark.parametrize("shape, how", CASES.values(), ids=CASES)
def test_fp32_parity(shape, how):
    config, time = config_of(shape, **how), 9 if "block_size" in how else None
    ours, _, exact = assert_parity(config, shape[-1], norm=max_abs, time=time)
    np.testing.assert_allclose(ours[0], exact[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=2e-6)
    if time is not None:
        assert not ours[2]["wpe"][time:].any() and ours[2]["wpe"][time - 1].all()


@pytest.mark.parametrize("name", ["bf16", "bf16_residual_fp32"])
@pytest.mark.parametrize("shape", ["wide head", "tiny gpt2"])
def test_bf16_parity(name, shape):
    """bf16_residual_fp32 against autocast; bf16 against autocast with a bf16 residual stream.

    Gradients are compared all together. Tensor by tensor does not hold on the CPU: its bf16 product
    for a weight gradient accumulates in bf16 (relative error 0.015 where PyTorch has 0.008, and
    0.008 with an fp32 accumulator asked for).
    """
    shape = SHAPES[shape]
    config = config_of(shape, precision=Precision(name))
    params = random_of(config)
    tokens, targets = batch_of(config, shape[-1])
    ours = run(config, params, tokens, targets, OPTIMIZED)
    theirs = run_torch(config, params, tokens, targets, precision=name)
    exact = run_torch(config, params, tokens, targets, dtype="float64")
    assert_within_twice(ours[0], theirs[0], exact[0], norm=rms, name="logits")
    relative = lambda grads: {k: (grads[k] - exact[2][k]) / rms(exact[2][k]) for k in grads}
    pooled = lambda errors: math.sqrt(np.mean([rms(error) ** 2 for error in errors.values()]))
    assert pooled(relative(ours[2])) < 2 * pooled(relative(theirs[2])) < 0.1
    # The loss of one batch can be right by luck: the bound is the size of PyTorch's logit errors,
    # averaged over tokens.
    assert abs(ours[1] - exact[1]) < 2 * rms(theirs[0] - exact[0])


def test_parity_of_the_mlps_passes(triton_on_cpu):
    """Triton's kernels around XLA's products, recomputed; on a CPU tf32 is fp32."""
    how = {"recompute": "sublayer", "mlp": "triton", "attention": "xla", "norm": "xla"}
    config = config_of(SHAPES["odd"], precision=Precision("tf32"), **how)
    assert_parity(config, 2, norm=rms)


def test_kernels_names_the_back_ends_of_each_operation():
    config, parts = config_of(SHAPES["odd"]), ("layer_norm", "flash_attention", "mlp")
    every = lambda name, loss: dict.fromkeys(parts, name) | {"linear_cross_entropy": loss}
    inside = {"linear": "xla", "fused_classifier": "xla", "sum_rows": "xla"}
    assert config.kernels(7) == every("xla", "xla") | inside
    named = dict.fromkeys(("attention", "norm", "mlp"), "reference")
    named = dataclasses.replace(config, **named, loss="fused", recompute="block")
    inside = {"linear": "reference", "fused_classifier": "xla", "transpose_copy": "xla"}
    assert named.kernels(7, batch=2) == every("reference", "fused") | inside
    with h200():
        tf32 = GPT2Config(precision=Precision("tf32"))
        inside = {"linear": "xla"} | dict.fromkeys(
            ("transpose_copy", "transpose_sum_rows", "fused_classifier"), "triton"
        )
        assert tf32.kernels(1024, 32) == every("triton", "fused") | inside
        device = jax.sharding.get_abstract_mesh().abstract_device
        two = AbstractMesh((2,), ("data",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(two):
            assert tf32.kernels(1024, 32) == every("triton", "fused") | inside
            fp8 = GPT2Config(precision=Precision("fp8"), norm="triton")
            assert fp8.kernels(1024, 32)["mlp"] == "mosaic (fp8)"
        # True fp32 has a back end of its own: heads 128 wide go through XLA.
        for precision, width, attention in [
            ("fp32", 128, "triton"),
            ("fp32", 256, "xla"),
            ("tf32", 256, "triton"),
            ("bf16", 256, "mosaic"),
        ]:
            wide = GPT2Config(n_head=2, n_embd=width, precision=Precision(precision))
            assert wide.kernels(1024)["flash_attention"] == attention
    for field in ("attention", "norm", "mlp"):
        for segments in (False, True):
            with pytest.raises(ValueError, match="implementation 'triton' needs an NVIDIA GPU"):
                dataclasses.replace(config, **{field: "triton"}).kernels(7, segments=segments)


def test_sampling_needs_no_whole_tiles():
    """A kernel that the model names for training does not stand in the way of one token at a
    time."""
    model = nnx.merge(*split(config_of(SHAPES["odd"], mlp="mosaic")))
    tokens, cache = jnp.zeros((2, 3), jnp.int32), model.init_cache(2, 7)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        jax.eval_shape(GPT2.hidden, model, tokens)
    assert jax.eval_shape(GPT2.hidden, model, tokens, cache).shape == (2, 3, 12)


def test_bf16_dtypes():
    def dtypes(name):
        graph, params = split(config_of(SHAPES["odd"], precision=Precision(name)))
        model, x = lambda params: nnx.merge(graph, params), jnp.zeros((2, 7), jnp.int32)
        step = jax.value_and_grad(lambda params: loss_fn(model(params), x, x))
        for y in jax.tree.leaves(jax.eval_shape(step, params)):
            assert y.dtype == jnp.float32
        found = jax.eval_shape(lambda params: (model(params).embed(x), model(params)(x)), params)
        return tuple(y.dtype.name for y in found)

    assert dtypes("bf16") == ("bfloat16", "bfloat16")
    assert dtypes("bf16_residual_fp32") == ("float32", "bfloat16")
    assert dtypes("tf32") == dtypes("fp32") == ("float32", "float32")


@pytest.mark.parametrize("rows", [64, pytest.param(4096, marks=pytest.mark.gpu)])
def test_a_bias_smaller_than_a_rounding_is_not_lost_in_bf16(rows):
    linear = Linear(256, 512, std=0.5, precision=Precision("bf16"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (rows, 256), jnp.bfloat16)
    # As training compiles: XLA's own Triton matmuls round before they add a bias.
    forward = jax.jit(Linear.__call__, compiler_options=compiler_options())
    without = forward(linear, x).astype(jnp.float32)
    linear.bias[...] = jnp.full((512,), 5e-3)
    moved = (forward(linear, x).astype(jnp.float32) - without).mean()
    assert float(moved) == pytest.approx(5e-3, rel=0.1)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_residual_fp32"])
def test_product_and_bias_join_the_stream_in_one_rounding(name):
    """Whoever adds them: LayerNorm, or the block whose sum is kept."""
    config = config_of(SHAPES["tiny gpt2"], precision=Precision(name))
    linear = Linear(128, config.n_embd, std=0.1, precision=config.precision, rngs=nnx.Rngs(0))
    linear.bias[...] = jnp.linspace(-5e-3, 1e-2, config.n_embd)
    x, h = (
        jax.random.normal(jax.random.key(i), (4, 64, c)) for i, c in enumerate((config.n_embd, 128))
    )
    x, h = x.astype(config.precision.residual_dtype), h.astype(config.precision.compute_dtype)
    pending = PendingResidual(linear.matmul(h), linear.bias[...])
    assert pending.matmul_BTC.dtype == h.dtype
    found = pending.added_to(x)
    exact = (
        np.asarray(x, np.float64)
        + np.asarray(pending.matmul_BTC, np.float64)
        + np.asarray(pending.bias_C, np.float64)
    )
    nearest = jnp.asarray(exact, jnp.float32).astype(x.dtype)
    np.testing.assert_allclose(
        found, nearest, rtol=2e-7 if x.dtype == jnp.float32 else 0, atol=2e-7
    )
    np.testing.assert_array_equal(Norm(config).add_norm(x, pending)[1], found)


# -------------------------------------------------------------------------------------- parity, GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [SHAPES["odd"], SHAPES["wide head"], WIDE], ids=["odd", "wide head", "124M"]
)
def test_fp32_parity_on_the_gpu(shape):
    ours, _, exact = assert_parity(config_of(shape), shape[-1], norm=rms, device="cuda")
    np.testing.assert_allclose(ours[0], exact[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tf32", "bf16", "bf16_residual_fp32"])
def test_low_precision_parity_on_the_gpu(name):
    """Against PyTorch on the same GPU: matmul precision high, or autocast to bf16.

    Wide tensors only: the errors of a tensor of twelve numbers are too few to compare by their mean
    square. One token less than GPT-2's vocabulary: with an odd leading dimension PyTorch's products
    need not be TF32.
    """
    config = config_of(WIDE, vocab_size=50256, precision=Precision(name))
    ours, theirs, exact = assert_parity(config, WIDE[-1], norm=rms, device="cuda")
    assert abs(ours[1] - exact[1]) < 2 * rms(theirs[0] - exact[0])
    assert rms(ours[0] - exact[0]) > 1e-5 * rms(exact[0]), "this is not a low precision"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "width, apply", [(2304, Linear.__call__), (768, Linear.matmul)], ids=["with bias", "matmul"]
)
def test_a_bf16_product_is_not_written_in_fp32(width, apply):
    """A bias is added where the product is: in cuBLASLt's epilogue, or in a Triton fusion of
    XLA's."""
    linear = Linear(768, width, std=0.02, precision=Precision("bf16"), rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((8, 1024, 768), jnp.bfloat16)
    text = jax.jit(apply).lower(linear, x).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert f"f32[8192,{width}]" not in entry and f"f32[8,1024,{width}]" not in entry, entry


# ----------------------------------------------------------------------------------- size and start


@pytest.mark.parametrize(
    "name, count",
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_count(name, count):
    config = PRESETS[name]
    shapes = [leaf.shape for leaf in jax.tree.leaves(split(config)[1])]
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    assert sum(map(math.prod, shapes)) - padding == config.num_params == count
    assert config.padded_vocab_size % 128 == 0 and config.head_dim == 64
    # 6 per weight that multiplies, and half of the two T×C products of attention, forward and twice
    # backward, per layer.
    attention = 12 * config.n_layer * config.n_embd * 1024 // 2
    weights = count - 1024 * config.n_embd
    assert config.flops_per_token(1024) == 6 * weights + attention


def test_padding_is_the_next_multiple_of_128():
    for vocab, rows in ((1, 128), (128, 128), (257, 384), (50257, 50304), (65536, 65536)):
        assert GPT2Config(vocab_size=vocab).padded_vocab_size == rows
    config = GPT2Config(vocab_size=250, block_size=8, n_layer=2, n_head=1, n_embd=4)
    assert config.num_allocated_params == config.num_params + 6 * 4
    assert GPT2Config().num_allocated_params == 124_475_904
    smaller = dataclasses.replace(GPT2Config(), vocab_size=256, padded_vocab_size=None)
    assert smaller == GPT2Config(vocab_size=256) == dataclasses.replace(smaller, n_layer=12)


def test_init_statistics():
    config = GPT2Config(
        vocab_size=2000, padded_vocab_size=2048, block_size=300, n_layer=8, n_head=4, n_embd=128
    )
    params = flatten(init_params(config, 7))
    assert not np.asarray(params["wte"][2000:]).any()
    params["wte"] = params["wte"][:2000]
    for name, value in params.items():
        value = np.asarray(value)
        assert value.dtype == np.float32
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.kernel") else 0.02
            # Five standard errors of an estimate from this many draws; no clipping of the tails.
            assert abs(value.std() / std - 1) < 5 / math.sqrt(2 * value.size), name
            assert abs(value.mean() / std) < 5 / math.sqrt(value.size), name
            assert np.abs(value).max() > 3 * std, name
    kernels = [np.asarray(v) for k, v in params.items() if k.endswith("c_fc.kernel")]
    assert all((a != b).any() for a, b in itertools.pairwise(kernels)), "two layers start alike"
