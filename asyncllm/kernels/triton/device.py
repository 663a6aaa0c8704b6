"""Which GPU a launcher runs on, where that decides which kernel it takes."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["MEASURED", "is_hopper", "table_name"]

MEASURED = "NVIDIA H200"
"""The GPU that the tables of tile sizes were measured on."""

_PROCESSORS = 132
"""Its multiprocessors."""


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def table_name(device: torch.device) -> str:
    """Return the name under which tables of tile sizes have the device; "" for a CPU.

    An H100 SXM and a GH200 have the H200's chip with other memory, and take its tables.
    """
    if is_hopper(device) and torch.cuda.get_device_properties(device).multi_processor_count == _PROCESSORS:
        return MEASURED
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
