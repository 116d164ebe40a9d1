"""gptjax.data.tokenizers: GPT-2's BPE and bytes, without a network too."""

import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from gptjax.data import Tokenizer, TokenizerUnavailable, choose_tokenizer, get_tokenizer
from gptjax.data import tokenizers as module


@pytest.fixture(scope="module")
def gpt2():
    try:
        return get_tokenizer("gpt2")
    except TokenizerUnavailable:
        pytest.skip(
            "GPT-2's BPE files are not to be had: no network, and TIKTOKEN_CACHE_DIR names no copy "
            "of them"
        )


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


def test_gpt2_is_gpt2s_bpe(gpt2):
    assert isinstance(gpt2, Tokenizer)
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ("gpt2", 50257, 50256)
    ids = gpt2.encode("Hello world, naïve 🙂")
    assert ids.dtype == np.uint16 and ids[:3].tolist() == [15496, 995, 11]
    assert gpt2.decode(ids) == "Hello world, naïve 🙂"
    assert gpt2.decode([15496, 50256, 995]) == "Hello<|endoftext|> world"
    assert gpt2.encode("").shape == (0,) and gpt2.decode([]) == ""


def test_bytes_are_utf8():
    byte = get_tokenizer("byte")
    assert isinstance(byte, Tokenizer)
    assert (byte.name, byte.vocab_size, byte.eot) == ("byte", 257, 256)
    ids = byte.encode("aé")
    assert ids.dtype == np.uint16 and ids.tolist() == [0x61, 0xC3, 0xA9]
    assert byte.decode(ids) == "aé"
    assert (
        byte.decode([256, 104, 105, 256, 256, 33]) == "<|endoftext|>hi<|endoftext|><|endoftext|>!"
    )
    assert byte.decode(np.array([0xC3, 256, 0xA9])) == "\ufffd<|endoftext|>\ufffd"
    assert byte.encode("").shape == (0,) and byte.decode([]) == ""


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_special_text_in_a_document_is_text(name, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else get_tokenizer(name)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_bytes_round_trip(text):
    assert get_tokenizer("byte").decode(get_tokenizer("byte").encode(text)) == text


def test_gpt2_round_trip(gpt2):
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    @settings(max_examples=100, deadline=None)
    def check(text):
        assert gpt2.decode(gpt2.encode(text)) == text

    check()


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_lone_surrogate_becomes_the_replacement_character(name, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else get_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("name", ["gpt2", "byte"])
@pytest.mark.parametrize("bad", [-1, "vocab_size", 65535])
def test_an_id_outside_the_vocabulary_is_an_error(name, bad, request):
    tokenizer = request.getfixturevalue("gpt2") if name == "gpt2" else get_tokenizer(name)
    bad = tokenizer.vocab_size if bad == "vocab_size" else bad
    with pytest.raises(
        ValueError,
        match=rf"expected ids in 0..{tokenizer.vocab_size - 1} .* found {bad} at position 2",
    ):
        tokenizer.decode([1, 2, bad])


def test_ids_of_another_shape_are_an_error():
    with pytest.raises(
        ValueError, match=r"expected token ids of shape \(tokens,\), found int64 of shape \(1, 2\)"
    ):
        get_tokenizer("byte").decode(np.array([[1, 2]]))


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt4'; choose one of gpt2, byte"):
        get_tokenizer("gpt4")
    with pytest.raises(
        ValueError, match="unknown tokenizer 'gpt4'; choose one of auto, gpt2, byte"
    ):
        choose_tokenizer("gpt4")


def test_without_files_gpt2_is_unavailable_and_auto_uses_bytes_with_a_note(no_network):
    says = (
        "not in tiktoken's cache .*ConnectionError: no route to host.*"
        "TIKTOKEN_CACHE_DIR.*--tokenizer byte"
    )
    with pytest.raises(TokenizerUnavailable, match=says):
        get_tokenizer("gpt2")
    with pytest.raises(TokenizerUnavailable):
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


def test_auto_is_gpt2_where_it_can_be_had(gpt2):
    tokenizer, note = choose_tokenizer("auto")
    assert tokenizer.name == "gpt2" and note is None
    assert choose_tokenizer("byte")[0].name == "byte" and choose_tokenizer("byte")[1] is None
