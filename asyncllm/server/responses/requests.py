"""The body of POST /v1/responses, and its tools and text format in the engine's terms."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncllm.config import MAX_LOGPROBS, RequestKeywords
from asyncllm.config.tools import MAX_TOOLS
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.fields import MAX_MESSAGES, Body, ImageOptions, NewTokens, SamplingFields, Variables

__all__ = [
    "InputTokensRequest",
    "ResponsesRequest",
    "check_included",
    "format_of",
    "functions_among",
    "logprobs_of",
    "tools_of",
]

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Known values of `include`. Clients that send reasoning back set the last one; here it is plain text."""


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: dict[str, Any] | None = None
    """What the answer is held to: text, json_object or json_schema."""
    verbosity: str | None = None
    """A hint to models that were trained on it; ignored."""


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    """none: the model does not think. Anything else is for templates that read it."""
    summary: str | None = None
    """Ignored: the reasoning itself is sent."""
    generate_summary: str | None = None
    """Its older name."""


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_obfuscation: bool | None = None
    """Padding against traffic analysis; ignored."""


Items = str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
ResponseId = Annotated[str, Meta(max_length=128)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class InputTokensRequest(Body, kw_only=True):
    """The body of POST /v1/responses/input_tokens: what of a response's request its prompt is made of."""

    input: Items = ""
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    """The form of an answer is no part of its prompt."""
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/responses."""

    input: Items
    """A text, or items: messages, calls of functions, their outputs, and reasoning."""
    instructions: str | None = None
    """A system message in front; it is not kept for the next response."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: NewTokens | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """How many of the most likely tokens are sent with each; needs message.output_text.logprobs in `include`."""
    metadata: dict[str, Any] | None = None
    """Sent back."""
    store: bool | None = None
    """false: the response cannot be asked for again, nor gone on from."""
    background: bool | None = None
    """true: the answer comes at once, with the status queued, and the response is computed and kept. Ask for it until
    its status is another than queued and in_progress."""
    previous_response_id: ResponseId | None = None
    """The conversation that goes on, without its instructions."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None
    """How images are prepared, as in chat completions."""


def check_included(body: ResponsesRequest) -> None:
    """Raise ApiError for an `include` that is not supported."""
    for name in body.include or ():
        if name not in INCLUDED:
            raise ApiError(
                400,
                f"include holds {name[:64]!r}, which responses do not have. Leave it out.",
                code="unsupported_parameter",
                param="include",
            )


def logprobs_of(body: ResponsesRequest) -> int | None:
    """Return the number of log-probabilities of each token besides its own; None: none at all. Raises ApiError."""
    if LOGPROBS not in (body.include or ()):
        if body.top_logprobs is not None:
            raise ApiError(
                400, f"top_logprobs needs {LOGPROBS!r} in include.", code="invalid_value", param="top_logprobs"
            )
        return None
    if body.tools:
        raise ApiError(
            400,
            "Log-probabilities are those of a message's tokens, which are not told apart from a call's. Leave tools or "
            f"{LOGPROBS} out; /v1/chat/completions has those of all tokens.",
            code="unsupported_parameter",
            param="include",
        )
    return body.top_logprobs or 0


def format_of(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return the form of the answer as a `response_format`."""
    return None if body.text is None else body.text.format


def functions_among(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the tools that are functions, and the types of the others."""
    others = [str(tool.get("type"))[:64] for tool in tools or () if tool.get("type") != "function"]
    return [tool for tool in tools or () if tool.get("type") == "function"] or None, others


def tools_of(body: ResponsesRequest | InputTokensRequest) -> RequestKeywords:
    """Return which tools may be called, in the form of chats. Raises ApiError for those that are no functions."""
    options: RequestKeywords = {}
    if body.tools:
        options["tools"] = [_function(tool) for tool in body.tools]
    if body.tool_choice is not None:
        options["tool_choice"] = body.tool_choice
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    return options


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise ApiError(
            400,
            f"There is a tool of type {str(kind)[:64]!r}, and only functions can be called: the server runs no tools "
            f"of its own. Leave it out, or start the server with --unknown-fields ignore.",
            code="unsupported_parameter",
            param="tools",
        )
    named = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in named if tool.get(key) is not None}}
