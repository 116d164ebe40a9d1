"""The training step: accumulation, skipped updates, metrics, and its kernels when
compiled for an H200."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kernel_tools import h200, lower_for_h200, unchecked

from gptjax import Precision, optim
from gptjax.models import gpt2, layers
from gptjax.models.base import graph
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.outliers import WINDOW
from gptjax.training.step import init_state, loss_and_grads, make_eval_step, make_train_step

pytestmark = pytest.mark.usefixtures("optax_promotion")

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32
)
# Compiled once for each shape of the windows.
gradient = jax.jit(functools.partial(loss_and_grads, graph(CONFIG)))


@functools.cache
def adamw_step(**skips):
    """Return AdamW's transformation, and a step that all tests share."""
    tx = optim.adamw(1e-2)
    return tx, jax.jit(make_train_step(graph(CONFIG), tx, **skips))


def windows(*shape, seed=0):
    return jax.random.randint(
        jax.random.key(seed), (*shape, CONFIG.block_size + 1), 0, CONFIG.vocab_size
    )


def state_of(tx, config=CONFIG, seed=0):
    return init_state(config, tx, seed)


@pytest.mark.parametrize(
    "seed", [7, 2**40 + 3, pytest.param(7, marks=pytest.mark.gpu)], ids=["7", "2**40 + 3", "gpu"]
)
def test_the_first_state_is_the_model_of_its_seed_bit_for_bit(monkeypatch, seed, request):
    """`init_state`, compiled and not, against the model made operation by operation.

    Not with `jax.nn.initializers.normal`: since JAX 0.12 that is one compiled program, which rounds
    otherwise.
    """
    gpu = request.node.get_closest_marker("gpu")
    config = GPT2Config(n_layer=3) if gpu else dataclasses.replace(CONFIG, n_layer=3)
    tx = optim.adamw(optim.schedule("constant", peak=1e-2, warmup_steps=0, total_steps=10))
    plain = lambda key, shape, *, std, dtype: (
        jax.random.normal(key, shape, dtype) * jnp.array(std, dtype)
    )
    with monkeypatch.context() as patch:
        patch.setattr(gpt2, "normal", plain)
        patch.setattr(layers, "normal", plain)
        params = nnx.to_pure_dict(nnx.split(gpt2.GPT2(config, rngs=nnx.Rngs(seed)), nnx.Param)[1])
    expected = params, tx.init(params), jax.random.key_data(jax.random.key(seed))
    compiled = jax.jit(lambda seed: init_state(config, tx, seed))(np.uint32(seed % 2**32))
    for state in (compiled, init_state(config, tx, seed)):
        found = state.params, state.opt_state, state.rng
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        rest = (state.step, state.loss_window, state.grad_norm_window)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(rest))


def test_gradients_accumulate_in_fp32_whatever_the_precision():
    config = dataclasses.replace(
        CONFIG, precision=dataclasses.replace(CONFIG.precision, name="bf16")
    )
    _, grads = jax.eval_shape(
        lambda windows: loss_and_grads(
            graph(config), state_of(optax.identity(), config).params, windows
        ),
        windows(4, 2),
    )
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    "shape, dtype", [((4, 17), "int32"), ((2, 4, 1), "int32"), ((0, 4, 17), "int32"),
                     ((2, 4, 17), "float32")]
)  # fmt: skip
def test_other_windows_are_refused(shape, dtype):
    """Such as the windows (B, T+1) of the evaluation step."""
    tx, _ = adamw_step()
    got = re.escape(f"got {shape} in {dtype}")
    step = unchecked(make_train_step(graph(CONFIG), tx))
    with pytest.raises(ValueError, match=rf"train_step: expected .*\(A, B, T \+ 1\).* {got}"):
        jax.eval_shape(step, state_of(tx), jax.ShapeDtypeStruct(shape, dtype))
    evaluate, windows = unchecked(make_eval_step(graph(CONFIG))), jax.ShapeDtypeStruct(shape, dtype)
    if shape != (4, 17):
        with pytest.raises(ValueError, match=rf"eval_step: expected .*\(B, T \+ 1\).* {got}"):
            jax.eval_shape(evaluate, state_of(tx).params, windows)


def test_metrics_report_the_step_that_was_made():
    schedule = optim.schedule("linear", peak=1e-2, warmup_steps=2, total_steps=10)
    tx = optim.adamw(schedule)
    step = jax.jit(make_train_step(graph(CONFIG), tx))
    state, params = state_of(tx), state_of(tx).params
    loss, grads = gradient(params, windows(1, 8))
    state, metrics = step(state, windows(1, 8))
    assert int(state.step) == 1 and int(metrics["skipped"]) == 0
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    assert float(metrics["lr"]) == pytest.approx(5e-3)
    _, metrics = step(state, windows(1, 8))
    assert float(metrics["lr"]) == pytest.approx(1e-2)


@pytest.mark.parametrize("which", ["skip_loss_z", "skip_grad_norm_z"])
def test_an_outlier_skips_its_update_and_the_window_remembers(which):
    tx, step = adamw_step(**{which: 3.0})
    state = state_of(tx)
    # both series have been near 0.01: any real loss or norm is an outlier
    quiet = jnp.linspace(0.01, 0.011, WINDOW)
    full = dataclasses.replace(state.loss_window, values=quiet, count=jnp.int32(WINDOW))
    state = dataclasses.replace(state, loss_window=full, grad_norm_window=full)
    after, metrics = step(state, windows(1, 4))
    assert int(metrics["skipped"]) == 1 and float(metrics[which.removeprefix("skip_")]) > 3
    for new, old in zip(
        *(jax.tree.leaves((s.params, s.opt_state)) for s in (after, state)), strict=True
    ):
        count = new.dtype == jnp.int32  # of the learning rate
        np.testing.assert_array_equal(new, old + 1 if count else old)
    assert int(after.step) == 1 and int(after.loss_window.count) == WINDOW + 1
    _, never = adamw_step()
    moved, metrics = never(state, windows(1, 4))
    assert int(metrics["skipped"]) == 0 and bool((moved.params["wpe"] != state.params["wpe"]).any())


# --------------------------------------------------------------------------------------- on an H200


def lowered_step(*batch, **options):
    """AdamW's step of GPT-2 124M on sequences of 1,024 tokens, lowered for an H200: the text, and
    the launches of each kernel. Mosaic's kernels are lowered once each, and called."""
    config, tx = GPT2Config(**options), optim.adamw(6e-4)
    state = jax.eval_shape(lambda: init_state(config, tx, 0))
    windows = jax.ShapeDtypeStruct((*batch, 1025), jnp.int32)
    text = lower_for_h200(make_train_step(graph(config), tx), state, windows)
    kernels = collections.Counter(re.findall(r"custom_call @(\w+)", text))
    kernels["mosaic"] = len(re.findall(r"call @(?:forward|backward|activated|du)\w*\(", text))
    return text, kernels


def passes(text, elements):
    """(operation, results' shape and dtype) → how often the program makes an array of so many
    elements or more, other than by a kernel or a product."""
    found = collections.Counter()
    for line in text.splitlines():
        operation = re.search(r'= "?stablehlo\.(\w+)|= (call)', line)
        result = re.search(r"tensor<([\dx]+)x([a-z]\w*)>[^<]*$", line.partition("->")[2] or line)
        if operation and result and math.prod(map(int, result[1].split("x"))) >= elements:
            found[operation[1] or operation[2], f"{result[1]} {result[2]}"] += 1
    kept = ("reshape", "return", "custom_call", "call", "dot_general")
    return collections.Counter({key: n for key, n in found.items() if key[0] not in kept})


def what_a_layer_adds(batch, back_ends, **options):
    """Kernels of a step with two layers, those that the second adds, its passes over what is as
    large as the residual stream, and the text."""
    with h200():
        chosen = GPT2Config(**options).kernels(1024, batch)
    parts = ("flash_attention", "layer_norm", "mlp", "linear_cross_entropy")
    assert chosen.items() >= dict(zip(parts, back_ends, strict=True)).items()
    (text, kernels), (fewer_text, fewer) = (
        lowered_step(1, batch, n_layer=layers, **options) for layers in (2, 1)
    )
    size = batch * 1024 * 768
    return kernels, kernels - fewer, passes(text, size) - passes(fewer_text, size), text


def test_the_step_on_an_h200_is_its_kernels_and_products():
    kernels, added, moved, text = what_a_layer_adds(
        64,
        ("mosaic", "triton", "mosaic", "fused"),
        precision=Precision("bf16"),
        attention="mosaic",
    )
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 4
    # Four chunks of the head, in the branch for unequal cotangents, which XLA drops, once more.
    assert kernels["classifier_kernel"] == 8 and added["classifier_kernel"] == 0
    assert kernels["norm_forward"] == kernels["norm_backward"] == 2 * 2 + 1
    # Attention; the MLP's first product with what follows it, and the one before it backward.
    assert added["mosaic"] == 4 and added["norm_forward"] == added["norm_backward"] == 2
    n = 64 * 1024
    # Of qkv alone: the MLP's kernels add c_fc's, LayerNorm's those of both projections into the
    # stream. No bias's gradient is a pass of its own: attention's function, which is lowered once,
    # sums dq.
    biases = {("add", f"{n}x2304 bf16"): 1, ("broadcast_in_dim", f"{n}x2304 bf16"): 1}
    assert moved == biases


def test_the_tf32_step_on_an_h200_moves_no_more_than_it_must():
    _, added, moved, text = what_a_layer_adds(
        32, ("triton", "triton", "triton", "fused"), precision=Precision("tf32")
    )
    own = {"activate_forward": 1, "activate_backward": 1, "norm_forward": 2, "norm_backward": 2}
    # The four weights; the inputs of c_attn, attention's c_proj and c_fc, and the gradients of both
    # projections into the stream. What is left for weight gradients comes out of the transpose that
    # sums rows, and of activate_backward for the four times wider hidden layer.
    own |= {"transpose": 4 + 3 + 2 + 1}
    assert {name: added[name] for name in own} == own
    # XLA's own passes: qkv's bias. No sum of rows, no transpose, nothing of the hidden layer.
    assert moved == {("add", "32768x2304 f32"): 1, ("broadcast_in_dim", "32768x2304 f32"): 1}
    assert not re.search(r"stablehlo\.reduce\(.*\(tensor<32768x(2304|3072)xf32>", text)


@pytest.mark.parametrize("recompute", ["block", "sublayer"])
def test_recomputation_on_an_h200_runs_the_forward_kernels_again(recompute):
    options = {"precision": Precision("bf16"), "attention": "mosaic", "recompute": recompute}
    _, kernels = lowered_step(2, 64, n_layer=2, **options)
    assert kernels["norm_forward"] == 2 * 2 * 2 + 1 and kernels["norm_backward"] == 2 * 2 + 1
    # Attention and the MLP's first half: forward, forward again, backward.
    assert kernels["mosaic"] == 2 * 2 * 3
