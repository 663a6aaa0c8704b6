"""RankGroup: the ranks that compute one model together, and what they say to each other in the midst of a step."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Meeting", "RankGroup", "TorchGroup"]

_PATIENCE = timedelta(seconds=120)
"""For the others at the start, when each reads its part of the weights."""


class Meeting(NamedTuple):
    """Where ranks find each other."""

    rank: int
    size: int
    file: str
    """The same empty file for all."""


class RankGroup(Protocol):
    """Ranks 0 to `size` - 1. Every rank makes the same calls in the same order; the results have equal bits on all."""

    rank: int
    size: int

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, in x's memory."""

    def join(self, x: Tensor) -> Tensor:
        """x [..., n], of equal shape on all ranks -> [..., size * n], in the order of the ranks."""

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values."""


class TorchGroup:
    """The group of this process, by torch.distributed: NCCL between GPUs, gloo on CPUs."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Wait for the others. Raises RuntimeError when they do not come."""
        self.rank, self.size = meeting.rank, meeting.size
        self._device = device
        store = dist.FileStore(meeting.file, meeting.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=_PATIENCE,
            device_id=device if device.type == "cuda" else None,
        )

    def add_up(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        agreed = torch.tensor(value, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return int(agreed.item())

    def close(self) -> None:
        """Leave the group. No call is under way."""
        dist.destroy_process_group()
