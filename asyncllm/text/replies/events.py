"""The parts of a reply, as events in order, and the output that collects them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

__all__ = ["CallEnd", "CallPiece", "CallStart", "Event", "Output", "Text", "Thought"]


class Text(msgspec.Struct, frozen=True):
    """A piece of the answer's content."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """A piece of the reasoning before the content."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """The start of a tool call. Calls are numbered from 0 and do not overlap."""

    index: int
    name: str
    id: str | None = None
    """The call's id, if the model wrote one."""


class CallPiece(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    arguments: str


class CallEnd(msgspec.Struct, frozen=True):
    """The end of a call. `complete`: its arguments are not truncated."""

    index: int
    complete: bool


Event = Text | Thought | CallStart | CallPiece | CallEnd


class Output:
    """Collects events. Adjacent pieces of one kind are merged.

    White space next to markup is not content. Directly after markup it is dropped; elsewhere it is held back until it
    is known whether markup follows.
    """

    def __init__(self, spelled: Callable[[str], str], on_call: Callable[[], None], max_calls: int) -> None:
        """`spelled` converts codes of special tokens back to text. `on_call` is called when a call begins. Everything
        after `max_calls` calls is ignored; 0: no limit."""
        self._spelled = spelled
        self._on_call = on_call
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._ids: set[str] = set()
        """Ids that the model has given to calls."""
        self._after_markup = False
        self._blanks: list[str] = []
        """White space that markup may follow."""
        self._thinking = False
        self.inside = False
        """Whether the next text is reasoning."""
        self.over = False
        """Whether all allowed calls have ended."""
        self.num_calls = 0
        """Calls that have begun."""
        self.num_complete = 0
        """Calls whose arguments are complete."""

    def take(self) -> list[Event]:
        """Return the events since the previous `take`."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add to the content."""
        self._add(text, thinking=False)

    def thought(self, text: str) -> None:
        """Add to the reasoning."""
        self._add(text, thinking=True)

    def markup(self) -> None:
        """Record markup at this position."""
        self._blanks = []
        self._after_markup = True

    def end(self) -> None:
        """Record the end of the reply. White space at the end belongs to the text."""
        self._flush_blanks()

    def start(self, name: str, own_id: str | None = None) -> None:
        """Begin a call. `own_id` is the id that the model wrote, which is dropped if an earlier call has it."""
        self.markup()
        self.inside = False
        self._on_call()
        if self.over:
            return
        if own_id in self._ids:
            own_id = None
        elif own_id is not None:
            self._ids.add(own_id)
        self._events.append(CallStart(self.num_calls, name, own_id))
        self.num_calls += 1

    def arguments(self, piece: str) -> None:
        """Add to the arguments of the current call."""
        if not piece or self.over:
            return
        index, piece = self.num_calls - 1, self._spelled(piece)
        last = self._events[-1] if self._events else None
        if type(last) is CallPiece:
            self._events[-1] = CallPiece(index, last.arguments + piece)
        else:
            self._events.append(CallPiece(index, piece))

    def finish(self, *, complete: bool) -> None:
        """End the current call."""
        if self.over:
            return
        self.num_complete += complete
        self._events.append(CallEnd(self.num_calls - 1, complete))
        self.over = self.num_calls == self._max_calls

    def _add(self, text: str, *, thinking: bool) -> None:
        if self.over:
            return
        if thinking != self._thinking:
            self._flush_blanks()
            self._thinking = thinking
        if self._after_markup:
            text = text.lstrip()
            if not text:
                return
            self._after_markup = False
        core = text.rstrip()
        if core:
            self._flush_blanks()
            self._emit(core)
        if len(core) < len(text):
            self._blanks.append(text[len(core) :])

    def _flush_blanks(self) -> None:
        if self._blanks:
            blanks, self._blanks = "".join(self._blanks), []
            self._emit(blanks)

    def _emit(self, text: str) -> None:
        text = self._spelled(text)
        kind = Thought if self._thinking else Text
        last = self._events[-1] if self._events else None
        if last is not None and type(last) is kind:
            text = last.text + text
            self._events[-1] = kind(text)
        else:
            self._events.append(kind(text))
