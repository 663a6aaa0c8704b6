"""Token ids to text that is safe to emit, while the ids are still coming."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from asyncllm.errors import InvalidParameter
from asyncllm.text.token_table import LeadingSpace
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher"]

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Ids: how far back a token's text may reach, and how long an incomplete character may be, without a byte table."""


class Detokenizer:
    """Decodes one answer piece by piece: the pieces concatenate to `Tokenizer.decode` of all ids.

    A character that is not complete yet is held back; `flush` gives what is left at the end.
    """

    __slots__ = ("_at_start", "_pending", "_settled", "_skip", "_table", "_texts", "_window")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        table = tokenizer.table
        self._skip = skip_special_tokens
        self._table = table
        self._window = _Window(tokenizer, skip_special_tokens=skip_special_tokens)
        self._texts = [] if table is None else table.texts(skip_special_tokens=skip_special_tokens)
        self._pending = b""
        self._at_start = table is not None and table.leading is not LeadingSpace.KEEP
        # True while a token's text can be taken from `_texts`: not at the start, no incomplete character pending.
        self._settled = table is not None and not self._at_start

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; ids outside the vocabulary have none."""
        if self._settled and len(ids) == 1 and 0 <= ids[0] < len(self._texts):
            text = self._texts[ids[0]]
            if text is not None:
                return text
        if self._table is None:
            return self._window.push(ids)
        fresh, self._at_start = self._table.join(ids, skip_special_tokens=self._skip, at_start=self._at_start)
        data = self._pending + fresh
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self._settled = not self._pending and not self._at_start
        return text

    def flush(self) -> str:
        """The rest: U+FFFD for a character that stays incomplete, else nothing."""
        text = self._window.flush() + self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _Window:
    """Decodes the last few ids again for every push, for decoders that look at a token's neighbours (WordPiece)."""

    __slots__ = ("_context", "_fresh", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """Ids whose text is out."""
        self._fresh: list[int] = []
        """Ids whose text ends in an incomplete character."""

    def push(self, ids: Sequence[int]) -> str:
        out = []
        for id_ in self._tokenizer.visible(ids, skip_special_tokens=self._skip):
            self._fresh.append(id_)
            text = self._fresh_text()
            if not text.endswith(REPLACEMENT) or len(self._fresh) >= WINDOW:
                out.append(text)
                self._settle()
        return "".join(out)

    def flush(self) -> str:
        text = self._fresh_text()
        self._settle()
        return text

    def _fresh_text(self) -> str:
        if not self._fresh:
            return ""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._fresh)
        return whole[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._fresh)[-WINDOW:]
        self._fresh = []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatcher:
    """Cuts a stream of text at the first stop word.

    The word that is complete first wins; of two that are complete at the same character, the longer one. So the result
    does not depend on how the text is split. Held back is only the longest end of the text that may begin a stop word.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_longest", "_matched", "_prefixes", "_words")

    def __init__(self, words: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop word is part of the text. Raises InvalidParameter for an empty word."""
        if not all(words):
            raise InvalidParameter("A stop word is empty, and every text contains that. Remove it.", "stop_words")
        self._words = tuple(dict.fromkeys(words))
        self._include = include
        self._prefixes = frozenset(word[:end] for word in self._words for end in range(1, len(word)))
        self._first_characters = frozenset(word[0] for word in self._words)
        self._longest = max(map(len, self._words), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to emit now, and the stop word, if it has come. Nothing is emitted after that."""
        if not self._words:
            return text, None
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        found = [(start + len(word), start, word) for word in self._words if (start := text.find(word)) >= 0]
        if found:
            end, start, self._matched = min(found)
            self._held = ""
            return text[: end if self._include else start], self._matched
        keep = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters and text[start:] in self._prefixes:
                keep = start
                break
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text that was held back, now that nothing can complete a stop word."""
        text, self._held = self._held, ""
        return text
