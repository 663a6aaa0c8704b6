"""Inputs of requests as texts or token ids, truncated as asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from aiohttp import web

from asyncllm.config import ServerConfig
from asyncllm.server.http.errors import ApiError
from asyncllm.server.openai.requests import PooledInput
from asyncllm.server.request.arguments import template_options
from asyncllm.server.request.fields import Prompt
from asyncllm.server.request.history import normalised
from asyncllm.server.service import service_of

__all__ = ["kept_tokens", "pooled_inputs", "prompts_of", "truncated"]


class Truncation(Protocol):
    """A body with the fields for truncation."""

    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


def kept_tokens(body: Truncation, room: int, added: int = 0) -> int | None:
    """Return how many tokens of each prompt are kept, or None for all. `room`: as many as fit, for -1. `added`: tokens
    among them that the tokenizer adds. Raises ApiError."""
    if body.truncate_prompt_tokens is None:
        return None
    kept = (room if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens) - added
    if kept < 1:
        raise ApiError(
            400,
            f"No token of the prompt would be kept: truncate_prompt_tokens is {body.truncate_prompt_tokens}, there is "
            f"room for {max(0, room)}, and the tokenizer adds {added}. Keep at least one.",
            code="invalid_value",
            param="truncate_prompt_tokens",
        )
    return kept


def truncated(body: Truncation, ids: list[int], kept: int | None) -> list[int]:
    """Return the last `kept` tokens, or the first if the body says so."""
    if kept is None:
        return ids
    return ids[:kept] if body.truncation_side == "right" else ids[-kept:]


def prompts_of(prompt: Prompt | None, config: ServerConfig, name: str) -> list[str | list[int]]:
    """Return the prompts of a request, each as text or token ids. Raises ApiError."""
    if prompt is None:
        raise ApiError(400, f"The parameter {name!r} is missing.", code="missing_required_parameter", param=name)
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds == {int}:
        return [[each for each in prompt if isinstance(each, int)]]
    if len(kinds) > 1 or int in kinds:
        raise ApiError(
            400, f"{name} mixes texts and token ids. Send one kind in a request.", code="invalid_type", param=name
        )
    if not 1 <= len(prompt) <= config.max_prompts:
        raise ApiError(
            400,
            f"{name} holds {len(prompt)} entries. Send 1 to {config.max_prompts} in a request.",
            code="invalid_value",
            param=name,
        )
    return [each for each in prompt if not isinstance(each, int)]


async def pooled_inputs(request: web.Request, body: PooledInput) -> Any:
    """Return texts or token ids whose hidden states are pooled, truncated without the tokens that the tokenizer adds.
    Raises ApiError."""
    service = service_of(request)
    engine = service.engine
    adds = body.add_special_tokens is not False
    if (body.input is None) == (body.messages is None):
        raise ApiError(400, "Send either input or messages.", code="invalid_value", param="input")
    inputs: Any = [await _conversation(request, body, adds)] if body.input is None else body.input
    inputs = prompts_of(inputs, service.config, "input")
    if (body.truncate_prompt_tokens is None and adds) or not isinstance(inputs[0], str):
        kept = kept_tokens(body, engine.session_len)
        return inputs if kept is None else [truncated(body, ids, kept) for ids in inputs]
    before, after = (engine.tokenizer.model.prefix, engine.tokenizer.model.suffix) if adds else ((), ())
    kept = kept_tokens(body, engine.session_len, len(before) + len(after))
    encoded: Any = await engine.encode(inputs, do_preprocess=False, add_bos=adds, bounded=kept is None)
    return [[*before, *truncated(body, _between(ids, before, after), kept), *after] for ids in encoded]


async def _conversation(request: web.Request, body: PooledInput, adds: bool) -> list[int]:
    """Return the tokens of a body's messages. Raises ApiError."""
    sent = body.messages or []
    for message in sent:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and part.get("type") not in ("text", "input_text") for part in parts):
            raise ApiError(
                400,
                "Only texts are pooled, and a message has a part of another type. Send text parts.",
                code="unsupported_feature",
                param="messages",
            )
    service = service_of(request)
    options = template_options(body, service.template_for(body.model))
    options.setdefault("add_generation_prompt", False)
    messages: Any = [await normalised(request, sent)]
    encoded: Any = await service.engine.encode(
        messages,
        do_preprocess=True,
        add_bos=adds,
        bounded=body.truncate_prompt_tokens is None,
        adapter_name=service.adapter_of(body.model),
        **options,
    )
    ids: list[int] = encoded[0]
    return ids


def _between(ids: list[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
    ids = ids[len(before) :]
    return ids[: -len(after)] if after and ids[-len(after) :] == list(after) else ids
