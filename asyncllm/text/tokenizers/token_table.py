"""TokenTable maps token ids to bytes, for tokenizers whose decoding is a concatenation of bytes.

Byte-level BPE, BPE with byte fallback, Metaspace and sentencepiece all decode that way, except for one rule about white
space at the very beginning. With the table, decoding needs neither the tokenizer nor any earlier token.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["LeadingSpace", "TokenTable", "byte_level_piece", "byte_level_text", "byte_of_fallback_token"]


class LeadingSpace(enum.Enum):
    """Which white space before the first text a decoder removes."""

    KEEP = enum.auto()
    DROP_ONE = enum.auto()
    """One space, if the text begins with one: the dummy prefix of sentencepiece."""
    DROP_ONE_PER_TOKEN = enum.auto()
    """One space per token until there is text: sentencepiece with remove_extra_whitespaces."""
    DROP_IN_FIRST_TOKEN = enum.auto()
    """All spaces of the first token: the Metaspace decoder of `tokenizers`."""


class TokenTable:
    """Decoding tables for one vocabulary.

    `pieces[id]` is the id's bytes, None where the vocabulary has a gap. Ill-formed UTF-8 decodes to U+FFFD, one per
    maximal ill-formed part (Unicode 15, section 3.9). For byte-fallback vocabularies that is more lenient than
    `tokenizers`, which gives up a whole run of byte tokens when one of them is wrong, and so cannot stream the run.
    """

    __slots__ = ("_all_texts", "_kept_texts", "leading", "pieces", "special_ids")

    def __init__(self, pieces: list[bytes | None], special_ids: frozenset[int], leading: LeadingSpace) -> None:
        self.pieces = pieces
        self.special_ids = special_ids
        self.leading = leading
        self._all_texts = [_whole_text(piece) for piece in pieces]
        self._kept_texts = list(self._all_texts)
        for id_ in special_ids:
            if id_ < len(pieces):
                self._kept_texts[id_] = ""

    def texts(self, *, skip_special_tokens: bool) -> list[str | None]:
        """Return the text of each id if it does not depend on its neighbours; None for a part of a character.

        White space before the first text is not handled here.
        """
        return self._kept_texts if skip_special_tokens else self._all_texts

    def join(self, ids: Iterable[int], *, skip_special_tokens: bool, at_start: bool) -> tuple[bytes, bool]:
        """Return the bytes of `ids`, and whether what follows them is still at the start of the text.

        Ids outside the vocabulary have no bytes.
        """
        pieces: list[bytes] = []
        for id_ in ids:
            piece = self.pieces[id_] if 0 <= id_ < len(self.pieces) else None
            if piece is None or (skip_special_tokens and id_ in self.special_ids):
                continue
            if at_start:
                piece, at_start = self._open(piece)
            pieces.append(piece)
        return b"".join(pieces), at_start

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`."""
        return self.join(ids, skip_special_tokens=skip_special_tokens, at_start=True)[0].decode("utf-8", "replace")

    def _open(self, piece: bytes) -> tuple[bytes, bool]:
        match self.leading:
            case LeadingSpace.KEEP:
                return piece, False
            case LeadingSpace.DROP_ONE:
                return piece.removeprefix(b" "), not piece
            case LeadingSpace.DROP_ONE_PER_TOKEN:
                rest = piece.removeprefix(b" ")
                return rest, not rest
            case LeadingSpace.DROP_IN_FIRST_TOKEN:
                return piece.replace(b" ", b""), False


def _whole_text(piece: bytes | None) -> str | None:
    if piece is None:
        return ""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def byte_of_fallback_token(token: str) -> bytes | None:
    """Return the byte that a byte-fallback token such as "<0x0A>" stands for; None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _byte_level_alphabet() -> dict[int, int]:
    """Return character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest follows U+0100.

    The other Latin-1 characters map to U+FFFF, so that a token that holds one is recognised as plain text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    alphabet = {byte: byte for byte in printable} | {byte: 0xFFFF for byte in rest}
    return alphabet | {0x100 + index: byte for index, byte in enumerate(rest)}


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items() if byte != 0xFFFF}


def byte_level_text(token: bytes) -> str:
    """Return how byte-level BPE spells a token."""
    return token.decode("latin-1").translate(_CHARACTERS)


def byte_level_piece(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token outside the alphabet, as some added tokens are, stands for
    itself."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
