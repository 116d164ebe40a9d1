"""gptjax.terminal: characters that a terminal executes are replaced, all others are kept."""

import unicodedata

import pytest

from gptjax.terminal import printable


@pytest.mark.parametrize(
    "text", ["a b\tc\n", "1\u202f000\u00a0€ «\u00a0oui\u00a0»", "\u3000語", "🙂é"]
)
def test_text_is_kept(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    "character", ["\x1b", "\r", "\x9b", "\u2028", "\u202e", "\ud800", "\u200b"]
)
def test_control_characters_are_replaced(character):
    assert printable(f"a{character}[2J") == "a\ufffd[2J"


def test_every_character_that_is_kept_is_printable_or_a_space():
    every = "".join(map(chr, range(0x10000)))
    kept = {c for c, shown in zip(every, printable(every), strict=True) if c == shown}
    others = {c for c in kept - {"\n", "\t", "\ufffd"} if not c.isprintable()}
    assert {unicodedata.category(c) for c in others} == {"Zs"}
