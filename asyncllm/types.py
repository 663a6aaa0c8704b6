"""What users get back: chunks while an answer streams, and responses as the sum of their chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

__all__ = ["Chunk", "Embedding", "FinishReason", "Message", "Pooling", "Response"]

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: end-of-sequence, a stop token or a stop word. length: max_new_tokens or the session length.
abort: cancelled by `stop_session` or by closing. error: this request failed inside a step, or its timeout was over."""

Message = dict[str, Any]
"""An OpenAI chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts}."""

Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make its embedding: the last token's, or the mean of all."""

Logprobs = list[dict[int, float]]
"""One dict per token: the chosen token first, then the most likely ones in falling order."""


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of an answer. Concatenating the `text` of a choice's chunks gives the whole answer, byte for byte."""

    text: str = ""
    token_ids: list[int] = []
    """Tokens new in this chunk. A token may come before its text, while a character or a stop word is incomplete."""
    logprobs: Logprobs | None = None
    """One entry per id in `token_ids`, if asked for."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a choice, and only there."""
    stop_reason: int | str | None = None
    """The stop token id or stop word that ended the answer, if it was one the caller named."""
    index: int = 0
    """Which prompt of a batch this answers (`stream_infer`)."""
    choice: int = 0
    """Which of the `n` answers to the prompt this belongs to."""
    input_token_len: int = 0
    """Tokens of this turn's prompt."""
    generate_token_len: int = 0
    """Tokens generated so far for this choice."""
    history_token_len: int = 0
    """Tokens of the session before this turn."""
    cached_token_len: int = 0
    """Prompt and history tokens that came from the prefix cache."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """On the first chunk, if asked for: one entry per prompt token; None for the first, which nothing precedes."""
    logits: Any = None
    """On the last chunk of a scoring request: float32 tensor [tokens, vocab]."""
    pooled: Sequence[float] | None = None
    """On the last chunk of an embedding request: the sum of the pooled hidden states [hidden]."""

    @property
    def response(self) -> str:
        """The seed-era name of `text`."""
        return self.text

    @property
    def session_id(self) -> int:
        """The seed-era name of `index`."""
        return self.index


class Response(msgspec.Struct, kw_only=True):
    """A whole answer: the sum of its chunks."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    index: int = 0
    input_token_len: int = 0
    generate_token_len: int = 0
    history_token_len: int = 0
    cached_token_len: int = 0
    error_message: str | None = None
    """Why this request failed, with finish_reason 'error'."""
    choices: tuple[Response, ...] = ()
    """All `n` answers, this one first, when n > 1; empty when n = 1."""

    @property
    def session_id(self) -> int:
        """The seed-era name of `index`."""
        return self.index

    def extend(self, chunk: Chunk) -> None:
        """Add a chunk of the same choice to this response."""
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason
        self.index = chunk.index
        self.input_token_len = chunk.input_token_len
        self.generate_token_len = chunk.generate_token_len
        self.history_token_len = chunk.history_token_len
        self.cached_token_len = chunk.cached_token_len

    @staticmethod
    def collect(chunks: Iterable[Chunk]) -> Response:
        """Sum the chunks of one prompt, of any number of choices, into one response."""
        answers: dict[int, Response] = {}
        for chunk in chunks:
            answers.setdefault(chunk.choice, Response()).extend(chunk)
        return Response.join([answers[choice] for choice in sorted(answers)])

    @staticmethod
    def join(answers: Sequence[Response]) -> Response:
        """One response out of the answers to one prompt, in choice order."""
        if not answers:
            return Response()
        first = answers[0]
        if len(answers) > 1:
            first = msgspec.structs.replace(first, choices=tuple(answers))
        return first


class Embedding(msgspec.Struct, kw_only=True):
    """A prompt as a vector."""

    values: list[float]
    """Plain floats, as JSON and every vector store take them."""
    input_token_len: int
    """Tokens of the prompt."""
