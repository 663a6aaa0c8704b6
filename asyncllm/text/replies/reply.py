"""Reply splits a streamed model reply into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncllm.text.replies.events import Event
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Codes, Reading
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Reply", "ReplyFormat", "Thinking"]


class Thinking(NamedTuple):
    """The marks around the reasoning."""

    open: str
    close: str
    around_content: tuple[str, ...] = ()
    """Marks around the content, which are left out."""


class ReplyFormat:
    """How one checkpoint's replies are written. Immutable, and shared by its replies."""

    def __init__(self, tools: ToolFormat | None, thinking: Thinking | None, tokenizer: Tokenizer | None = None) -> None:
        """`tools`, `thinking`: None if no format is known. With `tokenizer`, a marker that is a special token is
        recognized only as that token, not as its spelling."""
        self.tools = tools
        self.thinking = thinking
        markers = () if tools is None else (*tools.openers, *tools.inside)
        markers += () if thinking is None else (thinking.open, thinking.close, *thinking.around_content)
        found: list[str] = []
        if tokenizer is not None:
            for marker in markers:
                found += (match[0] for match in tokenizer.spellings.pattern.finditer(marker))
        self.codes = Codes(found)
        self.tokens: dict[int, str] = {}
        """Id of a marker's special token -> its code in the text given to `Reply.push`."""
        for spelling, code in self.codes:
            token = None if tokenizer is None else tokenizer.token_id(spelling)
            if token is not None:
                self.tokens[token] = code

    @property
    def splits(self) -> bool:
        """Whether replies without tools are more than text."""
        return self.thinking is not None or (self.tools is not None and self.tools.answer is not None)

    def begins_inside(self, prompt: str, continued: str | None = None) -> bool:
        """Return whether a reply to this rendered prompt begins inside the reasoning. `continued`: the beginning of the
        reply, with which the prompt ends."""
        if self.thinking is None:
            return False
        opening, closing = self.thinking.open.strip(), self.thinking.close.strip()
        if continued is None:
            return prompt.rstrip().endswith(opening)
        return continued.rfind(opening) > continued.rfind(closing) or (
            closing not in continued and prompt.removesuffix(continued).rstrip().endswith(opening)
        )


class Reply:
    """A reply that arrives in pieces. Its events do not depend on where the pieces are split, except for how texts are
    split.

    Text that fits no format is content: nothing is lost, and nothing is raised.
    """

    def __init__(
        self, form: ReplyFormat, tools: Mapping[str, Any] | None = None, *, inside: bool = False, max_calls: int = 0
    ) -> None:
        """`tools`: name -> schema of the parameters of each callable tool; None: calls are content. `inside`: the
        prompt has opened the reasoning. `max_calls`: the reply ends after this many calls; 0: no limit."""
        self._reader = Reader(form.codes, tools or {}, max_calls)
        self._thinking = form.thinking
        self._format = form.tools if tools else None
        whole = None if form.tools is None else form.tools.answer
        self._reading: Reading | None = self._read(inside) if whole is None else whole(self._reader)
        self._reader.output.inside = inside
        self._resume()

    def push(self, text: str) -> list[Event]:
        """Return the events of more text, in which the format's special tokens are codes."""
        if self._reading is None:
            return []
        self._reader.source.feed(text)
        self._resume()
        return self._reader.output.take()

    def end(self) -> list[Event]:
        """Return the last events, once no more text will arrive."""
        if self._reading is not None:
            self._reader.source.close()
            self._resume()
            self._reader.output.end()
        return self._reader.output.take()

    @property
    def thinking(self) -> bool:
        """Whether the next text is reasoning, as far as known."""
        return self._reader.output.inside

    @property
    def over(self) -> bool:
        """Whether further text no longer belongs to the reply."""
        return self._reader.output.over

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._reader.output.num_calls

    @property
    def num_complete(self) -> int:
        """Calls whose arguments are complete."""
        return self._reader.output.num_complete

    def _resume(self) -> None:
        assert self._reading is not None
        try:
            next(self._reading)
        except StopIteration:
            self._reading = None

    def _read(self, thought: bool) -> Reading:
        """Read a reply of text, reasoning and calls. `thought`: the prompt has begun its reasoning."""
        reader, source, output = self._reader, self._reader.source, self._reader.output
        yield  # the first text
        if thought:
            output.markup()
            yield from self._think()
        elif self._format is not None and self._format.at_start is not None:
            yield from reader.attempt(self._format.at_start(reader))
        openers: Sequence[str] = () if self._format is None else self._format.openers
        opening = () if self._thinking is None else (self._thinking.open,)
        closing = () if self._thinking is None else (self._thinking.close,)
        around = () if self._thinking is None else self._thinking.around_content
        while True:
            # After the reasoning another closing mark is dropped; without reasoning it is content.
            markers = reader.markers(*openers, *opening, *around, *(closing if thought else ()))
            marker = yield from source.until(markers, output.text)
            if marker is None:
                return
            if marker in closing or marker in around:
                output.markup()
            elif marker in opening:
                output.markup()
                thought = True
                yield from self._think()
            elif self._format is not None:
                yield from reader.attempt(self._format.read(reader, marker), marker)

    def _think(self) -> Reading:
        """Read the reasoning up to its end or to a call, which also ends it."""
        assert self._thinking is not None
        reader, output = self._reader, self._reader.output
        output.inside = True
        openers: Sequence[str] = () if self._format is None else self._format.openers
        markers = reader.markers(self._thinking.close, *openers)
        yield from reader.source.space()
        while (yield from reader.source.literal(self._thinking.open)):
            # Some models repeat the mark that the prompt ends with.
            yield from reader.source.space()
        while (marker := (yield from reader.source.until(markers, output.thought))) is not None:
            if marker == self._thinking.close:
                output.inside = False
                output.markup()
                if self._format is not None and self._format.at_start is not None:
                    yield from reader.attempt(self._format.at_start(reader))
                return
            found = self._format is not None and (
                yield from reader.attempt(self._format.read(reader, marker), marker, output.thought)
            )
            if found:
                return
