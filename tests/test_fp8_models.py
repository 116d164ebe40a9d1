"""Precision("fp8_head") and ("fp8"): what is in FP8 in a training step, and what is not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gptjax import GPT2, GPT2Config, Llama3Config, Precision, SpeedrunConfig, generate
from gptjax import parallel as parallel_module
from gptjax.models.base import graph, init_params
from gptjax.models.speedrun import Stage
from gptjax.optim import adamw
from gptjax.parallel import Parallel
from gptjax.training.step import init_state, loss_and_grads, make_eval_step, make_train_step

SIZES = {"vocab_size": 61, "padded_vocab_size": 64, "block_size": 16, "n_embd": 32}
STAGE = Stage(short_window=4, long_window=8, rotary_windows=(8,))
CONFIGS = {
    "gpt2": GPT2Config(**SIZES, n_layer=2, n_head=2),
    "llama3": Llama3Config(**SIZES, n_layer=1, n_head=2),
    "speedrun": SpeedrunConfig(
        **SIZES,
        n_layer=4,
        n_head=2,
        n_inner=32,
        bigram_rows=50,
        paired_layers=(0,),
        long_layers=(0,),
        value_layers=(0,),
        skip=(0, 1),
        lanes_from=2,
        stage=STAGE,
    ),
}


def with_precision(model, name):
    return dataclasses.replace(CONFIGS[model], precision=Precision(name))


def tokens(batch=2):
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (1, batch, 17)), jnp.int32)


def fp8_matmuls(f, *args):
    """The FP8 matmuls in the program."""
    text = jax.jit(f).lower(*args).as_text()
    return sum("dot_general" in line and "f8E" in line for line in text.splitlines())


# Of each block with attention: three matmuls of q, k and v, six of the MLP, and in a wide model
# three of the output projection; three of the head.
CONFIGS_OF_MATMULS = CONFIGS | {
    "wide gpt2": dataclasses.replace(CONFIGS["gpt2"], n_embd=1024, n_layer=1),
    "wide llama3": dataclasses.replace(CONFIGS["llama3"], n_embd=1024),
}
MATMULS = [
    ("wide gpt2", "fp8", 12 + 3),
    ("wide llama3", "fp8", 12 + 3),
    ("gpt2", "fp8", 3 + 2 * 9),
    ("llama3", "fp8", 9 + 3),
    ("speedrun", "fp8", 3 * 9 + 6 + 3),
    *((model, "fp8_head", 3) for model in CONFIGS),
]


@pytest.mark.parametrize("model, name, number", MATMULS)
def test_only_the_step_is_in_fp8(model, name, number):
    """So many matmuls in the step, and none in evaluation."""
    config = dataclasses.replace(CONFIGS_OF_MATMULS[model], precision=Precision(name))
    g, windows = graph(config), tokens()
    params = jax.eval_shape(lambda: init_params(config, 0))
    assert fp8_matmuls(lambda p: loss_and_grads(g, p, windows), params) == number
    evaluation = jax.jit(make_eval_step(g)).lower(params, windows[0])
    # The norms' FP8 copies are unused in evaluation.
    assert "f8e" not in (evaluation.compile() if name == "fp8" else evaluation).as_text().lower()


@functools.cache
def one_device(model, name, batch=2):
    """Graph and random parameters of a model, GPT-2 of one layer, and the function that returns its
    loss and gradient on one device, compiled once.

    Parameters that begin at zero, such as the speedrun's gates, are random.
    """
    config = with_precision(model, name)
    if model == "gpt2":
        config = dataclasses.replace(config, n_layer=1)
    g, params, rng = graph(config), init_params(config, 0), np.random.default_rng(1)
    if model != "gpt2":
        noise = lambda x: x + 0.05 * jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        params = jax.tree.map(noise, params)
    return g, params, jax.jit(lambda p: loss_and_grads(g, p, tokens(batch)))


def norm(tree) -> float:
    return float(sum((x**2).sum() for x in jax.tree.leaves(tree))) ** 0.5


def groups(grads, expected):
    """Each parameter by itself, and the speedrun's λ together: the gradient of a λ is a sum of
    products of both signs, with an error relative to the products."""
    pairs = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True)
    named = [(jax.tree_util.keystr(path), a, b) for (path, a), b in pairs]
    lambdas = [pair for name, *pair in named if "lambda" in name]
    if lambdas:
        yield "lambdas", *zip(*lambdas, strict=True)
    yield from (entry for entry in named if "lambda" not in entry[0])


@pytest.mark.parametrize(
    "model, name, batch, bound",
    [
        ("gpt2", "fp8_head", 2, 0.06),
        ("gpt2", "fp8", 2, 0.1),
        ("llama3", "fp8", 128, 0.1),
        ("speedrun", "fp8", 128, 0.1),
    ],
)
def test_gradients_are_near_those_of_bf16(model, name, batch, bound):
    """The relative error of a sum of independently rounded terms is below that of a term: 1/8 for
    e5m2, 1/16 for e4m3. A gradient passes through several such sums. Many tokens, since the errors
    of the gradient of the logits, which is rounded stochastically, average out over tokens."""
    (_, params, run), (_, _, of_bf16) = (one_device(model, p, batch) for p in (name, "bf16"))
    (loss, grads), (expected, expected_grads) = run(params), of_bf16(params)
    assert 0 < abs(loss - expected) < 0.02 * (1 if model == "gpt2" else expected)
    difference = norm(jax.tree.map(jnp.subtract, grads, expected_grads))
    assert 0 < difference < bound * norm(expected_grads)
    for label, a, b in groups(grads, expected_grads):
        assert norm(jax.tree.map(jnp.subtract, a, b)) < 0.25 * norm(b), label


@pytest.mark.parametrize("strategy, tolerance", [("data", 1e-6), ("zero1", 1e-6), ("fsdp", 4e-3)])
def test_strategies(monkeypatch, strategy, tolerance):
    """The same loss and gradient on two devices, although each device computes the scales of its
    own gradients: powers of two change no rounding inside FP8's range. fsdp's gradients of kernels
    are rounded to bf16.
    """
    monkeypatch.setattr(parallel_module, "SMALLEST_SHARDED", 200)
    g, params, on_one_device = one_device("gpt2", "fp8")
    parallel = Parallel.of(jax.devices("cpu")[:2], strategy)
    placed = jax.device_put(params, parallel.shardings(params))
    two = jax.jit(lambda p: loss_and_grads(g, p, tokens(), parallel))(placed)
    one = on_one_device(params)
    assert abs(one[0] - two[0]) < 2e-6
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert float(jnp.linalg.norm(a - b)) <= tolerance * float(jnp.linalg.norm(a)) + 1e-9


@dataclasses.dataclass(frozen=True)
class SpikeConfig(GPT2Config):
    """GPT-2's config, with a step whose gradient is 128 times its size."""

    spike_step: int = 3

    def build(self, rngs):
        return SpikeGPT2(self, rngs=rngs)

    def loss_options(self, step):
        return {"factor": jnp.where(step == self.spike_step, jnp.float32(128.0), 1.0)}


class SpikeGPT2(GPT2):
    """GPT-2 whose gradient in a training step is multiplied by a factor: the whole backward pass
    computes with the larger numbers."""

    def losses(self, *args, factor=None, **options):
        losses_N = super().losses(*args, **options)
        if factor is None:
            return losses_N
        return factor * losses_N - (factor - 1) * jax.lax.stop_gradient(losses_N)


@pytest.mark.usefixtures("optax_promotion")
def test_a_spike_and_a_resume():
    """Without clipping: a gradient of 2⁷ times its size has exactly 2⁷ times its norm, so that
    nothing saturates, and the loss falls after it as before. The state has no arrays that bf16 has
    not, and a copy of it continues bit for bit."""
    spike = SpikeConfig(**SIZES, n_layer=1, n_head=2, precision=Precision("fp8"))
    tx = adamw(1e-2, clip_norm=None)
    train_step = jax.jit(make_train_step(graph(spike), tx))
    states, metrics = [init_state(spike, tx, 0)], []

    def step(state):
        state, row = train_step(state, tokens())
        return state, (float(row["loss"]), float(row["grad_norm"]))

    for _ in range(10):
        state, row = step(states[-1])
        states.append(state)
        metrics.append(row)
    losses, norms = np.array(metrics).T
    _, (loss, norm) = step(dataclasses.replace(states[3], step=states[2].step))
    assert norms[3] == 128 * norm and abs(losses[3] - loss) < 1e-5
    assert np.isfinite(metrics).all() and norms[4:].max() < 2 * norms[:3].max()
    assert losses[9] < losses[5] < losses[3] < losses[0]

    bf16 = dataclasses.replace(spike, precision=Precision("bf16"))
    expected = jax.eval_shape(lambda: init_state(bf16, tx, 0))
    assert jax.tree.map(dtype_of, states[0]) == jax.tree.map(dtype_of, expected)
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), states[5])
    for i in range(5, 10):
        restored, row = step(restored)
        assert row == metrics[i]
    for a, b in zip(jax.tree.leaves(states[10]), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)


def dtype_of(x):
    return x.shape, x.dtype


@pytest.mark.parametrize("model", CONFIGS)
def test_evaluation_and_generation_are_those_of_bf16(model):
    found = []
    for name in ("fp8", "bf16"):
        g, params, _ = one_device(model, name)
        evaluate, text = jax.jit(make_eval_step(g)), ()
        if model == "gpt2":
            how = {"temperature": 0.0, "key": jax.random.key(0), "max_new_tokens": 4}
            text = generate(nnx.merge(g, params), tokens()[0, :, :8], **how)
        found.append((evaluate(params, tokens()[0]), text))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("model", CONFIGS)
def test_kernels(model):
    norm = "layer_norm" if model == "gpt2" else "rms_norm"
    mlp = "swiglu" if model == "llama3" else "mlp"
    head = {"linear_cross_entropy": "fused (fp8)", "quantize": "xla", "scaled_matmul": "xla"}
    both = dict.fromkeys((norm, "linear"), "xla and xla (fp8)") | {mlp: "xla (fp8)"}
    others = with_precision(model, "bf16").kernels(16)
    assert with_precision(model, "fp8_head").kernels(16) == others | head
    assert with_precision(model, "fp8").kernels(16) == others | head | both


@pytest.mark.parametrize(
    "model, name, change, message",
    [
        ("gpt2", "fp8_head", {"loss": "xla"}, "'xla' has no fp8 matmuls"),
        *((model, "fp8", {"mlp": "reference"}, "'reference'") for model in CONFIGS),
        ("gpt2", "fp8", {"attention": "reference"}, "'reference' has no fp8 matmuls"),
    ],
)
def test_back_ends_without_fp8_refuse(model, name, change, message):
    config = dataclasses.replace(with_precision(model, name), **change)
    with pytest.raises(ValueError, match=message):
        config.kernels(16)
    with pytest.raises(ValueError, match=message):
        params = jax.eval_shape(lambda: init_params(CONFIGS[model], 0))
        jax.eval_shape(functools.partial(loss_and_grads, graph(config)), params, tokens())


def test_a_model_without_fp8_blocks_refuses():
    class Plain(GPT2Config):
        supports_fp8 = False

    with pytest.raises(ValueError, match="Plain: expected another precision than fp8: .* fp8_head"):
        Plain(precision=Precision("fp8"))
