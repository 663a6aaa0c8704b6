"""RankGroup: the ranks that compute one model together, and what they say to each other in the midst of a step."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.peer_memory import PeerMemory

__all__ = ["Meeting", "RankGroup", "TorchGroup", "heads_of", "rows_of", "tokens_of"]

_PATIENCE = timedelta(seconds=120)
"""For the others at the start, when each reads its part of the weights."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The first name is newer than the oldest torch that is supported."""


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

    def expect_sums(self, rows: int, row_bytes: int, *, alike: bool = False) -> None:
        """Make ready for sums of up to so many rows. To be called once, before the first sum. `alike`: a row's sum is
        the same whatever other rows there are."""

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x, in x's memory."""

    def add_up_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return what `kernels.add_rms_norm` makes of `add_up`, and leave anything in x."""

    def collect(self, x: Tensor) -> Tensor:
        """Return every rank's x, of equal shape on all: [size, *x.shape]."""

    def exchange(self, x: Tensor) -> Tensor:
        """x [size, ...], of equal shape on all ranks: what this one has for each -> what each has for this one."""

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values."""


def rows_of(group: RankGroup, num_rows: int) -> slice:
    """Return which of `num_rows` rows the group's rank takes where they are divided: as many as every other one, of
    which the last ranks' may be beyond the end."""
    each = -(-num_rows // group.size)
    return slice(group.rank * each, (group.rank + 1) * each)


def heads_of(group: RankGroup, num_heads: int) -> slice:
    """Return which of `num_heads` heads the group's rank has: as many as every other one, and where there are fewer
    than ranks, one that several have."""
    copies, each = max(group.size // num_heads, 1), max(num_heads // group.size, 1)
    return slice(group.rank // copies * each, (group.rank // copies + 1) * each)


_TOKENS_TOGETHER = 8
"""Rows of 16-bit logits begin at multiples of 16 bytes, and noise comes for four tokens at a time."""


def tokens_of(group: RankGroup, vocab_size: int) -> slice:
    """Return which tokens of a vocabulary the group's rank has logits of: as many as every other one, of which the last
    ranks' may be beyond the end."""
    each = -(-vocab_size // (_TOKENS_TOGETHER * group.size)) * _TOKENS_TOGETHER
    return slice(group.rank * each, (group.rank + 1) * each)


class TorchGroup:
    """The group of this process, by torch.distributed: NCCL between GPUs, gloo on CPUs. Where GPUs can map each
    other's memory, sums go through a kernel of our own instead.

    Of NCCL there is one communicator, made here and bound to the device, and all calls come from the stream that
    computes steps. What CUDA graphs capture has been called once outside of them, which sets connections up, and the
    graphs are gone before `close`. A rank that waits for one that is dead is ended by the engine (`ranks.executor`).
    """

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Wait for the others. Raises RuntimeError when they do not come."""
        self.rank, self.size = meeting.rank, meeting.size
        self._device = device
        self.peers: PeerMemory | None = None
        """What sums go through if it takes them."""
        if device.type == "cuda":
            # A device without a number is the current one; the communicator wants it spelled out.
            device = torch.device("cuda", torch.cuda.current_device())
        store = dist.FileStore(meeting.file, meeting.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=_PATIENCE,
            # By its index, which a rank's device has none of: it sees one alone.
            device_id=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None,
        )

    def expect_sums(self, rows: int, row_bytes: int, *, alike: bool = False) -> None:
        if self._device.type == "cuda":
            self.peers = PeerMemory.open(
                rows, row_bytes, torch.device("cuda", torch.cuda.current_device()), always=alike
            )

    def add_up(self, x: Tensor) -> Tensor:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.add_up(x)
        dist.all_reduce(x)
        return x

    def add_up_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.add_up_rms_norm(x, residual, weight, eps)
        return kernels.add_rms_norm(self.add_up(x), residual, weight, eps)

    def collect(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        _all_gather(whole.view(self.size * x.shape[0], *x.shape[1:]), x.contiguous())
        return whole

    def exchange(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    def least(self, value: int) -> int:
        agreed = torch.tensor(value, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return int(agreed.item())

    def close(self) -> None:
        """Leave the group. No call is under way."""
        self.peers = None
        dist.destroy_process_group()
