"""tokenizer.json, through the `tokenizers` library."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import TokenSettings
from asyncllm.text.token_table import LeadingSpace, TokenTable, byte_level_piece, byte_of_fallback_token

__all__ = ["TokenizerJson"]

SPACE = "\u2581"
CHUNK = 512
"""Ids per call when the table is checked against the library."""


class TokenizerJson:
    """The `tokenizers` pipeline of one tokenizer.json."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        """Raises InvalidCheckpoint when the file cannot be read or does not hold."""
        try:
            self._tokenizer = HubTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise InvalidCheckpoint(
                f"{path} is not a tokenizer that `tokenizers` can read: {error}. "
                f"The file is truncated, damaged, or of a newer format; download it again or upgrade `tokenizers`."
            ) from None
        # A saved training-time limit would silently shorten or pad every prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._literal: HubTokenizer | None = None
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max((*self._vocabulary.values(), *self._added), default=-1)
        self._special = _any_of(token.content for token in self._added.values() if token.special)
        texts = settings.special_texts()
        self.special_ids = frozenset(
            id_ for id_, token in self._added.items() if token.special or token.content in texts
        ) | frozenset(self._vocabulary[text] for text in texts if text in self._vocabulary)
        self.prefix = self._prefix(settings)
        self.table = self._table()

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token(self, id_: int) -> str | None:
        return self._tokenizer.id_to_token(id_)

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Token ids per text, without the prefix. `encode_batch_fast` releases the GIL, `encode` does not."""
        literal = not parse_special and any(self._special.search(text) for text in texts)
        tokenizer = self._literal_tokenizer() if literal else self._tokenizer
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _literal_tokenizer(self) -> HubTokenizer:
        """A second tokenizer that takes special tokens in the text for plain text; the switch is per object.

        Made when the first such text comes, as copying a large vocabulary takes half a second.
        """
        if self._literal is None:
            literal = copy.deepcopy(self._tokenizer)
            literal.encode_special_tokens = True
            self._literal = literal
        return self._literal

    def _prefix(self, settings: TokenSettings) -> tuple[int, ...]:
        """The ids that the post-processor puts in front of a text; what it appends would end the answer at once."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = range(len(whole) - len(bare) + 1)
        start = next((start for start in starts if bare and whole[start : start + len(bare)] == bare), 0)
        prefix = tuple(whole[:start])
        bos = settings.bos_token_id(self.token_id)
        if settings.add_bos is True and not prefix and bos is not None:
            return (bos,)
        if settings.add_bos is False:
            return tuple(id_ for id_ in prefix if id_ != bos)
        return prefix

    def _table(self) -> TokenTable | None:
        """The byte table, or None when the decoder is of another kind or disagrees with it."""
        steps = _steps(self._tokenizer)
        rule = _rule(steps)
        if rule is None:
            return None
        to_piece, leading = rule
        pieces: list[bytes | None] = [None] * self.size
        for token, id_ in self._vocabulary.items():
            pieces[id_] = to_piece(token)
        for id_, added in self._added.items():
            pieces[id_] = to_piece(added.content)
        table = TokenTable(pieces, self.special_ids, leading)
        return table if self._agrees(table) else None

    def _agrees(self, table: TokenTable) -> bool:
        """Decode the whole vocabulary both ways."""
        # A single byte of 0x80 and above is ill-formed alone, where the two differ on purpose.
        ids = [
            id_
            for id_, piece in enumerate(table.pieces)
            if piece is not None and not (piece[0:1] >= b"\x80" and self.token(id_) == f"<0x{piece[0]:02X}>")
        ]
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        expected = self._tokenizer.decode_batch(chunks, skip_special_tokens=False)
        return all(
            table.decode(chunk, skip_special_tokens=False) == text for chunk, text in zip(chunks, expected, strict=True)
        )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of `texts`, in any case, as a normalizer may fold it; nothing when there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)", re.IGNORECASE)


def _steps(tokenizer: HubTokenizer) -> list[dict[str, Any]]:
    """The decoder as a flat list of its JSON descriptions."""
    if tokenizer.decoder is None:
        return []
    description = json.loads(tokenizer.decoder.__getstate__())
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


def _rule(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], LeadingSpace] | None:
    """How one token becomes bytes under these decoder steps; None when tokens cannot be decoded one by one."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_piece, LeadingSpace.KEEP
    if kinds == ["Metaspace"] and len(steps[0]["replacement"]) == 1:
        mark = steps[0]["replacement"]
        never = steps[0].get("prepend_scheme", "always") == "never"
        leading = LeadingSpace.KEEP if never else LeadingSpace.DROP_IN_FIRST_TOKEN
        return (lambda token: token.replace(mark, " ").encode()), leading
    leading = LeadingSpace.KEEP
    if kinds[-2:] == ["Fuse", "Strip"]:
        if (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) != (" ", 1, 0):
            return None
        leading = LeadingSpace.DROP_ONE
        kinds.pop()
    if sorted(kinds) == ["ByteFallback", "Fuse", "Replace"] and kinds.index("ByteFallback") < kinds.index("Fuse"):
        replace = steps[kinds.index("Replace")]
        old, new = replace["pattern"].get("String"), replace["content"]
        if old == SPACE:
            return (lambda token: byte_of_fallback_token(token) or token.replace(old, new).encode()), leading
    return None
