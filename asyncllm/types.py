"""Types of the public API: inputs, the chunks and responses of answers, and the record of a request that has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

__all__ = [
    "Chunk",
    "Embedding",
    "EmbeddingInput",
    "ErrorCode",
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
"""Why an answer ended.

stop: an end-of-sequence token, a stop token or a stop word. tool_calls: the same after at least one complete tool call.
length: max_new_tokens or the session length. abort: `stop_session`, or the reader left. error: the request failed in a
step, or its timeout passed.
"""

ErrorCode = Literal["invalid_request", "context_length_exceeded", "deadline_exceeded", "internal_error"]
"""Why a request of a batch failed. invalid_request: its prompt cannot be read. internal_error: a step with the request,
or the code that encodes it, failed."""

Message = dict[str, Any]
"""An OpenAI chat message: {"role": "system" | "user" | "assistant" | "tool", "content": str | list of parts}."""

ImagePrompt = tuple[str, Any]
"""A text, and an image or a list of images: paths, URLs, bytes or PIL images. They may come before the text too."""

EmbeddingInput = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""One prompt to embed (a text or token ids), or a list of them."""

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""A mapping of names to torch.Tensor, or an iterable of (name, tensor)."""

Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt become its embedding: the last token's, or the mean over all tokens."""

Pooled = Pooling | Literal["score"]
"""What a prompt's hidden states become: an embedding, or the scores of the model's head at the last token."""

Logprobs = list[dict[int, float]]
"""One dict {token id: log-probability} per token: the chosen token first, then the most likely ones in falling
order."""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call made by the model."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it. It may violate the tool's schema, or be incomplete if the answer was cut."""
    text_position: int = 0
    """Number of characters of the answer's `text` that the model wrote before the call."""


class ToolCallPiece(msgspec.Struct, kw_only=True):
    """A piece of a tool call. The first piece has the call's id, name and text_position; the pieces' arguments are
    concatenated."""

    index: int
    """Index of the call within the answer. A call is complete before the next one begins."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    text_position: int = 0
    """As in ToolCall; 0 in later pieces."""


class Response(msgspec.Struct, kw_only=True):
    """A whole answer: the sum of its chunks."""

    text: str = ""
    reasoning: str = ""
    """The model's reasoning before its answer, if its format is known. It is not part of `text`."""
    tool_calls: list[ToolCall] = []
    """The tool calls, if the request has tools."""
    reasoning_token_len: int = 0
    """Number of reasoning tokens generated so far, including the marks around them."""
    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    """One entry per id in `token_ids`, if requested."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """If requested, one entry per prompt token; None for the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop word of the request that ended the answer; None for any other end."""
    index: int = 0
    """Index of the prompt within a batch (`stream_infer`)."""
    input_token_len: int = 0
    """Number of prompt tokens in this turn."""
    generate_token_len: int = 0
    """Number of tokens generated so far for this choice."""
    history_token_len: int = 0
    """Number of session tokens before this turn."""
    cached_token_len: int = 0
    """Number of prompt and history tokens that came from the prefix cache."""
    num_images: int = 0
    """Number of images in prompt and history."""
    image_token_len: int = 0
    """Number of prompt tokens that stand for images."""
    error_code: ErrorCode | None = None
    """The kind of failure, if finish_reason is 'error'."""
    error_message: str | None = None
    """Why this request of a batch failed, if finish_reason is 'error'."""
    choices: tuple[Response, ...] = ()
    """All `n` answers, this one first, when n > 1; empty when n = 1."""

    @property
    def session_id(self) -> int:
        """LMDeploy's name for `index`."""
        return self.index

    @property
    def cached_tokens(self) -> int:
        """LMDeploy's name for `cached_token_len`."""
        return self.cached_token_len

    @property
    def parsed(self) -> Any:
        """The text, parsed as JSON. Raises ValueError if it is not JSON, as when the answer was cut."""
        return msgspec.json.decode(self.text)

    def parsed_as(self, kind: type[Kind]) -> Kind:
        """Return the JSON text as `kind`: a pydantic model, or a type that msgspec knows. Raises ValueError."""
        validate = getattr(kind, "model_validate_json", None)
        if validate is not None:
            found: Kind = validate(self.text)
            return found
        return msgspec.json.decode(self.text, type=kind)

    def extend(self, chunk: Chunk) -> Response:
        """Add a chunk of the same choice to this response, and return the response."""
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls:
            if piece.name is not None:
                self.tool_calls.append(
                    ToolCall(
                        id=piece.id or "",
                        name=piece.name,
                        arguments=piece.arguments,
                        text_position=piece.text_position,
                    )
                )
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
        self.error_code = chunk.error_code
        self.error_message = chunk.error_message
        return self

    @staticmethod
    def collect(chunks: Iterable[Chunk]) -> Response:
        """Sum the chunks of one prompt, of any number of choices, into one response."""
        answers: dict[int, Response] = {}
        for chunk in chunks:
            answers.setdefault(chunk.choice, Response()).extend(chunk)
        return Response.join([answers[choice] for choice in sorted(answers)])

    @staticmethod
    def join(answers: Sequence[Response]) -> Response:
        """Combine the answers to one prompt, in choice order, into one response."""
        if not answers:
            return Response()
        first = answers[0]
        if len(answers) > 1:
            first = msgspec.structs.replace(first, choices=tuple(answers))
        return first


class Chunk(Response, kw_only=True):
    """A piece of an answer: a Response with the new parts only. The concatenated `text` of a choice's chunks is the
    whole answer, byte for byte; lengths count from the beginning.

    Within a chunk, reasoning comes before the rest. A token may arrive before its text, while a
    character or a stop word is incomplete. Only the last chunk of a choice has a `finish_reason`, and only the first
    has `prompt_logprobs`.
    """

    tool_calls: list[ToolCallPiece] = []  # type: ignore[assignment]
    """Pieces of tool calls."""
    choice: int = 0
    """Index of the answer among the `n` answers to the prompt."""
    logits: Any = None
    """On the last chunk of `get_logits`: float32 CPU tensors of the prompt's chunks, each [tokens, vocab]."""
    pooled: Sequence[float] | None = None
    """On the last chunk of `embed`: the sum of the pooled hidden states [hidden]. On that of `classify`: the scores
    [labels]."""

    @property
    def response(self) -> str:
        """LMDeploy's name for `text`."""
        return self.text

    def extend(self, chunk: Chunk) -> Response:
        """Return the sum of this chunk and the next one of its choice, as LMDeploy's programs collect an answer."""
        return Response().extend(self).extend(chunk)


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of a prompt."""

    values: list[float]
    input_token_len: int
    """Number of prompt tokens."""


class SequenceScores(msgspec.Struct, kw_only=True):
    """The scores of a prompt, computed by a head for labels or rewards."""

    values: list[float]
    """The head's output, one score per label."""
    input_token_len: int
    """Number of prompt tokens."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, for `AsyncEngine.observers`. Times are in seconds of `time.monotonic`."""

    prompt_tokens: int
    """Number of tokens of history and prompt."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    generated_tokens: int
    """Number of generated tokens, over all answers."""
    longest_answer: int
    """Number of tokens of the longest answer."""
    finish_reasons: tuple[FinishReason, ...]
    """One per answer."""
    arrived: float
    """Time of the first await, before the prompt was encoded."""
    queued: float
    """Time at which the request entered the queue."""
    admitted: float | None
    """Time at which its first sequence got a row; None if the request ended in the queue."""
    prefilled: float | None
    """Time at which the step that computed the end of its prompt was read; None if the request ended before that."""
    ended: float
