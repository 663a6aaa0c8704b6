"""Several prompts in one call: wait for their Generations in order, or yield their chunks as they arrive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from asyncllm.engine.requests.generation import Generation
from asyncllm.errors import ContextLengthExceeded, DeadlineExceeded, InvalidMessage, RequestFailed
from asyncllm.types import Chunk, ErrorCode, Response

__all__ = ["interleave", "responses_of"]

PROMPT_ERRORS = (ContextLengthExceeded, InvalidMessage, RequestFailed)
"""Errors of a single prompt, which do not end the others."""


async def responses_of(
    generations: Sequence[Generation],
    starting_order: Iterable[int],
    on_response: Callable[[Response], None] | None,
    *,
    single: bool,
) -> list[Response]:
    """Return the answers in the order of `generations`, which may start in a different order. A request that fails
    alone produces a Response with finish_reason 'error', and the others continue; any other error ends them all, and
    with `single` so does an error of the prompt."""
    responses = []
    failures: dict[int, Chunk] = {}
    try:
        for index in starting_order:
            try:
                await generations[index].start()
            except PROMPT_ERRORS as error:
                if single:
                    raise
                failures[index] = failure(index, error)
            await asyncio.sleep(0)  # Many prompts must not block the event loop.
        for index, generation in enumerate(generations):
            if index in failures:
                response = Response.collect([failures[index]])
            else:
                try:
                    response = await generation.response()
                except RequestFailed as error:
                    response = Response.collect([failure(index, error)])
            responses.append(response)
            if on_response is not None:
                on_response(response)
    finally:
        for generation in generations:
            generation.cancel()
    return responses


async def interleave(generations: Sequence[Generation], *, single: bool) -> AsyncIterator[Chunk]:
    """Yield the chunks of several answers as they arrive. A request that fails alone ends with a chunk of finish_reason
    'error', or raises with `single`. Closing the iterator early ends all requests."""
    news = asyncio.Event()
    failures: list[Chunk] = []
    open_ones = []
    try:
        for index, generation in enumerate(generations):
            generation.listen(news.set)
            try:
                await generation.start()
            except PROMPT_ERRORS as error:
                if single:
                    raise
                failures.append(failure(index, error))
            else:
                open_ones.append(generation)
            await asyncio.sleep(0)  # Many prompts must not block the event loop.
        for chunk in failures:
            yield chunk
        while open_ones:
            news.clear()
            for generation in list(open_ones):
                # A request that failed inside a step has reported it in its last chunk; the others continue.
                with contextlib.suppress(RequestFailed):
                    while (found := generation.poll()) is not None:
                        yield found
                if generation.ended:
                    open_ones.remove(generation)
            if open_ones:
                await news.wait()
    finally:
        for generation in generations:
            generation.cancel()


def failure(index: int, error: Exception) -> Chunk:
    """Return the only chunk of a request that failed alone."""
    code: ErrorCode = "invalid_request"
    match error:
        case ContextLengthExceeded():
            code = "context_length_exceeded"
        case DeadlineExceeded():
            code = "deadline_exceeded"
        case RequestFailed():
            code = "internal_error"
    return Chunk(finish_reason="error", error_code=code, error_message=str(error), index=index)
