"""Converts a request's fields to arguments of `AsyncEngine.generate`: the GenerationConfig and the keywords.

Clients with different keys share only the engine, neither cached prefixes, which timing could reveal, nor session ids.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
from aiohttp import web

from asyncllm.config import MAX_COUNT, GenerationConfig, RequestKeywords, ServerConfig
from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.lmdeploy.requests import GenerateRequest, InteractiveRequest
from asyncllm.server.openai.requests import ChatRequest, CompletionRequest, OpenAIFields
from asyncllm.server.request.custom_tools import chat_choice, chat_functions
from asyncllm.server.request.fields import ImageOptions, PolicyFields, SamplingFields, Variables
from asyncllm.server.request.structure import response_format_of
from asyncllm.server.service import service_of
from asyncllm.text.chat_template import SWITCHES, ChatTemplate

__all__ = [
    "GENERATE_TOKENS",
    "OPENAI_DEFAULTS",
    "Templated",
    "budget_options",
    "chat_config",
    "completion_config",
    "defaults_of",
    "engine_session_id",
    "generate_config",
    "image_options",
    "interactive_config",
    "label_of",
    "request_options",
    "same_fields",
    "sampled_config",
    "template_options",
    "thinking_options",
    "tool_options",
]

OPENAI_DEFAULTS = GenerationConfig(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=None)
"""Sampling parameters for fields that neither the request nor the checkpoint sets."""

INTERACTIVE_DEFAULTS = GenerationConfig(temperature=0.8, top_p=0.8, top_k=40, max_new_tokens=None)
"""LMDeploy's defaults for /v1/chat/interactive."""

GENERATE_TOKENS = 128
"""LMDeploy's default of max_tokens for /generate."""

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for plain completions."""

CHECKPOINT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Entries of generation_config.json that become defaults of requests."""

SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields of a request with the same name in GenerationConfig."""

IDS_PER_KEY = 2**32
"""Greater than every session id that a body can contain."""


def defaults_of(generation: dict[str, Any]) -> GenerationConfig:
    """Return the defaults of a checkpoint's generation_config.json, without values out of range."""
    fields: dict[str, Any] = {}
    for name in CHECKPOINT_FIELDS:
        value = generation.get(name)
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        try:
            msgspec.structs.replace(OPENAI_DEFAULTS, **{name: value}).checked()
        except ValueError:
            continue
        fields[name] = value
    if generation.get("do_sample") is False and "temperature" not in fields:
        fields["temperature"] = 0.0
    return msgspec.structs.replace(OPENAI_DEFAULTS, **fields)


def chat_config(body: ChatRequest, config: ServerConfig, defaults: GenerationConfig) -> GenerationConfig:
    """Return the config of a chat. Raises ApiError for fields that contradict each other, InvalidParameter for values
    out of range."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _config(body, body.max_completion_tokens or body.max_tokens, logprobs, config, defaults)


def completion_config(body: CompletionRequest, config: ServerConfig, defaults: GenerationConfig) -> GenerationConfig:
    """Like `chat_config`. An echo without new tokens still computes one, which the answer omits."""
    if body.best_of not in (None, 1, body.n):
        raise ApiError(
            400,
            "Answers are not ranked, so that best_of can be n only. Ask for n answers instead.",
            code="unsupported_parameter",
            param="best_of",
        )
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked == 0 and body.echo:
        asked = 1
    made = _config(body, COMPLETION_TOKENS if asked is None else asked, body.logprobs, config, defaults)
    if body.echo and body.logprobs is not None:
        made = msgspec.structs.replace(made, prompt_logprobs=body.logprobs)
    return made


def _config(
    body: OpenAIFields, max_tokens: int | None, logprobs: int | None, config: ServerConfig, defaults: GenerationConfig
) -> GenerationConfig:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", code="invalid_value", param="stream_options")
    if body.n is not None and body.n > config.max_choices:
        raise ApiError(
            400,
            f"n is {body.n}, and the server gives at most {config.max_choices} answers.",
            code="invalid_value",
            param="n",
        )
    lower_bound = 0 if isinstance(body, CompletionRequest) and body.echo else 1
    if body.max_tokens is not None and body.max_tokens < lower_bound:
        raise ApiError(400, f"max_tokens must be at least {lower_bound}.", code="invalid_value", param="max_tokens")
    minimum = body.min_tokens if body.min_tokens is not None else body.min_new_tokens
    return msgspec.structs.replace(
        defaults,
        max_new_tokens=max_tokens,
        min_new_tokens=minimum,
        random_seed=body.seed,
        logprobs=logprobs,
        response_format=response_format_of(body),
        **same_fields(body),
    ).checked()


def sampled_config(body: SamplingFields, defaults: GenerationConfig, **fields: Any) -> GenerationConfig:
    """Return the config of a body whose `fields` have other names. Raises ApiError and InvalidParameter, like
    `chat_config`."""
    return msgspec.structs.replace(defaults, random_seed=body.seed, **fields, **same_fields(body)).checked()


def generate_config(body: GenerateRequest, defaults: GenerationConfig) -> GenerationConfig:
    """Return the config of /generate. Raises ApiError and InvalidParameter, like `chat_config`."""
    return msgspec.structs.replace(
        defaults,
        max_new_tokens=GENERATE_TOKENS if body.max_tokens is None else body.max_tokens,
        min_new_tokens=body.min_new_tokens,
        random_seed=body.seed,
        logprobs=0 if body.return_logprob else None,
        **same_fields(body),
    ).checked()


def interactive_config(body: InteractiveRequest) -> GenerationConfig:
    """Like `generate_config`, with the route's own defaults."""
    if body.request_output_len == 0:
        raise ApiError(
            400,
            "request_output_len must be at least 1. 0 is for the end of a session, without a prompt.",
            code="invalid_value",
            param="request_output_len",
        )
    return msgspec.structs.replace(
        INTERACTIVE_DEFAULTS,
        max_new_tokens=body.request_output_len,
        min_new_tokens=body.min_new_tokens,
        random_seed=body.seed,
        **same_fields(body),
    ).checked()


def same_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Return the common fields of bodies as fields of GenerationConfig, without those that are omitted."""
    fields = {name: value for name in SAME_NAME if (value := getattr(body, name, None)) is not None}
    top_k, stop = getattr(body, "top_k", None), getattr(body, "stop", None)
    if top_k is not None:
        fields["top_k"] = max(0, top_k)
    if stop is True:
        raise ApiError(
            400, "stop is a text or a list of texts. To stop an answer, cancel it.", code="invalid_value", param="stop"
        )
    if stop:
        fields["stop_words"] = [stop] if isinstance(stop, str) else stop
    return fields


EFFORT = "reasoning_effort"
"""The variable of templates with levels of reasoning effort, such as gpt-oss's."""


class WithTools(Protocol):
    """A body with the fields for tools and reasoning."""

    separate_reasoning: bool | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


class Templated(Protocol):
    """A body with the fields of the chat template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Variables | None
    enable_thinking: bool | None


def request_options(request: web.Request, body: PolicyFields) -> RequestKeywords:
    """Return user, priority, timeout and salt as keywords of the engine. With several keys, each has its own salt."""
    options: RequestKeywords = {}
    if body.priority is not None:
        options["priority"] = body.priority
    if body.timeout is not None:
        options["timeout"] = body.timeout
    if body.user_id is not None:
        options["user_id"] = body.user_id
    salt = body.cache_salt
    if service_of(request).access.num_keys > 1 and salt != "":
        salt = f"{request[KEY]}/{salt or ''}"
    if salt is not None:
        options["cache_salt"] = salt
    return options


class WithImages(Protocol):
    """A body with the field for images."""

    mm_processor_kwargs: ImageOptions | None


def image_options(body: WithImages) -> RequestKeywords:
    """Return the options of image preparation as keywords of the engine."""
    return {} if body.mm_processor_kwargs is None else {"mm_processor_kwargs": body.mm_processor_kwargs}


def template_options(body: Templated, template: ChatTemplate, effort: str | None = None) -> RequestKeywords:
    """Return the chat template's options as keywords of the engine. `effort`: reasoning effort. Raises ApiError for two
    contradictory fields."""
    options: RequestKeywords = {}
    variables = dict(body.chat_template_kwargs or {})
    asked = body.enable_thinking
    if asked is not None and variables.setdefault("enable_thinking", asked) != asked:
        raise ApiError(
            400,
            "enable_thinking and chat_template_kwargs contradict each other. Send it once.",
            code="invalid_value",
            param="enable_thinking",
        )
    options |= thinking_options(template, effort, variables, EFFORT)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    return options


def thinking_options(
    template: ChatTemplate, effort: str | None, variables: Variables | None, param: str
) -> RequestKeywords:
    """Return the template's `variables` with the reasoning `effort`, which the field `param` sets. Raises ApiError if
    the template has no such variable."""
    variables = dict(variables or {})
    if effort is not None:
        _set_effort(variables, effort, template, param)
    return {"chat_template_kwargs": variables} if variables else {}


def tool_options(body: WithTools) -> RequestKeywords:
    """Return tools and the separation of reasoning as keywords of the engine."""
    options: RequestKeywords = {}
    if body.separate_reasoning is False:
        options["separate_reasoning"] = False
    if body.tools:
        options["tools"] = chat_functions(body.tools)
    if body.tool_choice is not None:
        options["tool_choice"] = chat_choice(body.tool_choice)
    if body.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = body.parallel_tool_calls
    return options


def _set_effort(variables: Variables, effort: str, template: ChatTemplate, param: str) -> None:
    """Set the template's variables for an effort. Raises ApiError if the template has no such variable."""
    if EFFORT in template.variables:
        variables.setdefault(EFFORT, effort)
    elif effort == "none":
        for switch in SWITCHES & template.variables:
            variables.setdefault(switch, False)
    else:
        switches = " or ".join(sorted(SWITCHES & template.variables))
        instead = f"Set {switches} in chat_template_kwargs" if switches else "Leave it out"
        raise ApiError(
            400,
            f"The model's chat template knows no degrees of reasoning. {instead}, or send 'none'.",
            code="unsupported_parameter",
            param=param,
        )


def budget_options(body: ChatRequest) -> RequestKeywords:
    """Return the maximum number of reasoning tokens. Raises ApiError for two budgets."""
    budget, other = body.thinking_budget, body.thinking_token_budget
    if budget is not None and other is not None and budget != other:
        raise ApiError(
            400,
            "thinking_budget and thinking_token_budget contradict each other. Send one.",
            code="invalid_value",
            param="thinking_token_budget",
        )
    budget = other if budget is None else budget
    return {} if budget is None else {"thinking_budget": budget}


NUMBER = re.compile("-1|[0-9]{1,19}")
"""A session_id that is a number in a text."""


def engine_session_id(request: web.Request, session_id: int) -> int:
    """Return the engine's id for a client's `session_id`; ids of different keys never collide."""
    # The engine numbers sessions of its own program from 2**31, and a request without a key has index -1.
    return (request[KEY] + 2) * IDS_PER_KEY + session_id


def label_of(request: web.Request, session_id: int | str | None, name: str | None = None) -> int | None:
    """Return the engine's label for an answer that others may stop by `session_id`, or if it has none by its own id,
    `name`; LMDeploy's -1 means None."""
    if isinstance(session_id, str) and NUMBER.fullmatch(session_id) and int(session_id) <= MAX_COUNT:
        session_id = int(session_id)
    if isinstance(session_id, int) and session_id != -1:
        return engine_session_id(request, session_id)
    name = f"session {session_id}" if isinstance(session_id, str) else name
    if name is None:
        return None
    # Names, none of which has a space but those of sessions, are below all numbers.
    return -1 - int.from_bytes(blake2b(f"{request[KEY]}/{name}".encode(), digest_size=8).digest())
