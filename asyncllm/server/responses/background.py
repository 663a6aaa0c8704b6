"""Background responses: computed whether or not a client waits, and read and cancelled by their ids.

A finished response moves to `ResponseStore`, with its events if it is streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError, as_api_error, retry_after
from asyncllm.server.responses.event_log import EventLog
from asyncllm.types import Chunk

__all__ = ["BackgroundResponse", "BackgroundResponses"]

MAX_OPEN = 64
"""Maximum number of background responses in progress."""


class Answer(Protocol):
    """Builds a response from its chunks."""

    def began(self) -> list[bytes]: ...

    def took(self, chunk: Chunk) -> list[bytes]: ...

    def ended(self) -> list[bytes]: ...

    def cancelled(self) -> list[bytes]: ...

    def broke(self, error: ApiError) -> list[bytes]: ...

    def body(self) -> dict[str, Any]:
        """Return the response in its current state."""


class BackgroundResponse:
    """One response in progress, in a task of its own."""

    def __init__(self, answer: Answer, log: EventLog | None, input_items: list[dict[str, Any]]) -> None:
        """`log`: None if the response is not streamed."""
        self.log = log
        self.input_items = input_items
        self._answer = answer
        self._task: asyncio.Task[None] | None = None
        self._note(answer.began())

    def begin(self, generation: Generation, work: AbstractContextManager[None], over: Callable[[], None]) -> None:
        """Compute the response, as part of the server's `work`. Call `over` when it ends."""
        name = "asyncllm-background-response"
        self._task = asyncio.get_running_loop().create_task(self._run(generation, work, over), name=name)

    async def _run(self, generation: Generation, work: AbstractContextManager[None], over: Callable[[], None]) -> None:
        with work:
            try:
                async for chunk in generation:
                    self._note(self._answer.took(chunk))
                last = self._answer.ended()
            except asyncio.CancelledError:
                last = self._answer.cancelled()
            except Exception as error:
                last = self._answer.broke(as_api_error(error, "input"))
                error.__traceback__ = None
            finally:
                generation.cancel()
        self._note(last)
        if self.log is not None:
            self.log.end()
        over()

    def _note(self, events: list[bytes]) -> None:
        if self.log is not None:
            self.log.add(events)

    @property
    def body(self) -> dict[str, Any]:
        return self._answer.body()

    async def cancel(self) -> None:
        """Stop the response and wait until that is recorded. Its task has started, since clients learn the id only
        then."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


class BackgroundResponses:
    """The responses in progress, by key and id. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], BackgroundResponse] = {}

    def check_room(self) -> None:
        """Raise ApiError 429 if too many are in progress."""
        if len(self._open) >= MAX_OPEN:
            raise ApiError(
                429,
                f"{MAX_OPEN} background responses are in progress, the server's maximum. Try again later.",
                code="too_many_requests",
                headers=retry_after(5),
            )

    def begin(
        self, key: int, job: BackgroundResponse, generation: Generation, work: AbstractContextManager[None]
    ) -> None:
        """Start computing a response. Raises ApiError as `check_room` does."""
        self.check_room()
        place = key, job.body["id"]
        self._open[place] = job
        job.begin(generation, work, lambda: self._forget(place))

    def _forget(self, place: tuple[int, str]) -> None:
        del self._open[place]

    def find(self, key: int, response_id: str) -> BackgroundResponse | None:
        """Return the response in progress under this id, if any."""
        return self._open.get((key, response_id))

    def check_over(self, key: int, response_id: str, param: str) -> None:
        """Raise ApiError 400 if the response is still in progress."""
        if (key, response_id) in self._open:
            raise ApiError(
                400,
                f"The response {response_id!r} is not finished. Ask for it until its status is completed.",
                code="response_not_completed",
                param=param,
            )
