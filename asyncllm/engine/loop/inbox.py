"""Inbox: messages from callers, readers and timers to the engine's next turn."""

from __future__ import annotations

from collections import deque
from itertools import islice

from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request
from asyncllm.event_loop.request_gate import RequestGate

__all__ = ["MAX_PUT_OFF", "Inbox"]

MAX_PUT_OFF = 8
"""How many event-loop iterations an idle engine waits for the rest of a burst; each iteration admits 16 prompts."""


class Inbox:
    """Requests that have arrived, been abandoned or expired since the last turn. Each turn empties the inbox."""

    def __init__(self, scheduler: Scheduler, bounds: Backpressure, gate: RequestGate) -> None:
        """`gate`: the RequestGate that prompts pass on their way here."""
        self._scheduler = scheduler
        self._bounds = bounds
        self.gate = gate
        self.arrived: deque[Request] = deque()
        """New requests. Written by `EngineLoop.open`."""
        self.arrived_tokens = 0
        """Prompt tokens of the new requests."""
        self.abandoned: deque[Request] = deque()
        """Requests whose reader has left. Written by `EngineLoop.abandon`."""
        self.overdue: deque[Request] = deque()
        """Requests whose deadline has passed. Written by the timers."""
        self._put_off = 0
        """How many times in a row a turn has been put off."""

    @property
    def num_refused(self) -> int:
        """Requests that were refused because the queue was full."""
        return self._bounds.num_refused

    def put(self, request: Request) -> None:
        """Add a new request."""
        self.arrived.append(request)
        self.arrived_tokens += len(request.prompt_ids)

    def take_arrived(self, *, ended: bool) -> list[Request]:
        """Remove and return the new requests; with `ended` those alone that have been abandoned or expired."""
        ending = {*self.abandoned, *self.overdue}
        taken = [request for request in self.arrived if not ended or request in ending]
        self.arrived = deque(request for request in self.arrived if ended and request not in ending)
        self.arrived_tokens = sum(len(request.prompt_ids) for request in self.arrived)
        return taken

    def clear(self) -> None:
        """Drop everything."""
        self.arrived_tokens = 0
        for messages in (self.arrived, self.abandoned, self.overdue):
            messages.clear()

    def num_queued(self, *, hold: bool) -> tuple[int, int]:
        """Return the number of requests that wait for a row, and of their tokens, not counting those that the next turn
        can admit. `hold`: it can admit none."""
        waiting = self._scheduler.waiting
        served = 0 if waiting or hold else min(self._scheduler.num_free_rows, len(self.arrived))
        served_tokens = sum(len(request.prompt_ids) for request in islice(self.arrived, served))
        requests = waiting.num_requests + len(self.arrived) - served
        return requests, waiting.num_tokens + self.arrived_tokens - served_tokens

    def check_queue(self, request: Request, now: float, *, hold: bool) -> None:
        """Raise QueueFull if the queue is full for a new request. `hold`: see `num_queued`."""
        if self._bounds.bounded and not self._has_own_share(request):
            requests, tokens = self.num_queued(hold=hold)
            self._bounds.check(requests, tokens, len(request.prompt_ids), now)

    def _has_own_share(self, request: Request) -> bool:
        """Return whether the user's waiting requests fill less than the user's share of the queue. A user with many
        requests can thus fill the remainder, but not the share of other users."""
        user = request.policy.user
        if user is None:
            return False
        arrived = [len(other.prompt_ids) for other in self.arrived if other.policy.user is user]
        requests, tokens = user.queued_requests + len(arrived), user.queued_tokens + sum(arrived)
        return self._bounds.has_room(user.quota / 100, requests, tokens, len(request.prompt_ids))

    def waits_for_burst(self, *, idle: bool) -> bool:
        """Return whether an idle engine should put off its turn for prompts that are at the gate, and count the delay.
        A prompt that misses the first step of a burst would wait for that whole step."""
        waits = idle and self.gate.in_use and self._put_off < MAX_PUT_OFF
        waits = waits and 0 < len(self.arrived) < self._scheduler.num_free_rows
        self._put_off = self._put_off + 1 if waits else 0
        return waits
