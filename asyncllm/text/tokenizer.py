"""Tokenizer turns text into token ids and back, using the tokenizer files of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from asyncllm.errors import InvalidCheckpoint, InvalidMessage, InvalidParameter, ModelNotFound
from asyncllm.text.checkpoint_files import TokenSettings
from asyncllm.text.tokenizers.added_tokens import Spellings
from asyncllm.text.tokenizers.tiktoken_file import find_tiktoken_file
from asyncllm.text.tokenizers.token_table import TokenTable

__all__ = ["Tokenizer", "TokenizerModel"]


class TokenizerModel(Protocol):
    """The contents of a tokenizer file, whichever library reads it."""

    size: int
    """One above the highest token id."""
    special_ids: frozenset[int]
    spellings: tuple[str, ...]
    """All texts that are read as special tokens."""
    prefix: tuple[int, ...]
    """Ids that begin every sequence: usually one or none."""
    suffix: tuple[int, ...]
    """Ids that end a text which nothing follows: usually none; for embedding models the one that ends a sequence."""
    table: TokenTable | None
    """The bytes of each token; None if a token's text depends on its neighbours other than by incomplete characters."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact text, or None."""

    def token(self, id_: int) -> str | None:
        """Return the token as spelled in the file; None for a gap in the vocabulary."""

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Return token ids per text, without the prefix."""

    def encode_literal(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """Return token ids without the prefix. Text that overlaps a (start, end) pair of `literal` is not a special
        token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of the vocabulary, special tokens included."""


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable; usable from several threads at once."""

    def __init__(self, model: TokenizerModel, *, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> None:
        self.model = model
        """Reads the tokenizer's file."""
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        """Ids that end an answer; may be empty."""
        self.vocab_size = model.size
        """One above the highest token id. The model's output embedding may have more rows."""
        self.special_token_ids = model.special_ids
        self.table = model.table
        self.spellings = Spellings(model.spellings)
        """Finds the spellings of special tokens in a text."""

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """Read tokenizer.json if there is one, else another tokenizer file, and the JSON files beside it.

        Raises ModelNotFound if there is no such folder, and InvalidCheckpoint if the tokenizer is missing or damaged.
        """
        path = Path(path)
        if not path.is_dir():
            raise ModelNotFound(f"There is no folder {str(path)!r} to read a tokenizer from. Give a checkpoint folder.")
        settings = TokenSettings.read(path)
        model = _open_model(path, settings)
        bos = model.prefix[0] if len(model.prefix) == 1 else settings.bos_token_id(model.token_id)
        return Tokenizer(model, bos_token_id=bos, eos_token_ids=settings.eos_token_ids(model.token_id))

    @property
    def eos_token_id(self) -> int | None:
        """The first id that ends an answer."""
        return next(iter(self.eos_token_ids), None)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_special_tokens: bool = True,
        *,
        parse_special: bool = True,
        literal_spans: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Return the token ids of `text`. See `encode_batch`; without `add_special_tokens`, nothing is added either.

        `literal_spans` are (start, end) pairs in `text`, in ascending order. No special token overlaps them even if
        `parse_special` is set (`asyncllm.text.literals`). The text around them is encoded as usual.
        """
        add_bos = add_bos and add_special_tokens
        if not literal_spans or not parse_special:
            return self.encode_batch([text], add_bos=add_bos, parse_special=parse_special)[0]
        _check_text(text)
        ids = self.model.encode_literal(text, literal_spans)
        return self._with_prefix(ids) if add_bos else ids

    def with_suffix(self, ids: list[int]) -> list[int]:
        """Return `ids` with the ids that the checkpoint's tokenizer appends to a text, unless they already end with
        these."""
        suffix = list(self.model.suffix)
        return ids if not suffix or ids[-len(suffix) :] == suffix else ids + suffix

    def encode_batch(
        self, texts: Sequence[str], *, add_bos: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text. For tokenizer.json the GIL is released meanwhile, so call it in a thread.

        `add_bos` adds the ids that the checkpoint's tokenizer prepends, unless the text already begins with them.
        `parse_special=False` reads the spellings of special tokens as plain text. Raises InvalidMessage for a text that
        is not valid Unicode, or has a character for which there is no token.
        """
        for text in texts:
            _check_text(text)
        encoded = self.model.encode_batch(texts, parse_special=parse_special)
        return [self._with_prefix(ids) for ids in encoded] if add_bos and self.model.prefix else encoded

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = list(self.model.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Sequence[int], offset: int | None = None, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids` from the position `offset` on; ids outside the vocabulary have none. Incomplete
        characters become U+FFFD.

        Raises InvalidParameter unless `ids` are non-negative ints.
        """
        if not isinstance(ids, Sequence):
            raise InvalidParameter(
                f"ids must be a list of token ids, not {type(ids).__name__}. Pass ids.tolist() of a tensor.", "ids"
            )
        ids = ids[offset:] if offset else ids
        for id_ in ids:
            if not isinstance(id_, int) or id_ < 0:
                raise InvalidParameter(f"{id_!r} is not a token id. Token ids are non-negative ints.", "ids")
        if self.table is not None:
            return self.table.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.model.decode(self.visible(ids, skip_special_tokens=skip_special_tokens))

    def visible(self, ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Return the `ids` that have a text."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        return [id_ for id_ in ids if id_ not in skipped and self.model.token(id_) is not None]

    def token_text(self, id_: int) -> str:
        """Return the text of one token on its own, special tokens included; U+FFFD for a part of a character."""
        return self.token_bytes(id_).decode("utf-8", "replace")

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes of one token on its own; empty outside the vocabulary."""
        if self.table is not None:
            return (self.table.pieces[id_] or b"") if 0 <= id_ < len(self.table.pieces) else b""
        return self.model.decode(self.visible([id_], skip_special_tokens=False)).encode()

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this spelling in the vocabulary, such as "<|im_end|>", or None."""
        return self.model.token_id(token) if _surrogate(token) is None else None


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidMessage(f"A text to encode is of type {type(text).__name__}, not str. Give a str.")
    place = _surrogate(text)
    if place is not None:
        raise InvalidMessage(
            f"The text holds a lone surrogate (U+{ord(text[place]):04X}) at position {place}, which is not valid "
            f"Unicode. Decode the input with the right encoding, or replace the character."
        )


def _surrogate(text: str) -> int | None:
    """Return the position of the first lone surrogate, which is not valid Unicode, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _open_model(path: Path, settings: TokenSettings) -> TokenizerModel:
    # The libraries are imported here, so that only the one that is needed is loaded.
    if (path / "tokenizer.json").exists():
        from asyncllm.text.tokenizers.tokenizer_json import TokenizerJson

        return TokenizerJson.open(path / "tokenizer.json", settings)
    ranked = find_tiktoken_file(path)
    if ranked is not None:
        from asyncllm.text.tokenizers.tiktoken_pipeline import tiktoken_pipeline
        from asyncllm.text.tokenizers.tokenizer_json import TokenizerJson

        return TokenizerJson(tiktoken_pipeline(ranked, settings), ranked, settings)
    tekken = path / "tekken.json"
    if tekken.exists() and not (path / "tokenizer.model").exists():
        from asyncllm.text.tokenizers.tekken_file import tekken_pipeline
        from asyncllm.text.tokenizers.tokenizer_json import TokenizerJson

        return TokenizerJson(tekken_pipeline(tekken), tekken, settings)
    if (path / "tokenizer.model").exists():
        from asyncllm.text.tokenizers.sentencepiece_model import SentencePieceModel

        return SentencePieceModel(path / "tokenizer.model", settings)
    if (path / "vocab.json").exists():
        from asyncllm.text.tokenizers.merges_file import merges_pipeline
        from asyncllm.text.tokenizers.tokenizer_json import TokenizerJson

        return TokenizerJson(merges_pipeline(path, settings), path / "vocab.json", settings)
    raise InvalidCheckpoint(
        f"{path} has no tokenizer: neither tokenizer.json nor tokenizer.model, tekken.json, vocab.json with merges.txt "
        f"or a rank file is there. Copy the one that came with the model into the folder."
    )
