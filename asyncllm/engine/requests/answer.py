"""Answer turns the tokens of one choice into text."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.protocol import TokenLogprobs
from asyncllm.text.detokenizer import Detokenizer, StopMatcher, StopWords
from asyncllm.types import Chunk, Logprobs, Response

__all__ = ["Answer"]


class Answer:
    """The text of one choice: detokenizes tokens, looks for stop words, and holds text that has not been sent yet."""

    __slots__ = (
        "_detokenizer",
        "_hidden_ids",
        "_matcher",
        "_parts",
        "_unsent",
        "_unsent_logprobs",
        "num_read",
        "num_sent",
        "stop_reason",
    )
    splits = False
    """Whether reasoning and tool calls are split off the text."""

    def __init__(
        self, detokenizer: Detokenizer, *, stop_words: StopWords | None, hidden_ids: frozenset[int], include_stop: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_words, include=include_stop) if stop_words else None
        self._hidden_ids = hidden_ids
        """Tokens that end the answer without being part of its text."""
        self._parts: list[str] = []
        self._unsent = ""
        self._unsent_logprobs: Logprobs | None = None
        self.num_read = 0
        """Number of tokens turned into text."""
        self.num_sent = 0
        """Number of tokens carried by chunks."""
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    @property
    def watches_text(self) -> bool:
        """Whether every token must be read at once, because its text may end the answer."""
        return self._matcher is not None

    @property
    def over(self) -> bool:
        """Whether the text read so far ends the answer."""
        return self.stop_reason is not None

    @property
    def called(self) -> bool:
        """Whether the answer contains a complete tool call."""
        return False

    def complete(self, chunk: Chunk) -> None:
        """Move everything that no chunk has carried yet to `chunk`."""
        chunk.text, self._unsent = self._unsent, ""
        if self._unsent_logprobs is not None:
            chunk.logprobs, self._unsent_logprobs = self._unsent_logprobs, None

    def fill(self, response: Response) -> None:
        """Set the text, reasoning and tool calls of a response."""
        response.text = self.text

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Turn new tokens into text. After the `last` ones, no text is held back. If an answer ends within several
        forced tokens, `stop_reason` is set and the tokens after its end are not read."""
        if self._matcher is not None and len(tokens) > 1:
            for token in tokens[:-1]:
                self.read([token], last=False)
                if self.stop_reason is not None:
                    return
            tokens = tokens[-1:]
        self.num_read += len(tokens)
        if last and tokens and tokens[-1] in self._hidden_ids:
            tokens = tokens[:-1]
        text = self._detokenizer.push(tokens)
        if last:
            text += self._detokenizer.flush()
        if self._matcher is not None:
            text, hit = self._matcher.push(text)
            if hit is not None:
                self.stop_reason = hit
            elif last:
                text += self._matcher.flush()
        if text:
            self._parts.append(text)
            self._unsent += text

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the newest token."""
        if self._unsent_logprobs is None:
            self._unsent_logprobs = []
        self._unsent_logprobs.append(dict(entry))
