"""tokenizer.model, through the `sentencepiece` library.

The text is split on the checkpoint's added and special tokens, and sentencepiece encodes each part between them.
Converting the model to another library's pipeline changes the result for some inputs, so it is not done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import AddedToken, TokenSettings
from asyncllm.text.token_table import LeadingSpace, TokenTable, byte_of_fallback_token

__all__ = ["SentencePieceModel"]

SPACE = "\u2581"
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
"""ModelProto.normalizer_spec.add_dummy_prefix = false on the wire. A repeated message field is merged into the earlier
one by every protobuf parser, so appending these bytes to a model overrides that one setting."""


class SentencePieceModel:
    """One tokenizer.model and the added tokens around it."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        """Raises InvalidCheckpoint when the file cannot be read, does not hold, or contradicts its neighbours."""
        try:
            model = path.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._bare_model = sentencepiece.SentencePieceProcessor(model_proto=model + WITHOUT_DUMMY_PREFIX)
            model_size: int = self._model.get_piece_size()
        except (OSError, RuntimeError) as error:
            raise InvalidCheckpoint(
                f"{path} is not a sentencepiece model: {error}. The file is truncated or damaged (a Git LFS pointer, "
                f"perhaps); download it again."
            ) from None
        if model_size == 0:
            raise InvalidCheckpoint(f"{path} is an empty sentencepiece model. Download it again.")
        self._model_size = model_size
        self._dummy_prefix_after_special = settings.legacy
        self._added = self._number(settings)
        self._ids = {token.content: id_ for id_, token in self._added.items()}
        texts = settings.special_texts()
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.content in texts) | frozenset(
            id_ for id_ in range(model_size) if self._model.is_control(id_) or self._model.is_unknown(id_)
        )
        self.size = max(model_size, 1 + max(self._added, default=-1))
        self._split_all = _splitter(self._added.values())
        self._split_plain = _splitter(token for id_, token in self._added.items() if id_ not in self.special_ids)
        bos = settings.bos_token_id(self.token_id)
        if bos is None and self._model.bos_id() >= 0:
            bos = self._model.bos_id()
        self.prefix: tuple[int, ...] = () if bos is None or settings.add_bos is False else (bos,)
        self._byte_table = self._table()
        self.table: TokenTable | None = self._byte_table

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        id_: int = self._model.piece_to_id(token)
        return None if self._model.is_unknown(id_) and self._model.id_to_piece(id_) != token else id_

    def token(self, id_: int) -> str | None:
        if id_ in self._added:
            return self._added[id_].content
        if not 0 <= id_ < self._model_size:
            return None
        piece: str = self._model.id_to_piece(id_)
        return piece

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Token ids per text, without the prefix."""
        return [self._encode(text, parse_special=parse_special) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._byte_table.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        model = self._model
        for part, token_id in self._parts(text, parse_special=parse_special):
            if part:
                ids += model.encode(part)
            if token_id is not None:
                ids.append(token_id)
                if not self._dummy_prefix_after_special:
                    model = self._bare_model
        return ids

    def _parts(self, text: str, *, parse_special: bool) -> Iterator[tuple[str, int | None]]:
        """Pairs of plain text and the added token that follows it; the last pair has no token."""
        pattern = self._split_all if parse_special else self._split_plain
        start = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            token = self._ids[match[0]]
            part = text[start : match.start()]
            start = match.end()
            if self._added[token].lstrip:
                part = part.rstrip()
            if self._added[token].rstrip:
                start = len(text) - len(text[start:].lstrip())
            yield part, token
        yield text[start:], None

    def _number(self, settings: TokenSettings) -> dict[int, AddedToken]:
        """Added tokens by id. One without an id has its place in the model, or else follows the last id."""
        numbered = dict(settings.added)
        for id_, token in numbered.items():
            if id_ < self._model_size and self._model.id_to_piece(id_) != token.content:
                raise InvalidCheckpoint(
                    f"Token {id_} is {token.content!r} in the tokenizer's JSON files, but "
                    f"{self._model.id_to_piece(id_)!r} in tokenizer.model. The files are of different models; "
                    f"download them again."
                )
        last = max(self._model_size - 1, max(numbered, default=-1))
        for token in settings.unnumbered:
            id_ = self._model.piece_to_id(token.content)
            if self._model.id_to_piece(id_) != token.content:
                last += 1
                id_ = last
            numbered.setdefault(id_, token)
        for id_ in range(self._model_size):
            if self._model.is_control(id_):
                numbered.setdefault(id_, AddedToken(self._model.id_to_piece(id_)))
        return numbered

    def _table(self) -> TokenTable:
        pieces: list[bytes | None] = [None] * self.size
        for id_ in range(self._model_size):
            piece = self._model.id_to_piece(id_)
            byte = byte_of_fallback_token(piece) if self._model.is_byte(id_) else None
            pieces[id_] = byte if byte is not None else piece.replace(SPACE, " ").encode()
        for id_, token in self._added.items():
            pieces[id_] = token.content.encode()
        return TokenTable(pieces, self.special_ids, self._leading_space())

    def _leading_space(self) -> LeadingSpace:
        if self._model.encode("  a") == self._model.encode("a"):
            return LeadingSpace.DROP_ONE_PER_TOKEN
        if self._model.encode("a") != self._bare_model.encode("a"):
            return LeadingSpace.DROP_ONE
        return LeadingSpace.KEEP


def _splitter(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Matches the longest added token at the leftmost place; None when there are none."""
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    alternatives = [
        rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content)
        for token in longest_first
    ]
    return re.compile("|".join(alternatives)) if alternatives else None
