"""Request bodies of Anthropic's routes, and the conversion of their fields to the engine's arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncllm.config import MAX_COUNT, RequestKeywords
from asyncllm.config.tools import MAX_TOOLS
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.arguments import image_options, thinking_options
from asyncllm.server.request.fields import MAX_MESSAGES, Body, ImageOptions, NewTokens, SamplingFields, Variables
from asyncllm.text.chat_template import ChatTemplate

__all__ = ["CountTokensRequest", "MessagesRequest", "options_of"]


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`thinking`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of reasoning tokens."""
    display: Literal["summarized"] | None = None
    """The reasoning is sent in full."""


class OutputOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`output_config`."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    """For templates that read it."""
    format: dict[str, Any] | None = None
    """The form of the answer: json_schema."""


class ToolChoiceOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


Messages = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
AnthropicTools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]


class CountTokensRequest(Body, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: AnthropicTools | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: dict[str, Any] | None = None
    """The form of the answer, which is no part of the prompt."""
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/messages."""

    messages: Messages
    """Messages of users and the assistant, whose content is a text or blocks."""
    max_tokens: NewTokens
    system: str | list[dict[str, Any]] | None = None
    tools: AnthropicTools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: dict[str, Any] | None = None
    """The name that `output_config.format` has in older clients."""
    chat_template_kwargs: Variables | None = None
    mm_processor_kwargs: ImageOptions | None = None
    """Image preparation, as in chat completions."""
    stop_sequences: Words | None = None
    stream: bool | None = None
    thread: dict[str, Any] | None = None
    """Refused with the words that make Anthropic's client retry without it."""


WORDS = {"any": "required"}
"""Values of `tool_choice` -> OpenAI's."""


def options_of(body: CountTokensRequest | MessagesRequest, template: ChatTemplate) -> RequestKeywords:
    """Return the tools, the reasoning effort and the image preparation as keyword arguments of the engine. Raises
    ApiError."""
    if isinstance(body, MessagesRequest) and body.thread is not None:
        raise ApiError(
            400,
            "Messages are not kept for a thread. Send all of them, without thread.",
            code="unsupported_parameter",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    variables = dict(body.chat_template_kwargs or {})
    thinking, output = body.thinking, body.output_config
    effort = None if output is None else output.effort
    param = "output_config"
    if thinking is not None and thinking.type == "disabled":
        effort, param = "none", "thinking"
    elif thinking is not None and thinking.type == "enabled" and "enable_thinking" in template.variables:
        variables.setdefault("enable_thinking", True)
    options = thinking_options(template, effort, variables, param) | image_options(body)
    if thinking is not None and thinking.budget_tokens is not None:
        options["thinking_budget"] = thinking.budget_tokens
    if body.tools:
        options["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        named: dict[str, Any] = {"type": "function", "function": {"name": choice.name}}
        options["tool_choice"] = named if choice.type == "tool" else WORDS.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use is not None:
            options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return options


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type", "custom")
    if kind not in ("custom", None):
        raise ApiError(
            400,
            f"There is a tool of type {str(kind)[:64]!r}, and only tools with an input_schema can be called: the "
            f"server runs none of its own. Leave it out.",
            code="unsupported_parameter",
            param="tools",
        )
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}
