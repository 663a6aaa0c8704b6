"""Source: text that arrives in pieces, read by generators that yield when they need more.

A format is thus parsed as if all of its text were available, and the result does not depend on where the pieces are
split. A special token of the format is one code in the text, a lone surrogate, which decoded text never contains.
Therefore a reply that spells a marker as text does not contain the marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any

__all__ = ["Codes", "Markers", "Reading", "Source"]

Reading = Generator[None, None, Any]
"""Yields when it needs more text."""

FIRST_CODE = 0xDC00
OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w.,:+-]')
"""In JSON outside strings: brackets and quotes, and characters that are invalid there."""
INSIDE = re.compile('["\\\\\udc00-\udfff]')
"""In a string: its end, an escape, or a special token."""
CONTROL = re.compile(r"[\x00-\x1f]")
SCALAR_END = re.compile("[\\s,}\\]]|[\udc00-\udfff]")
CLOSING = {"{": "}", "[": "]"}


class Codes:
    """The codes of the special tokens in a format's markers."""

    def __init__(self, spellings: Iterable[str] = ()) -> None:
        self._codes = {spelling: chr(FIRST_CODE + index) for index, spelling in enumerate(dict.fromkeys(spellings))}
        self._texts = {ord(code): spelling for spelling, code in self._codes.items()}

    def __iter__(self) -> Generator[tuple[str, str], None, None]:
        """Yield each special token's spelling and its code."""
        yield from self._codes.items()

    def coded(self, marker: str) -> str:
        """Return a marker as it appears in the source."""
        for spelling, code in self._codes.items():
            marker = marker.replace(spelling, code)
        return marker

    def spelled(self, text: str) -> str:
        """Return a text of the source with special tokens spelled out."""
        return text if text.isascii() or not self._texts else text.translate(self._texts)


class Markers:
    """Texts to search for. None is a prefix of another."""

    def __init__(self, markers: Iterable[str], codes: Codes) -> None:
        self.spelled = {codes.coded(marker): marker for marker in markers}
        self.pattern = re.compile("|".join(map(re.escape, self.spelled)) or "(?!)")
        self._beginnings = {marker[:size] for marker in self.spelled for size in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def open_end(self, text: str, start: int) -> int:
        """Return the start of the longest suffix of the text that may begin a marker."""
        for at in range(max(start, len(text) - self._longest), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)


class Source:
    """Text that has arrived and is not read yet."""

    __slots__ = ("_at", "_codes", "_ended", "_kept", "_literals", "_text")

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None
        """The text read since `keep`."""
        self._literals: dict[str, str] = {}

    def feed(self, text: str) -> None:
        """Add text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Record that no more text will arrive."""
        self._ended = True

    def keep(self, before: str = "") -> bool:
        """Keep the text read from here on, after `before`. Return False if text is being kept already."""
        if self._kept is not None:
            return False
        self._kept = [self._codes.coded(before)]
        return True

    def stop_keeping(self) -> str:
        """Return the kept text and stop keeping."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def peek(self) -> Reading:
        """Return the next character without reading it; empty at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def character(self) -> Reading:
        """Read the next character; empty at the end and before a special token."""
        first = yield from self.peek()
        return self._take(self._at + 1) if first and not "\udc00" <= first <= "\udfff" else ""

    def space(self) -> Reading:
        """Read white space."""
        while True:
            at = self._at
            while at < len(self._text) and self._text[at].isspace():
                at += 1
            self._take(at)
            if at < len(self._text) or self._ended:
                return
            yield

    def literal(self, marker: str) -> Reading:
        """Read `marker` if it comes next, and return whether it does."""
        wanted = self._literals.get(marker)
        if wanted is None:
            wanted = self._literals[marker] = self._codes.coded(marker)
        while True:
            if self._text.startswith(wanted, self._at):
                self._take(self._at + len(wanted))
                return True
            if self._ended or not wanted.startswith(self._text[self._at :]):
                return False
            yield

    def matching(self, pattern: re.Pattern[str]) -> Reading:
        """Read characters as long as `pattern` matches them."""
        parts = []
        while True:
            at = self._at
            while at < len(self._text) and pattern.match(self._text[at]):
                at += 1
            parts.append(self._take(at))
            if at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def until(self, markers: Markers, sink: Callable[[str], None]) -> Reading:
        """Pass the text up to the first marker to `sink` as it arrives. Read and return the marker, or None if there is
        none."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if not found and not self._ended:
                end = markers.open_end(self._text, self._at)
            if end > self._at:
                sink(self._take(end))
            if found:
                self._take(found.end())
                return markers.spelled[found[0]]
            if self._ended:
                return None
            yield

    def json_value(self, sink: Callable[[str], None]) -> Reading:
        """Pass a JSON value to `sink` as it arrives. Return whether it is complete.

        It is passed on unchanged but for control characters in strings, which models write there as they are, such as
        the line ends of code, and which JSON allows only as escapes.
        The value is not validated; brackets and strings determine its end. It ends early at a character that JSON does
        not allow there.
        """
        first = yield from self.peek()
        if first == '"':
            return (yield from self._string(sink))
        if first not in ("{", "["):
            return (yield from self._scalar(sink))
        open_brackets: list[str] = []
        while True:
            found = OUTSIDE.search(self._text, self._at)
            if not found:
                if self._at < len(self._text):
                    sink(self._take(len(self._text)))
                if self._ended:
                    return False
                yield
                continue
            kind = found[0]
            if kind == '"':
                if found.start() > self._at:
                    sink(self._take(found.start()))
                if not (yield from self._string(sink)):
                    return False
                continue
            if kind in CLOSING:
                open_brackets.append(CLOSING[kind])
            elif not open_brackets or open_brackets.pop() != kind:
                if found.start() > self._at:
                    sink(self._take(found.start()))
                return False
            sink(self._take(found.end()))
            if not open_brackets:
                return True

    def _string(self, sink: Callable[[str], None]) -> Reading:
        sink(self._take(self._at + 1))
        while True:
            found = INSIDE.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if found and found[0] == "\\":
                if end + 1 < len(self._text) and not "\udc00" <= self._text[end + 1] <= "\udfff":
                    sink(CONTROL.sub(_escape, self._take(end + 2)))
                    continue
                found = None if end + 1 == len(self._text) else found
            if end > self._at:
                sink(CONTROL.sub(_escape, self._take(end)))
            if found:
                if found[0] == '"':
                    sink(self._take(end + 1))
                return found[0] == '"'
            if self._ended:
                if self._at < len(self._text):
                    sink(CONTROL.sub(_escape, self._take(len(self._text))))
                return False
            yield

    def _scalar(self, sink: Callable[[str], None]) -> Reading:
        size = 0
        while True:
            found = SCALAR_END.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            size += end - self._at
            if end > self._at:
                sink(self._take(end))
            if found or self._ended:
                return size > 0
            yield

    def json_string(self) -> Reading:
        """Read a JSON string and return its text, or None if there is none."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        if not (yield from self._string(parts.append)):
            return None
        try:
            text = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        # Half of a pair of surrogates is not a character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
