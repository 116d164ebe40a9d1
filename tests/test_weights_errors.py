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
from gptjax.export import export
from gptjax.weights import WeightsError

SIZES = {"vocab_size": 11, "block_size": 5, "n_layer": 2, "n_head": 2, "n_embd": 4}
FILES = {"gpt2": "model.safetensors", "llama": "model.safetensors", "llmc": "model.bin"}
HEADER, LENGTH = 1024, 4 * (128 * 4 + 5 * 4 + 2 * (12 * 16 + 13 * 4) + 2 * 4)


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
def models():
    return {(kind, seed): small(kind, seed) for kind in ("gpt2", "llama") for seed in (0, 1)}


@pytest.fixture(scope="module")
def originals(tmp_path_factory, models):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in FILES}
    for kind, folder in folders.items():
        save(kind, models["llama" if kind == "llama" else "gpt2", 0], folder)
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


def entry(field, value):
    """Change the description of a tensor in the header."""

    def change(content):
        end = 8 + int.from_bytes(content[:8], "little")
        described = json.loads(content[8:end])
        described["transformer.wpe.weight"][field] = value
        text = json.dumps(described).encode()
        return len(text).to_bytes(8, "little") + text + content[end:]

    return raw("model.safetensors", change)


def fifo(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def gone(name):
    return lambda folder: (folder / name).unlink()


NAMES = ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")
WRONG = ("\x1b[31m", 12.0, True, None, -1, 0, 10**30, float("nan"), [4], {})
VALUES = [
    ("activation_function", "gelu"),
    ("scale_attn_by_inverse_layer_idx", True),
    ("layer_norm_epsilon", float("nan")),
    ("tie_word_embeddings", 1),
    ("n_inner", 16.0),
    ("model_type", ["gpt2"]),
    ("model_type", "\x1b]0;x\x07"),
]
GPT2 = [
    # config.json: sizes of a wrong type, other values, text that is no object
    (config(n_layer=10**9), r"expected 1\d+ layers, as in config.json, found 28 tensors"),
    (config(n_head=3), r"config\.json: .*n_embd=4 is not a multiple of n_head=3"),
    *(
        (config(**{name: x}), rf"json: expected {name} to be .* found {re.escape(repr(x))}")
        for name, x in VALUES
    ),
    (raw("config.json", b"{"), r"config\.json: Expecting property name"),
    (raw("config.json", b"[" * 10**5), "maximum recursion depth"),
    (raw("config.json", b"\xff\xfe"), "utf-8"),
    (raw("config.json", b"[]"), "expected a JSON object, found list"),
    (raw("config.json", b"{}"), "missing .*vocab_size"),
    (gone("config.json"), r"config\.json: No such file"),
    # safetensors: names, shapes and dtypes, headers, what is no file
    (tensor("transformer.ln_f.bias", lambda x: None), r"ln_f.bias: the file has nothing"),
    (tensor("ex\x1btra", lambda x: np.zeros(3, "f4")), r"ex\ufffdtra: .*json needs nothing"),
    (tensor("transformer.wpe.weight", lambda x: x[:4]), r"float\[4, 4\], .* float\[5, 4\]"),
    (tensor("transformer.wte.weight", lambda x: x[:8]), r"float\[8, 4\], .* float\[11, 4\]"),
    (tensor("transformer.ln_f.bias", lambda x: np.int32(x)), r"has I32\[4\], .* float\[4\]"),
    (tensor("lm_head.weight", lambda x: np.ones((11, 4), "f4")), "the same tensor .* tied"),
    (tensor("wpe.weight", lambda x: np.ones((5, 4), "f4")), "one tensor wpe.weight, found two"),
    (gone("model.safetensors"), r"found config\.json\. .*safe_serialization"),
    *(
        (raw("model.safetensors", content), r"model\.safetensors: Error while deserializing header")
        for content in (b"", b"\1\0\0", (1 << 40).to_bytes(8, "little") + b"{}", b"no tensors")
    ),
    *(
        (entry(*changed), "Error while deserializing header")
        for changed in (
            ("dtype", "F64"),
            ("dtype", "\x1b[31m"),
            ("shape", [2**32, 2**32]),
            ("shape", [-1, 4]),
            ("data_offsets", [0, 2**63]),
            ("data_offsets", None),
        )
    ),
    *(
        (fifo(name), f"{re.escape(name)}: a FIFO instead of a regular file")
        for name in ("config.json", "model.safetensors")
    ),
]
LLAMA = [
    (config(attention_bias=True), "expected attention_bias to be False, found True"),
    (config(head_dim=32), "expected head_dim to be 2 or None, found 32"),
    (config(rope_scaling={"rope_type": "yarn"}), "rope_type to be 'default' or 'llama3'"),
    (config(rope_scaling={"rope_type": "llama3"}), "low_freq_factor to be 1.0"),
    (config(rope_scaling=3), "rope_scaling to be an object, found 3"),
    (config(num_key_value_heads=3), r"config\.json: .* not a multiple of n_kv_head=3"),
    (config(hidden_size=None), r"missing \['hidden_size'\]"),
    (config(num_hidden_layers=10**6), "expected 1000000 layers, as in config.json, found 21"),
    (config(intermediate_size=64), r"mlp.gate_proj.weight: .* config.json needs float\[64, 4\]"),
    (config(tie_word_embeddings=True), "expected lm_head.weight to be the same tensor"),
]
HUGE = 2**31 - 2
CUT = rf"expected {HEADER + LENGTH} bytes for this header \(2 layers, .*\), found "
LLMC = [
    (header(0, 20240520), r"magic 20240326 of an llm.c model .* begin with \[20240520, 3\]"),
    (header(1, 2), r"version 3 \(fp32\) or 5 \(bf16\), found 1024 .* \[20240326, 2\]"),
    (header(1, 5), f"expected {HEADER + LENGTH // 2} bytes .* bfloat16"),
    (header(5, 3), "n_embd=4 is not a multiple of n_head=3"),
    (header(7, 10), "padded_vocab_size=10 is below vocab_size=11"),
    (header(4, 0), "n-layer must be at least 1 .*, got 0"),
    *((header(at, HUGE, 7, HUGE + 1 if at == 3 else 128), r"\d{10,} bytes") for at in (2, 3, 4, 6)),
    *((header(at, -1), "must be at least 1|is below") for at in range(2, 8)),
    (raw("model.bin", lambda b: b[:5135]), CUT + "5135"),
    (raw("model.bin", lambda b: b + b"\0\0"), CUT),
    (raw("model.bin", lambda b: b[:3]), "header of 1024 bytes.* found 0 bytes"),
    (fifo("model.bin"), "a FIFO instead of a regular file"),
    (gone("model.bin"), r"model\.bin: No such file"),
]
CASES = [("gpt2", *case) for case in GPT2]
CASES += [("llama", *case) for case in LLAMA] + [("llmc", *case) for case in LLMC]


def refused(folder, kind, message):
    with pytest.raises(WeightsError, match=message) as caught:
        load(kind, folder)
    assert str(caught.value).isprintable() and str(folder) in str(caught.value)


@pytest.mark.parametrize(("kind", "change", "message"), CASES)
def test_a_file_is_refused(copied, kind, change, message, monkeypatch):
    """Before a model is built: the names of 2³¹ − 1 layers alone would take gigabytes."""
    folder = copied(kind)
    change(folder)
    monkeypatch.setattr("flax.nnx.eval_shape", lambda *_: pytest.fail("the model was built"))
    refused(folder, kind, message)


def test_a_size_of_a_wrong_type_is_refused(copied):
    folder = copied("gpt2")
    before = (folder / "config.json").read_text()
    for name in NAMES:
        for value in WRONG:
            (folder / "config.json").write_text(before)
            edit_config(folder, **{name: value})
            refused(folder, "gpt2", r"config\.json")


def test_numbers_beyond_fp32_are_refused(copied):
    folder = copied("gpt2")
    tensor("transformer.ln_f.bias", lambda x: np.float64(x) + 1e300)(folder)
    refused(folder, "gpt2", "overflow encountered in cast")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("", "a directory instead of a regular file"),
        ("/dev/zero", "a device instead of a regular file"),
        ("a\0b", "null"),
        ("x" * 1000, "File name too long"),
    ],
)
def test_a_path_without_a_file_is_refused(tmp_path, path, says):
    with pytest.raises(WeightsError, match=says):
        gptjax.load_llmc(tmp_path / path)
    with pytest.raises(WeightsError):
        gptjax.load(tmp_path / path)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16"}, r"expected precision .* gptjax.Precision\('bf16'\), got 'bf16'"),
        ({"attn": "xla"}, r"unknown options \['attn'\], or .*; choose from \['attention'"),
        ({"n_head": 1}, r"unknown options \['n_head'\], or the file decides them"),
        ({"padded_vocab_size": 5}, "padded_vocab_size"),
    ],
)
def test_a_wrong_option_does_not_blame_the_file(originals, kind, options, message):
    folder = originals[kind]
    with pytest.raises(ValueError, match=message) as caught:
        load(kind, folder, **options)
    assert not isinstance(caught.value, WeightsError) and str(folder) not in str(caught.value)


def test_a_name_on_the_hub_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "hf download openai-community/gpt2 config.json model.safetensors --local-dir gpt2"
    with pytest.raises(WeightsError, match=f"^gpt2: not there. .*{command}$"):
        gptjax.load_hf("gpt2")


# ----------------------------------------------------------------------------------------- writing
class Changed(gptjax.GPT2):
    """A subclass with GPT-2's config."""


class ChangedLlama(gptjax.Llama3):
    """A subclass with Llama 3's config."""


def save_gguf(model, path):
    return export(model, path.with_suffix(".gguf"), "gguf", tokenizer=None)


@pytest.mark.parametrize(
    ("save", "model", "expected"),
    [
        (gptjax.save_hf, Changed, "GPT2 or Llama3"),
        (gptjax.save_hf, ChangedLlama, "GPT2 or Llama3"),
        (gptjax.save_llmc, Changed, "GPT2"),
        (gptjax.save_llmc, gptjax.Llama3, "GPT2"),
        (save_gguf, Changed, "GPT2 or Llama3"),
    ],
)
def test_a_subclass_is_not_saved(save, model, expected, tmp_path):
    message = f"{save.__name__}: expected a {expected}, found a {model.__name__}"
    with pytest.raises(WeightsError, match=message):
        inspect.unwrap(save)(model(model.Config(**SIZES), rngs=nnx.Rngs(0)), tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["gpt2", "llmc"])
@pytest.mark.parametrize("fault", ["full disk", "error", None])
def test_a_save_replaces_the_whole_file_or_nothing(copied, models, kind, fault, monkeypatch):
    """A process that has the old file open still reads the old contents."""
    folder, limit = copied(kind), resource.getrlimit(resource.RLIMIT_FSIZE)
    file, before = folder / FILES[kind], (folder / FILES[kind]).read_bytes()
    if fault is None:
        with open(file, "rb") as opened:
            save(kind, models["gpt2", 1], folder)
            assert opened.read() == before != file.read_bytes()
        return
    if fault == "error":
        monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises((WeightsError, ZeroDivisionError)) as caught:
            save(kind, models["gpt2", 1], folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if fault == "full disk":
        says = rf"{file.name}: not written: .*File too large.* older file is unchanged"
        assert re.search(says, str(caught.value))
    assert file.read_bytes() == before and not list(folder.glob("*.tmp"))


def test_saving_where_no_file_can_be_names_the_target(tmp_path, models):
    model = models["gpt2", 0]
    with pytest.raises(WeightsError, match=r"m\.bin: the folder .*absent does not exist. Create"):
        gptjax.save_llmc(model, tmp_path / "absent" / "m.bin")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(WeightsError, match="a FIFO instead of a regular file"):
        gptjax.save_llmc(model, tmp_path / "fifo")
    with pytest.raises(WeightsError, match="fifo: the folder cannot be created: File exists"):
        gptjax.save_hf(model, tmp_path / "fifo")
    with pytest.raises(ValueError, match=re.escape("'fp16'; choose one of ['fp32', 'bf16']")):
        gptjax.save_llmc(model, tmp_path / "m.bin", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]
