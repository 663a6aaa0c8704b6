"""Streams of a device, and copies between host and device that never wait.

A GPU has two streams: one computes, the other copies results to the host, and events mark their progress. An upload
goes through pinned memory and runs on the current stream: after everything launched before, and before anything
launched later. Torch reuses that memory only when the copy has run, however many steps are in flight. On a CPU, where a
launch returns when everything is computed, the same calls are plain copies.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "MAX_STEPS_IN_FLIGHT",
    "Arrival",
    "StepClock",
    "Streams",
    "fetch",
    "offsets",
    "upload",
    "upload_together",
    "views",
]

MAX_STEPS_IN_FLIGHT = 8
"""Maximum number of steps launched and not yet read."""

_ALIGNMENT = 16
"""Kernels assume that every tensor begins at a multiple of this many bytes."""

_TORCH_TYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}

_Pair = tuple[torch.cuda.Stream, torch.cuda.Stream]

_idle_streams: defaultdict[torch.device, list[_Pair]] = defaultdict(list)
"""Pairs of streams that no engine uses. An engine takes one of these before it creates new streams, because the matrix
library keeps a workspace of 34 MB for every stream it has ever seen."""


class Arrival(Protocol):
    """The arrival of results on the host: a CUDA event."""

    def synchronize(self) -> None:
        """Block until the results are there. Raises RuntimeError if the device is lost."""


class StepClock(Protocol):
    """Measures a step in device time, starting at its launch."""

    def stop(self) -> None:
        """Mark the end of the step, after everything launched so far."""

    def elapsed_ms(self) -> float:
        """Return the duration of the step in milliseconds. Call it when the step is done."""


class Streams:
    """The two streams of a device: one computes steps, the other copies results to the host.

    Called only by the thread that launches steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        """Whether a launch returns before the work is done."""
        self._kind = "cuda" if self.on_gpu else "cpu"
        self.stream: torch.cuda.Stream | None = None
        """The stream that computes; None on a CPU."""
        self._down_stream: torch.cuda.Stream | None = None
        if self.on_gpu:
            self.stream, self._down_stream = streams = _borrow_streams(device)
            weakref.finalize(self, _idle_streams[device].append, streams)
        self._last_download: torch.cuda.Event | None = None

    def computing(self) -> AbstractContextManager[Any]:
        """Run launches inside the block on `stream`."""
        return torch.cuda.stream(self.stream) if self.on_gpu else nullcontext()

    def launching(self) -> AbstractContextManager[Any]:
        """Run launches inside the block on `stream`, in inference mode, without autocast or a default device.

        A user's coroutine may be waiting inside `with torch.autocast(...)` or `with torch.device(...)`, which apply to
        the whole thread of the event loop. Usually none is.
        """
        if torch.is_autocast_enabled(self._kind) or torch._C._is_torch_function_mode_enabled():
            return self._launching_alone()
        return torch.inference_mode() if self.stream is None else self._launching()

    @contextmanager
    def _launching(self) -> Iterator[None]:
        with torch.inference_mode(), self.computing():
            yield

    @contextmanager
    def _launching_alone(self) -> Iterator[None]:
        with (
            torch._C.DisableTorchFunction(),
            torch.autocast(self._kind, enabled=False),
            self._launching(),
        ):
            yield

    def clock(self) -> StepClock:
        """Return a clock that starts with the next launch."""
        return _DeviceClock() if self.on_gpu else _HostClock()

    def wait_for_downloads(self) -> None:
        """Make `stream` wait for the last download, which reads what the next launches may overwrite."""
        if self._last_download is not None and self.stream is not None:
            self.stream.wait_event(self._last_download)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Arrival | None]:
        """Begin to copy tensors to the host, after all work on `stream`.

        Return the host tensors, and the event of their arrival, or None if they have already arrived. The caller keeps
        `tensors` alive until then.
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
        """Raise RuntimeError if the driver has an error to report. Does not wait."""
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


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor of `values` on `device`. On a CPU it shares their memory."""
    return upload_together([values], device)[0]


def upload_together(arrays: Sequence[NDArray[Any]], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Copy arrays of int32, int64, float32 or float64 to the device in one copy. Return one tensor of the same dtype
    for each.

    `into`: uint8 tensor on the device that receives the arrays at `offsets`. None allocates one, or on a CPU lets the
    tensors share the arrays' memory.
    """
    if into is None and device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    places = offsets(arrays)
    total = places[-1]
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = pinned.numpy()
    for array, place in zip(arrays, places, strict=False):
        staged[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
    if into is None:
        into = pinned.to(device, non_blocking=True)
    else:
        into[:total].copy_(pinned, non_blocking=True)
    return views(arrays, into)


def views(arrays: Sequence[NDArray[Any]], uploaded: Tensor) -> list[Tensor]:
    """Return tensors of the arrays' shapes and dtypes over `uploaded`, the uint8 tensor that `upload_together`
    fills."""
    return [
        uploaded[place : place + array.nbytes].view(_TORCH_TYPES[array.dtype.type]).view(array.shape)
        for array, place in zip(arrays, offsets(arrays), strict=False)
    ]


def offsets(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the byte offset of each array in an upload, and the end of the last one."""
    places = [0]
    for array in arrays:
        places.append(-(-(places[-1] + array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places


def fetch(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete once the current stream has reached this point. Does not wait."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _borrow_streams(device: torch.device) -> _Pair:
    idle = _idle_streams[device]
    if idle:
        return idle.pop()
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
