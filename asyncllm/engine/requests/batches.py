"""Several prompts in one call: waits for their Generations in order, or yields chunks as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from asyncllm.engine.requests.generation import Generation
from asyncllm.errors import ContextLengthExceeded, DeadlineExceeded, InvalidMessage, RequestFailed
from asyncllm.types import Chunk, ErrorCode, Response

__all__ = ["interleave", "responses_of"]

ALONE = (ContextLengthExceeded, InvalidMessage, RequestFailed)
"""Errors of a prompt's own."""


async def responses_of(
    generations: Sequence[Generation],
    starting_order: Iterable[int],
    on_response: Callable[[Response], None] | None,
    *,
    single: bool,
) -> list[Response]:
    """Return the answers in the order of `generations`, which start in another. A request that fails alone gives a
    Response with finish_reason 'error', and the others go on; any other error ends them all, and with `single` one of
    the prompt."""
    responses = []
    failures: dict[int, Chunk] = {}
    try:
        for index in starting_order:
            try:
                await generations[index].start()
            except ALONE as error:
                if single:
                    raise
                failures[index] = failure(index, error)
            await asyncio.sleep(0)  # many prompts do not hold up the loop
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
    """Yield the chunks of several answers as they come. A request that fails alone ends with a chunk with
    finish_reason 'error', or raises with `single`. Closing it early ends them all."""
    news = asyncio.Event()
    failures: list[Chunk] = []
    open_ones = []
    try:
        for index, generation in enumerate(generations):
            generation.listen(news.set)
            try:
                await generation.start()
            except ALONE as error:
                if single:
                    raise
                failures.append(failure(index, error))
            else:
                open_ones.append(generation)
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        for chunk in failures:
            yield chunk
        while open_ones:
            news.clear()
            for generation in list(open_ones):
                # A request that failed inside a step has said so in its last chunk; the others go on.
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
