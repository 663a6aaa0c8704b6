"""What is remembered of a request beside its answer: when it got how far, told to observers at its end."""

from __future__ import annotations

import time

import msgspec

from asyncllm.types import FinishReason

__all__ = ["RequestRecord", "RequestTimes"]


class RequestTimes:
    """When a request got how far, in seconds of `time.monotonic`; an event loop's own may be as coarse as 1 ms."""

    __slots__ = ("admitted", "arrived", "prefilled", "queued")

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        """When somebody first awaited it, before its prompt was encoded. Written by the generation."""
        self.queued = self.arrived
        """When it entered the queue. Written by the loop, as are the rest."""
        self.admitted: float | None = None
        """When its first sequence first got a row."""
        self.prefilled: float | None = None
        """When the step that computed the last of its prompt was read, which gave the first token if one was wanted."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended. Times are those of RequestTimes."""

    prompt_tokens: int
    """History included."""
    cached_tokens: int
    """Those of them that the prefix cache had."""
    generated_tokens: int
    """Of all its answers."""
    longest_answer: int
    """Tokens of the longest of them."""
    finish_reasons: tuple[FinishReason, ...]
    """One for each answer."""
    arrived: float
    queued: float
    admitted: float | None
    """None: it ended in the queue."""
    prefilled: float | None
    """None: it ended before its first token."""
    ended: float
