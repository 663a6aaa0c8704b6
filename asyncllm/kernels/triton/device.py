"""Properties of the GPU that determine which kernels a launcher uses."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["MEASURED", "is_hopper", "table_name"]

MEASURED = "NVIDIA H200"
"""The GPU on which the tables of tile sizes were measured."""

_PROCESSORS = 132
"""Its multiprocessors."""


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def table_name(device: torch.device) -> str:
    """Return the device's key in tables of tile sizes; "" for a CPU.

    An H100 SXM and a GH200 have the H200's chip with other memory, and use its tables.
    """
    if is_hopper(device) and torch.cuda.get_device_properties(device).multi_processor_count == _PROCESSORS:
        return MEASURED
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
