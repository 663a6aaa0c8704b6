"""What differs between a GPU, where a launch returns at once, and a CPU, where it returns when all is computed.

A GPU has two streams: one computes, another brings results to the host, and events tell how far they are. On a CPU the
same calls are plain copies that are there at once.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["MAX_STEPS_IN_FLIGHT", "Arrival", "StepClock", "Streams", "fetch"]

MAX_STEPS_IN_FLIGHT = 8
"""Most steps launched and not yet read."""

_Pair = tuple[torch.cuda.Stream, torch.cuda.Stream]

_idle_streams: defaultdict[torch.device, list[_Pair]] = defaultdict(list)
"""Pairs of streams that no engine uses. An engine takes one of them before it makes new ones, since the matrix library
keeps a workspace of 34 MB for every stream that it ever saw."""


class Arrival(Protocol):
    """The event of results that arrive on the host."""

    def synchronize(self) -> None:
        """Block until it has happened. Raises RuntimeError when the device is lost."""


class StepClock(Protocol):
    """Runs from the launch of a step on, in the device's own time."""

    def stop(self) -> None:
        """Mark the end of the step: all that has been launched so far."""

    def elapsed_ms(self) -> float:
        """Return how long the step took. To be called when it is over."""


class Streams:
    """Two streams of a device: `computing` is where steps run, a second one brings results to the host.

    Only the thread that launches steps calls this.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        """Whether work goes on when a launch has returned."""
        self.stream: torch.cuda.Stream | None = None
        """What computes; None on a CPU."""
        self._down_stream: torch.cuda.Stream | None = None
        if self.on_gpu:
            self.stream, self._down_stream = streams = _borrow_streams(device)
            weakref.finalize(self, _idle_streams[device].append, streams)
        self._last_download: torch.cuda.Event | None = None

    def computing(self) -> AbstractContextManager[Any]:
        """Run on `stream` what is launched inside."""
        return torch.cuda.stream(self.stream) if self.on_gpu else nullcontext()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Run on `stream` what is launched inside, in inference mode, without autocast or a default device.

        A coroutine may wait for its answer inside `with torch.autocast(...)` or `with torch.device(...)`, which then
        hold for all that runs in the event loop's thread meanwhile. This takes 5 us.
        """
        with (
            torch.inference_mode(),
            torch._C.DisableTorchFunction(),
            torch.autocast("cuda" if self.on_gpu else "cpu", enabled=False),
            self.computing(),
        ):
            yield

    def clock(self) -> StepClock:
        """Return a clock that starts with what is launched next."""
        return _DeviceClock() if self.on_gpu else _HostClock()

    def wait_for_downloads(self) -> None:
        """Let what is launched from now on begin after the last download: it may write what that one reads."""
        if self._last_download is not None and self.stream is not None:
            self.stream.wait_event(self._last_download)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Arrival | None]:
        """Bring tensors to the host once `stream` has computed them: host tensors, and the event of their arrival, or
        None if they are there.

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

    def check(self) -> None:
        """Raise RuntimeError if the driver has an error to report; wait for nothing."""
        if self.stream is not None:
            self.stream.query()


class _HostClock:
    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def elapsed_ms(self) -> float:
        return (self._ended - self._began) * 1e3


class _DeviceClock:
    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def elapsed_ms(self) -> float:
        return float(self._began.elapsed_time(self._ended))


def fetch(tensor: Tensor) -> Tensor:
    """Return a copy on the host, which is there once the current stream has come so far, without waiting for it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _borrow_streams(device: torch.device) -> _Pair:
    idle = _idle_streams[device]
    if idle:
        return idle.pop()
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
