"""The body of POST /v1/responses, and the conversion of its tools and text format for the engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncllm.config import MAX_LOGPROBS, FrequencyPenalty, LogitBias, PresencePenalty, RequestKeywords
from asyncllm.config.tools import MAX_TOOLS
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.custom_tools import as_function, is_callable
from asyncllm.server.request.fields import MAX_MESSAGES, Body, ImageOptions, NewTokens, SamplingFields, Variables
from asyncllm.server.request.structure import StructuredOutputs, only_format

__all__ = [
    "InputTokensRequest",
    "ResponsesRequest",
    "callable_among",
    "check_included",
    "custom_names_of",
    "format_of",
    "logprobs_of",
    "tools_of",
]

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Known values of `include`. Clients that send reasoning back set the last one; here reasoning is plain text."""


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: dict[str, Any] | None = None
    """The form of the answer: text, json_object or json_schema."""
    verbosity: str | None = None
    """A hint for models trained on it. Ignored."""


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    """none: the model does not think. Other values go to templates that read them."""
    summary: str | None = None
    """Ignored: the reasoning itself is sent."""
    generate_summary: str | None = None
    """The older name of `summary`."""


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_obfuscation: bool | None = None
    """Padding against traffic analysis. Ignored."""


Items = str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
ResponseId = Annotated[str, Meta(max_length=128)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class InputTokensRequest(Body, kw_only=True):
    """The body of POST /v1/responses/input_tokens: the fields of a response's request that form its prompt."""

    input: Items = ""
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    """Accepted; the form of an answer is not part of its prompt."""
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/responses."""

    input: Items
    """A text, or items: messages, function calls, their outputs, and reasoning."""
    instructions: str | None = None
    """A system message before the input. The next response does not inherit it."""
    tools: Tools | None = None
    """Functions and custom tools that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: NewTokens | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    logit_bias: LogitBias | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's: a form other than those of text.format."""
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of most likely tokens sent with each token. Needs message.output_text.logprobs in `include`."""
    metadata: dict[str, Any] | None = None
    """Returned unchanged."""
    store: bool | None = None
    """false: the response can be neither retrieved nor continued."""
    background: bool | None = None
    """true: return at once with the status queued, and compute and keep the response. Poll it until its status is
    neither queued nor in_progress."""
    previous_response_id: ResponseId | None = None
    """The response to continue. Its instructions are not inherited."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None
    """Image preparation, as in chat completions."""


def check_included(body: ResponsesRequest) -> None:
    """Raise ApiError if `include` has an unsupported value."""
    for name in body.include or ():
        if name not in INCLUDED:
            raise ApiError(
                400,
                f"include holds {name[:64]!r}, which responses do not have. Leave it out.",
                code="unsupported_parameter",
                param="include",
            )


def logprobs_of(body: ResponsesRequest) -> int | None:
    """Return the number of alternatives per token, or None if no log-probabilities are requested. Raises ApiError."""
    if LOGPROBS not in (body.include or ()):
        if body.top_logprobs is not None:
            raise ApiError(
                400, f"top_logprobs needs {LOGPROBS!r} in include.", code="invalid_value", param="top_logprobs"
            )
        return None
    if body.tools:
        raise ApiError(
            400,
            "Log-probabilities are sent for a message's tokens only, and here calls may be among them. Leave tools or "
            f"{LOGPROBS} out; /v1/chat/completions has those of all tokens.",
            code="unsupported_parameter",
            param="include",
        )
    return body.top_logprobs or 0


def format_of(body: ResponsesRequest) -> dict[str, Any] | None:
    """Return the form of the answer as a `response_format`. Raises ApiError for two of them."""
    return only_format(body.structured_outputs, ("text.format", None if body.text is None else body.text.format))


def callable_among(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return the tools that the model may call, and the types of the others."""
    others = [str(tool.get("type"))[:64] for tool in tools or () if not is_callable(tool)]
    return [tool for tool in tools or () if is_callable(tool)] or None, others


def custom_names_of(body: ResponsesRequest) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool["name"] for tool in body.tools or () if tool.get("type") == "custom")


def tools_of(body: ResponsesRequest | InputTokensRequest) -> RequestKeywords:
    """Return the callable tools in the chat format. Raises ApiError for other tools."""
    options: RequestKeywords = {}
    if body.tools:
        options["tools"] = [_function(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chosen = body.tool_choice
        if isinstance(chosen, dict) and chosen.get("type") == "custom":
            chosen = {**chosen, "type": "function"}
        options["tool_choice"] = chosen
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    return options


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        return {"type": "function", "function": as_function(tool)}
    if kind != "function":
        raise ApiError(
            400,
            f"There is a tool of type {str(kind)[:64]!r}, and only functions and custom tools can be called: the "
            f"server runs no tools of its own. Leave it out, or start the server with --unknown-fields ignore.",
            code="unsupported_parameter",
            param="tools",
        )
    named = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in named if tool.get(key) is not None}}
