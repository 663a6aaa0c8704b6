"""Reader: a reply's text, its output and the callable tools. ToolFormat: how calls are written."""

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

    def __init__(self, codes: Codes, tools: Mapping[str, Any], max_calls: int = 0) -> None:
        self.codes = codes
        self.source = Source(codes)
        self.output = Output(codes.spelled, self._begun, max_calls)
        self.tools = tools
        """Tool name -> JSON schema of its parameters."""
        self._markers: dict[tuple[str, ...], Markers] = {}

    def _begun(self) -> None:
        # From here on no part of the call can become text again.
        self.source.stop_keeping()

    def markers(self, *markers: str) -> Markers:
        """Return the markers, prepared for searching."""
        found = self._markers.get(markers)
        if found is None:
            found = self._markers[markers] = Markers(markers, self.codes)
        return found

    def attempt(self, reading: Reading, before: str = "", sink: Callable[[str], None] | None = None) -> Reading:
        """Try to read a call, and return whether it was one. If not, the text goes to `sink` (by default the content),
        after `before`, which has already been read."""
        outermost = self.source.keep(before)
        found = yield from reading
        if outermost:
            rest = self.source.stop_keeping()
            if rest:
                (sink or self.output.text)(rest)
        return found

    def call_of(self, name: str, own_id: str | None = None) -> Reading:
        """Read a JSON object as the arguments of a call of `name`, whose id the model may have written. Return whether
        there was one."""
        yield from self.source.space()
        if (yield from self.source.peek()) != "{":
            return False
        self.output.start(name, own_id)
        self.output.finish(complete=(yield from self.source.json_value(self.output.arguments)))
        return True

    def calls(self, read: Callable[[Reader], Reading], closer: str) -> Reading:
        """Read a call, all calls that follow it, and `closer`. Return whether there was a call."""
        found = yield from read(self)
        if found:
            while (yield from self.attempt(read(self))):
                pass
            yield from self.source.space()
            yield from self.source.literal(closer)
        return found


@dataclass(frozen=True)
class ToolFormat:
    """How one model family writes calls."""

    name: str
    openers: tuple[str, ...]
    """Markers that begin a call or a list of calls."""
    read: Callable[[Reader, str], Reading]
    """Reads the text after an opener, and returns whether it was a call."""
    at_start: Callable[[Reader], Reading] | None = None
    """Reads a call without a marker at the beginning of the content."""
    inside: tuple[str, ...] = ()
    """Further markers, which may be special tokens."""
    grammars: tuple[CallGrammar, ...] = ()
    """Grammars of calls. The first whose marker the tokenizer has is used."""
    whole: Callable[[CallRules, str | None], str] | None = None
    """For a format whose replies consist of several messages: takes the rule of the content (None: a call is required),
    returns the rules of a whole reply."""
    answer: Callable[[Reader], Reading] | None = None
    """Reads a whole reply, for a format whose replies are more than text and calls."""
