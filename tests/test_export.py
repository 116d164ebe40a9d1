"""python -m gptjax.export: transformers, llm.c and GGUF files with the logits of the model."""

import signal
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from generation_tools import forward
from hf_tools import read_gguf, transformers
from saved_run_tools import random_model, random_params, save_run

import gptjax
from gptjax import export as command
from gptjax.data import TokenizerUnavailable, get_tokenizer
from gptjax.data.tokenizers import name_in
from gptjax.export import export
from gptjax.models.base import params_of
from gptjax.weights import bpe_files

SIZES = {"block_size": 12, "n_layer": 2, "n_head": 2, "n_embd": 8}
BYTES = gptjax.GPT2Config(vocab_size=257, **SIZES)
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 12))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    params = {3: random_params(BYTES, 1), 6: random_params(BYTES)}
    return save_run(tmp_path_factory.mktemp("export") / "run", params, model=BYTES)


@pytest.fixture(scope="module")
def logits():
    return np.asarray(forward(random_model(BYTES), jnp.asarray(TOKENS)))


def theirs(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def export_run(run, to, out, capsys):
    assert command.main(run, to, out) == 0
    return capsys.readouterr().out


def test_transformers_loads_model_and_byte_tokenizer(run, tmp_path, capsys, logits):
    said = export_run(run, "hf", tmp_path / "hf", capsys)
    assert "checkpoints/6" in said and "with the tokenizer byte" in said
    assert np.ptp(logits) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    np.testing.assert_allclose(theirs(model), logits, rtol=0, atol=2e-5)
    assert model.generation_config.eos_token_id == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = get_tokenizer("byte")
    text = "naïve 日本 🙂\n\t def f(x):  return\u00a0x\r\n" + "".join(map(chr, range(300)))
    assert tokenizer.encode(text) == ours.encode(text).tolist()
    assert tokenizer.decode(ours.encode(text)) == text
    assert tokenizer.encode("a<|endoftext|>b") == [97, 256, 98]
    loaded = gptjax.load(tmp_path / "hf")
    assert loaded.tokenizer.name == "byte"
    found = loaded.model.wte[:257]
    np.testing.assert_array_equal(found, random_params(BYTES)["wte"][:257])


def test_a_step_is_exported_to_llmc(run, tmp_path):
    assert command.main(run, "llmc", tmp_path / "model.bin", step=3) == 0
    found = params_of(gptjax.load_llmc(tmp_path / "model.bin"))
    np.testing.assert_array_equal(found["wpe"], random_params(BYTES, 1)["wpe"])


TEXTS = [
    "Hello world, naïve 🙂  \n\n\tfoo_bar 12345 they'll've I'M don't  ",
    "日本語 한국어 العربية ß\u00a0x\u200b\r\n   trailing   ",
    "def f(x):\n        return {'a': x**2}  # ½ ≤ π\n\n\n",
]


@pytest.fixture(scope="module")
def gpt2():
    try:
        return get_tokenizer("gpt2")
    except TokenizerUnavailable:
        pytest.skip("no network, and TIKTOKEN_CACHE_DIR names no copy of GPT-2's BPE files")


@pytest.fixture(scope="module")
def gpt2_model():
    # 20 ids more than the tokenizer.
    return random_model(gptjax.GPT2Config(vocab_size=50277, **SIZES))


def test_transformers_encodes_as_tiktoken(gpt2, gpt2_model, tmp_path):
    export(gpt2_model, tmp_path / "hf", "hf", tokenizer=gpt2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    points = np.random.default_rng(0).integers(32, 0x3000, 3000).tolist()
    for text in [*TEXTS, "".join(map(chr, points))]:
        assert tokenizer.encode(text) == gpt2.encode(text).tolist()
        assert tokenizer.decode(gpt2.encode(text)) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (50256, 50257)
    tokenizer.save_pretrained(tmp_path / "again")  # the tokenizer.json of the hub's folder
    assert name_in(tmp_path / "again") == "gpt2"


def test_merges_of_a_known_tokenizer():
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"bc", b"abc", b"abab", b"abcabab"]
    parts = [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"ab", b"ab"), (b"abc", b"abab")]
    assert bpe_files.merges(tokens) == parts
    assert bpe_files.text_of(b" \n\x00z") == "ĠĊĀz"


def test_gguf_has_llama_cpps_names_and_the_logits_of_the_model(run, tmp_path, capsys, logits):
    said = export_run(run, "gguf", tmp_path / "m.gguf", capsys)
    assert "only the model" in said and "llama-cli" not in said
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    expected = {"block_count": 2, "context_length": 12, "embedding_length": 8}
    expected |= {"feed_forward_length": 32, "attention.head_count": 2}
    assert {name: fields(f"gpt2.{name}") for name in expected} == expected
    assert fields("general.architecture") == "gpt2"
    assert fields("gpt2.attention.layer_norm_epsilon") == pytest.approx(1e-5)
    import gguf

    # llama.cpp's own table of names, and its transposes of Hugging Face's Conv1D.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    sizes = {"vocab_size": 257, "n_positions": 12, "n_layer": 2, "n_head": 2, "n_embd": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        found = tensors.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        conv = tensor.ndim == 2 and ".h." in name
        state[name] = torch.from_numpy(found.T.copy() if conv else found)
    assert not tensors
    model.load_state_dict(state)
    np.testing.assert_allclose(theirs(model), logits, rtol=0, atol=2e-5)


def test_gguf_has_gpt2s_tokenizer(gpt2, gpt2_model, tmp_path):
    export(gpt2_model, tmp_path / "m.gguf", "gguf", tokenizer=gpt2)
    fields, tensors = read_gguf(tmp_path / "m.gguf")
    part = lambda name, *at: fields(f"tokenizer.ggml.{name}", *at)
    assert (part("model"), part("pre"), part("eos_token_id")) == ("gpt2", "gpt-2", 50256)
    kinds = part("token_type")
    assert len(kinds) == len(tensors["token_embd.weight"]) == 50277
    tokens = [part("tokens", id) for id in (262, 50256, 50257, -1)]
    assert tokens == ["Ġthe", "<|endoftext|>", "[PAD50257]", "[PAD50276]"]
    assert [kinds[id] for id in (262, 50256, 50257, -1)] == [1, 3, 5, 5]
    assert [part("merges", i) for i in (0, 1, 49999)] == ["Ġ t", "Ġ a", "Ġg azed"]


def test_what_cannot_be_exported_is_refused_in_a_sentence(run, tmp_path, capsys, monkeypatch):
    def refused(path, to, out, **options):
        before = sorted(tmp_path.rglob("*"))
        assert command.main(path, to, out, **options) == 1
        assert sorted(tmp_path.rglob("*")) == before
        text = capsys.readouterr().err
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    assert "existing one" in refused(run, "hf", tmp_path)
    assert "does not exist" in refused(run, "hf", tmp_path / "no" / "hf")
    assert "found step=4" in refused(run, "hf", tmp_path / "hf", step=4)
    assert "does not exist" in refused(tmp_path / "no", "hf", tmp_path / "hf")
    assert "expected a name that ends in .bin" in refused(run, "llmc", tmp_path / "model")
    assert "expected a name that ends in .gguf" in refused(run, "gguf", tmp_path / "model.bin")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bpe_files, "_write_json", full)
    assert "No space left" in refused(run, "hf", tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'gptjax[gguf]'" in refused(run, "gguf", tmp_path / "m.gguf")


@pytest.mark.parametrize(("args", "code"), [((), 130), ((signal.SIGTERM,), 143)])
def test_an_interrupted_export_leaves_nothing(run, tmp_path, capsys, monkeypatch, args, code):
    def interrupted(*_):
        raise KeyboardInterrupt(*args)

    monkeypatch.setattr(command, "save_tokenizer", interrupted)
    assert command.main(run, "hf", tmp_path / "hf") == code
    assert list(tmp_path.iterdir()) == []
    out, error = capsys.readouterr()
    assert error == "interrupted\n" and not out
