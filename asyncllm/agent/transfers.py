"""Transfers between host and device that nobody waits for: one copy up and one copy down a step.

On a CPU the same calls are plain copies, so that what launches steps can be tested without a GPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MAX_STEPS_IN_FLIGHT", "Transfers"]

MAX_STEPS_IN_FLIGHT = 8
"""Most steps launched and not yet read. Pinned memory is used in turn by one more step than that."""

_ALIGNMENT = 16
"""Kernels assume that every tensor begins at a multiple of this many bytes."""

_FIRST_BYTES = 2**16

_Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]

_idle_streams: defaultdict[torch.device, list[_Streams]] = defaultdict(list)
"""Pairs of streams that no engine uses. An engine takes one of them before it makes new ones, since the matrix library
keeps a workspace of 34 MB for every stream that it ever saw."""


class Transfers:
    """Two streams of a device: `stream` computes, a second one brings results to the host.

    Only the thread that launches steps calls this. An upload's pinned memory is written anew by the step
    MAX_STEPS_IN_FLIGHT + 1 later, which is launched after this one was read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._pinned: list[Tensor | None] = [None] * (MAX_STEPS_IN_FLIGHT + 1)
        """Bytes, one buffer a turn, which grow to what was asked for."""
        self._turn = 0
        self.stream: torch.cuda.Stream | None = None
        self._down_stream: torch.cuda.Stream | None = None
        if self._on_gpu:
            self.stream, self._down_stream = streams = _borrow_streams(device)
            weakref.finalize(self, _idle_streams[device].append, streams)
        self._last_download: torch.cuda.Event | None = None

    def computing(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on `stream`."""
        return torch.cuda.stream(self.stream) if self._on_gpu else nullcontext()

    def upload(self, arrays: Sequence[NDArray[Any]], into: Tensor | None = None) -> list[Tensor]:
        """Bring contiguous arrays to the device in one copy, once a step: one tensor each, of the same types.

        `into`: the bytes on the device that receive them, one after another at `offsets`; by default fresh ones.
        """
        places = offsets(arrays)
        total = places[-1]
        self._turn = (self._turn + 1) % len(self._pinned)
        pinned = self._pinned[self._turn]
        if pinned is None or pinned.shape[0] < total:
            size = max(_FIRST_BYTES, 1 << (total - 1).bit_length())
            pinned = self._pinned[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
        staged = pinned.numpy()
        for array, place in zip(arrays, places, strict=False):
            staged[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(total, dtype=torch.uint8, device=self._device)
        into[:total].copy_(pinned[:total], non_blocking=True)
        return [
            into[place : place + array.nbytes].view(_TORCH_TYPES[array.dtype.type]).view(array.shape)
            for array, place in zip(arrays, places, strict=False)
        ]

    def wait_for_downloads(self) -> None:
        """Let what is launched from now on begin after the last download: it may write what that one reads."""
        if self._last_download is not None and self.stream is not None:
            self.stream.wait_event(self._last_download)

    def download(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Bring tensors to the host once `stream` has computed them: host tensors, and the event of their arrival.

        The caller keeps `tensors` alive until then.
        """
        if self.stream is None or self._down_stream is None:
            return [tensor.clone() for tensor in tensors], None
        self._down_stream.wait_stream(self.stream)
        with torch.cuda.stream(self._down_stream):
            arriving = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrival.record()
        self._last_download = arrival
        return arriving, arrival


_TORCH_TYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


def _borrow_streams(device: torch.device) -> _Streams:
    idle = _idle_streams[device]
    if idle:
        return idle.pop()
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def offsets(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Where each array begins in an upload, in bytes, and where the last one ends."""
    places = [0]
    for array in arrays:
        places.append(-(-(places[-1] + array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places
