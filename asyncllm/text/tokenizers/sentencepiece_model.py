"""SentencePieceModel reads a tokenizer.model through the `sentencepiece` library.

The text is split on the checkpoint's added and special tokens, and sentencepiece encodes each part between them.
Converting the model to another library's pipeline changes the result for some inputs, so it is not done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import sentencepiece

from asyncllm.errors import InvalidCheckpoint
from asyncllm.text.checkpoint_files import AddedToken, TokenSettings
from asyncllm.text.tokenizers.added_tokens import SPACE, TokenFinder, led_by_space
from asyncllm.text.tokenizers.sentencepiece_file import (
    UNUSED,
    USER_DEFINED,
    WITHOUT_DUMMY_PREFIX,
    piece_types,
    with_unused_pieces,
)
from asyncllm.text.tokenizers.token_table import LeadingSpace, TokenTable, byte_of_fallback_token

__all__ = ["SentencePieceModel"]

_CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
"""Tokens that the code of ChatGLM2 and ChatGLM3 adds after the model's. Only newer files name all of them."""
_CHATGLM_PREFIX = ("[gMASK]", "sop")


class SentencePieceModel:
    """One tokenizer.model with the added tokens around it."""

    def __init__(self, path: Path, settings: TokenSettings) -> None:
        """Raise InvalidCheckpoint for a file that is unreadable, damaged, or contradicts the files next to it."""
        try:
            model = path.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
            model_size: int = self._model.get_piece_size()
            self._pieces: list[str] = [self._model.id_to_piece(id_) for id_ in range(model_size)]
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            raise InvalidCheckpoint(
                f"{path} is not a sentencepiece model: {error}. The file is truncated or damaged (a Git LFS pointer, "
                f"perhaps); download it again."
            ) from None
        if model_size == 0:
            raise InvalidCheckpoint(f"{path} is an empty sentencepiece model. Download it again.")
        self._model_size = model_size
        self._dummy_prefix_after_special = settings.legacy
        self._added = self._number(settings, model)
        self._ids = {token.content: id_ for id_, token in self._added.items()}
        texts = settings.special_texts() | (frozenset(_CHATGLM) if _is_chatglm(settings) else frozenset())
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.content in texts) | frozenset(
            id_ for id_ in range(model_size) if self._model.is_control(id_) or self._model.is_unknown(id_)
        )
        self.size = max(model_size, 1 + max(self._added, default=-1))
        # Special tokens are found in the text beforehand, so the model must not produce any.
        named = [id_ for id_ in self.special_ids | self._renamed if id_ < model_size and not self._never_encoded(id_)]
        if named:
            model = with_unused_pieces(model, named)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._bare_model = sentencepiece.SentencePieceProcessor(model_proto=model + WITHOUT_DUMMY_PREFIX)
        self._led = led_by_space({token.content: id_ for id_, token in self._added.items() if id_ in self.special_ids})
        self._all_tokens = TokenFinder(self._added, self.special_ids, self._led)
        self._plain_tokens = TokenFinder(
            {id_: token for id_, token in self._added.items() if id_ not in self.special_ids}, frozenset(), {}
        )
        self._inside = frozenset(self._led.values())
        self.spellings = (*(self._added[id_].content for id_ in self.special_ids if id_ in self._added), *self._led)
        bos = settings.bos_token_id(self.token_id)
        if bos is None and self._model.bos_id() >= 0:
            bos = self._model.bos_id()
        self.prefix: tuple[int, ...] = () if bos is None or settings.add_bos is False else (bos,)
        if _is_chatglm(settings):
            self.prefix = tuple(self._ids[token] for token in _CHATGLM_PREFIX)
        eos = settings.named_id("eos_token", self.token_id)
        if eos is None and self._model.eos_id() >= 0:
            eos = self._model.eos_id()
        self.suffix: tuple[int, ...] = (eos,) if settings.add_eos and eos is not None else ()
        self._byte_table = self._table()
        self.table: TokenTable | None = self._byte_table

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        id_ = self._piece_id(token)
        # A renamed piece is known by its new name only.
        return None if id_ in self._added else id_

    def token(self, id_: int) -> str | None:
        if id_ in self._added:
            return self._added[id_].content
        return self._pieces[id_] if 0 <= id_ < self._model_size else None

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Return token ids per text, without the prefix."""
        tokens = self._all_tokens if parse_special else self._plain_tokens
        return [self._encode(text, tokens, ()) for text in texts]

    def encode_literal(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """Return token ids without the prefix. Text that overlaps a (start, end) pair of `literal` is not a special
        token."""
        return self._encode(text, self._all_tokens, literal)

    def decode(self, ids: Sequence[int]) -> str:
        return self._byte_table.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str, tokens: TokenFinder, literal: Sequence[tuple[int, int]]) -> list[int]:
        ids: list[int] = []
        model = self._model
        for part, token_id in self._parts(text, tokens, literal):
            if part:
                ids += model.encode(part)
            if token_id is not None:
                ids.append(token_id)
                prefixed = self._dummy_prefix_after_special and token_id not in self._inside
                model = self._model if prefixed else self._bare_model
        return ids

    def _parts(
        self, text: str, tokens: TokenFinder, literal: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[str, int | None]]:
        """Yield pairs of plain text and the added token that follows it; the last pair has no token."""
        start = 0
        for found in tokens.find(text, literal):
            part = text[start : found.start]
            start = found.end
            if self._added[found.id].lstrip:
                part = part.rstrip()
            yield part, found.id
        yield text[start:], None

    def _never_encoded(self, id_: int) -> bool:
        """Return whether no text is encoded to a piece. A byte, even one that some checkpoints name as padding, still
        stands for itself."""
        return any(kind(id_) for kind in (self._model.is_control, self._model.is_unknown, self._model.is_byte)) or bool(
            self._model.is_unused(id_)
        )

    def _number(self, settings: TokenSettings, model: bytes) -> dict[int, AddedToken]:
        """Return added tokens by id. A token without an id has the id of its piece in the model, or else follows the
        last id.

        A piece that the model reserves, as unused or user-defined, may have another name in the settings.
        """
        numbered = dict(settings.added)
        if _is_chatglm(settings):
            numbered |= _chatglm_tokens(self._model_size)
        renamed = {
            id_ for id_, token in numbered.items() if id_ < self._model_size and self._pieces[id_] != token.content
        }
        types = piece_types(model, renamed) if renamed else {}
        self._renamed = frozenset(renamed)
        for id_, token in numbered.items():
            if id_ in renamed and types[id_] not in (UNUSED, USER_DEFINED):
                raise InvalidCheckpoint(
                    f"Token {id_} is {token.content!r} in the tokenizer's JSON files, but "
                    f"{self._pieces[id_]!r} in tokenizer.model. The files are of different models; "
                    f"download them again."
                )
        last = max(self._model_size - 1, max(numbered, default=-1))
        for token in settings.unnumbered:
            piece_id = self._piece_id(token.content)
            if piece_id is None:
                piece_id = last = last + 1
            numbered.setdefault(piece_id, token)
        for id_ in range(self._model_size):
            if self._model.is_control(id_):
                numbered.setdefault(id_, AddedToken(self._pieces[id_]))
        return numbered

    def _piece_id(self, piece: str) -> int | None:
        """Return the id of a piece of the model, or None."""
        id_: int = self._model.piece_to_id(piece)
        # Unknown pieces get the id of the unknown piece, which a damaged file may lack.
        return id_ if id_ < self._model_size and self._pieces[id_] == piece else None

    def _table(self) -> TokenTable:
        pieces: list[bytes | None] = [None] * self.size
        for id_ in range(self._model_size):
            byte = byte_of_fallback_token(self._pieces[id_]) if self._model.is_byte(id_) else None
            pieces[id_] = byte if byte is not None else self._pieces[id_].replace(SPACE, " ").encode()
        for id_, token in self._added.items():
            pieces[id_] = token.content.encode()
        return TokenTable(pieces, self.special_ids, self._leading_space())

    def _leading_space(self) -> LeadingSpace:
        if self._model.encode("  a") == self._model.encode("a"):
            return LeadingSpace.DROP_ONE_PER_TOKEN
        if self._model.encode("a") != self._bare_model.encode("a"):
            return LeadingSpace.DROP_ONE
        return LeadingSpace.KEEP


def _is_chatglm(settings: TokenSettings) -> bool:
    return bool(settings.tokenizer.get("tokenizer_class") == "ChatGLMTokenizer")


def _chatglm_tokens(first: int) -> dict[int, AddedToken]:
    """Return the tokens by id. Those made of letters only are not found inside words, which may contain them by
    chance."""
    return {first + index: AddedToken(text, single_word=text.isalpha()) for index, text in enumerate(_CHATGLM)}
