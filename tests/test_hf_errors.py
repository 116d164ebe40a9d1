"""Files and options that gptjax.load_hf and save_hf refuse, without transformers."""

import inspect
import json
import os
import re
import resource

import numpy as np
import pytest
from flax import nnx
from hf_tools import edit_config, edit_tensors

import gptjax
from gptjax.weights import WeightsError


@pytest.fixture
def tiny(tmp_path):
    """A saved model of one block, without transformers."""
    config = gptjax.GPT2Config(
        vocab_size=11, padded_vocab_size=128, block_size=5, n_layer=1, n_head=2, n_embd=4
    )
    gptjax.save_hf(gptjax.GPT2(config, rngs=nnx.Rngs(0)), tmp_path)
    return tmp_path


@pytest.mark.parametrize("field", ["vocab_size", "n_positions", "n_layer", "n_head", "n_embd"])
@pytest.mark.parametrize(
    "value", ["12", 12.0, True, None, -1, 0, float("nan"), [4], {}, 10**30, "\x1b[31m"], ids=repr
)
def test_sizes_of_a_wrong_type_are_refused(tiny, field, value):
    edit_config(tiny, **{field: value})
    message = rf"config\.json: (not a GPT2|expected .*, missing \['{field}'\])|model\.safetensors: "
    with pytest.raises(WeightsError, match=message) as caught:
        gptjax.load_hf(tiny)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", "\x1b]0;x\x07"),
        ("tie_word_embeddings", 1),
        ("n_inner", 16.0),
        ("n_inner", "\x1b"),
        ("n_head", 3),
    ]
    + [
        ("activation_function", ["gelu_new"]),
        ("layer_norm_epsilon", "1e-5"),
        ("layer_norm_epsilon", float("nan")),
    ],
)
def test_other_fields_of_a_wrong_type_are_refused(tiny, field, value):
    edit_config(tiny, **{field: value})
    with pytest.raises(WeightsError, match=field) as caught:
        gptjax.load_hf(tiny)
    assert str(caught.value).isprintable()


def test_a_million_layers_are_refused_before_anything_is_built(tiny, monkeypatch):
    monkeypatch.setattr("flax.nnx.eval_shape", lambda *_: pytest.fail("the model was built"))
    edit_config(tiny, n_layer=10**18)
    with pytest.raises(
        WeightsError, match=r"the 12\d+4 tensors of a GPT2 of 1\d+ layers, found 16"
    ):
        gptjax.load_hf(tiny)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_only_regular_files_are_opened(tiny, name):
    (tiny / "model.safetensors").rename(tiny / "other.safetensors")
    (tiny / name).unlink(missing_ok=True)
    os.mkfifo(tiny / name)
    with pytest.raises(
        WeightsError, match=f"{re.escape(name)}: expected a regular file, found a FIFO"
    ):
        gptjax.load_hf(tiny)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"[" * 10**5, "expected JSON: maximum recursion depth"),
        (b"\xff\xfe", "expected JSON: .*utf-8"),
        (b'{"n_layer": ' + b"9" * 5000 + b"}", "expected JSON: .*integer string"),
        (b"[]", "expected a JSON object, found list"),
        (b" " * (16 << 20) + b"{}", "expected at most 16777216 bytes of JSON"),
    ],
    ids=["nested", "no UTF-8", "digits", "list", "long"],
)
def test_json_that_is_none_is_refused(tiny, raw, message):
    (tiny / "config.json").write_bytes(raw)
    with pytest.raises(WeightsError, match=rf"config\.json: {message}"):
        gptjax.load_hf(tiny)


@pytest.mark.parametrize(
    "weight_map",
    [
        "x",
        None,
        3,
        [],
        {"a": 1},
        {"a": None},
        {"a": ".."},
        {"a": ""},
        {"a": "../x"},
        {"a": "/etc/passwd"},
    ],
    ids=repr,
)
def test_an_index_that_names_no_file_of_the_folder_is_refused(tiny, weight_map):
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        WeightsError,
        match=r"index\.json: expected weight_map to give each tensor the name of a file",
    ):
        gptjax.load_hf(tiny)


def test_a_header_longer_than_the_file_or_huge_is_refused(tiny):
    file = tiny / "model.safetensors"
    for raw in (
        b"",
        b"\x01\0\0",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (17 << 20).to_bytes(8, "little"),
    ):
        file.write_bytes(raw)
        with pytest.raises(
            WeightsError,
            match=r"model\.safetensors: expected a safetensors file: a header of \d+ bytes",
        ):
            gptjax.load_hf(tiny)
    os.truncate(file, 32 << 20)
    with pytest.raises(WeightsError, match="a header of 17825792 bytes in a file of 33554432"):
        gptjax.load_hf(tiny)


def test_one_tensor_under_two_names_is_refused(tiny):
    edit_tensors(tiny, lambda t: t.update({"wpe.weight": t["transformer.wpe.weight"] + 1}))
    with pytest.raises(WeightsError, match=r"expected one tensor wpe\.weight, found two"):
        gptjax.load_hf(tiny)


def test_numbers_beyond_fp32_are_refused(tiny):
    edit_tensors(tiny, lambda t: t.update({"transformer.ln_f.bias": np.full(4, 1e300)}))
    with pytest.raises(WeightsError, match="transformer.ln_f.bias to hold numbers of fp32's range"):
        gptjax.load_hf(tiny)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium"])
def test_a_name_on_the_hub_says_how_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    command = (
        f"hf download openai-community/{name} config.json model.safetensors --local-dir {name}"
    )
    with pytest.raises(WeightsError, match=f"^{name}: not there. .*{command}$"):
        gptjax.load_hf(name)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"precision": "bf16"},
            r"expected precision to be .* gptjax.Precision\('bf16'\), got 'bf16'",
        ),
        ({"attn": "xla"}, r"unknown options \['attn'\]; choose from \['attention'"),
        ({"padded_vocab_size": 5}, "padded_vocab_size=5 is below vocab_size=11"),
    ],
)
def test_a_wrong_option_does_not_blame_the_file(tiny, options, message):
    unchecked = inspect.unwrap(gptjax.load_hf)  # outside pytest no annotation is checked
    with pytest.raises(ValueError, match=message) as caught:
        unchecked(tiny, **options)
    assert not isinstance(caught.value, WeightsError)


def test_a_full_disk_is_an_error_and_leaves_the_old_files(tiny):
    model, before = gptjax.load_hf(tiny), (tiny / "model.safetensors").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(
            WeightsError,
            match=r"model\.safetensors: not written: .*File too large.* older file is unchanged",
        ):
            gptjax.save_hf(model, tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tiny / "model.safetensors").read_bytes() == before and not list(tiny.glob("*.tmp"))


def test_saving_into_a_file_names_the_folder(tiny):
    model = gptjax.load_hf(tiny)
    with pytest.raises(
        WeightsError, match=r"config\.json: the folder cannot be created: File exists"
    ):
        gptjax.save_hf(model, tiny / "config.json")


class Changed(gptjax.GPT2):
    """A subclass with GPT-2's config."""


class ChangedLlama(gptjax.Llama3):
    """A subclass with Llama 3's config."""


@pytest.mark.parametrize(
    "save, model, expected",
    [
        (gptjax.save_hf, Changed, "GPT2 or Llama3"),
        (gptjax.save_hf, ChangedLlama, "GPT2 or Llama3"),
        (gptjax.save_llmc, Changed, "GPT2"),
        (gptjax.save_llmc, gptjax.Llama3, "GPT2"),
    ],
)
def test_a_subclass_is_not_saved(save, model, expected, tmp_path):
    sizes = {"vocab_size": 11, "block_size": 5, "n_layer": 1, "n_head": 2, "n_embd": 4}
    message = f"{save.__name__}: expected a {expected}, found a {model.__name__}"
    with pytest.raises(WeightsError, match=message):
        inspect.unwrap(save)(model(model.Config(**sizes), rngs=nnx.Rngs(0)), tmp_path / "new")
    assert not list(tmp_path.iterdir())
