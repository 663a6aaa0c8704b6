"""Several prompts in one call: a Generation for each, and the wait for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncllm.config import GenerationConfig
from asyncllm.engine.generation import Generation
from asyncllm.engine.prompts import is_token_ids
from asyncllm.errors import RequestFailed
from asyncllm.types import Response

__all__ = ["generations_of", "responses_of"]


def generations_of(
    generate: Callable[..., Generation], pairs: Sequence[tuple[Any, GenerationConfig | None]], **arguments: Any
) -> list[Generation]:
    """One Generation per (prompt, config), not started. `generate`: `AsyncEngine.generate`, with its `arguments`."""
    generations = []
    for index, (prompt, config) in enumerate(pairs):
        ids = prompt if is_token_ids(prompt) else None
        generation = generate(None if ids is not None else prompt, config, input_ids=ids, **arguments)
        generation.index = index
        generations.append(generation)
    return generations


async def responses_of(
    generations: Sequence[Generation], admission_order: Iterable[int], on_response: Callable[[Response], None] | None
) -> list[Response]:
    """The answers in the order of `generations`, which are admitted in another. A request that fails inside a step, or
    at its deadline, gives a Response with finish_reason 'error', and the others go on; bad input ends them all."""
    responses = []
    try:
        for index in admission_order:
            await generations[index].start()
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        for index, generation in enumerate(generations):
            try:
                response = await generation.response()
            except RequestFailed as error:
                response = Response(finish_reason="error", error_message=str(error), index=index)
            responses.append(response)
            if on_response is not None:
                on_response(response)
    finally:
        for generation in generations:
            generation.cancel()
    return responses
