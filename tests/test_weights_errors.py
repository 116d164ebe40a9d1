"""Files and options that the loaders and writers of weights refuse, in one printable line."""

import inspect
import json
import os
import re
import resource
import shutil
import struct

import numpy as np
import pytest
from flax import nnx
from hf_tools import edit_config, edit_tensors

import gptjax
from gptjax.weights import WeightsError

SIZES = {"vocab_size": 11, "block_size": 5, "n_layer": 2, "n_head": 2, "n_embd": 4}
FILES = {"gpt2": "model.safetensors", "llama": "model.safetensors", "llmc": "model.bin"}
HEADER, LENGTH = 1024, 4 * (128 * 4 + 5 * 4 + 2 * (12 * 16 + 13 * 4) + 2 * 4)
ENDS = HEADER + LENGTH


def small(kind, seed=0):
    made = gptjax.Llama3 if kind == "llama" else gptjax.GPT2
    return made(made.Config(**SIZES), rngs=nnx.Rngs(seed))


def save(kind, model, folder):
    save = gptjax.save_llmc if kind == "llmc" else gptjax.save_hf
    return save(model, folder / "model.bin" if kind == "llmc" else folder)


def load(kind, folder, **options):
    if kind == "llmc":
        return inspect.unwrap(gptjax.load_llmc)(folder / "model.bin", **options)
    return inspect.unwrap(gptjax.load_hf)(folder, **options)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in FILES}
    for kind, folder in folders.items():
        save(kind, small(kind), folder)
    return folders


@pytest.fixture
def copied(originals, tmp_path):
    return lambda kind: shutil.copytree(originals[kind], tmp_path / "model")


def config(**fields):
    return lambda folder: edit_config(folder, **fields)


def tensor(name, change):
    """Replace a tensor by `change` of it, or remove it."""

    def edit(tensors):
        old = tensors.pop(name, None)
        if (new := change(old)) is not None:
            tensors[name] = np.asarray(new)

    return lambda folder: edit_tensors(folder, edit)


def raw(name, content):
    """Replace a file, or its content by a function of the content."""

    def change(folder):
        before = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).write_bytes(content(before) if callable(content) else content)

    return change


def header(at, value, *more):
    def change(content):
        content = bytearray(content)
        for i, number in zip((at, *more[::2]), (value, *more[1::2]), strict=True):
            struct.pack_into("<i", content, 4 * i, number)
        return bytes(content)

    return raw("model.bin", change)


def index(weight_map):
    def change(folder):
        (folder / "model.safetensors").unlink()
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def fifo(name):
    def change(folder):
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def gone(name):
    return lambda folder: (folder / name).unlink()


NAMES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
WRONG = ("12", 12.0, True, None, -1, 0, float("nan"), [4], {}, 10**30, "\x1b[31m")
JSON = r"config\.json: expected JSON: "
INDEX = r"index\.json: expected weight_map to give each tensor the name of a file"
CUT = rf"expected {ENDS} bytes .* found {{}}: cut short, inside {{}}, which is at offset {{}}"
CASES = [
    # config.json: sizes of a wrong type, other values, text that is no object
    *(
        (
            "gpt2",
            config(**{name: value}),
            r"config\.json: (not a GPT2|expected .*, missing)|tensors: ",
        )
        for name in NAMES
        for value in WRONG[:-2]
    ),
    *(("gpt2", config(**{name: value}), "model") for name in NAMES for value in WRONG[-2:]),
    ("gpt2", config(n_layer=10**18), r"the 12\d+4 tensors of a GPT2 of 1\d+ layers, found 28"),
    ("gpt2", config(n_head=3), "n_embd=4 is not a multiple of n_head=3"),
    *(
        (
            "gpt2",
            config(**{name: value}),
            rf"expected {name} to be .* found {re.escape(repr(value))}",
        )
        for name, value in [
            ("activation_function", "gelu"),
            ("activation_function", "relu"),
            ("activation_function", ["gelu_new"]),
            ("scale_attn_by_inverse_layer_idx", True),
            ("scale_attn_weights", False),
            ("layer_norm_epsilon", 1e-6),
            ("layer_norm_epsilon", "1e-5"),
            ("layer_norm_epsilon", float("nan")),
            ("tie_word_embeddings", False),
            ("tie_word_embeddings", 1),
            ("add_cross_attention", True),
            ("n_inner", 24),
            ("n_inner", 16.0),
            ("n_inner", "\x1b"),
            ("model_type", "gpt_neo"),
            ("model_type", "\x1b]0;x\x07"),
        ]
    ),
    ("llama", config(model_type="mistral"), "model_type to be 'gpt2' or 'llama', found 'mistral'"),
    ("llama", config(attention_bias=True), "expected attention_bias to be False, found True"),
    ("llama", config(head_dim=32), "expected head_dim to be 2 or None, found 32"),
    ("llama", config(rope_scaling={"rope_type": "yarn"}), "rope_type to be 'default' or 'llama3'"),
    ("llama", config(rope_scaling={"rope_type": "llama3"}), "low_freq_factor to be 1.0"),
    ("llama", config(rope_scaling=3), "rope_scaling to be an object, found 3"),
    ("llama", config(num_key_value_heads=3), "not a Llama3: .* not a multiple of n_kv_head=3"),
    ("llama", config(hidden_size=None), r"missing \['hidden_size'\]"),
    ("llama", config(num_hidden_layers=3), "missing .*model.layers.2.input_layernorm.weight"),
    ("llama", config(num_hidden_layers=10**6), "the 9000003 tensors of a Llama3 of 1000000 layers"),
    ("llama", config(intermediate_size=64), r"mlp.gate_proj.weight of shape \(64, 4\)"),
    ("gpt2", raw("config.json", b"{"), JSON),
    ("gpt2", raw("config.json", b"[" * 10**5), f"{JSON}maximum recursion depth"),
    ("gpt2", raw("config.json", b"\xff\xfe"), f"{JSON}.*utf-8"),
    ("gpt2", raw("config.json", b'{"n_layer": ' + b"9" * 5000 + b"}"), f"{JSON}.*integer string"),
    ("gpt2", raw("config.json", b"[]"), "expected a JSON object, found list"),
    ("gpt2", raw("config.json", b" " * (16 << 20) + b"{}"), "expected at most 16777216 bytes"),
    ("gpt2", raw("config.json", b"{}"), "missing .*vocab_size"),
    ("gpt2", gone("config.json"), r"config\.json: not there"),
    # safetensors: names, shapes and dtypes, headers, the index, what is no file
    (
        "gpt2",
        tensor("transformer.ln_f.bias", lambda x: None),
        r"missing \['ln_f.bias'\], unexp.* \[\]",
    ),
    ("gpt2", tensor("extra", lambda x: np.zeros(3, "f4")), r"missing \[\], unexpected \['extra'\]"),
    (
        "gpt2",
        tensor("transformer.wpe.weight", lambda x: x[:4]),
        r"of shape \(5, 4\) .* \(4, 4\) F32",
    ),
    ("gpt2", tensor("transformer.wte.weight", lambda x: x[:8]), r"\(11, 4\) .* found \(8, 4\) F32"),
    ("gpt2", tensor("transformer.ln_f.bias", lambda x: np.int32(x)), r"found \(4,\) I32"),
    ("gpt2", tensor("lm_head.weight", lambda x: np.ones((11, 4), "f4")), "the same tensor .* tied"),
    (
        "gpt2",
        tensor("wpe.weight", lambda x: np.ones((5, 4), "f4")),
        "one tensor wpe.weight, found two",
    ),
    ("llama", tensor("model.norm.weight", lambda x: None), r"missing \['model.norm.weight'\]"),
    ("llama", config(tie_word_embeddings=True), "expected lm_head.weight to be the same tensor"),
    ("gpt2", gone("model.safetensors"), r"found \['config\.json'.*safe_serialization"),
    *(
        ("gpt2", raw("model.safetensors", content), "a safetensors file: a header of")
        for content in (b"", b"\1\0\0", (1 << 40).to_bytes(8, "little") + b"{}")
    ),
    ("gpt2", raw("model.safetensors", b"not safetensors at all"), "expected a safetensors file"),
    (
        "gpt2",
        raw("model.safetensors", (17 << 20).to_bytes(8, "little").ljust(32 << 20, b"\0")),
        "a header of 17825792 bytes in a file of 33554432",
    ),
    *(
        ("gpt2", index(weight_map), INDEX)
        for weight_map in ["x", None, 3, [], *({"a": x} for x in (1, None, "..", "", "../x", "/x"))]
    ),
    ("gpt2", index({"a": "absent"}), "absent: not there. .*index.json names it"),
    *(
        ("gpt2", fifo(name), f"{re.escape(name)}: expected a regular file, found a FIFO")
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
    ),
    # llm.c
    ("llmc", header(0, 20240520), r"magic 20240326 .* 0, found 20240520 \(a shard of tokens\)"),
    ("llmc", header(0, 7), r"found 7 \(not a file of llm\.c's\)"),
    ("llmc", header(1, 2), r"expected version 3 \(fp32\) or 5 \(bf16\) at offset 4, found 2"),
    ("llmc", header(1, 5), "too long"),
    ("llmc", header(5, 3), "header at offset 8 .* n_embd=4 is not a multiple of n_head=3"),
    ("llmc", header(7, 10), "padded_vocab_size=10 is below vocab_size=11"),
    ("llmc", header(4, 0), "n_layer must be .*at least 1, got 0"),
    ("llmc", header(4, -3), "n_layer must be .*at least 1, got -3"),
    *(
        (
            "llmc",
            header(at, 2**31 - 2, 7, 2**31 - 1 if at == 3 else 128),
            r"\d{10,} bytes .* cut short",
        )
        for at in (2, 3, 4, 6)
    ),
    ("llmc", raw("model.bin", lambda b: b[:-1]), CUT.format(ENDS - 1, "ln_f.bias", ENDS - 16)),
    ("llmc", raw("model.bin", lambda b: b[:3072]), CUT.format(3072, "wpe", "3072 … 3151")),
    ("llmc", raw("model.bin", lambda b: b[:HEADER]), CUT.format(HEADER, "wte", HEADER)),
    ("llmc", raw("model.bin", lambda b: b + b"\0\0"), f"found {ENDS + 2}: too long"),
    *(
        (
            "llmc",
            raw("model.bin", lambda b, n=n: b[:n]),
            f"header of 1024 bytes, found a file of {n}",
        )
        for n in (1000, 3, 0)
    ),
    ("llmc", fifo("model.bin"), "expected a regular file, found a FIFO"),
    ("llmc", gone("model.bin"), r"model\.bin: not there"),
]


@pytest.mark.parametrize(("kind", "change", "message"), CASES)
def test_a_file_is_refused(copied, kind, change, message, monkeypatch):
    """Before a model is built: the names of 2³¹ − 1 layers alone would take gigabytes."""
    folder = copied(kind)
    change(folder)
    monkeypatch.setattr("flax.nnx.eval_shape", lambda *_: pytest.fail("the model was built"))
    with pytest.raises(WeightsError, match=message) as caught:
        load(kind, folder)
    assert str(caught.value).isprintable() and str(folder) in str(caught.value)


def test_numbers_beyond_fp32_are_refused(copied):
    folder = copied("gpt2")
    tensor("transformer.ln_f.bias", lambda x: np.float64(x) + 1e300)(folder)
    with pytest.raises(WeightsError, match="ln_f.bias to hold numbers of fp32's range"):
        gptjax.load_hf(folder)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "expected a regular file, found a directory"),
        ("/dev/zero", "expected a regular file, found a device"),
        ("a\0b", "null"),
        ("x" * 1000, "cannot be read: File name too long"),
    ],
)
def test_a_path_without_a_file_is_refused(tmp_path, path, says):
    with pytest.raises(WeightsError, match=says):
        gptjax.load_llmc(tmp_path / path if "\0" not in path else path)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, r"expected precision .* gptjax.Precision\('bf16'\), got 'bf16'"),
        ({"attn": "xla"}, r"unknown options \['attn'\]; choose from \['attention'"),
        ({"n_head": 1}, r"(the file|config.json) decides \['n_head'\]"),
        ({"padded_vocab_size": 5}, "padded_vocab_size"),
    ],
)
def test_a_wrong_option_does_not_blame_the_file(copied, kind, options, message):
    folder = copied(kind)
    with pytest.raises(ValueError, match=message) as caught:
        load(kind, folder, **options)
    assert not isinstance(caught.value, WeightsError) and str(folder) not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium"])
def test_a_name_on_the_hub_says_how_to_get_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    command = f"hf download openai-community/{name} config.json model.safetensors --local-dir"
    with pytest.raises(WeightsError, match=f"^{name}: not there. .*{command} {name}$"):
        gptjax.load_hf(name)


# ----------------------------------------------------------------------------------------- writing
class Changed(gptjax.GPT2):
    """A subclass with GPT-2's config."""


class ChangedLlama(gptjax.Llama3):
    """A subclass with Llama 3's config."""


@pytest.mark.parametrize(
    ("save", "model", "expected"),
    [
        (gptjax.save_hf, Changed, "GPT2 or Llama3"),
        (gptjax.save_hf, ChangedLlama, "GPT2 or Llama3"),
        (gptjax.save_llmc, Changed, "GPT2"),
        (gptjax.save_llmc, gptjax.Llama3, "GPT2"),
    ],
)
def test_a_subclass_is_not_saved(save, model, expected, tmp_path):
    message = f"{save.__name__}: expected a {expected}, found a {model.__name__}"
    with pytest.raises(WeightsError, match=message):
        inspect.unwrap(save)(model(model.Config(**SIZES), rngs=nnx.Rngs(0)), tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("fault", ["full disk", "error"])
def test_a_failed_save_leaves_the_old_file(copied, kind, fault, monkeypatch):
    folder, limit = copied(kind), resource.getrlimit(resource.RLIMIT_FSIZE)
    file, before = folder / FILES[kind], (folder / FILES[kind]).read_bytes()
    if fault == "error":
        monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises((WeightsError, ZeroDivisionError)) as caught:
            save(kind, small(kind, seed=1), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if fault == "full disk":
        says = rf"{file.name}: not written: .*File too large.* older file is unchanged"
        assert re.search(says, str(caught.value))
    assert file.read_bytes() == before and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_replaced_whole(copied, kind):
    """A process that has the old file open still reads the old contents."""
    folder = copied(kind)
    with open(folder / FILES[kind], "rb") as before:
        old = (folder / FILES[kind]).read_bytes()
        save(kind, small(kind, seed=1), folder)
        assert before.read() == old != (folder / FILES[kind]).read_bytes()


def test_saving_where_no_file_can_be_names_the_target(copied, tmp_path):
    folder, model = copied("gpt2"), small("gpt2")
    with pytest.raises(WeightsError, match=r"m\.bin: the folder .*absent does not exist. Create"):
        gptjax.save_llmc(model, tmp_path / "absent" / "m.bin")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WeightsError, match="expected a regular file, found a FIFO"):
        gptjax.save_llmc(model, tmp_path / "fifo")
    with pytest.raises(WeightsError, match=r"config\.json: the folder cannot be created: File ex"):
        gptjax.save_hf(model, folder / "config.json")
    with pytest.raises(ValueError, match=re.escape("'fp16'; choose one of ['fp32', 'bf16']")):
        gptjax.save_llmc(model, tmp_path / "m.bin", dtype="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "model"]
