"""Small arrays on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["upload"]


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` on `device`, without waiting for what runs there. On a CPU the result may share their memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # Torch lends this pinned memory again only after the copy has run.
    return tensor.pin_memory().to(device, non_blocking=True)
