"""Several prompts in one call: waits for their Generations in order, or yields chunks as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from asyncllm.engine.requests.generation import Generation
from asyncllm.errors import RequestFailed
from asyncllm.types import Chunk, Response

__all__ = ["interleave", "responses_of"]


async def responses_of(
    generations: Sequence[Generation], starting_order: Iterable[int], on_response: Callable[[Response], None] | None
) -> list[Response]:
    """Return the answers in the order of `generations`, which start in another. A request that fails inside a step, or
    at its deadline, gives a Response with finish_reason 'error', and the others go on; bad input ends them all."""
    responses = []
    try:
        for index in starting_order:
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


async def interleave(generations: Sequence[Generation]) -> AsyncIterator[Chunk]:
    """Yield the chunks of several answers as they come. Closing it early ends them all."""
    news = asyncio.Event()
    try:
        for generation in generations:
            generation.listen(news.set)
            await generation.start()
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        open_ones = list(generations)
        while open_ones:
            news.clear()
            for generation in list(open_ones):
                # A request that failed inside a step has said so in its last chunk; the others go on.
                with contextlib.suppress(RequestFailed):
                    while (chunk := generation.poll()) is not None:
                        yield chunk
                if generation.ended:
                    open_ones.remove(generation)
            if open_ones:
                await news.wait()
    finally:
        for generation in generations:
            generation.cancel()
