"""Placement of parameters, and equal training on any number of devices.

`parallel_runs.py` runs the cases with 8 devices in a process of its own.
"""

import collections
import dataclasses
import functools
import json
import re

import jax
import numpy as np
import parallel_runs
import pytest
from parallel_runs import CASES, RESUMED, SMALLEST_SHARDED, STEPS, Case
from process_tools import python

from gptjax import Precision, parallel
from gptjax.models.base import graph, init_params
from gptjax.models.gpt2 import GPT2Config
from gptjax.parallel import Parallel, shard_axis
from gptjax.training.step import loss_and_grads

CONFIG = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all cases."""
    folder = tmp_path_factory.mktemp("parallel")
    python(parallel_runs.__file__, str(folder), XLA_FLAGS=parallel_runs.XLA_FLAGS)
    return json.loads((folder / "results.json").read_text())


def difference(a: list[float], b: list[float]) -> float:
    return float(np.abs(np.subtract(a, b)).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_do_not_depend_on_devices_and_strategy(results, case):
    expected = results["runs"][str(Case(1, "data", case.optimizer))]
    found = results["runs"][str(case)]
    assert expected["loss"][0] - expected["loss"][-1] > 0.5 and len(found["loss"]) == STEPS
    assert difference(found["loss"], expected["loss"]) <= 1e-6
    # AdamW's update does not depend on the gradient's scale, nor does NorMuon's.
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found["different_copies"] == 0


@pytest.mark.parametrize(("before", "after"), RESUMED, ids=str)
def test_a_checkpoint_resumes_with_other_devices_and_strategy(results, before, after):
    expected = results["runs"][str(Case(1, "data"))]["loss"][STEPS // 2 :]
    found = results["resumed"][f"{before} → {after}"]
    assert len(found) == len(expected) and difference(found, expected) <= 1e-6


@pytest.mark.parametrize("case", [case for case in CASES if case.strategy != "data"], ids=str)
def test_a_device_stores_its_share_of_the_state(results, case):
    whole = results["runs"][str(Case(1, "data", case.optimizer))]["bytes"]
    found = results["runs"][str(case)]
    # Biases, norms and the outliers' windows are replicated.
    assert found["copied"] < 0.12 * whole
    assert found["bytes"] - found["copied"] == (whole - found["copied"]) / case.devices


def test_fsdp_gathers_again_instead_of_storing(results):
    zero1, fsdp = (results["memory"][str(Case(4, name))] for name in ("zero1", "fsdp"))
    kernels, embeddings = 4 * parallel_runs.LARGE.n_layer, 2
    assert zero1["gathers"] == [kernels + embeddings]
    # The loop over micro-batches gathers the kernels in both passes, and is before the embeddings.
    assert sorted(fsdp["gathers"]) == [embeddings, 2 * kernels]
    assert fsdp["temporary"] < 0.6 * zero1["temporary"]


def tokens(sequences: int) -> np.ndarray:
    """Return one micro-batch of different sequences."""
    shape = (1, sequences, CONFIG.block_size + 1)
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def gradient(strategy, devices, reduce_dtype, precision, windows, n_layer=CONFIG.n_layer):
    """Return `loss_and_grads`, jitted, and its arguments."""
    config = dataclasses.replace(CONFIG, precision=Precision(precision), n_layer=n_layer)
    across = Parallel.of(jax.devices("cpu")[:devices], strategy, reduce_dtype)
    params = init_params(config, 0)
    params = jax.device_put(params, across.shardings(params))
    windows = jax.device_put(windows, parallel.over_batch(across.mesh, axis=1))
    f = jax.jit(lambda params, windows: loss_and_grads(graph(config), params, windows, across))
    return f, (params, windows)


@functools.cache
def computed(strategy="data", devices=2, reduce_dtype="fp32", precision="fp32"):
    """Return loss and gradient of sequences of which each device has the same.

    Numbers of one device and of several are then comparable bit for bit.
    """
    windows = np.concatenate([tokens(4)] * devices, axis=1)
    f, arguments = gradient(strategy, devices, reduce_dtype, precision, windows, n_layer=1)
    return jax.device_get(f(*arguments))


@pytest.fixture
def small_shards(monkeypatch):
    """Shard the arrays of a small model."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", SMALLEST_SHARDED)


@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
@pytest.mark.parametrize(
    ("precision", "reduce_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")]
)
def test_collectives_of_a_gradient(small_shards, strategy, precision, reduce_dtype):
    """Kernels are gathered in the compute dtype; the embeddings are read in fp32."""
    f, arguments = gradient(strategy, 2, reduce_dtype, precision, tokens(4))
    text = str(f.trace(*arguments).jaxpr)
    found = re.findall(r":(\w+)\[[\d,]*\] = (all_gather|reduce_scatter)\[", text)
    kernels, embeddings = 4 * CONFIG.n_layer, 2
    short = {"fp32": "f32", "bf16": "bf16"}
    expected = collections.Counter()
    if strategy != "data":
        expected[short[precision], "all_gather"] += kernels * (2 if strategy == "fsdp" else 1)
        expected["f32", "all_gather"] += embeddings
        expected[short[reduce_dtype], "reduce_scatter"] += kernels + embeddings
    assert collections.Counter(found) == expected
    assert ("remat" in text) == (strategy == "fsdp")


def relative_error(a, b) -> float:
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
def test_losses_and_gradients_of_a_strategy(small_shards, strategy):
    loss, grads = computed(devices=1, precision="bf16")
    found = computed(strategy, precision="bf16")
    assert found[0].tobytes() == loss.tobytes()
    if strategy != "fsdp":
        # One device returns kernels' gradients in fp32. Rounded to bf16, they differ by 7e-4.
        assert relative_error(found[1], grads) < 1e-6
    grads = computed(devices=1)[1]
    assert relative_error(computed(strategy)[1], grads) < 1e-6
    # The gradient of each of two devices and their sum are rounded.
    error = relative_error(computed(strategy, reduce_dtype="bf16")[1], grads)
    assert 2**-12 < error < 2 * 2**-8


@pytest.mark.parametrize(
    ("shape", "devices", "axis"),
    [
        ((768, 2304), 2, 1),
        ((3072, 768), 2, 0),
        ((768, 768), 8, 0),  # the first of two equal axes
        ((50257, 768), 2, 1),  # the longest axis is odd
        ((50304, 768), 8, 0),
        ((12, 768, 64), 8, 1),
        ((129, 129), 2, None),  # no axis is divisible
        ((2**14,), 4, 0),
        ((2**14 - 4,), 4, None),  # small
        ((127, 128), 2, None),
        ((768, 2304), 1, None),
        ((), 2, None),
    ],
)
def test_the_sharded_axis(shape, devices, axis):
    assert shard_axis(shape, devices) == axis
