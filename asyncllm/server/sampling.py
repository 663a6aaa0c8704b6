"""From the fields of a request to a GenerationConfig."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.config import GenerationConfig, ServerConfig
from asyncllm.server.errors import ApiError
from asyncllm.server.native_requests import GenerateRequest, InteractiveRequest
from asyncllm.server.requests import Asking, ChatRequest, CompletionRequest, Sampled

__all__ = [
    "OPENAI_DEFAULTS",
    "chat_config",
    "completion_config",
    "defaults_of",
    "generate_config",
    "interactive_config",
]

OPENAI_DEFAULTS = GenerationConfig(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=None)
"""What a request leaves out, where the checkpoint says nothing."""

INTERACTIVE_DEFAULTS = GenerationConfig(temperature=0.8, top_p=0.8, top_k=40, max_new_tokens=None)
"""LMDeploy's, of /v1/chat/interactive."""

GENERATE_TOKENS = 128
"""LMDeploy's default of max_tokens for /generate."""

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for plain completions."""

CHECKPOINT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of generation_config.json."""

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
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields of a request that GenerationConfig has under the same name."""


def defaults_of(generation: dict[str, Any]) -> GenerationConfig:
    """The defaults by a checkpoint's generation_config.json; values out of range are the checkpoint's, and skipped."""
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
    """Raises ApiError for fields that contradict each other, InvalidParameter for values out of range."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _config(body, body.max_completion_tokens or body.max_tokens, logprobs, config, defaults)


def completion_config(body: CompletionRequest, config: ServerConfig, defaults: GenerationConfig) -> GenerationConfig:
    """As `chat_config`. An echo without new tokens still computes one, which the answer leaves out."""
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked == 0 and body.echo:
        asked = 1
    made = _config(body, COMPLETION_TOKENS if asked is None else asked, body.logprobs, config, defaults)
    if body.echo and body.logprobs is not None:
        made = msgspec.structs.replace(made, prompt_logprobs=body.logprobs)
    return made


def _config(
    body: Sampled, max_tokens: int | None, logprobs: int | None, config: ServerConfig, defaults: GenerationConfig
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
    least = 0 if isinstance(body, CompletionRequest) and body.echo else 1
    if body.max_tokens is not None and body.max_tokens < least:
        raise ApiError(400, f"max_tokens must be at least {least}.", code="invalid_value", param="max_tokens")
    minimum = body.min_tokens if body.min_tokens is not None else body.min_new_tokens
    return msgspec.structs.replace(
        defaults,
        max_new_tokens=max_tokens,
        min_new_tokens=minimum,
        random_seed=body.seed,
        logprobs=logprobs,
        **_same(body),
    ).checked()


def generate_config(body: GenerateRequest, defaults: GenerationConfig) -> GenerationConfig:
    """Raises ApiError and InvalidParameter, as `chat_config`."""
    return msgspec.structs.replace(
        defaults,
        max_new_tokens=GENERATE_TOKENS if body.max_tokens is None else body.max_tokens,
        min_new_tokens=body.min_new_tokens,
        random_seed=body.seed,
        logprobs=0 if body.return_logprob else None,
        **_same(body),
    ).checked()


def interactive_config(body: InteractiveRequest) -> GenerationConfig:
    """As `generate_config`; the route has its own defaults."""
    return msgspec.structs.replace(
        INTERACTIVE_DEFAULTS,
        max_new_tokens=body.request_output_len,
        min_new_tokens=body.min_new_tokens,
        random_seed=body.seed,
        **_same(body),
    ).checked()


def _same(body: Asking) -> dict[str, Any]:
    """What bodies share, as fields of GenerationConfig; a field that is left out is not among them."""
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
