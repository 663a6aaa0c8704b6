"""ByteTokenizer: one token per UTF-8 byte, so that tests can read token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tokenizers.token_table import LeadingSpace, TokenTable

__all__ = ["ByteTokenizer"]

BOS, EOS = 256, 257
_SPECIAL = {"<bos>": BOS, "<eos>": EOS}
_PATTERN = re.compile("(<bos>|<eos>)")


class _Bytes:
    """The vocabulary: ids 0 to 255 are bytes, 256 is `<bos>`, 257 is `<eos>`."""

    size = 258
    special_ids = frozenset({BOS, EOS})
    spellings = tuple(_SPECIAL)

    def __init__(self, *, adds_bos: bool) -> None:
        self.prefix: tuple[int, ...] = (BOS,) if adds_bos else ()
        self.suffix: tuple[int, ...] = ()
        pieces: list[bytes | None] = [bytes([value]) for value in range(256)]
        self.table: TokenTable | None = TokenTable([*pieces, b"<bos>", b"<eos>"], self.special_ids, LeadingSpace.KEEP)

    def token_id(self, token: str) -> int | None:
        return _SPECIAL.get(token)

    def token(self, id_: int) -> str | None:
        return self.decode([id_]) if 0 <= id_ < self.size else None

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        return [self._encode(text, parse_special=parse_special) for text in texts]

    def encode_literal(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        ids: list[int] = []
        last = 0
        for start, end in [*literal, (len(text), len(text))]:
            ids += self._encode(text[last:start], parse_special=True) + self._encode(
                text[start:end], parse_special=False
            )
            last = end
        return ids

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in _PATTERN.split(text) if parse_special else [text]:
            special = _SPECIAL.get(part) if parse_special else None
            ids.extend(part.encode("utf-8", "surrogatepass") if special is None else [special])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        assert self.table is not None
        return self.table.decode(ids, skip_special_tokens=False)


class ByteTokenizer(Tokenizer):
    """A tokenizer without a file: ids 0 to 255 are bytes, 256 is `<bos>`, 257 is `<eos>`.

    Any sequence of ids decodes; invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, *, adds_bos: bool = False) -> None:
        """`adds_bos`: whether a prompt starts with `<bos>`, as some checkpoints require."""
        super().__init__(_Bytes(adds_bos=adds_bos), bos_token_id=BOS, eos_token_ids=(EOS,))
