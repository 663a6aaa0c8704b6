"""Arrays on their way to the device, in copies that nothing waits for: everything that a step brings up goes this way.

An upload takes pinned memory, which torch lends again only once the copy out of it has run, however many steps are in
flight by then. The copy runs on the current stream: behind what was launched before, and before what is launched next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["offsets", "upload", "upload_together", "views"]

_ALIGNMENT = 16
"""Kernels assume that every tensor begins at a multiple of this many bytes."""

_TORCH_TYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return `values` on `device`. On a CPU the result shares their memory."""
    return upload_together([values], device)[0]


def upload_together(arrays: Sequence[NDArray[Any]], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Bring arrays of int32, int64, float32 or float64 to the device in one copy: one tensor each, of the same types.

    `into`: the bytes on the device that receive them, one after another at `offsets`; by default fresh ones. On a CPU
    the tensors share the arrays' memory then.
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
    """Return where in `uploaded`, bytes on the device, arrays of these shapes and types are once they are brought
    up."""
    return [
        uploaded[place : place + array.nbytes].view(_TORCH_TYPES[array.dtype.type]).view(array.shape)
        for array, place in zip(arrays, offsets(arrays), strict=False)
    ]


def offsets(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return where each array begins in an upload, in bytes, and where the last one ends."""
    places = [0]
    for array in arrays:
        places.append(-(-(places[-1] + array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return places
