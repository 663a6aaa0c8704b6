"""The bodies of Ollama's routes, and their fields as arguments of the engine.

Documented at https://github.com/ollama/ollama/blob/main/docs/api.md. Other names are looked up in the table of
neutral fields, entries of `options` too.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncllm.config import (
    MAX_COUNT,
    MAX_LOGPROBS,
    FrequencyPenalty,
    GenerationConfig,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    RequestKeywords,
    Temperature,
    Tools,
    TopP,
)
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.arguments import request_options, thinking_options
from asyncllm.server.request.fields import MAX_MESSAGES, FurtherFields, PolicyFields, Stop, Variables
from asyncllm.server.service import Service
from asyncllm.text.chat_template import SWITCHES

__all__ = [
    "AnswerFields",
    "EmbedRequest",
    "EmbeddingsRequest",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "OllamaOptions",
    "ShowRequest",
    "config_of",
    "options_of",
]

TAG = ":latest"
"""Of a name without one."""


class OllamaOptions(FurtherFields, kw_only=True):
    """`options`. Routes that draw no tokens take them, and there is nothing that they could change."""

    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1: all.")] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="-1: a new one each time.")] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_COUNT)] | None = None
    """Most new tokens; 0, -1 and -2: as many as there is room for."""
    stop: Stop = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None


class OllamaBody(PolicyFields, kw_only=True):
    """The fields of all bodies."""

    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    """The model stays loaded as long as the server runs, so any time is kept. 0 without a prompt, which asks for its
    end, is refused."""

    def __post_init__(self) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(TAG)


class AnswerFields(OllamaBody, kw_only=True):
    """The common fields of routes that generate."""

    stream: bool = True
    """Send the answer piece by piece, as lines of JSON."""
    format: dict[str, Any] | str | None = None
    """What the answer is held to: "json", or a JSON schema."""
    think: bool | str | None = None
    """Whether the model thinks, or how much, for templates that have degrees."""
    logprobs: bool | None = None
    """Send the log-probability of each token along."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """And those of as many of the most likely tokens; needs `logprobs`."""


class OllamaChatRequest(AnswerFields, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    """None: the model is to be loaded, which it is."""
    tools: Tools | None = None
    """Functions that the model may call."""


class OllamaGenerateRequest(AnswerFields, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    """None or empty: the model is to be loaded, which it is."""
    suffix: str | None = None
    """What follows the text that is asked for, as in /v1/completions."""
    system: str | None = None
    images: list[str] | None = None
    """In base64."""
    raw: bool | None = None
    """true: the prompt is continued as it is, without the chat template."""


class EmbedRequest(OllamaBody, kw_only=True):
    """The body of POST /api/embed."""

    input: str | list[str]
    dimensions: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None


class EmbeddingsRequest(OllamaBody, kw_only=True):
    """The body of POST /api/embeddings."""

    prompt: str


class ShowRequest(OllamaBody, kw_only=True):
    """The body of POST /api/show."""

    name: str | None = None
    """The older name of `model`."""
    verbose: bool | None = None
    """The answer is the same: it has no lists of tokens to leave out."""

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        super().__post_init__()


def config_of(body: AnswerFields, defaults: GenerationConfig) -> GenerationConfig:
    """Return the config of an answer. Raises ApiError for fields that contradict each other, InvalidParameter for
    values out of range."""
    if body.top_logprobs and not body.logprobs:
        raise _refused("top_logprobs needs logprobs: true.", "top_logprobs")
    options = body.options or OllamaOptions()
    if options.stop is True:
        raise _refused("stop is a text or a list of texts. To stop an answer, close the connection.", "stop")
    fields = {
        "temperature": options.temperature,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "random_seed": None if options.seed == -1 else options.seed,
        "max_new_tokens": max(0, options.num_predict or 0) or None,
        "stop_words": [options.stop] if isinstance(options.stop, str) else options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": _form_of(body.format),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return msgspec.structs.replace(
        defaults, **{name: value for name, value in fields.items() if value is not None}
    ).checked()


def _form_of(form: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"schema": form}}
    if not form:
        return None
    if form != "json":
        raise _refused(f"format is {form[:64]!r}, and can be 'json' or a JSON schema, as an object.", "format")
    return {"type": "json_object"}


def options_of(request: web.Request, body: AnswerFields, service: Service) -> RequestKeywords:
    """Return priority, timeout and the like, and how much the model thinks, as keywords of the engine. Raises
    ApiError."""
    options = request_options(request, body)
    template = service.template_for(body.model)
    match body.think:
        case None:
            return options
        case True:
            variables: Variables = dict.fromkeys(SWITCHES & template.variables, True)
            splits = service.engine.reply_format_of(service.adapter_of(body.model)).splits
            if not variables and not splits:
                raise _refused("The model's chat template knows no thinking. Leave think out.", "think")
            return options | thinking_options(template, None, variables, "think")
        case False:
            return options | thinking_options(template, "none", {}, "think")
        case effort:
            return options | thinking_options(template, effort[:64], {}, "think")


def _refused(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
