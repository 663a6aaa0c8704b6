"""Reader: a reply's text, its output and the tools that may be called; ToolFormat: how calls are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncllm.text.replies.call_rules import CallGrammar, CallRules
from asyncllm.text.replies.events import Output
from asyncllm.text.replies.source import Codes, Markers, Reading, Source

__all__ = ["Reader", "ToolFormat"]


class Reader:
    """One reply's source and output, with the tools' schemas."""

    def __init__(self, codes: Codes, tools: Mapping[str, Any], most_calls: int = 0) -> None:
        self.codes = codes
        self.source = Source(codes)
        self.output = Output(codes.spelled, self._begun, most_calls)
        self.tools = tools
        """The JSON schema of the parameters of each tool, by the tool's name."""
        self._markers: dict[tuple[str, ...], Markers] = {}

    def _begun(self) -> None:
        # From here on no part of the call can become text again.
        self.source.kept()

    def markers(self, *markers: str) -> Markers:
        """Return the markers, ready to be looked for."""
        found = self._markers.get(markers)
        if found is None:
            found = self._markers[markers] = Markers(markers, self.codes)
        return found

    def attempt(self, reading: Reading, before: str = "", sink: Callable[[str], None] | None = None) -> Reading:
        """Read a possible call, and return whether it was one. If not, the text goes to `sink` (the content unless
        given), behind `before`, which was read already."""
        outermost = self.source.keep(before)
        found = yield from reading
        if outermost:
            rest = self.source.kept()
            if rest:
                (sink or self.output.text)(rest)
        return found

    def calls(self, read: Callable[[Reader], Reading], closer: str) -> Reading:
        """Read a call, all that follow it, and `closer`. Return whether there was a call."""
        found = yield from read(self)
        if found:
            while (yield from self.attempt(read(self))):
                pass
            yield from self.source.space()
            yield from self.source.literal(closer)
        return found


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls."""

    name: str
    openers: tuple[str, ...]
    """Markers that begin a call or a list of them."""
    read: Callable[[Reader, str], Reading]
    """Reads the text behind an opener, and returns whether it was a call."""
    at_start: Callable[[Reader], Reading] | None = None
    """Reads a call without a marker at the beginning of the content."""
    inside: tuple[str, ...] = ()
    """Further markers, which may be special tokens."""
    grammars: tuple[CallGrammar, ...] = ()
    """Grammars of calls; the first one whose marker the tokenizer has counts."""
    whole: Callable[[CallRules, str | None], str] | None = None
    """For a format whose replies are several messages: given the rule of the content, or None if a call is required,
    returns the rules of a whole reply."""
    answer: Callable[[Reader], Reading] | None = None
    """Reads a whole reply, for a format whose replies are more than text and calls."""
