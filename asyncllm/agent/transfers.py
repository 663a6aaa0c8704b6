"""The streams of a device: one computes, another brings results to the host.

On a CPU the same calls are plain copies, so that what launches steps can be tested without a GPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["MAX_STEPS_IN_FLIGHT", "Transfers", "fetch"]

MAX_STEPS_IN_FLIGHT = 8
"""Most steps launched and not yet read."""

_Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]

_idle_streams: defaultdict[torch.device, list[_Streams]] = defaultdict(list)
"""Pairs of streams that no engine uses. An engine takes one of them before it makes new ones, since the matrix library
keeps a workspace of 34 MB for every stream that it ever saw."""


class Transfers:
    """Two streams of a device: `stream` computes, a second one brings results to the host.

    Only the thread that launches steps calls this.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = None
        self._down_stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            self.stream, self._down_stream = streams = _borrow_streams(device)
            weakref.finalize(self, _idle_streams[device].append, streams)
        self._last_download: torch.cuda.Event | None = None

    def computing(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on `stream`."""
        return torch.cuda.stream(self.stream) if self._on_gpu else nullcontext()

    def wait_for_downloads(self) -> None:
        """Let what is launched from now on begin after the last download: it may write what that one reads."""
        if self._last_download is not None and self.stream is not None:
            self.stream.wait_event(self._last_download)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Bring tensors to the host once `stream` has computed them: host tensors, and the event of their arrival.

        The caller keeps `tensors` alive until then.
        """
        if self.stream is None or self._down_stream is None:
            return [fetch(tensor) for tensor in tensors], None
        self._down_stream.wait_stream(self.stream)
        with torch.cuda.stream(self._down_stream):
            arriving = [fetch(tensor) for tensor in tensors]
            arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrival.record()
        self._last_download = arrival
        return arriving, arrival


def fetch(tensor: Tensor) -> Tensor:
    """A copy on the host, which is there when the current stream has come so far; nobody waits for it here."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _borrow_streams(device: torch.device) -> _Streams:
    idle = _idle_streams[device]
    if idle:
        return idle.pop()
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
