"""TokenizerJson runs a pipeline of the `tokenizers` library, from a tokenizer.json or built from another file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken as HubAddedToken
from tokenizers import Tokenizer as HubTokenizer

from asyncllm.errors import InvalidCheckpoint, InvalidMessage
from asyncllm.text.checkpoint_files import MAX_TOKEN_ID, AddedToken, TokenSettings
from asyncllm.text.tokenizers.added_tokens import SPACE, FoundToken, TokenFinder, any_of, led_by_space
from asyncllm.text.tokenizers.literal_pipeline import LiteralPipeline
from asyncllm.text.tokenizers.token_table import LeadingSpace, TokenTable, byte_level_piece, byte_of_fallback_token

__all__ = ["TokenizerJson"]

CHUNK = 512
"""Ids per call of the library when the table is checked against it."""


class TokenizerJson:
    """The `tokenizers` pipeline of one checkpoint."""

    @classmethod
    def open(cls, path: Path, settings: TokenSettings) -> TokenizerJson:
        """Read a tokenizer.json. Raises InvalidCheckpoint for a file that is unreadable or damaged."""
        try:
            return cls(HubTokenizer.from_file(str(path)), path, settings)
        except Exception as error:
            # The library raises bare Exception for every kind of damage, some of which it only finds while encoding.
            if type(error) is not Exception:
                raise
            raise InvalidCheckpoint(
                f"{path} is not a tokenizer that `tokenizers` can read: {error}. "
                f"The file is truncated, damaged, or of a newer format; download it again or upgrade `tokenizers`."
            ) from None

    def __init__(self, tokenizer: HubTokenizer, path: Path, settings: TokenSettings) -> None:
        """`tokenizer`: the pipeline of the file `path`. Raises InvalidCheckpoint if the settings contradict it."""
        self._tokenizer = tokenizer
        # A saved training-time limit would silently shorten or pad every prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._add_named(settings)
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = {token.content: id_ for id_, token in self._added.items()}
        self.size = 1 + max((*self._vocabulary.values(), *self._added), default=-1)
        if self.size > MAX_TOKEN_ID:
            raise InvalidCheckpoint(f"{path} has the token id {self.size - 1}. The file is damaged; download it again.")
        texts = settings.special_texts()
        self.special_ids = frozenset(
            id_ for id_, token in self._added.items() if token.special or token.content in texts
        ) | frozenset(self._vocabulary[text] for text in texts if text in self._vocabulary)
        self._find_special()
        self.prefix, self.suffix = self._frame(settings)
        self.table = self._table()

    def token_id(self, token: str) -> int | None:
        return self._added_ids.get(token, self._tokenizer.token_to_id(token))

    def token(self, id_: int) -> str | None:
        # The library returns the normalized form of an added token.
        return self._added[id_].content if id_ in self._added else self._tokenizer.id_to_token(id_)

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]:
        """Return token ids per text, without the prefix. `encode_batch_fast` releases the GIL, `encode` does not."""
        with _named_errors():
            if not parse_special:
                return [
                    self._literal.encode(text, (), [token[:2] for token in self._special(text, ())]) for text in texts
                ]
            if self._missed is not None and any(self._missed.search(text) for text in texts):
                return [self.encode_literal(text, ()) for text in texts]
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode_literal(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """Return token ids without the prefix. Text that overlaps a (start, end) pair of `literal` is not a special
        token."""
        with _named_errors():
            tokens = self._special(text, literal)
            if any(token.id in self._normalized_ids for token in tokens):
                tokens = self._confirmed(text, tokens, literal)
            return self._literal.encode(text, tokens, literal)

    def _special(self, text: str, literal: Sequence[tuple[int, int]]) -> list[FoundToken]:
        return [token for token in self._finder.find(text, literal) if token.id in self.special_ids]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _add_named(self, settings: TokenSettings) -> None:
        """Add the special tokens that only the settings next to the file name, as `transformers` does."""
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        self._tokenizer.add_special_tokens(
            [
                HubAddedToken(token.content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word)
                for token in (*settings.unnumbered, *settings.added.values())
                if token.special and token.content in self._vocabulary and token.content not in added
            ]
        )

    def _find_special(self) -> None:
        """Prepare for texts in which the spelling of a special token is plain text."""
        special = {id_: token for id_, token in self._added.items() if id_ in self.special_ids}
        named = {text: id_ for id_ in self.special_ids if (text := self.token(id_))}
        spaced = any(SPACE in token for token in self._tokenizer.encode("x x", add_special_tokens=False).tokens)
        led = led_by_space({token.content: id_ for id_, token in special.items()}) if spaced else {}
        self.spellings = (*named, *led)
        self._normalized_ids = frozenset(id_ for id_, token in special.items() if token.normalized)
        """Ids of special tokens that are found in the normalized text."""
        lost = [text for text, id_ in led.items() if id_ not in self._tokenizer.encode(f"x {text} x").ids]
        self._missed = any_of(lost) if lost else None
        """Spellings that name special tokens only after a space, and that the pipeline reads as plain text."""
        found = {
            id_: AddedToken(token.content, rstrip=token.rstrip, single_word=token.single_word)
            for id_, token in self._added.items()
        }
        self._finder = TokenFinder(found, self.special_ids, led)
        self._literal = LiteralPipeline(self._tokenizer, special, {**named, **led}, frozenset(led.values()))

    def _confirmed(self, text: str, tokens: list[FoundToken], literal: Sequence[tuple[int, int]]) -> list[FoundToken]:
        """Return those of `tokens` whose token the pipeline finds too, if it is a normalized one: it may begin with the
        space that the pipeline prepends to a text."""
        parts, last = [], 0
        for start, end in literal:
            # A text of the same length in which no token is found.
            parts += [text[last:start], re.sub(r"\S", "x", text[start:end])]
            last = end
        text = "".join([*parts, text[last:]])
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        covered = {
            position
            for id_, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if id_ in self._normalized_ids
            for position in range(*offsets)
        }
        return [token for token in tokens if token.id not in self._normalized_ids or token.start in covered]

    def _frame(self, settings: TokenSettings) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and after a text. tokenizer_config.json decides about the
        ids that begin and end a sequence."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = range(len(whole) - len(bare) + 1)
        start = next((start for start in starts if bare and whole[start : start + len(bare)] == bare), len(whole))
        prefix = tuple(whole[:start]) if start < len(whole) else ()
        suffix = tuple(whole[start + len(bare) :])
        bos, eos = settings.bos_token_id(self.token_id), settings.named_id("eos_token", self.token_id)
        return _with(bos, prefix, settings.add_bos), _with(eos, suffix, settings.add_eos)

    def _table(self) -> TokenTable | None:
        """Return the byte table; None if the decoder is of another kind or disagrees with it."""
        steps = _decoder_steps(self._tokenizer)
        rule = _decoding_rule(steps)
        if rule is None:
            return None
        to_piece, leading = rule
        pieces: list[bytes | None] = [None] * self.size
        for token, id_ in self._vocabulary.items():
            pieces[id_] = to_piece(token)
        for id_, added in self._added.items():
            pieces[id_] = to_piece(self._tokenizer.id_to_token(id_) or added.content)
        table = TokenTable(pieces, self.special_ids, leading)
        return table if self._agrees(table) else None

    def _agrees(self, table: TokenTable) -> bool:
        """Return whether table and library decode the whole vocabulary alike."""
        # A single byte of 0x80 and above is ill-formed by itself, and the two differ there on purpose.
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


def _with(token: int | None, ids: tuple[int, ...], add: bool | None) -> tuple[int, ...]:
    """Return `ids`: with `token` if `add` is true and `ids` is empty, without it if `add` is false."""
    if add is True and not ids and token is not None:
        return (token,)
    return tuple(id_ for id_ in ids if id_ != token) if add is False else ids


def _decoder_steps(tokenizer: HubTokenizer) -> list[dict[str, Any]]:
    """Return the decoder as a flat list of its JSON descriptions."""
    if tokenizer.decoder is None:
        return []
    description = json.loads(tokenizer.decoder.__getstate__())
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


def _decoding_rule(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], LeadingSpace] | None:
    """Return how these decoder steps turn one token into bytes; None if tokens cannot be decoded one by one."""
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


@contextmanager
def _named_errors() -> Iterator[None]:
    """Raise InvalidMessage for the library's errors about a text, such as a character without a token where there is no
    unknown token."""
    try:
        yield
    except Exception as error:
        # The library's own errors have no other class.
        if type(error) is not Exception:
            raise
        raise InvalidMessage(f"The model's tokenizer cannot encode the text: {error}. Leave that out.") from None
