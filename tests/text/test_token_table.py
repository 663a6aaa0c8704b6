"""The rules about white space at the beginning, and the byte-level alphabet."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from asyncllm.text.tokenizers.token_table import LeadingSpace, TokenTable, byte_level_piece, byte_of_fallback_token

PIECES: list[bytes | None] = [b"<s>", b" ", b" a", b"  b", b"c", b"", None, b"\xe4"]


@pytest.mark.parametrize(("leading", "ids", "text"), [
    (LeadingSpace.KEEP, [1, 2, 4], "  ac"),
    (LeadingSpace.DROP_ONE, [2, 2], "a a"),
    (LeadingSpace.DROP_ONE, [1, 2], " a"),
    (LeadingSpace.DROP_ONE, [3], " b"),
    (LeadingSpace.DROP_ONE, [5, 2], "a"),
    (LeadingSpace.DROP_ONE, [0, 6, 99, 2], "a"),
    (LeadingSpace.DROP_ONE, [4, 2], "c a"),
    (LeadingSpace.DROP_ONE, [7, 2], "\ufffd a"),
    (LeadingSpace.DROP_ONE_PER_TOKEN, [1, 1, 2, 2], "a a"),
    (LeadingSpace.DROP_ONE_PER_TOKEN, [3, 2], " b a"),
    (LeadingSpace.DROP_ONE_PER_TOKEN, [5, 1, 2], "a"),
    (LeadingSpace.DROP_IN_FIRST_TOKEN, [3, 2], "b a"),
    (LeadingSpace.DROP_IN_FIRST_TOKEN, [1, 2], " a"),
    (LeadingSpace.DROP_IN_FIRST_TOKEN, [0, 6, 3], "b"),
])  # fmt: skip
def test_leading_space(leading: LeadingSpace, ids: list[int], text: str) -> None:
    table = TokenTable(PIECES, frozenset({0}), leading)
    assert table.decode(ids, skip_special_tokens=True) == text


def test_a_special_token_that_is_shown_is_text() -> None:
    table = TokenTable(PIECES, frozenset({0}), LeadingSpace.DROP_ONE)
    assert table.decode([0, 2], skip_special_tokens=False) == "<s> a"


def test_byte_level_pieces_are_those_of_the_library() -> None:
    decoder = decoders.ByteLevel()
    for character in map(chr, [*range(0x20, 0x250), 0x4F60, 0x1F600]):
        for token in (character, f"a{character}", f"{character} b"):
            assert byte_level_piece(token).decode("utf-8", "replace") == decoder.decode([token])


def test_bytes_of_fallback_tokens() -> None:
    assert byte_of_fallback_token("<0x0A>") == b"\n"
    assert byte_of_fallback_token("<0xff>") == b"\xff"
    for token in ("<0x>", "<0x0G>", "<0x0A", "0x0A>>>", "<0x00A>"):
        assert byte_of_fallback_token(token) is None
