"""Finds added tokens in a text, and spellings with which a text could name a special token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncllm.text.checkpoint_files import AddedToken

__all__ = ["SPACE", "FoundToken", "Spellings", "TokenFinder", "any_of", "led_by_space"]

SPACE = "\u2581"
"""sentencepiece's character for a space."""


MAX_NESTING = 200
"""Maximum nesting of groups in an expression; compilation time grows with its square."""


_WHITE_SPACE = re.compile(r"\s*")


class FoundToken(NamedTuple):
    """The token `id` at text[start:end]."""

    start: int
    end: int
    id: int


class Spellings:
    """Texts that name special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = [text for text in dict.fromkeys(texts) if text]
        self.pattern = any_of(texts)
        self._trie = _trie(texts)
        self._longest = max(map(len, texts), default=0)

    def open_end(self, text: str, start: int) -> int:
        """Return the start of the longest end of text[start:] that more text could complete to a spelling, or
        len(text)."""
        size = len(text)
        for first in range(max(start, size - self._longest + 1), size):
            node: Any = self._trie
            for position in range(first, size):
                node = node.get(text[position])
                if node is None:
                    break
            else:
                return first
        return size


class TokenFinder:
    """Finds added tokens: the longest one at the leftmost position, like the libraries."""

    def __init__(self, tokens: Mapping[int, AddedToken], special: frozenset[int], led: Mapping[str, int]) -> None:
        """`led`: spelling -> id of a token that is also found after a space, which becomes part of it, and at the start
        of a text."""
        self._ids = {token.content: id_ for id_, token in tokens.items()}
        self._special = special
        self._single = frozenset(token.content for token in tokens.values() if token.single_word)
        self._stripping = frozenset(id_ for id_, token in tokens.items() if token.rstrip)
        self._led = led
        self._pattern = any_of([*self._ids, *led])

    def find(self, text: str, literal: Sequence[tuple[int, int]] = ()) -> Iterator[FoundToken]:
        """Yield the tokens in `text`, in order, including trailing white space that belongs to them. No special token
        overlaps any of the (start, end) pairs of `literal`, which are in ascending order."""
        start = last = number = 0
        while (match := self._pattern.search(text, start)) is not None:
            start = match.start()
            while number < len(literal) and literal[number][1] <= start:
                number += 1
            bound = literal[number][0] if number < len(literal) else len(text)
            for end in range(match.end(), start, -1):
                found = self._token_at(text, start, end, last)
                if found is not None and (found.id not in self._special or end <= bound):
                    if found.id in self._stripping:
                        found = found._replace(end=_WHITE_SPACE.match(text, found.end).end())  # type: ignore[union-attr]
                    yield found
                    start = last = found.end
                    break
            else:
                start += 1

    def _token_at(self, text: str, start: int, end: int, last: int) -> FoundToken | None:
        """Return text[start:end] as a token. `last`: end of the previous token."""
        spelling = text[start:end]
        if spelling in self._ids:
            if spelling in self._single and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                return None
            return FoundToken(start, end, self._ids[spelling])
        if spelling in self._led:
            if start > last and text[start - 1] == " ":
                return FoundToken(start - 1, end, self._led[spelling])
            if start == last:
                return FoundToken(start, end, self._led[spelling])
        return None


def led_by_space(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the texts that name one of `tokens` after a space: "<PRE>" for "▁<PRE>", in Code Llama."""
    led = {content[1:]: id_ for content, id_ in tokens.items() if content.startswith(SPACE)}
    return {text: id_ for text, id_ in led.items() if text.strip(SPACE) and text not in tokens}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that finds the longest of `texts` at the leftmost position, and nothing if there are none.

    Common prefixes are compared once, so that thousands of tokens cost as much as one.
    """
    texts = list(texts)
    try:
        return re.compile(_expression(_trie(texts)) or "(?!)")
    except RecursionError:
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _trie(texts: Iterable[str]) -> dict[str, Any]:
    """Return character -> what may follow; "" where a text ends."""
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _expression(node: dict[str, Any], depth: int = 0) -> str:
    """Return the expression for what follows in a trie. Raises RecursionError when it is nested too deeply."""
    if depth > MAX_NESTING:
        raise RecursionError("spellings that each begin with the one before")
    branches = []
    for character, following in node.items():
        if character:
            chain = [character]
            while len(following) == 1 and "" not in following:
                ((character, following),) = following.items()
                chain.append(character)
            branches.append(re.escape("".join(chain)) + _expression(following, depth + 1))
    if not branches:
        return ""
    joined = "|".join(branches)
    if "" in node:
        return f"(?:{joined})?"
    return f"(?:{joined})" if len(branches) > 1 else joined


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
