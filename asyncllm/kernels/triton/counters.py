"""Counters with which the blocks of one launch coordinate: int32, zero before and after a launch.

Kernels that follow one another on a stream share their counters. Two streams, such as those of two engines in one
process, do not, because their kernels run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["NUM_COUNTERS", "zero_counters"]

NUM_COUNTERS = 8192

_STREAMS_AT_ONCE = 32
"""Streams whose counters are allocated together, so that a stream first used while it captures a graph already has
some: memory allocated during a capture is not zeroed before the graph runs."""

_current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_by_stream: dict[tuple[torch.device, int], Tensor] = {}
"""Grows with the number of streams in the process, of which torch's pool has at most 64 per device."""

_spare: dict[torch.device, list[Tensor]] = {}


def zero_counters(device: torch.device) -> Tensor:
    """Return int32 [NUM_COUNTERS] for the device's current stream. A graph uses those of the stream that captured it.

    Raises RuntimeError if the first call on a device is made during a capture.
    """
    stream = _current_stream(device.index) if device.type == "cuda" and _current_stream is not None else 0
    found = _by_stream.get((device, stream))
    if found is None:
        found = _by_stream[device, stream] = _take(device)
    return found


def _take(device: torch.device) -> Tensor:
    spare = _spare.setdefault(device, [])
    if not spare:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "There are no counters for this stream yet, and a capture cannot make them. Launch the kernel once "
                "before capturing it."
            )
        zeros = torch.zeros(_STREAMS_AT_ONCE, NUM_COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            # Other streams get theirs without waiting for this one.
            torch.cuda.current_stream(device).synchronize()
        spare.extend(zeros)
    return spare.pop()
