"""gptjax.data.tokenizers: GPT-2's BPE and bytes, without a network too, and tokenizer.json."""

import json
import sys
import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizer_tools as tools
import tokenizers
from hypothesis import HealthCheck, given, settings

from gptjax.data import (
    Tokenizer,
    TokenizerError,
    TokenizerUnavailable,
    choose_tokenizer,
    get_tokenizer,
)
from gptjax.data import tokenizers as module
from gptjax.data.__main__ import main


@pytest.fixture(scope="module", params=["gpt2", "byte"])
def tokenizer(request):
    try:
        return get_tokenizer(request.param)
    except TokenizerUnavailable:
        pytest.skip("GPT-2's BPE files are neither in TIKTOKEN_CACHE_DIR nor on the network")


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Make tiktoken behave as on a machine without a cache and a network."""
    import tiktoken.load
    import tiktoken.registry

    def refuse(_):
        raise ConnectionError("no route to host")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})


# Name, ids, EOT; a text, its first ids; ids with EOTs and their text.
KNOWN = {
    "gpt2": (50257, 50256, "Hello world, naïve 🙂", [15496, 995, 11], [15496, 50256, 995]),
    "byte": (257, 256, "aé", [0x61, 0xC3, 0xA9], [72, 101, 108, 108, 111, 256, *b" world"]),
}


def test_known_ids(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    vocab_size, eot, text, first, two = KNOWN[tokenizer.name]
    assert (tokenizer.vocab_size, tokenizer.eot) == (vocab_size, eot)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids[:3].tolist() == first
    assert tokenizer.decode(ids) == text and tokenizer.decode(two) == "Hello<|endoftext|> world"
    np.testing.assert_array_equal(tokenizer.encode_batch(["", text])[1], ids)
    assert tokenizer.encode("").shape == (0,) and tokenizer.decode([]) == ""
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (vocab_size,) and lengths[ids].sum() == len(text.encode())
    assert lengths[eot] == 0
    # Special text in a document is text, and a lone surrogate becomes the replacement character.
    assert eot not in (special := tokenizer.encode("a<|endoftext|>b"))
    assert tokenizer.decode(special) == "a<|endoftext|>b"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_bytes_that_are_no_text_are_replaced():
    byte = get_tokenizer("byte")
    ids = [256, 104, 256, 256, 0xC3, 256, 0xA9]
    assert byte.decode(ids) == "!h!!\ufffd!\ufffd".replace("!", "<|endoftext|>")


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_outside_the_vocabulary_and_unknown_names_are_errors(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        says = rf"expected ids in 0..{tokenizer.vocab_size - 1} .* found {bad} at position 2"
        with pytest.raises(ValueError, match=says):
            tokenizer.decode([1, 2, bad])
    with pytest.raises(ValueError, match=r"ids of shape \(tokens,\), found shape \(1, 2\)"):
        tokenizer.decode(np.array([[1, 2]]))
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt4'; choose one of gpt2, byte"):
        choose_tokenizer("gpt4")


def test_auto_is_gpt2_where_it_is_available(tokenizer):
    chosen, note = choose_tokenizer("auto" if tokenizer.name == "gpt2" else "byte")
    assert (chosen.name, note) == (tokenizer.name, None)


def test_without_files_gpt2_is_unavailable_and_auto_uses_bytes_with_a_note(no_network):
    says = "not in tiktoken's cache .*no route to host.*TIKTOKEN_CACHE_DIR.*--tokenizer byte"
    with pytest.raises(TokenizerUnavailable, match=says):
        choose_tokenizer("gpt2")
    tokenizer, note = choose_tokenizer("auto")
    assert tokenizer.name == "byte"
    assert "BYTE" in note and "not comparable" in note and "TIKTOKEN_CACHE_DIR" in note


def test_a_network_that_does_not_answer_is_given_up_soon(no_network, monkeypatch):
    import tiktoken.load

    answers = threading.Event()
    monkeypatch.setattr(tiktoken.load, "read_file", lambda _: answers.wait(30) and b"")
    monkeypatch.setattr(module, "_LOAD_SECONDS", 0.3)
    try:
        begin = time.monotonic()
        with pytest.raises(TokenizerUnavailable, match="no answer from the network within 0.3 s"):
            get_tokenizer("gpt2")
        assert time.monotonic() - begin < 5
    finally:
        answers.set()


# ---------------------------------------------------------------------------------- tokenizer.json

KINDS = {"gpt2": tools.gpt2_kind, "llama 3": tools.llama3_kind, "llama 2": tools.llama2_kind}
TEXT = "document 7.\nThe naïve word 🙂 is abc\t\n  number 49, don't<|endoftext|></s> stop."


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """A tokenizer of the package tokenizers, and the same as ours."""
    theirs = KINDS[request.param]()
    theirs.save(str(path := tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))
    return theirs, get_tokenizer(path)


def test_a_tokenizer_json_has_the_ids_of_its_package(kind):
    theirs, ours = kind
    theirs.encode_special_tokens = True
    ids = ours.encode(TEXT)
    assert isinstance(ours, Tokenizer) and ids.dtype == np.uint16
    assert ids.tolist() == theirs.encode(TEXT, add_special_tokens=False).ids
    assert not {*ids.tolist()} & {*ours.special.values()}
    np.testing.assert_array_equal(ours.encode_batch(["", TEXT])[1], ids)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert theirs.id_to_token(ours.eot) in ("<|endoftext|>", "<|end_of_text|>", "</s>")
    space = " " if theirs.normalizer else ""  # which the package's decoder may remove
    assert ours.decode(ids) == space + TEXT
    assert ours.decode(ids[:3]) + ours.decode(ids[3:]) == space + TEXT  # while it is generated
    lengths = ours.byte_lengths()
    assert lengths[ids].sum() == len((space + TEXT).encode()) and lengths[ours.eot] == 0
    assert ours.decode([ours.eot]) == theirs.id_to_token(ours.eot)
    assert ours.decode(ours.encode("a\ud800b")).endswith("a\ufffdb")
    with pytest.raises(ValueError, match=f"expected ids in 0..{ours.vocab_size - 1}"):
        ours.decode([ours.vocab_size])


def test_a_prefix_is_what_the_file_puts_before_a_text(kind):
    theirs, ours = kind
    assert [*ours.prefix, *ours.encode("a b")] == theirs.encode("a b").ids
    assert len(ours.prefix) == (theirs.token_to_id(tools.BOS) is not None)


def test_the_name_depends_on_tokens_ids_and_merges_only(kind, tmp_path):
    theirs, ours = kind
    fields = json.loads(theirs.to_str())
    fields["model"]["merges"] = [
        each if isinstance(each, str) else " ".join(each) for each in fields["model"]["merges"]
    ]
    fields["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0}
    fields["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "x"}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(fields, indent=1))
    assert get_tokenizer(file).name == ours.name and ours.name.startswith("json-")
    np.testing.assert_array_equal(
        get_tokenizer(file).encode_batch(["a", "a b c"])[0][:1], ours.encode("a")[:1]
    )
    fields["model"]["merges"].pop()
    file.write_text(json.dumps(fields))
    assert get_tokenizer(file).name != ours.name


def test_saved_files_have_the_same_tokenizer_and_end_of_text(tmp_path):
    tools.gpt2_kind(["<pad>", "<begin>", "<stop>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="token, found none; choose one with --eot"):
        get_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="found no token '<end>'"):
        get_tokenizer(tmp_path, eot="<end>")
    tokenizer = get_tokenizer(tmp_path, eot="<stop>")
    assert tokenizer.eot == 2
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    again = get_tokenizer(str(tmp_path / "saved"))
    assert (again.name, again.eot) == (tokenizer.name, 2)
    named = {"eos_token": {"content": "<begin>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert get_tokenizer(tmp_path).eot == 1


def test_training_a_tokenizer(tmp_path, capsys, monkeypatch):
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(tools.TEXTS):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    out = tmp_path / "own.json"
    command = ["train-tokenizer", str(tmp_path / "texts"), "--out", str(out)]
    assert main([*command, "--vocab-size", "300"]) == 0
    said = capsys.readouterr().out
    assert "own.json: 300 ids" in said
    tokenizer = get_tokenizer(out)
    assert tokenizer.eot == 0 and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    text = "".join(tools.TEXTS)
    assert len(tokenizer.encode(text)) < len(text) / 2
    prepare = said.split("next: gptjax data ")[1].split()
    assert main([*prepare, "--data-dir", str(tmp_path / "data")]) == 0
    assert (tmp_path / "data" / f"text_{tokenizer.name}" / "tokenizer.json").is_file()

    for more, says in (
        (["--vocab-size", "300"], "own.json: expected the name of a new .json file"),
        (["--vocab-size", "256"], "expected a vocab-size of at least 257, found 256"),
    ):
        assert main([*command, *more]) == 1
        assert says in capsys.readouterr().err
    out.unlink()
    assert main([*command, "--vocab-size", "300"]) == 0
    assert get_tokenizer(out).name == tokenizer.name  # training is deterministic


def test_a_vocabulary_above_65536_ids_is_uint32(tmp_path):
    tools.with_ids(tools.llama3_kind(), 128_256).save(str(tmp_path / "tokenizer.json"))
    tokenizer = get_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 128_256 and tokenizer.encode("a").dtype == np.uint32
    assert tokenizer.decode([128_000, 128_255]) == "<|reserved|>"


def test_what_is_no_usable_tokenizer_json_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    for content, says in (
        ("{", "tokenizer.json: expected a JSON object, found Expecting"),
        ("[1]", "tokenizer.json: expected a JSON object, found "),
        ('{"a": 1}', "expected a tokenizer.json of Hugging Face, found KeyError: 'model'"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": []}', "tokenizer.json: "),
    ):
        file.write_text(content)
        with pytest.raises(TokenizerError, match=says):
            get_tokenizer(tmp_path)
    word_piece = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}))
    word_piece.decoder = tokenizers.decoders.WordPiece()
    word_piece.add_special_tokens(["[UNK]"])
    word_piece.save(str(file))
    with pytest.raises(TokenizerError, match="expected a decoder of bytes .* found WordPiece"):
        get_tokenizer(file)
    with pytest.raises(TokenizerError, match="gpt2 has an end-of-text token; leave out --eot"):
        get_tokenizer("gpt2", eot="x")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerUnavailable, match=r"pip install 'gptjax\[tokenizers\]'"):
        get_tokenizer(file)
