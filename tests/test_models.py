"""What every architecture has: causality, initial parameters for any padding, recomputation, its
kernels on a GPU, and the arguments that it refuses."""

import dataclasses
import functools
import re

import gpt2_tools
import jax
import jax.numpy as jnp
import jaxtyping
import llama_tools
import numpy as np
import pytest
import test_speedrun
from comparison_tools import assert_within_twice, flatten, max_abs, rms
from flax import nnx
from gpt2_tools import SHAPES, batch_of, build, config_of, run, split
from kernel_tools import h200, lower_for_h200

from gptjax import Batch, GPT2Config, Llama3Config, Precision, SpeedrunConfig, loss_fn
from gptjax.models.base import abstract_params, graph, init_params
from gptjax.models.speedrun import Stage
from gptjax.training.step import loss_and_grads

ODD = config_of(SHAPES["odd"])
MODELS = {
    "gpt2": (ODD, gpt2_tools.random_of),
    "llama3": (llama_tools.ODD, llama_tools.random_of),
    "speedrun": (test_speedrun.SMALL, test_speedrun.random_of),
}


@pytest.mark.parametrize("name, documents", [*((n, False) for n in MODELS), ("speedrun", True)])
def test_no_position_sees_a_later_token(name, documents):
    """Row k has another token k. GPT-2 and Llama 3 see all of their past."""
    config, random_of = MODELS[name]
    time = min(config.block_size, test_speedrun.TIME)
    tokens_T = batch_of(config, 1, time=time)[0, 0]
    rows = (tokens_T + 7 * np.eye(time + 1, time, -1, dtype=np.int32)) % config.vocab_size
    segments_T = test_speedrun.batch_of(test_speedrun.SMALL)[2][0]
    how = {"segment_ids_BT": jnp.asarray(segments_T[None])} if documents else {}
    # One row at a time: rows of a batch round differently.
    one = lambda model, row_T: model.hidden(row_T[None], **how)[0]
    hidden = jax.jit(lambda model, rows: jax.lax.map(functools.partial(one, model), rows))
    first, *others = np.asarray(hidden(build(config, random_of(config)), jnp.asarray(rows)))
    moved = np.abs(np.array(others) - first).max(-1)
    assert not np.tril(moved, -1).any() and np.diag(moved).min() > 1e-3
    if name != "speedrun":
        assert moved[np.triu_indices(time)].min() > 1e-6


@pytest.mark.parametrize("kind", [GPT2Config, Llama3Config, SpeedrunConfig])
def test_few_layers_have_the_kernels_of_all(kind, monkeypatch):
    config, windows = kind(n_head=12, precision=Precision("fp8")), kind is SpeedrunConfig
    shape = 8192 if windows else 1024, 2
    with h200():
        found = config.kernels(*shape)
        monkeypatch.setattr(kind, "with_few_layers", lambda self: self)
        assert found == config.kernels(*shape)
    # The speedrun's short window is narrow enough for Triton.
    assert found["flash_attention"] == ("mosaic and triton" if windows else "mosaic")


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_gives_one_model_for_any_padding(name):
    config = MODELS[name][0]
    of = lambda padded, seed=3: flatten(
        jax.device_get(init_params(dataclasses.replace(config, padded_vocab_size=padded), seed))
    )
    none, some, other = of(61), of(200), of(61, seed=4)
    for path, x in none.items():
        cut = some[path][*map(slice, x.shape)]
        np.testing.assert_array_equal(cut, x, err_msg=path)
        assert np.count_nonzero(cut) == np.count_nonzero(some[path]), f"padding of {path}"
    tables = {"wte", "embed"} & none.keys()
    assert all((none[table] != other[table]).all() for table in tables)


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_recompute_changes_nothing(name):
    config, random_of = MODELS[name]
    plain = dataclasses.replace(config, n_layer=1)
    params, batch = random_of(plain), batch_of(plain, 3)
    expected = run(plain, params, *batch)
    for recompute in ("block", "sublayer"):
        found = run(dataclasses.replace(plain, recompute=recompute), params, *batch)
        assert found[1] == expected[1]
        for path, exact in expected[2].items():
            bound = {"rtol": 0, "atol": 1e-6 * max_abs(exact)}
            np.testing.assert_allclose(found[2][path], exact, **bound, err_msg=path)


# ------------------------------------------------------------------------------------------ kernels

BF16 = Precision("bf16")
LOWERED = {
    # Mosaic reads the key heads by index, and computes two matmuls of the MLP. Norms have the
    # residual.
    "llama3": (
        Llama3Config(
            n_layer=1,
            n_head=6,
            n_kv_head=2,
            n_embd=768,
            n_inner=1280,
            precision=BF16,
            block_size=1024,
        ),
        {"mosaic_gpu_v2": 4, "norm_forward": 3, "norm_backward": 3}
        | dict.fromkeys(("rotary_forward_kernel", "rotary_backward_kernel"), 1),
    ),
    # Norms of two attentions, three MLPs, x0 and the output; a loss of one target.
    "speedrun": (
        SpeedrunConfig(**test_speedrun.LAYERS, bigram_rows=100, precision=BF16),
        {"norm_forward": 7, "norm_backward": 7, "classifier_kernel": 1},
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_step_lowers_for_an_h200_with_every_kernel(name):
    """No attention stores its scores."""
    config, counts = LOWERED[name]
    windows = jax.ShapeDtypeStruct((1, 1, 1025), jnp.int32)
    batch = lambda windows: Batch.of(windows, 50_256) if name == "speedrun" else windows
    step = lambda params, windows: loss_and_grads(graph(config), params, batch(windows))
    text = lower_for_h200(step, abstract_params(config), windows)
    kernels = re.findall(r"custom_call @(\w+)\b", text)
    assert {kernel: kernels.count(kernel) for kernel in counts} == counts
    assert not re.search(r"1024x1024x|2048x2048x", text)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, precision, sizes",
    [
        *(
            ("llama3", name, {"n_head": h, "n_kv_head": k})
            for name in ("bf16", "tf32")
            for h, k in ((6, 2), (3, 1))
        ),
        ("speedrun", "bf16", {"n_head": 2}),
    ],
)
def test_the_default_kernels_on_the_gpu(name, precision, sizes):
    """The 2× rule for each gradient, and for Llama 3's loss of each token: errors against fp32
    references, compared with those of XLA's back ends."""
    base, parts = MODELS[name][0], ("attention", "norm", "mlp", "loss")
    if name == "llama3":
        sizes = sizes | {"n_embd": 384, "n_inner": 1024, "block_size": 256, "rope_scaling": 1.0}
    else:
        base, stage = test_speedrun.ODD, Stage(40, 130, (64, 130), (1.0, 0.5))
        sizes = sizes | {"n_embd": 256, "n_inner": 512, "block_size": 512, "stage": stage}
    config = dataclasses.replace(base, **sizes, vocab_size=509, padded_vocab_size=512)
    near = dataclasses.replace(config, precision=Precision(precision))
    batch = jnp.asarray(batch_of(config, 4, time=config.block_size + 1)[:1])
    if name == "llama3":
        assert near.kernels(256, 4).items() >= {"swiglu": "triton", "rms_norm": "triton"}.items()
        params = init_params(config, 0)
    else:
        batch = Batch.of(batch[:, :2].at[:, :, ::37].set(508), 508)
        params = jax.tree.map(jnp.asarray, test_speedrun.random_of(config))
    grads = {}
    for form_name, form in {
        "ours": near,
        "xla": dataclasses.replace(near, **dict.fromkeys(parts, "xla")),
        "exact": dataclasses.replace(config, **dict.fromkeys(parts, "reference")),
    }.items():
        step = jax.jit(functools.partial(loss_and_grads, graph(form)))
        loss, found = jax.device_get(step(params, batch))
        assert np.isfinite(loss)
        grads[form_name] = flatten(found)
        if name == "llama3":
            # Not the mean loss, in which errors of tokens cancel each other by chance.
            losses_N = jax.jit(nnx.merge(graph(form), params).losses)
            grads[form_name]["losses"] = losses_N(batch[0, :, :-1], batch[0, :, 1:])
    for path, exact in grads["exact"].items():
        if "lambda" not in path:
            assert_within_twice(grads["ours"][path], grads["xla"][path], exact, norm=rms, name=path)


# ------------------------------------------------------------------------------------------- errors


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
    ],
)
def test_tokens_that_are_no_ids(unchecked_types, tokens, got):
    model, ids = nnx.merge(*split(ODD)), jnp.ones((1, 3), int)
    message = "{}: expected an array of integer ids of shape .batch, time.*got " + got
    with pytest.raises(ValueError, match=message.format("GPT2")):
        model(tokens)
    for pair in ((tokens, ids), (ids, tokens)):
        with pytest.raises(ValueError, match=message.format("loss_fn")):
            loss_fn(model, *pair)


def test_sequences_of_another_shape(unchecked_types):
    model, eight = nnx.merge(*split(ODD)), jnp.zeros((1, 8), jnp.int32)
    for call in (model, lambda tokens: loss_fn(model, tokens, tokens)):
        with pytest.raises(ValueError, match="a sequence of 8 tokens is longer than block_size=7"):
            call(eight)
    with pytest.raises(ValueError, match=r"got tokens \(1, 8\) and targets \(8, 1\)"):
        loss_fn(model, eight, eight.T)


SIZES = ("vocab_size", "padded_vocab_size", "block_size", "n_layer", "n_head", "n_embd")


@pytest.mark.parametrize("name", [*SIZES, "loss_chunk"])
def test_sizes_are_whole_numbers(unchecked_types, name):
    optional = name in ("padded_vocab_size", "loss_chunk")
    for value in (True, 2.0, "2", np.int64(2), 0, -1, *([] if optional else [None])):
        with pytest.raises(ValueError, match=f"--model.{name.replace('_', '-')} must be "):
            GPT2Config(**{name: value})


REFUSED = {
    "gpt2": [
        ({"n_embd": 770, "n_head": 12}, "n_embd=770 is not a multiple of n_head=12"),
        ({"padded_vocab_size": 60}, "padded_vocab_size=60 is below vocab_size=61"),
        # The rows of a config of which only the vocabulary was changed.
        (
            {"vocab_size": 256, "padded_vocab_size": 50304},
            "at most 1023 rows of padding, got padded_vocab_size=50304 for vocab_size=256; give "
            "padded_vocab_size=256 ",
        ),
        ({"recompute": "everything"}, "--model.recompute must be one of none, block, sublayer"),
        ({"precision": "bf16"}, "must be Precision, got 'bf16' (str); give Precision('bf16')"),
    ],
    "llama3": [
        ({"n_kv_head": 2}, "n_head=3 is not a multiple of n_kv_head=2"),
        ({"n_kv_head": 0}, "--model.n-kv-head must be at least 1"),
        ({"n_inner": -7}, "--model.n-inner must be at least 1"),
        ({"n_embd": 45}, "n_embd/n_head = 15 is odd"),
        ({"rope_theta": float("nan")}, "--model.rope-theta must be at least 1 and finite, got nan"),
        ({"rope_scaling": 0.5}, "--model.rope-scaling must be at least 1 and finite, got 0.5"),
        ({"norm_eps": -1.0}, "--model.norm-eps must be at least 0"),
    ],
    "speedrun": [
        ({"n_head": 3}, "an even n_head"),
        ({"n_embd": 24}, "n_embd/n_head that is a multiple of 4"),
        ({"n_embd": 8, "n_head": 2}, "n_embd ≥ 12"),
        ({"bigram_rows": 0}, "--model.bigram-rows must be at least 1"),
        ({"skip": (2, 2)}, "0 ≤ skip[0] < skip[1] < lanes_from < n_layer"),
        ({"long_layers": (1,)}, "paired, long and value layers with attention"),
        ({"recompute": "block"}, "recompute none"),
        ({"stage": Stage(steps=(6, 6))}, "steps of the stage in order"),
        ({"stage": Stage(final_token_weights=(1.0, 0.5))}, "as many final weights of tokens"),
        ({"stage": Stage(evaluation_window=0)}, "windows of at least 1"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_are_refused(unchecked_types, name):
    for fields, message in REFUSED[name]:
        with pytest.raises(ValueError, match=re.escape(message)):
            dataclasses.replace(MODELS[name][0], **fields)
