"""Request bodies of Ollama's routes, and the conversion of their fields to the engine's arguments.

Documented at https://github.com/ollama/ollama/blob/main/docs/api.md. Unknown names, also in `options`, are looked up in
the table of `unsupported`.
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
"""The tag of a name without one."""


class OllamaOptions(FurtherFields, kw_only=True):
    """`options`. Routes that sample no tokens accept them without effect."""

    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1: all.")] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="-1: a new one each time.")] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_COUNT)] | None = None
    """Maximum number of new tokens; 0, -1 and -2: as many as fit."""
    stop: Stop = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None


class OllamaBody(PolicyFields, kw_only=True):
    """The fields of all bodies."""

    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    """Accepted for any time, since the model stays loaded as long as the server runs. 0 without a prompt asks to unload
    it and is refused."""

    def __post_init__(self) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(TAG)


class AnswerFields(OllamaBody, kw_only=True):
    """The fields shared by routes that generate."""

    stream: bool = True
    """Send the answer in pieces, as JSON lines."""
    format: dict[str, Any] | str | None = None
    """The form of the answer: "json", or a JSON schema."""
    think: bool | str | None = None
    """Whether the model thinks, or how much, for templates that have levels."""
    logprobs: bool | None = None
    """Also send the log-probability of each token."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Also send those of this many most likely tokens. Needs `logprobs`."""


class OllamaChatRequest(AnswerFields, kw_only=True):
    """The body of POST /api/chat."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    """None asks to load the model, which is always loaded."""
    tools: Tools | None = None
    """Functions that the model may call."""


class OllamaGenerateRequest(AnswerFields, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    """None or empty asks to load the model, which is always loaded."""
    suffix: str | None = None
    """The text that follows the requested one, as in /v1/completions."""
    system: str | None = None
    images: list[str] | None = None
    """Base64."""
    raw: bool | None = None
    """true: continue the prompt without the chat template."""


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
    """Without effect, since the answer has no token lists to leave out."""

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        super().__post_init__()


def config_of(body: AnswerFields, defaults: GenerationConfig) -> GenerationConfig:
    """Return the config of an answer. Raises ApiError for contradictory fields, InvalidParameter for values out of
    range."""
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
    """Return priority, timeout, reasoning effort and the like as keyword arguments of the engine. Raises ApiError."""
    options = request_options(request, body)
    template = service.template_for(body.model)
    match body.think:
        case None:
            return options
        case True:
            variables: Variables = dict.fromkeys(SWITCHES & template.variables, True)
            splits = service.engine.reply_format_of(service.adapter_of(body.model)).splits
            if not variables and not splits:
                raise _refused("The model's chat template has no thinking mode. Leave think out.", "think")
            return options | thinking_options(template, None, variables, "think")
        case False:
            return options | thinking_options(template, "none", {}, "think")
        case effort:
            return options | thinking_options(template, effort[:64], {}, "think")


def _refused(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
