"""ByteTokenizer: one token per UTF-8 byte, so that tests can read token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """A tokenizer without a file: ids 0 to 255 are bytes, 256 is `<bos>`, 257 is `<eos>`.

    It has the public methods of `asyncllm.text.tokenizer.Tokenizer`. Any sequence of ids decodes; bytes that are not
    UTF-8 become U+FFFD.
    """

    vocab_size = 258
    bos_token_id: int | None = 256
    eos_token_ids: tuple[int, ...] = (257,)
    special_token_ids: frozenset[int] = frozenset({256, 257})

    _SPECIAL = {"<bos>": 256, "<eos>": 257}
    _SPECIAL_TEXT = {256: b"<bos>", 257: b"<eos>"}
    _PATTERN = re.compile("(<bos>|<eos>)")

    def __init__(self, *, adds_bos: bool = False) -> None:
        """`adds_bos`: whether a prompt starts with `<bos>`, as some checkpoints ask for."""
        self.adds_bos = adds_bos

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `<bos>` is added once at most."""
        ids: list[int] = []
        for part in self._PATTERN.split(text) if parse_special else [text]:
            special = self._SPECIAL.get(part) if parse_special else None
            ids.extend(part.encode("utf-8", "surrogatepass") if special is None else [special])
        if add_bos and self.adds_bos and ids[:1] != [256]:
            ids.insert(0, 256)
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_bos: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        return [self.encode(text, add_bos=add_bos, parse_special=parse_special) for text in texts]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self._bytes(ids, skip_special_tokens).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def _bytes(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        out = bytearray()
        for token_id in ids:
            if token_id < 256:
                out.append(token_id)
            elif not skip_special_tokens:
                out += self._SPECIAL_TEXT[token_id]
        return bytes(out)
