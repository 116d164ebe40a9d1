"""--init-from: the first loss, the shape of the model, shardings, resuming, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import saved_run_tools
from flax import nnx
from saved_run_tools import random_params, save_run
from train_tools import rows, run

import gptjax
from gptjax import parallel
from gptjax.config import Config, ConfigError
from gptjax.data import find_dataset
from gptjax.models.base import abstract_params, graph, params_of
from gptjax.optim import OptimizerConfig
from gptjax.parallel import Parallel
from gptjax.training import init_from
from gptjax.training.inputs import Inputs
from gptjax.weights import WeightsError, sources

MODEL = dataclasses.replace(saved_run_tools.MODEL, n_layer=2)


def test_the_first_loss_is_that_of_the_resumed_run(config, tmp_path, monkeypatch):
    """To the last bit, on the same batch; then the new run resumes without the other model."""
    loader = Inputs.loader
    monkeypatch.setattr(Inputs, "loader", lambda self, step: loader(self, 0))
    options = {"val_every": 0, "sample_every": 0}
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=5, schedule_steps=100)
    first = dataclasses.replace(config, optimizer=optimizer, **options)
    assert run(dataclasses.replace(first, max_steps=3))[0] == 0
    # The model's shape is not given: a default is replaced by that of the run.
    model = gptjax.GPT2Config()
    tuned = dataclasses.replace(first, name="tuned", model=model, init_from=first.run_dir)
    code, text = run(dataclasses.replace(tuned, max_steps=1))
    assert code == 0 and f"weights     {first.run_dir}/checkpoints/3; new optimizer" in text
    assert run(dataclasses.replace(first, max_steps=4))[0] == 0
    resumed, begun = rows(first, "train")[4], rows(tuned, "train")[1]
    assert begun["loss"] == resumed["loss"] and begun["grad_norm"] == resumed["grad_norm"]
    assert begun["loss"] < rows(first, "train")[1]["loss"] - 0.1  # not a random state's
    lines = [json.loads(line) for line in (tuned.run_dir / "log.jsonl").read_text().splitlines()]
    assert lines[0]["config"]["init_from"] == str(first.run_dir)
    assert lines[0]["init_from"].startswith("step 3, ")
    assert lines[0]["config"]["model.n_layer"] == 1

    gone = dataclasses.replace(tuned, max_steps=2, init_from=tmp_path / "gone")
    code, text = run(gone)
    assert code == 0 and "resuming from step 1" in text and "weights " not in text
    assert {*rows(tuned, "train")} == {1, 2}
    with pytest.raises(ConfigError, match="n-layer: the checkpoint has 1, now 3"):
        run(dataclasses.replace(gone, model=gptjax.GPT2Config(n_layer=3)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("init") / "run", {4: random_params(MODEL)}, model=MODEL)


def config_for(path, tmp_path, **model):
    options = {"name": "new", "runs_dir": tmp_path, "sequence_length": 8, "init_from": path}
    return Config(model=gptjax.GPT2Config(**model), **options)


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
@pytest.mark.parametrize("kind", ["run", "hf"])
def test_parameters_are_read_into_their_shardings(saved, tmp_path, monkeypatch, kind, strategy):
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 32)
    path = saved
    if kind == "hf":
        path = tmp_path / "hf"
        gptjax.save_hf(whole_model(), path)
    config, source = init_from.resolve(config_for(path, tmp_path))
    devices = Parallel.of(jax.devices("cpu")[:2], strategy)
    params = init_from.read_params(config.model, devices, source)
    expected = random_params(MODEL)
    if kind == "hf":  # without rows of padding; 384 rows
        padded = np.zeros((384, 8), np.float32)
        padded[:257] = expected["wte"][:257]
        expected = expected | {"wte": padded}
    same(params, expected)
    wanted = devices.shardings(abstract_params(config.model))
    assert all(
        x.sharding.is_equivalent_to(sharding, x.ndim)
        for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
    )
    assert (params["wte"].addressable_data(0).shape != params["wte"].shape) == (strategy != "data")


def whole_model():
    return nnx.merge(graph(MODEL), random_params(MODEL))


def test_positions_are_cropped_and_padding_may_differ(saved, tmp_path):
    given = {"block_size": 9, "vocab_size": 257, "padded_vocab_size": 300}
    config, source = init_from.resolve(config_for(saved, tmp_path, **given))
    sizes = {"block_size": 9, "padded_vocab_size": 300}
    assert config.model == dataclasses.replace(MODEL, **sizes)
    one = Parallel.of(jax.devices("cpu")[:1])
    params, whole = init_from.read_params(config.model, one, source), random_params(MODEL)
    np.testing.assert_array_equal(params["wpe"], whole["wpe"][:9])
    np.testing.assert_array_equal(params["wte"][:257], whole["wte"][:257])
    assert params["wte"].shape == (300, 8) and not np.asarray(params["wte"][264:]).any()
    same(params["blocks"], whole["blocks"])
    # A default of the config is the value of the other model, with its padding; precision and
    # kernels are those of the config.
    assert init_from.resolve(config_for(saved, tmp_path))[0].model == MODEL
    given = {"precision": gptjax.Precision("bf16"), "attention": "xla", "recompute": "block"}
    config, _ = init_from.resolve(config_for(saved, tmp_path, **given))
    assert config.model == dataclasses.replace(MODEL, **given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"n_layer": 3}, "--model.n-layer: 2 there, 3 in the config"),
        ({"n_layer": 3, "n_embd": 24}, r"n-embd: 8 there, 24 in the config\n(.|\n)*n-layer: 2"),
        ({"block_size": 17}, "--model.block-size: 16 there, 17 in the config"),
        ({"vocab_size": 100}, "--model.vocab-size: 257 there, 100 in the config"),
    ],
)
def test_another_shape_is_refused_with_both_values(saved, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        init_from.resolve(config_for(saved, tmp_path, **given))
    assert not (tmp_path / "new").exists()


def test_unsuitable_models_are_refused(saved, tmp_path, words):
    with pytest.raises(WeightsError, match="the path does not exist"):
        init_from.resolve(config_for(tmp_path / "no", tmp_path))
    config = dataclasses.replace(config_for(saved, tmp_path), sequence_length=20)
    # "raise --model.block-size" would be refused.
    says = "with the model at --init-from: .* block size 16; set --sequence-length 16 or less$"
    with pytest.raises(ConfigError, match=says):
        init_from.resolve(config)
    for name, error, says in (
        ("Mine", WeightsError, "found Mine; import the Python file that defines Mine first"),
        ("Llama3Config", ConfigError, "a model of Llama3Config, and the config has a GPT2Config"),
    ):
        other = save_run(tmp_path / name, {1: {}}, tokenizer="gpt2", changes={"model": name})
        with pytest.raises(error, match=says):
            init_from.resolve(config_for(other, tmp_path))
    source = dataclasses.replace(sources.find(saved), tokenizer="own", tokenizer_at="llama")
    dataset = find_dataset(str(words), tmp_path, "auto")
    says = "has the tokenizer own, and .* has byte; prepare the data with --tokenizer llama$"
    with pytest.raises(ConfigError, match=says):
        init_from.check_tokenizer(source, dataset)
    init_from.check_tokenizer(sources.find(saved), dataset)


def test_the_state_holds_the_parameters_and_is_new_otherwise(saved, tmp_path, optax_promotion):
    config, source = init_from.resolve(config_for(saved, tmp_path))
    one = Parallel.of(jax.devices("cpu")[:1])
    tx = gptjax.optim.adamw(1e-3)
    state = init_from.first_state(config, tx, one, source)
    same(state.params, params_of(whole_model()))
    plain = gptjax.init_state(config.model, tx, config.seed, one)
    same(dataclasses.replace(state, params={}), dataclasses.replace(plain, params={}))
