"""What users give and get back: weights and what to embed; chunks while an answer streams, responses as the sum of
their chunks, and the record of a request that has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

__all__ = [
    "Chunk",
    "Embedding",
    "EmbeddingInput",
    "FinishReason",
    "ImagePrompt",
    "Message",
    "Pooled",
    "Pooling",
    "RequestRecord",
    "Response",
    "SequenceScores",
    "ToolCall",
    "ToolCallPiece",
    "Weights",
]

Kind = TypeVar("Kind")

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""stop: end-of-sequence, a stop token or a stop word. length: max_new_tokens or the session length.
tool_calls: as stop, behind at least one complete call of a tool.
abort: cancelled by `stop_session` or by closing. error: this request failed inside a step, or its timeout was over."""

Message = dict[str, Any]
"""An OpenAI chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts}."""

ImagePrompt = tuple[str, Any]
"""A text, and an image or a list of them: paths, URLs, bytes or images of PIL's."""

EmbeddingInput = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""One prompt to embed (a text or token ids), or a list of them."""

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""torch.Tensor by name, or pairs of both."""

Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make its embedding: the last token's, or the mean of all."""

Pooled = Pooling | Literal["score"]
"""What is made of a prompt's hidden states: an embedding, or the scores that the model's head gives the last one."""

Logprobs = list[dict[int, float]]
"""One dict per token: the chosen token first, then the most likely ones in falling order."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool that the model asks for."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it; it may break the tool's schema, or off where the answer was cut."""


class ToolCallPiece(msgspec.Struct, kw_only=True):
    """A piece of a call. The first one of a call has its id and its name; the arguments of all of them join."""

    index: int
    """Which call of the answer, from 0; they come one after the other."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of an answer. Concatenating the `text` of a choice's chunks gives the whole answer, byte for byte.

    Within a chunk reasoning comes first, then text, then calls.
    """

    text: str = ""
    reasoning: str = ""
    """What the model thinks before it answers, where the format of that is known; it is no part of `text`."""
    tool_calls: list[ToolCallPiece] = []
    """Pieces of calls, in a request with tools."""
    reasoning_token_len: int = 0
    """Of the tokens generated so far, those of reasoning, its marks included."""
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
    num_images: int = 0
    """Images of the prompt and the history."""
    image_token_len: int = 0
    """Tokens that stand for them."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """On the first chunk, if asked for: one entry per prompt token; None for the first, which nothing precedes."""
    logits: Any = None
    """On the last chunk of a scoring request: float32 tensor [tokens, vocab]."""
    pooled: Sequence[float] | None = None
    """On the last chunk of an embedding request: the sum of the pooled hidden states [hidden]; of one that asks for
    scores, these [labels]."""

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
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    reasoning_token_len: int = 0
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
    num_images: int = 0
    image_token_len: int = 0
    error_message: str | None = None
    """Why this request failed, with finish_reason 'error'."""
    choices: tuple[Response, ...] = ()
    """All `n` answers, this one first, when n > 1; empty when n = 1."""

    @property
    def session_id(self) -> int:
        """The seed-era name of `index`."""
        return self.index

    @property
    def parsed(self) -> Any:
        """The text as JSON. Raises ValueError where it is none, as of an answer that was cut."""
        return msgspec.json.decode(self.text)

    def parsed_as(self, kind: type[Kind]) -> Kind:
        """Return the text as a msgspec Struct, a dataclass or a pydantic model. Raises ValueError where it is none."""
        validate = getattr(kind, "model_validate_json", None)
        if validate is not None:
            found: Kind = validate(self.text)
            return found
        return msgspec.json.decode(self.text, type=kind)

    def extend(self, chunk: Chunk) -> None:
        """Add a chunk of the same choice to this response."""
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls:
            if piece.name is not None:
                self.tool_calls.append(ToolCall(id=piece.id or "", name=piece.name, arguments=piece.arguments))
            else:
                self.tool_calls[piece.index].arguments += piece.arguments
        self.reasoning_token_len = chunk.reasoning_token_len
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
        self.num_images = chunk.num_images
        self.image_token_len = chunk.image_token_len

    @staticmethod
    def collect(chunks: Iterable[Chunk]) -> Response:
        """Sum the chunks of one prompt, of any number of choices, into one response."""
        answers: dict[int, Response] = {}
        for chunk in chunks:
            answers.setdefault(chunk.choice, Response()).extend(chunk)
        return Response.join([answers[choice] for choice in sorted(answers)])

    @staticmethod
    def join(answers: Sequence[Response]) -> Response:
        """Return one response out of the answers to one prompt, in choice order."""
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


class SequenceScores(msgspec.Struct, kw_only=True):
    """What a head for labels or rewards says of a sequence."""

    values: list[float]
    """One for each label, as the head gives them."""
    input_token_len: int
    """Tokens of the prompt."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, as an engine's observers are told. Times are seconds of `time.monotonic`."""

    prompt_tokens: int
    """History included."""
    cached_tokens: int
    """Those of them that the prefix cache had."""
    generated_tokens: int
    """Of all its answers."""
    longest_answer: int
    """Tokens of the longest of them."""
    finish_reasons: tuple[FinishReason, ...]
    """One for each answer."""
    arrived: float
    """When it was first awaited, before its prompt was encoded."""
    queued: float
    """When it entered the queue."""
    admitted: float | None
    """When its first sequence first got a row; None: it ended in the queue."""
    prefilled: float | None
    """When the step that computed the last of its prompt was read; None: it ended before that."""
    ended: float
