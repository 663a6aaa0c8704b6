"""Tensors in memory that several processes map: written once, read by every rank, never sent."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["TensorHeader", "map_tensors", "share_tensors"]

TensorHeader = tuple[str, str, list[int]]
"""A tensor's name, dtype and shape."""

_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


def share_tensors(tensors: Mapping[str, Any]) -> tuple[int, list[TensorHeader]]:
    """Copy tensors from any device into new memory. Return its file descriptor, and the tensors' headers.

    The caller closes the descriptor; the memory is freed when no process has it open or mapped. Raises OSError if there
    is not enough memory.
    """
    import torch

    descriptor = os.memfd_create("asyncllm-weights", os.MFD_CLOEXEC)
    try:
        headers, place = [], 0
        for name, tensor in tensors.items():
            values = tensor.detach().to("cpu").contiguous()
            headers.append((name, str(values.dtype).removeprefix("torch."), list(values.shape)))
            data = memoryview(values.view(-1).view(torch.uint8).numpy()) if values.numel() else memoryview(b"")
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], place + written)
            place = _aligned(place + len(data))
        os.ftruncate(descriptor, place)
        return descriptor, headers
    except BaseException:
        os.close(descriptor)
        raise


def map_tensors(descriptor: int, headers: list[TensorHeader]) -> dict[str, Any]:
    """Return the tensors in the memory of `descriptor`, which they share. The descriptor may be closed afterwards."""
    import torch

    size = os.fstat(descriptor).st_size
    # An empty file cannot be mapped; a private mapping is writable, as torch requires.
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) if size else bytearray(0)
    tensors, place = {}, 0
    for name, dtype_name, shape in headers:
        dtype: torch.dtype = getattr(torch, dtype_name)
        count = 1
        for length in shape:
            count *= length
        if count:
            tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=dtype)
        place = _aligned(place + count * dtype.itemsize)
    return tensors


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
