"""The model against the PyTorch reference from the same weights, and what must hold of it by
itself."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from kernel_tools import h200, lower_for_h200
from reference.torch_gpt2 import (
    assert_within_twice,
    computing,
    flatten,
    from_params,
    max_abs,
    random_params,
    rms,
    to_numpy,
)

from gptjax import GPT2, PRESETS, GPT2Config, Precision, generate, loss_fn
from gptjax.models.gpt2 import LayerNorm, PendingResidual
from gptjax.models.layers import Linear

torch.set_num_threads(2)

# (vocabulary, padded, time, layers, heads, width, batch)
SHAPES = {
    # odd T, three heads, a head dimension of 4, a prime vocabulary
    "odd": (61, 64, 7, 2, 3, 12, 2),
    "one of each": (5, 5, 1, 1, 1, 3, 1),  # T = 1: attention over one key; no padding; odd width
    "wide head": (97, 128, 33, 1, 3, 63, 3),  # odd width, T just above a power of two
    "tiny gpt2": (257, 384, 64, 4, 4, 64, 2),
}
# Blocks of the 124M model and its vocabulary.
WIDE = (50257, 50304, 256, 3, 12, 768, 2)


def config_of(shape, **how):
    vocab, padded, time, layers, heads, width, _ = shape
    sizes = {"vocab_size": vocab, "padded_vocab_size": padded, "block_size": time}
    return GPT2Config(**sizes | {"n_layer": layers, "n_head": heads, "n_embd": width} | how)


def split(config):
    """The static graph and the abstract parameters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))), nnx.Param)
    return graph, nnx.to_pure_dict(state)


def build(config, params):
    return nnx.merge(split(config)[0], jax.tree.map(jnp.asarray, params))


def random_of(config, seed=0):
    return random_params(split(config)[1], config.vocab_size, seed)


def batch_of(config, size, seed=0, time=None):
    shape = (2, size, time or config.block_size)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def run(config, params, tokens, targets):
    """Logits, loss and gradients of our model, in fp64; the padded rows' gradient is checked and
    left out."""

    @jax.jit
    def everything(params, tokens, targets):
        model = lambda params: nnx.merge(split(config)[0], params)
        loss, grads = jax.value_and_grad(lambda params: loss_fn(model(params), tokens, targets))(
            params
        )
        return model(params)(tokens).astype(jnp.float32), loss, grads

    logits, loss, grads = everything(
        jax.tree.map(jnp.asarray, params), jnp.asarray(tokens), jnp.asarray(targets)
    )
    assert loss.dtype == jnp.float32
    grads = {name: np.asarray(grad, np.float64) for name, grad in flatten(grads).items()}
    assert not grads["wte"][config.vocab_size :].any(), "a padded row of wte has a gradient"
    grads["wte"] = grads["wte"][: config.vocab_size]
    return np.asarray(logits, np.float64), float(loss), grads


def run_torch(
    config, params, tokens, targets, *, dtype=torch.float32, precision="fp32", device="cpu"
):
    """The same of the PyTorch reference."""
    residual = torch.bfloat16 if precision == "bf16" else None
    model = from_params(config, params, dtype=dtype, device=device, residual=residual)
    tokens, targets = (torch.from_numpy(x).long().to(device) for x in (tokens, targets))
    with computing(precision, device):
        logits, loss = model(tokens), model.loss(tokens, targets)
        if not precision.startswith("bf16"):
            loss.backward()
    if precision.startswith("bf16"):
        loss.backward()
    return logits.detach().double().cpu().numpy(), loss.item(), to_numpy(model, gradients=True)


def assert_parity(config, size, *, norm, device="cpu", time=None, seed=0):
    """Logits, loss and the gradient of every parameter under the 2× rule; exact is PyTorch in
    fp64."""
    params = random_of(config, seed)
    tokens, targets = batch_of(config, size, seed, time)
    ours = run(config, params, tokens, targets)
    theirs = run_torch(
        config, params, tokens, targets, precision=config.precision.name, device=device
    )
    exact = run_torch(config, params, tokens, targets, dtype=torch.float64, device=device)
    assert exact[0].std() > 0.1, "logits this flat would agree with any model's"
    assert_within_twice(ours[0], theirs[0], exact[0], norm=norm, name="logits")
    assert ours[2].keys() == theirs[2].keys() == exact[2].keys()
    for name in exact[2]:
        assert_within_twice(ours[2][name], theirs[2][name], exact[2][name], norm=norm, name=name)
    off = {
        name: norm(ours[2][name] - exact[2][name]) / (norm(exact[2][name]) or 1.0)
        for name in exact[2]
    }
    worst = max(off, key=off.get)
    print(
        f"parity, {config.precision}, {device}, {config.n_layer} layers, {config.n_embd} wide: "
        "logits off by "
        f"{max_abs(ours[0] - exact[0]):.2g} (PyTorch {max_abs(theirs[0] - exact[0]):.2g}), loss "
        f"{abs(ours[1] - exact[1]):.2g}, "
        f"{len(off)} gradients at most {off[worst]:.2g} of their size ({worst})"
    )
    return ours, theirs, exact


# -------------------------------------------------------------------------------------- parity, CPU


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fp32_parity(shape):
    ours, _, exact = assert_parity(config_of(shape), shape[-1], norm=max_abs)
    np.testing.assert_allclose(ours[0], exact[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=2e-6)


def test_fp32_parity_on_a_sequence_shorter_than_the_block():
    config = config_of(SHAPES["odd"], block_size=20)
    ours, _, _ = assert_parity(config, 2, norm=max_abs, time=9)
    assert not ours[2]["wpe"][9:].any() and ours[2]["wpe"][8].all()


@settings(max_examples=4, deadline=None)
@given(
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    time=st.integers(1, 17),
    vocab=st.integers(2, 40),
    padding=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
def test_fp32_loss_is_pytorchs_for_any_shape(heads, head_dim, time, vocab, padding, seed):
    shape = (vocab, vocab + padding, time, 1, heads, heads * head_dim, 2)
    config = config_of(shape)
    params, (tokens, targets) = random_of(config, seed), batch_of(config, 2, seed)
    # Width 1: LayerNorm gives its bias, whatever comes; the rest of the model still has to agree.
    found = float(
        jax.jit(loss_fn)(build(config, params), jnp.asarray(tokens), jnp.asarray(targets))
    )
    exact = run_torch(config, params, tokens, targets, dtype=torch.float64)[1]
    assert abs(found - exact) < 5e-6 * max(1, abs(exact))


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
    ours = run(config, params, tokens, targets)
    theirs = run_torch(config, params, tokens, targets, precision=name)
    exact = run_torch(config, params, tokens, targets, dtype=torch.float64)
    assert_within_twice(ours[0], theirs[0], exact[0], norm=rms, name="logits")
    relative = lambda grads: {k: (grads[k] - exact[2][k]) / rms(exact[2][k]) for k in grads}
    pooled = lambda errors: math.sqrt(np.mean([rms(error) ** 2 for error in errors.values()]))
    assert pooled(relative(ours[2])) < 2 * pooled(relative(theirs[2])) < 0.1
    # The loss of one batch can be right by luck: the bound is the size of PyTorch's logit errors,
    # averaged over tokens.
    assert abs(ours[1] - exact[1]) < 2 * rms(theirs[0] - exact[0])


@pytest.mark.parametrize("how", [{"norm": "reference"}, {"mlp": "reference"}], ids=["norm", "mlp"])
def test_fp32_parity_of_the_reference_back_ends(how):
    shape = SHAPES["wide head"]
    assert_parity(config_of(shape, **how), shape[-1], norm=max_abs)


@pytest.mark.parametrize(
    "name, recompute", [("bf16", "none"), ("bf16", "sublayer"), ("bf16_residual_fp32", "block")]
)
def test_a_model_of_references_is_the_plain_one(name, recompute):
    """In bf16: the same roundings of the same numbers, whichever back end makes the stream's
    sums."""
    shape = SHAPES["odd"]
    config = config_of(shape, precision=Precision(name), recompute=recompute)
    params, (tokens, targets) = random_of(config), batch_of(config, 2)
    plain = run(config, params, tokens, targets)
    found = run(
        dataclasses.replace(config, norm="reference", mlp="reference"), params, tokens, targets
    )
    size = rms(plain[0])
    assert rms(found[0] - plain[0]) < 2**-7 * size and abs(found[1] - plain[1]) < 2**-7 * size
    for key, grad in plain[2].items():
        assert rms(found[2][key] - grad) < 2**-5 * rms(grad) + 1e-6, key


@pytest.mark.parametrize("recompute", ["none", "sublayer"])
@pytest.mark.parametrize("name", ["tf32", "fp32"])
def test_parity_of_the_mlps_passes(triton_on_cpu, name, recompute):
    """Triton's kernels around XLA's products, which on a CPU are fp32 whatever is asked for: fp32
    parity for tf32 too."""
    shape = SHAPES["odd"]
    config = config_of(
        shape,
        precision=Precision(name),
        mlp="triton",
        recompute=recompute,
        attention="xla",
        norm="xla",
    )
    assert_parity(config, shape[-1], norm=rms)


def test_kernels_names_the_back_end_of_each_part():
    config = config_of(SHAPES["odd"])
    assert config.kernels(7) == dict.fromkeys(("attention", "norm", "mlp", "loss"), "xla")
    named = dataclasses.replace(
        config, attention="reference", norm="reference", mlp="reference", loss="fused"
    )
    assert named.kernels(7, batch=2) == dict.fromkeys(("attention", "norm", "mlp"), "reference") | {
        "loss": "fused"
    }
    with h200():
        tf32 = GPT2Config(precision=Precision("tf32"))
        assert tf32.kernels(1024, 32) == dict.fromkeys(("attention", "norm", "mlp"), "triton") | {
            "loss": "fused"
        }
        with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",))):
            assert tf32.kernels(1024, 32) == dict.fromkeys(
                ("attention", "norm", "mlp", "loss"), "xla"
            )
            with pytest.raises(
                ValueError, match="layer_norm: implementation 'triton' needs arrays of one device"
            ):
                dataclasses.replace(tf32, norm="triton").kernels(1024, 32)
    for field in ("norm", "mlp"):
        with pytest.raises(ValueError, match="implementation 'triton' needs an NVIDIA GPU"):
            dataclasses.replace(config, **{field: "triton"}).kernels(7)


@pytest.mark.parametrize(
    "precision, width, attention",
    [
        ("fp32", 128, "triton"),
        ("fp32", 256, "xla"),
        ("tf32", 256, "triton"),
        ("bf16", 256, "mosaic"),
    ],
)
def test_named_kernels_know_the_precision(precision, width, attention):
    """True fp32 has a back end of its own: heads 128 wide go through XLA, though TF32's and bf16's
    do not."""
    config = GPT2Config(n_head=2, n_embd=width, precision=Precision(precision))
    with h200():
        assert config.kernels(1024)["attention"] == attention


def test_sampling_needs_no_whole_tiles():
    """A kernel that the model names for training does not stand in the way of one token at a
    time."""
    config = config_of(SHAPES["odd"])
    params, prompt = random_of(config), jnp.asarray(batch_of(config, 2)[0][:, :3])
    how = {"max_new_tokens": 3, "temperature": 0, "key": jax.random.key(0)}
    named = build(dataclasses.replace(config, mlp="mosaic"), params)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        named(prompt)
    np.testing.assert_array_equal(
        generate(named, prompt, **how), generate(build(config, params), prompt, **how)
    )


def test_bf16_dtypes():
    def dtypes(name):
        config = config_of(SHAPES["odd"], precision=Precision(name))
        graph, params = split(config)
        tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)
        model = lambda params: nnx.merge(graph, params)
        step = jax.value_and_grad(lambda params, x: loss_fn(model(params), x, x))
        loss, grads = jax.eval_shape(step, params, tokens)
        stream = jax.eval_shape(lambda params, x: model(params).embed(x), params, tokens)
        logits = jax.eval_shape(lambda params, x: model(params)(x), params, tokens)
        assert loss.dtype == jnp.float32 and {g.dtype.name for g in jax.tree.leaves(grads)} == {
            "float32"
        }
        return stream.dtype.name, logits.dtype.name

    assert dtypes("bf16") == ("bfloat16", "bfloat16")
    assert dtypes("bf16_residual_fp32") == ("float32", "bfloat16")
    assert dtypes("tf32") == dtypes("fp32") == ("float32", "float32")


def assert_a_small_bias_counts(rows):
    linear = Linear(256, 512, std=0.5, precision=Precision("bf16"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (rows, 256), jnp.bfloat16)
    forward = jax.jit(Linear.__call__)
    without = forward(linear, x).astype(jnp.float32)
    linear.bias[...] = jnp.full((512,), 5e-3)
    moved = (forward(linear, x).astype(jnp.float32) - without).mean()
    assert float(moved) == pytest.approx(5e-3, rel=0.1)


def test_a_bias_smaller_than_a_rounding_is_not_lost_in_bf16():
    assert_a_small_bias_counts(64)


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
    np.testing.assert_array_equal(LayerNorm(config).add_layer_norm(x, pending)[1], found)
    # With two roundings a bias this small would move some numbers and not others.
    without = pending._replace(bias_C=0 * pending.bias_C).added_to(x)
    moved = (found.astype(jnp.float32) - without.astype(jnp.float32)).mean()
    assert float(moved) == pytest.approx(float(pending.bias_C.mean()), rel=0.1)


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
@pytest.mark.parametrize("rows", [64, 4096])
def test_a_bias_smaller_than_a_rounding_is_not_lost_on_the_gpu(rows):
    assert_a_small_bias_counts(rows)


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


def test_flops_per_token_of_the_124m_model():
    # 6 per weight that multiplies, and half of the two T×C products of attention, forward and twice
    # backward, per layer.
    weights = 124_439_808 - 1024 * 768
    assert PRESETS["gpt2"].flops_per_token(1024) == 6 * weights + 12 * 6 * 768 * 1024


def test_init_statistics():
    config = GPT2Config(
        vocab_size=2000, padded_vocab_size=2048, block_size=300, n_layer=8, n_head=4, n_embd=128
    )
    params = flatten(nnx.to_pure_dict(nnx.split(GPT2(config, rngs=nnx.Rngs(7)), nnx.Param)[1]))
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


def test_one_seed_gives_one_model_for_any_padding():
    base = config_of(SHAPES["odd"], n_layer=1)
    of = lambda padded, seed=3: flatten(
        nnx.to_pure_dict(
            nnx.split(
                GPT2(dataclasses.replace(base, padded_vocab_size=padded), rngs=nnx.Rngs(seed)),
                nnx.Param,
            )[1]
        )
    )
    none, some, other = of(61), of(200), of(61, seed=4)
    for name in none:
        np.testing.assert_array_equal(
            none[name], some[name][:61] if name == "wte" else some[name], err_msg=name
        )
    assert (np.asarray(none["wte"]) != np.asarray(other["wte"])).all()


def test_initial_loss_is_near_ln_vocabulary():
    config = GPT2Config(
        vocab_size=1009, padded_vocab_size=1024, block_size=64, n_layer=2, n_head=2, n_embd=64
    )
    tokens, targets = (jnp.asarray(x) for x in batch_of(config, 8))
    loss = float(jax.jit(loss_fn)(GPT2(config, rngs=nnx.Rngs(0)), tokens, targets))
    # Logits start with variance C·0.02², so the expected loss is ln V + half of that; a softmax
    # over the padding adds 0.015.
    assert abs(loss - (math.log(1009) + 0.5 * 64 * 0.02**2)) < 0.01


# ------------------------------------------------------------------------------- causality, padding


def test_causality_by_gradients():
    """Position s of the input moves the logits at t exactly when s ≤ t."""
    config = config_of(SHAPES["odd"])
    params = jax.tree.map(jnp.asarray, random_of(config))
    tokens = jnp.asarray(batch_of(config, 1)[0])
    direction = jnp.asarray(
        np.random.default_rng(1).standard_normal(config.vocab_size), jnp.float32
    )

    def scores_T(wpe):
        return nnx.merge(split(config)[0], params | {"wpe": wpe})(tokens)[0] @ direction

    moves_TS = np.abs(np.asarray(jax.jit(jax.jacrev(scores_T))(params["wpe"]))).max(-1)
    above = np.triu(np.ones_like(moves_TS, bool), 1)
    assert (moves_TS[above] == 0).all(), "a token sees the future"
    assert (moves_TS[~above] > 1e-6).all(), "a token does not see all of its past"


@pytest.mark.parametrize("precision, chunk", [("fp32", None), ("bf16", 7)])
def test_padding_is_invisible(precision, chunk):
    shape = SHAPES["odd"]
    bare = config_of(
        shape, n_layer=1, padded_vocab_size=61, precision=Precision(precision), loss_chunk=chunk
    )
    padded = dataclasses.replace(bare, padded_vocab_size=128)
    params = random_of(bare)
    tokens, targets = batch_of(bare, shape[-1])
    # What lies in the padded rows does not matter either: here it would win every softmax.
    rows = np.full((67, 12), 100, np.float32)
    with_rows = params | {"wte": np.concatenate([params["wte"], rows])}
    expected, found = run(bare, params, tokens, targets), run(padded, with_rows, tokens, targets)
    assert found[0].shape == (2, 7, 61)
    # The same products in another tiling may round another way; nothing else may differ.
    atol = 1e-6 if precision == "fp32" else 2e-2
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=atol)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=atol)
    for name in expected[2]:
        np.testing.assert_allclose(
            found[2][name], expected[2][name], rtol=0, atol=atol, err_msg=name
        )


@pytest.mark.parametrize(
    "where, token",
    [("tokens", 64), ("tokens", 10**6), ("targets", 61), ("targets", 10**6), ("targets", -1)],
)
def test_an_id_beyond_the_table_gives_nan(where, token):
    config = config_of(SHAPES["odd"])
    tokens, targets = batch_of(config, 2)
    (tokens if where == "tokens" else targets)[1, 3] = token
    model = build(config, random_of(config))
    assert np.isnan(jax.jit(loss_fn)(model, jnp.asarray(tokens), jnp.asarray(targets)))


INTEGERS = [jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32]


@pytest.mark.parametrize(
    "vocab, dtype", [*((61, dtype) for dtype in INTEGERS), (256, jnp.uint8), (65536, jnp.uint16)]
)
def test_tokens_of_any_integer_type(vocab, dtype):
    """Types that hold every id, though not the number of rows."""
    config = GPT2Config(vocab_size=vocab, block_size=8, n_layer=1, n_head=1, n_embd=4)
    model = GPT2(config, rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 5, 60, 0, vocab - 1, 7, 2, 3]], jnp.int32) % min(
        vocab, jnp.iinfo(dtype).max + 1
    )
    forward, loss = jax.jit(GPT2.__call__), jax.jit(loss_fn)
    np.testing.assert_array_equal(forward(model, tokens.astype(dtype)), forward(model, tokens))
    np.testing.assert_array_equal(
        loss(model, *[tokens.astype(dtype)] * 2), loss(model, tokens, tokens)
    )


@pytest.mark.parametrize("where", ["tokens", "targets"])
@pytest.mark.parametrize(
    "dtype, token", [(jnp.uint8, 61), (jnp.int8, -1), (jnp.uint32, 2**31), (jnp.uint32, 2**32 - 1)]
)
def test_an_id_beyond_the_vocabulary_in_any_type_gives_nan(where, dtype, token):
    config = config_of(SHAPES["odd"], n_layer=1)
    inputs = {name: jnp.ones((1, 7), dtype) for name in ("tokens", "targets")}
    inputs[where] = inputs[where].at[0, 3].set(token)
    assert np.isnan(jax.jit(loss_fn)(build(config, random_of(config)), *inputs.values()))


# -------------------------------------------------------------------------------- recompute, memory


def test_recompute_changes_nothing():
    shape = SHAPES["wide head"]
    plain = config_of(shape, n_layer=2)
    params = random_of(plain)
    tokens, targets = batch_of(plain, shape[-1])
    expected = run(plain, params, tokens, targets)
    for recompute in ("block", "sublayer"):
        found = run(dataclasses.replace(plain, recompute=recompute), params, tokens, targets)
        assert found[1] == expected[1]
        for name, exact in expected[2].items():
            np.testing.assert_allclose(
                found[2][name], exact, rtol=0, atol=1e-6 * max_abs(exact), err_msg=name
            )


def temp_bytes(config, size):
    graph, abstract = split(config)
    tokens = jax.ShapeDtypeStruct((size, config.block_size), jnp.int32)
    step = jax.grad(lambda params, tokens: loss_fn(nnx.merge(graph, params), tokens, tokens))
    return jax.jit(step).lower(abstract, tokens).compile().memory_analysis().temp_size_in_bytes


def test_recompute_and_chunked_loss_save_memory():
    config = GPT2Config(
        vocab_size=64, padded_vocab_size=64, block_size=128, n_layer=6, n_head=4, n_embd=32
    )
    none, block, sublayer = (
        temp_bytes(dataclasses.replace(config, recompute=how), 4)
        for how in ("none", "block", "sublayer")
    )
    # Of a block's activations (4 heads · 128 scores and 20-odd widths a token) one width is kept,
    # or two.
    assert block < none / 2 and sublayer < none / 2, (none, block, sublayer)
    wide = dataclasses.replace(config, n_layer=1, vocab_size=8192, padded_vocab_size=8192)
    whole, chunked = temp_bytes(wide, 4), temp_bytes(dataclasses.replace(wide, loss_chunk=64), 4)
    assert whole > 4 * 128 * 8192 * 4 > 2 * chunked, (whole, chunked)


# ------------------------------------------------------------------------- transformations, devices


def test_under_jit_and_without():
    config = config_of(SHAPES["odd"])
    model = build(config, random_of(config))
    tokens, targets = (jnp.asarray(x) for x in batch_of(config, 2))
    np.testing.assert_allclose(
        jax.jit(GPT2.__call__)(model, tokens), model(tokens), rtol=0, atol=5e-6
    )
    np.testing.assert_allclose(
        jax.jit(loss_fn)(model, tokens, targets), loss_fn(model, tokens, targets), atol=1e-6
    )


def test_batch_sharded_over_two_devices():
    config = config_of(SHAPES["tiny gpt2"], n_layer=2)
    params = random_of(config)
    tokens, targets = batch_of(config, 4)
    expected = run(config, params, tokens, targets)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices("cpu")[:2])
    everywhere, by_batch = (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("data")),
    )
    graph = split(config)[0]
    step = jax.jit(jax.value_and_grad(lambda params, x, y: loss_fn(nnx.merge(graph, params), x, y)))
    loss, grads = step(
        jax.device_put(params, everywhere),
        jax.device_put(tokens, by_batch),
        jax.device_put(targets, by_batch),
    )
    assert len(loss.sharding.device_set) == 2
    np.testing.assert_allclose(loss, expected[1], rtol=0, atol=1e-6)
    for name, grad in flatten(grads).items():
        exact = expected[2][name]
        np.testing.assert_allclose(
            grad[: len(exact)], exact, rtol=0, atol=2e-6 * max_abs(exact), err_msg=name
        )


@pytest.mark.parametrize("devices, where", [(1, "jit"), (2, "jit"), (2, "shard_map")])
def test_kernels_are_for_arrays_of_one_device(devices, where):
    """Lowered for an H200: no kernel of ours where the compiler splits arrays over a mesh, which it
    would gather for one."""
    config = config_of(SHAPES["tiny gpt2"], n_layer=1, precision=Precision("tf32"))
    graph, params = split(config)
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    everywhere, by_batch = PartitionSpec(), PartitionSpec("data")
    of = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    tokens = of(jax.ShapeDtypeStruct((4, 64), jnp.int32), by_batch)
    step = jax.grad(lambda params, x: loss_fn(nnx.merge(graph, params), x, x))
    if where == "shard_map":
        specs = {"in_specs": (everywhere, by_batch), "out_specs": everywhere}
        checked, step = (
            jax.shard_map(step, mesh=mesh, check_vma=check, **specs) for check in (True, False)
        )
        with pytest.raises(
            ValueError,
            match="fused_classifier: its kernel overwrites an argument.*Pass check_vma=False",
        ):
            lower_for_h200(checked, jax.tree.map(lambda x: of(x, everywhere), params), tokens)
    text = lower_for_h200(step, jax.tree.map(lambda x: of(x, everywhere), params), tokens)
    kernels = set(re.findall(r"custom_call @(\w+)", text)) - {
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
    }
    ours = {"norm_forward", "norm_backward", "classifier_kernel", "forward_kernel"}
    assert ours <= kernels if (devices, where) != (2, "jit") else not kernels, kernels


# ------------------------------------------------------------------------------------------- errors


def test_a_sequence_longer_than_the_block():
    config = config_of(SHAPES["odd"])
    model = build(config, random_of(config))
    with pytest.raises(ValueError, match="a sequence of 8 tokens is longer than block_size=7"):
        model(jnp.zeros((1, 8), jnp.int32))
    with pytest.raises(ValueError, match="longer than block_size=7"):
        loss_fn(model, jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8), jnp.int32))


@pytest.fixture
def unchecked_types():
    """Without jaxtyping and beartype, which under pytest refuse wrong types before the code itself
    does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "tokens, got",
    [
        (jnp.arange(3), r"\(3,\) in int32"),
        (jnp.zeros((1, 3)), r"\(1, 3\) in float32"),
        (jnp.ones((1, 3), bool), r"\(1, 3\) in bool"),
        ([[1, 2]], "a list"),
        (None, "a NoneType"),
    ],
)
def test_tokens_that_are_no_ids(unchecked_types, tokens, got):
    model = GPT2(config_of(SHAPES["odd"], n_layer=1), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match=rf"GPT2: expected an array of integer ids of shape \(batch, time\).*got {got}",
    ):
        model(tokens)
    for pair in ((tokens, jnp.ones((1, 3), int)), (jnp.ones((1, 3), int), tokens)):
        with pytest.raises(
            ValueError, match=rf"loss_fn: expected an array of integer ids .*got {got}"
        ):
            loss_fn(model, *pair)


def test_targets_of_another_shape(unchecked_types):
    model = GPT2(config_of(SHAPES["odd"], n_layer=1), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"a target for each token, got tokens \(4, 5\) and targets \(5, 4\)"
    ):
        loss_fn(model, jnp.zeros((4, 5), jnp.int32), jnp.zeros((5, 4), jnp.int32))


def test_a_model_of_no_config_or_no_rngs(unchecked_types):
    config = config_of(SHAPES["odd"])
    with pytest.raises(TypeError, match=r"GPT2: expected rngs=flax.nnx.Rngs\(seed\), got a int"):
        GPT2(config, rngs=0)
    with pytest.raises(TypeError, match="GPT2: expected a gptjax.GPT2Config, got a dict"):
        GPT2(vars(config), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("value", [True, 2.0, "2", np.int64(2), None, 0, -1])
@pytest.mark.parametrize(
    "name",
    ["vocab_size", "padded_vocab_size", "block_size", "n_layer", "n_head", "n_embd", "loss_chunk"],
)
def test_sizes_are_whole_numbers(unchecked_types, name, value):
    if value is None and name in ("padded_vocab_size", "loss_chunk"):
        return
    with pytest.raises(
        ValueError,
        match=f"GPT2Config: {name} must be an int of at least 1, got .*{type(value).__name__}",
    ):
        GPT2Config(**{name: value})


def test_padding_is_the_next_multiple_of_128():
    for vocab, rows in (
        (1, 128),
        (128, 128),
        (256, 256),
        (257, 384),
        (50257, 50304),
        (65536, 65536),
    ):
        assert GPT2Config(vocab_size=vocab).padded_vocab_size == rows
    config = GPT2Config(vocab_size=250, block_size=8, n_layer=2, n_head=1, n_embd=4)
    allocated = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split(config)[1]))
    assert config.num_allocated_params == allocated == config.num_params + 6 * 4
    assert (
        GPT2Config() == GPT2Config(padded_vocab_size=50304)
        and GPT2Config().num_allocated_params == 124_475_904
    )


def test_the_padding_of_another_vocabulary_is_refused():
    """The 50,304 rows of a config whose vocabulary alone was changed."""
    message = (
        r"at most 1023 rows of padding, got padded_vocab_size=50304 for vocab_size=256; "
        r"give padded_vocab_size=256"
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPT2Config(), vocab_size=256)
    smaller = dataclasses.replace(GPT2Config(), vocab_size=256, padded_vocab_size=None)
    assert smaller == GPT2Config(vocab_size=256) == dataclasses.replace(smaller, n_layer=12)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_layer": 0}, "n_layer must be an int of at least 1, got 0"),
        ({"n_embd": 770}, "n_embd=770 is not a multiple of n_head=12"),
        ({"padded_vocab_size": 50256}, "padded_vocab_size=50256 is below vocab_size=50257"),
    ],
)
def test_bad_config(fields, message):
    with pytest.raises(ValueError, match=message):
        GPT2Config(**fields)


@pytest.mark.parametrize("chunk", [None, 4])
def test_the_fused_loss_is_the_plain_one(chunk):
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12) % 7
    found = {}
    for loss in ("xla", "fused"):
        config = config_of(SHAPES["odd"], block_size=12, loss=loss, loss_chunk=chunk)
        graphdef, params = nnx.split(build(config, random_of(config)), nnx.Param)
        value = lambda params, graphdef=graphdef: loss_fn(
            nnx.merge(graphdef, params), tokens, (tokens + 1) % 7
        )
        found[loss] = jax.jit(jax.value_and_grad(value))(params)
    for ours, plain in zip(
        jax.tree.leaves(found["fused"]), jax.tree.leaves(found["xla"]), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_unknown_options_list_the_choices():
    # The type itself refuses under pytest; without the checker __post_init__ does.
    with pytest.raises((ValueError, TypeError), match="(?s)block.*sublayer"):
        GPT2Config(recompute="everything")
    with pytest.raises((ValueError, TypeError), match="precision"):
        GPT2Config(precision="bf16")
    config = config_of(SHAPES["odd"], attention="flash")
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(
        ValueError, match=r"flash_attention: unknown implementation 'flash'; choose one of \['auto'"
    ):
        build(config, random_of(config))(tokens)
    config = config_of(SHAPES["odd"], loss="sparse")
    with pytest.raises(
        ValueError, match=r"unknown implementation 'sparse'; choose one of \['auto'"
    ):
        loss_fn(build(config, random_of(config)), tokens, tokens)
    config = config_of(SHAPES["odd"], loss_chunk=4)
    with pytest.raises(ValueError, match="3 tokens are not a multiple of chunk=4"):
        loss_fn(build(config, random_of(config)), tokens, tokens)
