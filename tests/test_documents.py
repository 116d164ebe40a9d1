"""Separate documents in a sequence: losses and gradients equal those of each document alone.
Targets without a loss equal PyTorch's ignore_index. Both for any split of the batch."""

import dataclasses
import functools

import gpt2_tools
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison_tools import max_abs
from dataset_tools import make_folder
from flax import nnx
from gpt2_tools import SHAPES, assert_parity, config_of
from jax._src.cudnn import fused_attention_stablehlo
from kernel_tools import h200
from reference.torch_gpt2 import TorchGPT2
from torch_side import why_no_step

from gptjax import Batch, loss_fn, parallel
from gptjax.bench.jax_step import JaxStep
from gptjax.config import Config, ConfigError
from gptjax.data import write_shard
from gptjax.models.base import graph, init_params
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.models.layers import segment_positions
from gptjax.models.llama3 import Llama3Config
from gptjax.parallel import Parallel, data_mesh
from gptjax.training.inputs import Inputs
from gptjax.training.step import loss_and_grads, make_eval_step

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
        atol = 1e-6 * float(jnp.abs(a).max())
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


@functools.cache
def one_batch(documents: bool, masked: bool):
    """Return loss and gradients of the mean over all targets, by `loss_fn` on one big batch."""
    inputs, targets, ids = jax.tree.map(jnp.asarray, batch_of(documents, masked))
    f = lambda params: loss_fn(nnx.merge(graph(MODELS["gpt2"]), params), inputs, targets, -1, ids)
    return jax.jit(jax.value_and_grad(f))(params_of("gpt2"))


def batch_of(documents: bool, masked: bool, *shape: int) -> Batch:
    """Return 4 sequences; with `masked`, the k-th has 5k targets with a loss, EOTs among them."""
    batch = Batch.of(windows(), EOT if documents else None)
    if masked:
        ignored = np.arange(T) < T - 5 * np.arange(4)[:, None]
        batch = batch._replace(targets=np.where(ignored, np.int32(-1), batch.targets))
    return jax.tree.map(lambda x: x.reshape(*(shape or (-1,)), T), batch)


@pytest.mark.parametrize(
    "documents, masked, micro_batches, devices, strategy, recompute",
    [
        (False, False, 2, 1, "data", "none"),
        (True, False, 1, 2, "data", "none"),
        (True, True, 2, 2, "zero1", "none"),
        (True, True, 2, 2, "fsdp", "block"),
        (False, True, 4, 1, "data", "none"),
        (False, True, 2, 2, "data", "none"),
    ],
)
def test_any_split_of_a_batch_is_one_batch(
    monkeypatch, documents, masked, micro_batches, devices, strategy, recompute
):
    """A micro-batch on a device has between 0 and 32 targets."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 32)
    across = Parallel.of(jax.devices("cpu")[:devices], strategy)
    params = jax.device_put(params_of("gpt2"), across.shardings(params_of("gpt2")))
    batch = batch_of(documents, masked, micro_batches, -1)
    batch = parallel.put(parallel.over_batch(across.mesh, axis=1), batch)
    config = dataclasses.replace(MODELS["gpt2"], recompute=recompute)
    f = jax.jit(lambda p, batch: loss_and_grads(graph(config), p, batch, across))
    found, expected = f(params, batch), one_batch(documents, masked)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    same(found, expected)


@pytest.mark.parametrize(
    "documents, masked, devices",
    [(False, False, 1), (True, False, 1), (False, True, 1), (True, True, 2)],
)
def test_evaluation_is_the_mean_over_the_targets(documents, masked, devices):
    across = Parallel.of(jax.devices("cpu")[:devices])
    evaluate = jax.jit(make_eval_step(graph(MODELS["gpt2"]), across))
    batch = parallel.put(parallel.over_batch(across.mesh, axis=0), batch_of(documents, masked))
    params = jax.device_put(params_of("gpt2"), across.replicated)
    expected = one_batch(documents, masked)[0]
    np.testing.assert_allclose(evaluate(params, batch), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "how", [{"loss": "reference"}, {"loss": "xla"}, {"loss": "fused", "loss_chunk": 7}], ids=str
)
def test_ignored_targets_are_pytorchs(monkeypatch, how):
    plain = gpt2_tools.batch_of

    def batch_of(*args):
        tokens, targets = plain(*args)
        return tokens, np.where(np.random.default_rng(1).random(targets.shape) < 0.4, -1, targets)

    def loss(self, tokens, targets):
        logits = self(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1)

    monkeypatch.setattr(gpt2_tools, "batch_of", batch_of)
    monkeypatch.setattr(TorchGPT2, "loss", loss)
    config = config_of(SHAPES["odd"], n_layer=1, **how)
    ours, _, exact = assert_parity(config, 2, norm=max_abs)
    np.testing.assert_allclose(ours[1], exact[1], rtol=0, atol=2e-6)


def test_only_targets_with_a_loss_count():
    f = jax.jit(lambda batch: loss_and_grads(graph(MODELS["gpt2"]), params_of("gpt2"), batch))
    batch, other = (batch_of(False, True, 1, 4) for _ in range(2))
    other.targets[0, 3, -1] = (other.targets[0, 3, -1] + 7) % EOT
    assert f(other)[0] != f(batch)[0]
    loss, grads = f(batch._replace(targets=0 * batch.targets - 1))
    assert loss == 0 and not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_factor_of_the_losses_costs_no_second_matmul_of_the_head():
    """XLA sees that all losses have one factor."""
    config = dataclasses.replace(MODELS["gpt2"], loss="fused")
    f = jax.jit(lambda params, batch: loss_and_grads(graph(config), params, batch))
    compiled = f.lower(params_of("gpt2"), batch_of(False, True, 1, 4)).compile().as_text()
    assert compiled and "conditional" not in compiled


def test_a_batch_without_segments_is_a_computation_without_segments():
    f = jax.jit(lambda params, batch: loss_and_grads(graph(MODELS["gpt2"]), params, batch))
    found, separate = (
        f.lower(params_of("gpt2"), batch).as_text()
        for batch in (windows()[None], batch_of(True, False, 1, 4))
    )
    assert "cummax" in separate and "cummax" not in found


def test_a_model_without_segment_ids_is_refused():
    class Halved(GPT2):
        def losses(self, tokens_BT, targets_BT, ignore_index=None):
            return super().losses(tokens_BT, targets_BT, ignore_index) / 2

    class HalvedConfig(GPT2Config):
        def build(self, rngs):
            return Halved(self, rngs=rngs)

    model = HalvedConfig(**SHAPE, n_embd=16)
    with pytest.raises(ConfigError, match=r"and .*Halved.losses has no argument segment_ids_BT; l"):
        Config(model=model, sequence_length=T, separate_documents=True)
    tokens = jnp.asarray(windows(1))
    halved = jax.jit(lambda *args: loss_fn(model.build(nnx.Rngs(0)), *args))
    assert 1 < halved(tokens[:, :-1], tokens[:, 1:]) < 5  # without documents


@pytest.mark.parametrize("name", MODELS)
def test_the_back_end_of_attention_must_support_segment_ids(name, monkeypatch):
    model = dataclasses.replace(MODELS[name], n_head=1, n_embd=64)
    model = dataclasses.replace(model, precision=type(model.precision)("bf16"))

    def chosen(attention, **more):
        own = dataclasses.replace(model, attention=attention)
        how = {"model": own, "sequence_length": T, "micro_batch": 8, "batch_tokens": 8 * T}
        return Config(**how, **more).kernels()

    with h200():
        if name == "llama3":
            monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
            assert chosen("cudnn")["flash_attention"] == "cudnn"
            with pytest.raises(ConfigError, match="does not support segment ids"):
                chosen("cudnn", separate_documents=True)
        separate = chosen("mosaic", separate_documents=True)
        assert separate["flash_attention"] == "mosaic"
        # Without documents, attention's kernels sum the gradient of GPT-2's bias.
        assert ("sum_rows" in separate) == (name == "gpt2")
        assert "sum_rows" not in chosen("mosaic")


def test_bench_measures_separate_documents():
    """Some documents in each sequence, and no rival that computes something else."""
    how = {"micro_batch": 8, "batch_tokens": 8 * 1024}
    config = Config(separate_documents=True, **how)
    measured = JaxStep(config, jax.devices("cpu")[0])
    batch = measured._random_batch()
    assert 4 <= (batch.inputs == 50256).sum() <= 30 and batch.segments is not None  # 8,200 tokens
    assert JaxStep(Config(**how), jax.devices("cpu")[0])._random_batch().segments is None
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
