"""What a format reads with: the text, the output, and the tools that may be called."""

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
        # From here on nothing goes back to being text.
        self.source.kept()

    def markers(self, *markers: str) -> Markers:
        """Return the markers, ready to be looked for."""
        found = self._markers.get(markers)
        if found is None:
            found = self._markers[markers] = Markers(markers, self.codes)
        return found

    def attempt(self, reading: Reading, before: str = "", sink: Callable[[str], None] | None = None) -> Reading:
        """Read what may be a call, and return whether it was. If not, what was read goes to `sink`, which is the
        content's unless given, and so does `before`, which was read already."""
        outermost = self.source.keep(before)
        found = yield from reading
        if outermost:
            rest = self.source.kept()
            if rest:
                (sink or self.output.text)(rest)
        return found


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls."""

    name: str
    openers: tuple[str, ...]
    """Markers that begin a call or a list of them."""
    read: Callable[[Reader, str], Reading]
    """Reads what follows an opener, and returns whether it was a call."""
    at_start: Callable[[Reader], Reading] | None = None
    """Reads a call that needs no marker where the content begins."""
    inside: tuple[str, ...] = ()
    """Further markers, which may be special tokens."""
    grammars: tuple[CallGrammar, ...] = ()
    """What calls can be held to; the first whose marker the tokenizer has counts."""
    whole: Callable[[CallRules, str | None], str] | None = None
    """Returns the rules of a whole reply, of a format whose replies are several messages; given the rule of its
    content, which is None where it has to call."""
    answer: Callable[[Reader], Reading] | None = None
    """Reads a whole reply, of a format whose replies are more than text with calls in between."""
