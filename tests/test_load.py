"""gptjax.load: from runs, checkpoints, Hugging Face folders and llm.c files; what is refused."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from saved_run_tools import MODEL, random_params, save_run

import gptjax
from gptjax.models.base import graph, params_of
from gptjax.weights import DamagedError, WeightsError, sources
from gptjax.weights.bpe_files import is_byte_tokenizer
from gptjax.weights.checkpoint_files import checksum

EXAMPLE = Path(__file__).parents[1] / "examples" / "new_model"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 5 and 10, of a run with kernels that no CPU has."""
    params = {5: random_params(seed=1), 10: random_params(seed=2)}
    changes = {"model.attention": "mosaic", "model.loss_chunk": 7, "model.precision": "bf16"}
    return save_run(tmp_path_factory.mktemp("load") / "run", params, changes=changes)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def assert_has(model, params):
    found = params_of(model)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), found, params)
    assert all(jax.tree.leaves(same)), same


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_is_loaded_from_its_newest_checkpoint_and_is_not_changed(run):
    before = files(run)
    model, tokenizer = gptjax.load(run)
    assert_has(model, random_params(seed=2))
    assert tokenizer.name == "byte"
    expected = dataclasses.replace(MODEL, precision=gptjax.Precision("bf16"))
    assert model.config == expected  # and the kernels are auto
    assert files(run) == before
    assert gptjax.load(run, tokenizer=None).tokenizer is None


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16")])
def test_the_model_is_that_of_the_last_stage_reached(tmp_path, stage, precision):
    stages = [{"until": 20}, {"model": {"precision": "bf16", "attention": "mosaic"}}]
    save_run(tmp_path, {5: random_params()}, changes={"stages": stages}, stage=stage)
    found = gptjax.load(tmp_path).model.config
    assert found == dataclasses.replace(MODEL, precision=gptjax.Precision(precision))
    fp32 = gptjax.Precision("fp32")
    assert gptjax.load(tmp_path, precision=fp32).model.config.precision == fp32
    wrong = tmp_path / "wrong"
    save_run(wrong, {5: random_params()}, changes={"stages": stages}, stage=3)
    with pytest.raises(WeightsError, match="expected stage 3 in its config"):
        gptjax.load(wrong)


@pytest.mark.parametrize("where", ["step", "checkpoints", "folder", "renamed"])
def test_a_step_is_loaded_by_its_number_and_by_its_folder(copy, where):
    step = copy / "checkpoints" / "5"
    if where == "step":
        loaded = gptjax.load(copy, step=5)
    elif where == "checkpoints":
        loaded = gptjax.load(copy / "checkpoints", step=5)
    else:
        path = step if where == "folder" else step.rename(copy / "mine")
        loaded = gptjax.load(path, precision=gptjax.Precision("fp32"))
        assert loaded.model.config.precision == gptjax.Precision("fp32")
    assert_has(loaded.model, random_params(seed=1))


def test_options_replace_defaults_and_the_shape_is_the_runs(run):
    fp32 = gptjax.Precision("fp32")
    model = gptjax.load(run, precision=fp32, attention="reference", recompute="block").model
    assert (model.config.attention, model.config.recompute) == ("reference", "block")
    assert_has(model, random_params(seed=2))
    for wrong in ({"n_layer": 2}, {"speed": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            gptjax.load(run, **wrong)


@pytest.mark.parametrize("options", [{"attention": "flash9"}, {"mlp": "x", "attention": "mosaic"}])
def test_an_unknown_kernel_is_refused(run, options):
    """Generation would not use it. A kernel of another device is loaded."""
    assert gptjax.load(run, attention="mosaic").model.config.attention == "mosaic"
    message = f"load: .*: unknown implementation '{next(iter(options.values()))}'; choose one of "
    with pytest.raises(ValueError, match=message):
        gptjax.load(run, **options)


def test_a_damaged_array_is_named_with_the_steps_to_use(copy):
    for file in (copy / "checkpoints" / "10" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(DamagedError, match=r"10 is damaged: .*use another checkpoint: step=5"):
        gptjax.load(copy)
    assert_has(gptjax.load(copy, step=5).model, random_params(seed=1))


def test_a_changed_byte_is_found(copy):
    state = copy / "checkpoints" / "10" / "state"
    file = max(state.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"10 is damaged: the digest of .* is wrong"):
        gptjax.load(copy)


def test_the_arrays_of_another_step_are_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "10" / "state")
    shutil.copytree(copy / "checkpoints" / "5" / "state", copy / "checkpoints" / "10" / "state")
    with pytest.raises(DamagedError, match=r"10 is damaged: "):
        gptjax.load(copy)


def edit_meta(step_folder, change):
    """Change the metadata as somebody would who also corrects its checksum."""
    path = step_folder / "meta" / "metadata"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))


def test_changed_metadata_are_refused(copy):
    path = copy / "checkpoints" / "10" / "meta" / "metadata"
    path.write_text(path.read_text().replace('"model.n_head": 2', '"model.n_head": 4'))
    with pytest.raises(DamagedError, match="checksum of its metadata is wrong; use .*step=5"):
        gptjax.load(copy)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.n_layer": 12}, r"params\.blocks\.11\..*: the checkpoint has nothing, its config"),
        ({"model.n_layer": 10}, r"params\.blocks\.10\..*its config needs nothing"),
        ({"model.n_embd": 16}, r"the checkpoint has float32\[8\], its config needs float32\[16\]"),
        ({"model": "NobodysConfig"}, "found NobodysConfig; import the Python file that defines"),
        ({"model.depth": 3}, r"GPT2Config has no fields \['depth'\]"),
        ({"model.precision": "fp2"}, "fp2"),
    ],
)
def test_a_config_that_is_not_that_of_the_arrays_is_refused(copy, change, message):
    edit_meta(copy / "checkpoints" / "10", lambda meta: meta["config"].update(change))
    with pytest.raises(WeightsError, match=message):
        gptjax.load(copy)


def test_blocks_are_found_by_name_and_other_names_are_refused(tmp_path):
    """Strings sort as 0, 1, 10, 2; the saved order must not matter."""
    params = random_params()
    blocks = {str(i): params["blocks"][i] for i in sorted(params["blocks"], key=str)}
    run = save_run(tmp_path / "strings", {1: params | {"blocks": blocks}})
    assert_has(gptjax.load(run).model, params)
    padded = {f"{i:02}": block for i, block in params["blocks"].items()}
    run = save_run(tmp_path / "padded", {1: params | {"blocks": padded}})
    with pytest.raises(WeightsError, match=r"blocks\.0\..*: the checkpoint has nothing"):
        gptjax.load(run)


def test_an_architecture_outside_gptjax_is_known_once_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    config = importlib.import_module("model").RotaryConfig(
        vocab_size=257, block_size=8, n_layer=1, n_head=2, n_embd=8, rotary_base=100.0
    )
    run = save_run(tmp_path / "run", {1: random_params(config)}, model=config)
    model = gptjax.load(run).model
    assert type(model).__name__ == "RotaryLM" and model.config == config
    assert_has(model, random_params(config))


def test_files_of_other_programs(tmp_path):
    model = nnx.merge(graph(MODEL), random_params())
    gptjax.save_hf(model, tmp_path / "hf")
    gptjax.save_llmc(model, tmp_path / "model.bin")
    for path in ("hf", "hf/model.safetensors", "model.bin"):
        found, tokenizer = gptjax.load(tmp_path / path, attention="xla")
        assert tokenizer is None and found.config.attention == "xla"
        np.testing.assert_array_equal(found.wte[:257], model.wte[:257])
        assert_has(found.blocks, params_of(model.blocks))
    assert gptjax.load(tmp_path / "hf", tokenizer="byte").tokenizer.name == "byte"
    with pytest.raises(WeightsError, match="at least the 50257 ids of the tokenizer gpt2"):
        gptjax.load(tmp_path / "hf", tokenizer="gpt2")
    with pytest.raises(ValueError, match=r"config.json decides \['n_layer'\]"):
        gptjax.load(tmp_path / "hf", n_layer=3)
    with pytest.raises(ValueError, match=r"unknown options \['speed'\]"):
        gptjax.load(tmp_path / "model.bin", speed=3)
    with pytest.raises(WeightsError, match="expected a run's folder for step=3"):
        gptjax.load(tmp_path / "hf", step=3)


def test_a_vocabulary_of_gpt2s_size_has_gpt2s_tokenizer(tmp_path):
    small = gptjax.GPT2Config(block_size=4, n_layer=1, n_head=1, n_embd=2)
    gptjax.save_hf(nnx.merge(graph(small), random_params(small)), tmp_path / "hf")
    assert sources.find(tmp_path / "hf").tokenizer == "gpt2"


def test_a_fifo_as_tokenizer_json_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    assert not is_byte_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "expected a run's folder, .*; the path does not exist"),
        (lambda path: path.mkdir(), "found a folder without these files"),
        (lambda path: path.write_text("x"), "found another file"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "found a run without one"),
        (
            lambda path: (
                path.mkdir(),
                (path / "config.json").write_text('{"model_type": "bert"}'),
            ),
            "expected model_type to be 'gpt2' or 'llama', found 'bert'",
        ),
    ],
)
def test_a_path_without_a_model_is_refused_in_a_sentence(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(WeightsError, match=f"^{re.escape(str(tmp_path))}.*{message}") as error:
        gptjax.load(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_the_folder_of_a_step_may_be_renamed_but_not_to_another_number(copy):
    step = (copy / "checkpoints" / "5").rename(copy / "checkpoints" / "7")
    with pytest.raises(DamagedError, match="7 is damaged: it was saved as step 5.*rename .* to 5"):
        gptjax.load(step)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", ["gpt2"]])
def test_the_architectures_of_hugging_face_are_listed(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    message = f"config.json: expected model_type to be 'gpt2' or 'llama', found {kind!r}"
    with pytest.raises(WeightsError, match=re.escape(message)):
        gptjax.load(tmp_path)


def test_a_step_that_is_not_there_is_refused_with_the_steps(run):
    with pytest.raises(WeightsError, match=r"expected one of the steps \[10, 5\], found step='5'"):
        inspect.unwrap(sources._step_folder)(run / "checkpoints", run, "5")
    with pytest.raises(WeightsError, match=r"expected one of the steps \[10, 5\], found step=7"):
        gptjax.load(run, step=7)
