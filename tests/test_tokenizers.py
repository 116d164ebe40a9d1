"""gptjax.data.tokenizers: GPT-2's BPE and bytes, without a network too."""

import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gptjax.data import Tokenizer, TokenizerUnavailable, choose_tokenizer, get_tokenizer
from gptjax.data import tokenizers as module


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
    np.testing.assert_array_equal(tokenizer.encode_batch(["", text], workers=2)[1], ids)
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
