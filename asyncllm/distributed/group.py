"""RankGroup: the ranks that compute one model together, and the collective operations of their steps."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.peer_memory import PeerMemory

__all__ = ["RankGroup", "Rendezvous", "TorchGroup", "heads_of", "rows_of", "tokens_of"]

_TIMEOUT = timedelta(seconds=120)
"""How long to wait for the others at the start, while each reads its share of the weights."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The first name is newer than the oldest supported torch."""


class Rendezvous(NamedTuple):
    """How ranks find each other: this rank, the number of ranks, and the file through which they meet."""

    rank: int
    size: int
    file: str
    """An empty file, the same for all."""


class RankGroup(Protocol):
    """Ranks 0 to `size` - 1. Every rank makes the same calls in the same order; the results are bitwise equal on
    all."""

    rank: int
    size: int

    def prepare_sums(self, rows: int, row_bytes: int, *, batch_invariant: bool = False) -> None:
        """Prepare for sums of up to `rows` rows. Call this once, before the first sum. `batch_invariant`: a row's sum
        must not depend on the other rows."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, in x's memory."""

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Apply `kernels.add_rms_norm` to the sum of the ranks' x. x may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, of equal shape on all ranks: [size, *x.shape]."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return what every rank sends to this one [size, ...]. `x[r]` is what this rank sends to rank r, of equal
        shape on all ranks."""

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest of the ranks' values."""


def rows_of(group: RankGroup, num_rows: int) -> slice:
    """Return the slice of `num_rows` rows that the group's rank owns. All ranks own equally many; rows of the last
    ranks may be beyond the end."""
    each = -(-num_rows // group.size)
    return slice(group.rank * each, (group.rank + 1) * each)


def heads_of(group: RankGroup, num_heads: int) -> slice:
    """Return the slice of `num_heads` heads that the group's rank has. All ranks have equally many; if there are fewer
    heads than ranks, several ranks have the same one."""
    copies, each = max(group.size // num_heads, 1), max(num_heads // group.size, 1)
    return slice(group.rank // copies * each, (group.rank // copies + 1) * each)


_TOKENS_TOGETHER = 8
"""A rank's slice is a multiple of this many tokens, because rows of 16-bit logits begin at multiples of 16 bytes, and
noise is generated for four tokens at a time."""


def tokens_of(group: RankGroup, vocab_size: int) -> slice:
    """Return the slice of a vocabulary for which the group's rank has logits. All ranks have equally many tokens; those
    of the last ranks may be beyond the end."""
    each = -(-vocab_size // (_TOKENS_TOGETHER * group.size)) * _TOKENS_TOGETHER
    return slice(group.rank * each, (group.rank + 1) * each)


class TorchGroup:
    """The group of this process, through torch.distributed: NCCL between GPUs, gloo on CPUs. If GPUs can map each
    other's memory, sums use our own kernel instead.

    There is one NCCL communicator, created here and bound to the device, and all calls come from the stream that
    computes steps. Everything captured in CUDA graphs has been called once before, which sets up connections, and the
    graphs are gone before `close`. A rank that waits for a dead one is ended by the engine (`ranks.executor`).
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Wait for the other ranks. Raises RuntimeError if they do not appear."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._device = device
        self.peers: PeerMemory | None = None
        """Computes the sums that it supports."""
        if device.type == "cuda":
            # A device without an index is the current one, but the communicator needs an explicit index.
            device = torch.device("cuda", torch.cuda.current_device())
        store = dist.FileStore(rendezvous.file, rendezvous.size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )

    def prepare_sums(self, rows: int, row_bytes: int, *, batch_invariant: bool = False) -> None:
        if self._device.type == "cuda":
            self.peers = PeerMemory.open(
                rows, row_bytes, torch.device("cuda", torch.cuda.current_device()), always=batch_invariant
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce(x)
        dist.all_reduce(x)
        return x

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce_rms_norm(x, residual, weight, eps)
        return kernels.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        whole = x.new_empty(self.size, *x.shape)
        _all_gather(whole.view(self.size * x.shape[0], *x.shape[1:]), x.contiguous())
        return whole

    def all_to_all(self, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    def all_reduce_min(self, value: int) -> int:
        agreed = torch.tensor(value, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        return int(agreed.item())

    def close(self) -> None:
        """Leave the group. No call is under way."""
        self.peers = None
        dist.destroy_process_group()
