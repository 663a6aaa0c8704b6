"""Detokenizer turns token ids into text as they arrive; StopMatcher cuts the text at stop words."""

from __future__ import annotations

from array import array
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from asyncllm.errors import InvalidParameter
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tokenizers.token_table import LeadingSpace

__all__ = ["Detokenizer", "StopMatcher", "StopWords"]

REPLACEMENT = "\ufffd"
WINDOW = 8
"""Without a byte table: how many ids back a token's text may depend on, and the longest incomplete character in ids."""


class Detokenizer:
    """Decodes one answer piece by piece: the pieces concatenate to `Tokenizer.decode` of all ids.

    An incomplete character is held back; `flush` returns the rest at the end.
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
        # True while a token's text can be looked up in `_texts`: not at the start, and no incomplete character is
        # pending.
        self._settled = table is not None and not self._at_start

    def push(self, ids: Sequence[int]) -> str:
        """Return the text completed by `ids`. Ids outside the vocabulary have none."""
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
        """Return the rest: U+FFFD for a character that stays incomplete, otherwise nothing."""
        text = self._window.flush() + self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _Window:
    """Decodes the last few ids again at every push, for decoders that look at neighbouring tokens (WordPiece)."""

    __slots__ = ("_context", "_fresh", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        """Ids whose text has been returned."""
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


class StopWords:
    """The stop words of one request, shared by the matchers of all its choices.

    They take four bytes for each character of a word that an answer has matched so far. Used by one thread at a time.
    """

    __slots__ = ("beginnings", "words")

    def __init__(self, words: Iterable[str]) -> None:
        """Raise InvalidParameter for an empty word."""
        texts = tuple(dict.fromkeys(words))
        if not all(texts):
            raise InvalidParameter("A stop word is empty, and every text contains that. Remove it.", "stop_words")
        self.words = tuple(_StopWord(text) for text in texts)
        self.beginnings = frozenset(text[0] for text in texts)
        """First characters of the words."""

    def __len__(self) -> int:
        return len(self.words)


class _StopWord:
    """A word with its Knuth-Morris-Pratt table (1977), whose entries are computed on demand.

    `fallback[size]`: how much of the word still matches when its first `size` characters match and the next one does
    not. No entry leads to a position that expects the same character, so that a chain of entries has logarithmic
    length.
    """

    __slots__ = ("_border", "fallback", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.fallback = array("i", [-1])
        self._border = 0

    def match(self, text: str, matched: int, end: int) -> tuple[int, int]:
        """Continue from `matched` characters of the word through text[:end]. Return how many characters match now, and
        the position in the text, which is before `end` only for a complete word."""
        word, size, fallback = self.text, len(self.text), self.fallback
        place = 0
        while place < end:
            if matched == 0:
                place = text.find(word[0], place, end)
                if place < 0:
                    return 0, end
            character = text[place]
            while matched >= 0 and word[matched] != character:
                if matched >= len(fallback):
                    self._extend(matched)
                matched = fallback[matched]
            matched += 1
            place += 1
            if matched == size:
                break
        return matched, place

    def _extend(self, size: int) -> None:
        """Extend the table to the entry of `size`."""
        word, fallback, border = self.text, self.fallback, self._border
        for place in range(len(fallback), size + 1):
            same = word[place] == word[border]
            fallback.append(fallback[border] if same else border)
            while border >= 0 and word[place] != word[border]:
                border = fallback[border]
            border += 1
        self._border = border


class StopMatcher:
    """Cuts a stream of text at the first stop word.

    The word that is completed first wins; of two completed at the same character, the longer one. The result thus does
    not depend on how the text is split. Only the longest end of the text that may begin a stop word is held back.
    """

    __slots__ = ("_include", "_matched", "_open", "_stops")

    def __init__(self, stops: StopWords, *, include: bool = False) -> None:
        """`include`: keep the stop word in the text."""
        self._stops = stops
        self._include = include
        self._open: dict[int, int] = {}
        """Index of a word that the end of the text may begin -> number of its characters matched so far. The number of
        characters held back is the largest of these, so the text itself need not be kept."""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to emit now, and the stop word, if one has been found. Nothing is emitted after
        that."""
        if self._matched is not None:
            return "", self._matched
        if not self._open and self._stops.beginnings.isdisjoint(text):
            return text, None
        held, before = self._held(), self._open
        self._open = {}
        start, end = 0, len(text)
        for index, word in enumerate(self._stops.words):
            matched, place = word.match(text, before.get(index, 0), end)
            if matched == len(word.text):
                begin = len(held) + place - matched
                if self._matched is None or (place, begin) < (end, start):
                    start, end, self._matched = begin, place, word.text
            elif matched:
                self._open[index] = matched
        text = held + text
        if self._matched is not None:
            self._open = {}
            return text[: len(held) + end if self._include else start], self._matched
        return text[: len(text) - max(self._open.values(), default=0)], None

    def flush(self) -> str:
        """Return the text that was held back; no stop word can be completed any more."""
        text, self._open = self._held(), {}
        return text

    def _held(self) -> str:
        if not self._open:
            return ""
        index = max(self._open, key=self._open.__getitem__)
        return self._stops.words[index].text[: self._open[index]]
