"""ByteTokenizer: ids are bytes, and every text comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.testing import ByteTokenizer


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens() -> None:
    tokenizer = ByteTokenizer(adds_bos=True)
    assert tokenizer.encode("hi<eos>") == [256, 104, 105, 257]
    assert tokenizer.encode("<bos>hi") == [256, 104, 105]
    assert tokenizer.encode("hi", add_bos=False) == [104, 105]
    assert tokenizer.encode("<eos>", add_bos=False, parse_special=False) == list(b"<eos>")
    assert tokenizer.decode([256, 104, 257]) == "h"
    assert tokenizer.token_text(257) == "<eos>"


def test_incomplete_characters_show_as_replacement() -> None:
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"
