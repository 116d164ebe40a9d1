"""gptjax.load: from runs, checkpoints, Hugging Face folders and llm.c files; what is refused."""

import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hf_tools import assert_same
from saved_run_tools import MODEL, random_model, random_params, save_run

import gptjax
from gptjax.weights import DamagedError, WeightsError, sources
from gptjax.weights.checkpoint_files import checksum

EXAMPLE = Path(__file__).parents[1] / "examples" / "new_model"
FP32 = gptjax.Precision("fp32")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 5 and 10, of a run with kernels that no CPU has."""
    params = {5: random_params(seed=1), 10: random_params(seed=2)}
    changes = {"model.attention": "mosaic", "model.loss_chunk": 7, "model.precision": "bf16"}
    return save_run(tmp_path_factory.mktemp("load") / "run", params, changes=changes)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_is_loaded_from_its_newest_checkpoint_and_is_not_changed(run):
    before = files(run)
    model, tokenizer = gptjax.load(run)
    assert_same(model, random_params(seed=2))
    assert tokenizer.name == "byte"
    expected = dataclasses.replace(MODEL, precision=gptjax.Precision("bf16"))
    assert model.config == expected  # and the kernels are auto
    assert files(run) == before


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16")])
def test_the_model_is_that_of_the_last_stage_reached(tmp_path, stage, precision):
    stages = [{"until": 20}, {"model": {"precision": "bf16", "attention": "mosaic"}}]
    save_run(tmp_path, {5: random_params()}, changes={"stages": stages}, stage=stage)
    found = sources.find(tmp_path).config()
    assert found == dataclasses.replace(MODEL, precision=gptjax.Precision(precision))
    assert sources.find(tmp_path).config(precision=FP32).precision == FP32


@pytest.mark.parametrize("where", ["step", "checkpoints", "folder", "renamed"])
def test_a_step_is_loaded_by_its_number_and_by_its_folder(copy, where):
    step = copy / "checkpoints" / "5"
    if where in ("step", "checkpoints"):
        loaded = gptjax.load(copy / "checkpoints" if where == "checkpoints" else copy, step=5)
    else:
        loaded = gptjax.load(step if where == "folder" else step.rename(copy / "mine"))
    assert_same(loaded.model, random_params(seed=1))


def test_options_replace_defaults_and_the_shape_is_the_runs(run):
    """Generation might not use the kernel. A kernel of another device is loaded."""
    options = {"recompute": "block", "tokenizer": None}
    for attention in ("reference", "mosaic"):
        model, tokenizer = gptjax.load(run, precision=FP32, attention=attention, **options)
        assert (model.config.attention, model.config.recompute) == (attention, "block")
        assert_same(model, random_params(seed=2))
        assert tokenizer is None
    for wrong in ({"n_layer": 2}, {"speed": 3}):
        with pytest.raises(ValueError, match=f"unknown options .'{next(iter(wrong))}'., or the"):
            gptjax.load(run, **wrong)


def flip(step):
    file = max((step / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def changed_metadata(step):
    path = step / "meta" / "metadata"
    path.write_text(path.read_text().replace('"model.n_head": 2', '"model.n_head": 4'))


def config_of(**changes):
    """Change the metadata as somebody would who also corrects its checksum."""

    def change(step):
        path = step / "meta" / "metadata"
        meta = json.loads(path.read_text())
        meta["config"].update({key.replace("__", "."): value for key, value in changes.items()})
        path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))

    return change


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (changed_metadata, DamagedError, "checksum of its metadata is wrong"),
        (config_of(model__n_layer=12), WeightsError, r"blocks\.11\..*: the checkpoint has nothing"),
        (
            config_of(model__n_embd=16),
            WeightsError,
            r"the checkpoint has float32\[8\], its config needs float32\[16\]",
        ),
        (config_of(model="NobodysConfig"), WeightsError, "found NobodysConfig; import the Python"),
        (config_of(model__depth=3), WeightsError, "GPT2Config has no fields 'depth'"),
        (config_of(model__precision="fp2"), WeightsError, "fp2"),
    ],
)
def test_a_damaged_checkpoint_is_refused(copy, damage, kind, message):
    damage(copy / "checkpoints" / "10")
    with pytest.raises(kind, match=message):
        gptjax.load(copy)


def test_a_changed_byte_is_found(copy):
    flip(copy / "checkpoints" / "10")
    with pytest.raises(DamagedError, match=r"10 is damaged: the digest of .* is wrong"):
        gptjax.load(copy)
    assert_same(gptjax.load(copy, step=5).model, random_params(seed=1))


def test_blocks_are_found_by_name_and_other_names_are_refused(tmp_path):
    """Strings sort as 0, 1, 10, 2; the saved order must not matter."""
    params = random_params()
    blocks = {str(i): params["blocks"][i] for i in sorted(params["blocks"], key=str)}
    run = save_run(tmp_path / "strings", {1: params | {"blocks": blocks}})
    assert_same(gptjax.load(run).model, params)
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
    assert_same(model, random_params(config))


def test_files_of_other_programs(tmp_path):
    """The vocabulary decides the tokenizer."""
    model = random_model()
    gptjax.save_hf(model, tmp_path / "hf")
    gptjax.save_llmc(model, tmp_path / "model.bin")
    for path in ("hf", "hf/model.safetensors", "model.bin"):
        found, tokenizer = gptjax.load(tmp_path / path, attention="xla")
        assert tokenizer.name == "byte" and found.config.attention == "xla"
        np.testing.assert_array_equal(found.wte[:257], model.wte[:257])
        assert_same(found.blocks, random_params()["blocks"])
    with pytest.raises(WeightsError, match="at least the 50257 ids of the tokenizer gpt2"):
        gptjax.load(tmp_path / "hf", tokenizer="gpt2")
    with pytest.raises(WeightsError, match="expected a run for step=3"):
        gptjax.load(tmp_path / "hf", step=3)
    for size, name in {50257: "gpt2", 50304: "gpt2", 258: None}.items():
        config = tmp_path / "hf" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": size}))
        assert sources.find(tmp_path / "hf").tokenizer == name


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "expected a run's folder, .*; the path does not exist"),
        (lambda path: path.mkdir(), "expected a run's folder, .* an llm.c .bin file$"),
        (lambda path: path.write_text("x"), "expected a run's folder, .* an llm.c .bin file$"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "found a run without one"),
    ],
)
def test_a_path_without_a_model_is_refused_in_a_sentence(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(WeightsError, match=f"^{re.escape(str(tmp_path))}.*{message}") as error:
        gptjax.load(tmp_path / "x")
    assert "\n" not in str(error.value)


def test_a_step_that_is_not_there_and_a_renamed_step_are_refused(copy):
    with pytest.raises(WeightsError, match=r"expected one of the steps \[10, 5\], found step=7"):
        gptjax.load(copy, step=7)
    step = (copy / "checkpoints" / "5").rename(copy / "checkpoints" / "7")
    with pytest.raises(DamagedError, match="7 is damaged: it was saved as step 5.*rename .* to 5"):
        gptjax.load(step)
