"""Separate documents in a sequence: losses and gradients equal those of each document alone, for
any split of the batch. Without the option, the step is unchanged."""

import dataclasses
import functools
import io
import re
import shutil
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataset_tools import make_folder
from flax import nnx
from kernel_tools import h200
from rich.console import Console
from torch_side import why_no_step
from train_tools import train_py

from gptjax import Batch, loss_fn, parallel
from gptjax.bench.jax_step import JaxStep
from gptjax.config import Config, ConfigError
from gptjax.data import write_shard
from gptjax.models import llama3
from gptjax.models.base import graph, init_params
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.models.layers import segment_positions
from gptjax.models.llama3 import Llama3Config
from gptjax.parallel import Parallel, data_mesh
from gptjax.training.inputs import Inputs
from gptjax.training.step import loss_and_grads, make_eval_step

# The fixture `config`.
pytest_plugins = ["train_tools"]

EOT, T = 60, 16
SHAPE = {"vocab_size": 61, "padded_vocab_size": 64, "block_size": T, "n_layer": 1, "n_head": 2}
MODELS = {
    "gpt2": GPT2Config(**SHAPE, n_embd=16),
    "llama3": Llama3Config(**SHAPE, n_embd=16, n_kv_head=1, n_inner=24),
}
# Where a document begins: the rest of one, one of a single EOT, one of two tokens, a long one.
BEGINS = (0, 4, 5, 7, T)


def windows(batch: int = 4) -> np.ndarray:
    """Return sequences of T+1 tokens; the last target of each is the EOT of a next document."""
    tokens = np.random.default_rng(0).integers(0, EOT, (batch, T + 1)).astype(np.int32)
    for row in range(batch):
        tokens[row, [begin + row * (0 < begin < T) for begin in BEGINS[1:]]] = EOT
    return tokens


@functools.cache
def params_of(name: str):
    """Return parameters of which positions and attention matter."""
    params = init_params(MODELS[name], 0)
    return jax.tree.map(lambda x: 5 * x if x.ndim == 2 else x, params)


def losses(name: str, params, tokens, targets, ids=None):
    model = nnx.merge(graph(MODELS[name]), params)
    return model.losses(tokens, targets, -1, ids).reshape(tokens.shape)


def test_ids_and_positions():
    tokens = jnp.array([[5, EOT, 3, EOT, EOT, 2, 9], [EOT, 1, 2, 3, 4, 5, 9]])
    ids = Batch.of(tokens, EOT).segments
    np.testing.assert_array_equal(ids, Batch.of(np.asarray(tokens), EOT).segments)
    assert ids.tolist() == [[0, 1, 1, 2, 3, 3], [1] * 6]
    assert segment_positions(ids).tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    reused = jnp.array([[7, 7, 0, 7, 7, 7]], jnp.uint8)  # a segment is a run
    assert segment_positions(reused).tolist() == [[0, 1, 0, 0, 1, 2]]


def test_llama_s_positions_restart(monkeypatch):
    """No loss could tell: rotary attention depends on differences of positions only."""

    class Rotated(Exception):
        pass

    def rotation(config, position_BT):
        raise Rotated(position_BT.tolist())

    monkeypatch.setattr(llama3, "rotation", rotation)
    model = nnx.merge(graph(MODELS["llama3"]), params_of("llama3"))
    ids = jnp.array([[0, 0, 1, 1, 1, 2]])
    with pytest.raises(Rotated, match=re.escape("[[0, 1, 0, 1, 2, 0]]")):
        model.hidden(ids, segment_ids_BT=ids)


@functools.cache
def one_by_one(name: str):
    """Return loss and gradients of the first window, each document in a row of its own."""
    window = windows(1)
    spans = list(zip(BEGINS, BEGINS[1:], strict=False))
    # A row for each document from position 0 on. What follows has no loss, and is not seen before.
    tokens, targets = np.zeros((2, len(spans), T), np.int32)
    targets -= 1
    for row, (begin, end) in enumerate(spans):
        tokens[row, : end - begin] = window[0, begin:end]
        targets[row, : end - begin] = window[0, begin + 1 : end + 1]  # of the last, the next EOT
    f = lambda params: losses(name, params, jnp.asarray(tokens), jnp.asarray(targets)).sum() / T
    return jax.jit(jax.value_and_grad(f))(params_of(name))


@pytest.mark.parametrize(
    "name, recompute",
    [("gpt2", "none"), ("gpt2", "sublayer"), ("llama3", "none"), ("llama3", "block")],
)
def test_a_packed_window_is_its_documents_one_by_one(name, recompute):
    config, window = dataclasses.replace(MODELS[name], recompute=recompute), jnp.asarray(windows(1))
    batch = Batch.of(window[None], EOT)
    packed = jax.jit(lambda params: loss_and_grads(graph(config), params, batch))
    same(packed(params_of(name)), one_by_one(name))


def same(found, expected):
    for (path, a), b in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        # fp32: sums of the same numbers in another order.
        atol = 2e-6 * float(jnp.abs(a).max())
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=atol, err_msg=str(path))


@pytest.mark.parametrize("name", MODELS)
def test_a_document_changes_no_loss_of_another(name):
    params, f = params_of(name), jax.jit(functools.partial(losses, name))
    before = windows(1)
    begin, end = BEGINS[2:4]
    after = before.copy()
    after[:, begin + 1 : end] = (after[:, begin + 1 : end] + 7) % EOT
    ids = jnp.asarray(Batch.of(before, EOT).segments)
    changed = [
        np.asarray(f(params, *(jnp.asarray(x) for x in (w[:, :-1], w[:, 1:])), given))[0]
        for given in (ids, None)
        for w in (before, after)
    ]
    inside = np.zeros(T, bool)
    inside[begin:end] = True  # its EOT predicts a token that changed
    np.testing.assert_array_equal(changed[0] != changed[1], inside)
    assert (changed[2] != changed[3])[begin:].all(), "without ids all later losses change"


@jax.jit
@jax.value_and_grad
def loss_of(params, tokens, targets):
    ids = jnp.cumsum(tokens == EOT, axis=1)
    return loss_fn(nnx.merge(graph(MODELS["gpt2"]), params), tokens, targets, -1, ids)


@functools.cache
def one_batch(masked: bool):
    """Return loss and gradients of one big batch on one device, by `loss_fn`."""
    return loss_of(params_of("gpt2"), windows()[:, :-1], targets_of(masked))


def targets_of(masked: bool) -> np.ndarray:
    """Return targets; with `masked`, those of an uneven part of each sequence, EOTs among both."""
    targets = windows()[:, 1:].copy()
    for row in range(len(targets) if masked else 0):
        targets[row, : 3 + 2 * row] = -1
    return targets


def batch_of(masked: bool, *shape: int) -> Batch:
    batch = Batch.of(windows(), EOT)._replace(targets=targets_of(masked))
    return Batch(*(x.reshape(*(shape or (-1,)), T) for x in batch))


@pytest.mark.parametrize(
    "micro_batches, strategy, masked, recompute",
    [
        (1, "data", False, "none"),
        (2, "zero1", True, "none"),
        (2, "fsdp", True, "block"),
    ],
)
def test_two_devices_compute_one_batch(monkeypatch, micro_batches, strategy, masked, recompute):
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 32)
    across = Parallel.of(jax.devices("cpu")[:2], strategy)
    params = jax.device_put(params_of("gpt2"), across.shardings(params_of("gpt2")))
    batch = parallel.put(
        parallel.over_batch(across.mesh, axis=1),
        batch_of(masked, micro_batches, -1),
    )
    config = dataclasses.replace(MODELS["gpt2"], recompute=recompute)
    f = jax.jit(lambda p, batch: loss_and_grads(graph(config), p, batch, across))
    same(f(params, batch), one_batch(masked))


@pytest.mark.parametrize("masked, devices", [(False, 1), (True, 2)])
def test_evaluation(masked, devices):
    across = Parallel.of(jax.devices("cpu")[:devices])
    evaluate = jax.jit(make_eval_step(graph(MODELS["gpt2"]), across))
    batch = parallel.put(parallel.over_batch(across.mesh, axis=0), batch_of(masked))
    params = jax.device_put(params_of("gpt2"), across.replicated)
    np.testing.assert_allclose(evaluate(params, batch), one_batch(masked)[0], rtol=1e-6)


def test_a_batch_without_segments_is_a_computation_without_segments():
    config, windows_ABT1 = MODELS["gpt2"], windows()[None]
    f = jax.jit(lambda params, batch: loss_and_grads(graph(config), params, batch))
    found, separate = (
        f.lower(params_of("gpt2"), batch).as_text()
        for batch in (windows_ABT1, Batch.of(windows_ABT1, EOT))
    )
    assert "cummax" in separate and "cummax" not in found


def test_train_py_compiles_both_steps_with_segments(config, words, tmp_path, monkeypatch):
    """And prints a line about it."""

    class Compiling(Exception):
        pass

    given = []

    def start(compiler, function, state, batch):
        given.append(batch)
        if len(given) == 2:
            raise Compiling
        return Future()

    monkeypatch.setattr(train_py.Compiler, "start", start)
    shutil.copytree(words, tmp_path / "copy")
    write_shard(tmp_path / "copy" / "words_train_000003.bin", np.array([256, *range(40)]))
    config = dataclasses.replace(config, dataset=str(tmp_path / "copy"), separate_documents=True)
    shown = io.StringIO()
    with pytest.raises(Compiling):
        train_py.train(config, Console(file=shown, width=200))
    assert [batch.segments.shape for batch in given] == [(4, 4, 32), (4, 32)]
    assert "documents do not see each other: each begins with token 256" in shown.getvalue()


def test_options():
    """A model without segment ids is refused, and the back end of attention must support them."""

    class Halved(GPT2):
        def losses(self, tokens_BT, targets_BT, ignore_index=None):
            return super().losses(tokens_BT, targets_BT, ignore_index) / 2

    class HalvedConfig(GPT2Config):
        def build(self, rngs):
            return Halved(self, rngs=rngs)

    model = HalvedConfig(vocab_size=257, block_size=T, n_layer=1, n_head=2, n_embd=16)
    with pytest.raises(ConfigError, match=r"and .*Halved.losses has no argument segment_ids_BT; l"):
        Config(model=model, sequence_length=T, separate_documents=True)
    tokens = jnp.asarray(windows(1))
    halved = jax.jit(lambda *args: loss_fn(model.build(nnx.Rngs(0)), *args))
    loss = halved(tokens[:, :-1], tokens[:, 1:])  # without documents
    assert 1 < loss < 5
    with h200():
        for name in ("gpt2", "llama3"):
            model = dataclasses.replace(MODELS[name], attention="cudnn", n_head=1, n_embd=64)
            model = dataclasses.replace(model, precision=type(model.precision)("bf16"))
            how = {"model": model, "sequence_length": T, "micro_batch": 8, "batch_tokens": 8 * T}
            if name == "llama3":
                assert Config(**how).kernels()["attention"] == "cudnn"
                with pytest.raises(ConfigError, match="does not support segment ids"):
                    Config(**how, separate_documents=True).kernels()
            how["model"] = dataclasses.replace(model, attention="mosaic")
            chosen = Config(**how, separate_documents=True).kernels()["attention"]
            unfused = " (bias gradient not fused)" if name == "gpt2" else ""
            assert chosen == "mosaic" + unfused


def test_bench_measures_separate_documents():
    """Some documents in each sequence, and no rival that computes something else."""
    config = Config(separate_documents=True, micro_batch=8)
    measured = JaxStep(config, jax.devices("cpu")[0])
    batch = measured._random_batch()
    assert 4 <= (batch.inputs == 50256).sum() <= 30 and batch.segments is not None  # 8,200 tokens
    assert JaxStep(Config(micro_batch=8), jax.devices("cpu")[0])._random_batch().segments is None
    assert "does not separate documents" in (why_no_step(config) or "")
    assert why_no_step(Config()) is None


def test_data_without_end_of_text_is_refused(tmp_path):
    folder = make_folder(tmp_path / "x", manifest=False)
    how = {"sequence_length": 16, "micro_batch": 1, "batch_tokens": 16}
    config = Config(dataset=str(folder), sample_every=0, separate_documents=True, **how)
    mesh = data_mesh(jax.devices("cpu")[:1])
    with pytest.raises(ConfigError, match="documents that begin with the end-of-text token .* gpt"):
        Inputs.find(config, mesh)
    assert Inputs.find(dataclasses.replace(config, separate_documents=False), mesh).eot is None
    write_shard(folder / "some_train_000002.bin", np.array([50256, *range(40)]))
    assert Inputs.find(config, mesh).eot == 50256
