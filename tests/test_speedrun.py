"""gptjax.models.speedrun against a plain PyTorch model, from the same random weights."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison_tools import assert_within_twice, max_abs, rms
from flax import nnx
from reference import speedrun as reference
from reference.torch_gpt2 import computing

from gptjax import Precision, generate, loss_fn
from gptjax.models.base import abstract_params, graph, init_params
from gptjax.models.speedrun import SpeedrunConfig, Stage

# A prime vocabulary, two pairs of heads, three frequencies, an odd length. Layer 0 is paired; 1 has
# value embeddings and starts the skip; 2 has no attention; 3 is long; 4 is paired and has value
# embeddings.
ODD = SpeedrunConfig(
    vocab_size=61,
    padded_vocab_size=64,
    block_size=33,
    n_layer=5,
    n_head=4,
    n_embd=48,
    n_inner=36,
    bigram_rows=23,
    paired_layers=(0, 4),
    long_layers=(3,),
    value_layers=(1, 4),
    skip=(1, 2),
    lanes_from=3,
)
# One layer of each kind: paired, without attention, long with value embeddings.
LAYERS = {"n_layer": 3, "paired_layers": (0,), "skip": (0, 1), "lanes_from": 2}
LAYERS |= {"long_layers": (2,), "value_layers": (2,)}
SMALL = dataclasses.replace(ODD, **LAYERS)
TIME = 19
# The third sequence is of documents of one token; the first has one at each end, too.
BEGINS = ((0, 1, 6, 7, 13, TIME - 1), (4,), range(TIME))
STAGES = {
    "first": Stage(2, 5, (5,), (1.0, 0.5, 0.25), tied=True),
    "grown": Stage(4, 9, (5, 9), (1.0, 0.5)),
}
VALIDATION = Stage(5, 2 * TIME, (5, 9, 13))


def random_of(config, seed=0):
    """Parameters far from the initial ones: every gate, λ and table matters, and embed is not the
    transposed lm_head."""
    rng, params = np.random.default_rng(seed), {}
    for name, leaf in sorted(abstract_params(config).items()):
        z = rng.standard_normal(leaf.shape)
        if name in ("attention_bank", "mlp_in"):
            z /= math.sqrt(leaf.shape[-1])
        elif name in ("mlp_out", "lm_head"):
            z /= math.sqrt(leaf.shape[-2])
        elif "lambda" in name:
            z = 0.8 + 0.2 * z
        params[name] = z.astype(np.float32)
    return params


def batch_of(config):
    """Tokens, targets and the numbers of the documents."""
    tokens, targets = np.random.default_rng(1).integers(0, config.vocab_size, (2, 3, TIME))
    documents = np.zeros((3, TIME), np.int32)
    for row, begins in zip(documents, BEGINS, strict=True):
        row[list(begins)] = 1
    return tokens.astype(np.int32), targets.astype(np.int32), documents.cumsum(1, dtype=np.int32)


def build(config, params):
    return nnx.merge(graph(config), jax.tree.map(jnp.asarray, params))


def ours(config, params, batch, compiler_options=None):
    """Loss and gradients of our model in fp64, without those of the padding, which are 0."""
    tokens, targets, documents = map(jnp.asarray, batch)

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def value_and_grad(params):
        loss = lambda params: loss_fn(build(config, params), tokens, targets, None, documents)
        return jax.value_and_grad(loss)(params)

    loss, grads = value_and_grad(jax.tree.map(jnp.asarray, params))
    found = {}
    for name, grad in grads.items():
        grad = np.asarray(grad, np.float64)
        found[name] = reference.unpadded(name, grad, config.vocab_size)
        assert math.isclose(np.abs(grad).sum(), np.abs(found[name]).sum()), f"padding of {name}"
    return float(loss), found


def theirs(config, params, batch, dtype=torch.float32):
    """The same of PyTorch's model, and its logits."""
    model = reference.from_params(config, params, dtype=dtype)
    tokens, targets, documents = (torch.from_numpy(x).long() for x in batch)
    logits = model(tokens, documents)
    loss = model.losses(logits, targets, config.stage.token_weights).mean()
    loss.backward()
    grads = {name: p.grad.double().numpy() for name, p in model.named_parameters()}
    return loss.item(), grads, logits.detach().double().numpy()


@pytest.mark.parametrize("stage", STAGES)
def test_loss_and_every_gradient(stage):
    """By the 2× rule. A λ is one number, whose error may be zero by luck in PyTorch: relative to
    its gradient instead."""
    config = dataclasses.replace(SMALL if stage == "first" else ODD, stage=STAGES[stage])
    params, batch = random_of(config), batch_of(config)
    loss, grads = ours(config, params, batch)
    their_loss, their_grads, _ = theirs(config, params, batch)
    exact_loss, exact_grads, exact_logits = theirs(config, params, batch, torch.float64)

    assert exact_logits.std() > 0.5, "logits this flat would agree with any model's"
    assert abs(loss - exact_loss) < 1e-5 and abs(their_loss - exact_loss) < 1e-5
    assert grads.keys() == exact_grads.keys()
    for name, exact in exact_grads.items():
        assert rms(exact) > 1e-4, f"{name} does not matter"
        if "lambda" in name:
            np.testing.assert_allclose(grads[name], exact, rtol=0, atol=1e-4 * rms(exact))
        else:
            assert_within_twice(grads[name], their_grads[name], exact, norm=rms, name=name)


def test_logits_of_the_validation():
    """A window beyond the sequence, one document, and a rotary embedding of shorter windows."""
    config = dataclasses.replace(SMALL, stage=VALIDATION)
    params, (tokens, targets, _) = random_of(config), batch_of(config)
    batch = tokens, targets, np.zeros_like(tokens)
    model = lambda params: build(config, params)(jnp.asarray(tokens))
    logits = np.asarray(jax.jit(model)(params), np.float64)
    their_logits, exact = (
        theirs(config, params, batch)[2],
        theirs(config, params, batch, torch.float64)[2],
    )
    for norm in (rms, max_abs):
        assert_within_twice(logits, their_logits, exact, norm=norm, name="logits")


def test_bf16():
    """By the 2× rule against autocast, except for λ: the error of one number may be small by
    luck."""
    config = dataclasses.replace(SMALL, stage=STAGES["grown"])
    params, batch = random_of(config), batch_of(config)
    exact_loss, exact_grads, exact_logits = theirs(config, params, batch, torch.float64)
    with computing("bf16"):
        _, their_grads, their_logits = theirs(config, params, batch)
    near = dataclasses.replace(config, precision=Precision("bf16_residual_fp32"))
    loss, grads = ours(near, params, batch)
    assert 1e-5 < abs(loss - exact_loss) < 2 * rms(their_logits - exact_logits) < 0.1
    for name, exact in exact_grads.items():
        if "lambda" not in name:
            assert_within_twice(grads[name], their_grads[name], exact, norm=rms, name=name)


def test_the_loss_of_several_tokens():
    """Targets after the end and ignored ones have no term; weights may be traced; NaN for a target
    that is no id."""
    config = dataclasses.replace(SMALL, stage=STAGES["first"])
    params, (tokens, targets, _) = random_of(config), batch_of(config)
    targets[1, 3] = -1

    @jax.jit
    def losses(params, weights):
        model, args = build(config, params), (jnp.asarray(tokens), jnp.asarray(targets))
        return model(args[0]), *(
            model.losses(*args, ignored, token_weights=weights).reshape(3, TIME)
            for ignored in (-1, None)
        )

    logits, found, strict = map(np.asarray, losses(params, jnp.array([1, 0.5, 0.25])))
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    expected = np.zeros((3, TIME))
    for b, t, k in np.ndindex(3, TIME, 3):
        if t + k < TIME and targets[b, t + k] >= 0:
            expected[b, t] -= (1, 0.5, 0.25)[k] * log_p[b, t, targets[b, t + k]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    unknown = np.zeros((3, TIME), bool)
    unknown[1, 1:4] = True
    np.testing.assert_array_equal(np.isnan(strict), unknown)
    np.testing.assert_allclose(strict[~unknown], found[~unknown], rtol=1e-6)


def test_initial_parameters():
    """The record's distributions."""
    params = init_params(dataclasses.replace(ODD, n_embd=96, n_inner=128), 0)
    for name, std in {"lm_head": 0.005, "values": 0.01}.items():
        drawn = reference.unpadded(name, params[name], ODD.vocab_size)
        assert drawn.std() == pytest.approx(std, rel=0.05)
    np.testing.assert_array_equal(params["embed"], params["lm_head"].T)
    for name in ("attention_bank", "mlp_in"):
        assert params[name].std() == pytest.approx(0.5 / math.sqrt(96), rel=0.02), name
        assert np.abs(params[name]).max() <= 3**0.5 * 0.5 / math.sqrt(96) * (1 + 1e-6), "uniform"
    zeros = ("bigram", "mlp_out", "smear_gate", "skip_gate", "attention_gates", "value_gates")
    for name in (*zeros, "smear_lambda", "x0_lambdas"):
        assert not params[name].any(), name
    for name, value in {
        "skip_lambda": -1.5,
        "backout_lambda": 0.5,
        "qkvo_lambdas": [0.5, 1],
        "residual_lambdas": 1.1**0.5,
        "bigram_lambdas": 0.05,
        "mlp_lambdas": 1,
        "lane_lambdas": [[1, 1.5], [1, 1]],
    }.items():
        np.testing.assert_allclose(params[name], np.broadcast_to(value, params[name].shape))


def test_sizes_matrices_and_flops():
    """543.8M parameters in the record, two of whose 24 MLP matrices are padding; 114.1M in
    matmuls."""
    config = SpeedrunConfig(vocab_size=50_304)
    assert config.num_params / 1e6 == pytest.approx(543.8 - 2 * 3072 * 768 / 1e6, abs=0.05)
    matmuls = (config.num_params - config.lookup_params()) / 1e6
    assert matmuls == pytest.approx(114.1, abs=0.05)
    real = SpeedrunConfig()
    assert config.num_params - real.num_params == 47 * 768 * 7
    # One token sees itself alone; a long sequence, 10 windows.
    per_key, keys = 12 * 768, (config.flops_per_token(10**9) - 6e6 * matmuls) / (12 * 768)
    assert keys == pytest.approx(8 * (6 * 128 + 1) + 2 * (13 * 128 + 1), rel=1e-4)
    assert real.flops_per_token(1) == 6 * (real.num_params - real.lookup_params()) + per_key * (
        6 + 4 * 1.5
    )

    params, groups = abstract_params(config), config.parameter_groups()
    matrices = {g.paths: g.matrices.shape(params[g.paths].shape) for g in groups if g.matrices}
    assert matrices == {
        "attention_bank": (10, 4, 1, 768, 768),
        "mlp_in": (11, 1, 768, 3072),
        "mlp_out": (11, 1, 3072, 768),
    }


def test_generation():
    """Greedy tokens are those of the whole sequence, for prompts of two lengths."""
    model, prompts = build(SMALL, random_of(SMALL)), jnp.asarray(batch_of(SMALL)[0][:2, :5])
    how = {"max_new_tokens": 6, "temperature": 0.0, "key": jax.random.key(0)}
    out = generate(model, prompts, **how, lengths_B=jnp.array([5, 3]))
    likeliest = jax.jit(lambda tokens: model(tokens).argmax(-1))(out)
    np.testing.assert_array_equal(out[0, 5:], likeliest[0, 4:-1])
    np.testing.assert_array_equal(out[1, 3:9], likeliest[1, 2:8])
    with pytest.raises(ValueError, match="the model has no KV cache"):
        model.hidden(prompts, cache=model.init_cache(2, 9))
    for call in (model.losses, functools.partial(loss_fn, model)):
        with pytest.raises(ValueError, match=f"ignore_index in the range of int32, got {2**40}"):
            call(prompts, prompts, 2**40)
