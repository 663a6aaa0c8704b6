"""Chunk events by template: what all chunks of an answer share is encoded once, so that a token costs one string."""

from __future__ import annotations

import time
import uuid

from asyncllm.server.encode import encode
from asyncllm.server.requests import Sampled
from asyncllm.server.responses import Usage

__all__ = ["Answering", "Tail"]


class Answering:
    """Names one answer to one request: its id, its time, its model."""

    def __init__(self, prefix: str, model: str, request_id: str | None) -> None:
        self.id = prefix + (request_id or uuid.uuid4().hex)
        self.created = int(time.time())
        """Seconds since 1970."""
        self.model = model

    def head(self, kind: str) -> bytes:
        """The beginning of every event of a stream, up to the choices' list."""
        fields = encode({"id": self.id, "object": kind, "created": self.created, "model": self.model})
        return b"data: " + fields[:-1] + b',"choices":['


class Tail:
    """The end of every event: the usage, as `stream_options` has it."""

    def __init__(self, body: Sampled) -> None:
        options = body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous = bool(options and options.continuous_usage_stats)
        self.plain = b'],"usage":null}\n\n' if self.includes_usage else b"]}\n\n"

    def of(self, usage: Usage) -> bytes:
        """The end of an event that carries the usage."""
        return b'],"usage":' + encode(usage) + b"}\n\n"
