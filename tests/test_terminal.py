"""gptjax.terminal: characters that a terminal executes are replaced, all others are kept."""

import unicodedata

import pytest

from gptjax.terminal import printable


@pytest.mark.parametrize(
    "text", ["a b\tc\n", "1\u202f000\u00a0€ «\u00a0oui\u00a0»", "\u3000語", "🙂é"]
)
def test_text_is_kept(text):
    assert printable(text) == text


def test_what_is_neither_printable_nor_a_space_is_replaced():
    every = "".join(map(chr, range(0x10000)))
    kept = {c for c, shown in zip(every, printable(every), strict=True) if c == shown}
    assert {*printable(every)} == kept
    others = {c for c in kept - {"\n", "\t", "\ufffd"} if not c.isprintable()}
    assert {unicodedata.category(c) for c in others} == {"Zs"}
