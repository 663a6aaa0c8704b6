"""GPU memory that the other ranks map as well, for sums by our own kernel (`kernels.triton.rank_sum`)."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncllm import kernels

if TYPE_CHECKING:
    from asyncllm.kernels.triton.rank_sum import Mailbox

__all__ = ["SWITCH", "PeerMemory", "max_rows"]

logger = logging.getLogger("asyncllm.ranks")

SWITCH = "ASYNCLLM_PEER_MEMORY"
"""If set to 0 in the environment, all sums go through NCCL."""

_MAX_MAILBOX_BYTES = 256 * 2**20
"""Maximum size of a rank's mailbox: with two ranks 16,384 rows of 8 KB."""

_MAX_SUM_BYTES = {3: 16 * 2**20, 4: 4 * 2**20}
_MAX_SUM_BYTES_OF_MORE = 2**20
"""By number of ranks, the largest sum, in bytes, that is faster than NCCL's. Each rank sends everything to every other
one, unlike NCCL, which however takes 20 us longer to begin. With two ranks there is no limit, as measured on H200s; the
others are derived from 371 GB/s per link and NCCL's figures for eight ranks, and are not measured."""


def max_rows(ranks: int, rows: int, row_bytes: int, *, always: bool) -> int:
    """Return the number of rows, up to `rows`, that are worth allocating memory for. `always`: even for sums that are
    not faster this way."""
    if ranks > 2 and not always:
        rows = min(rows, _MAX_SUM_BYTES.get(ranks, _MAX_SUM_BYTES_OF_MORE) // row_bytes)
    return max(1, rows)


class PeerMemory:
    """A rank's mailbox, and the rules for its use."""

    def __init__(self, mailbox: Mailbox, *, always: bool, mapping: Any = None) -> None:
        """`always`: compute sums of more rows than the mailbox has in parts, instead of leaving them to the library.
        `mapping`: object to keep alive as long as the mailbox."""
        # Imported here because CPUs have no Triton.
        from asyncllm.kernels.triton import rank_sum

        self._kernels = rank_sum
        self._mailbox, self._always, self._mapping = mailbox, always, mapping
        self._rows = len(mailbox.turns)

    @staticmethod
    def open(rows: int, row_bytes: int, device: torch.device, *, always: bool = False) -> PeerMemory | None:
        """Return memory for sums of up to `rows` rows, or of as many as are faster than the library's, among the ranks
        of torch.distributed's group, all of which call this; None, with a log line, if their GPUs cannot reach each
        other.

        It is torch's symmetric memory, without multicast. Each rank sees a single GPU, whose index is 0. Torch takes
        these for the same GPU unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set.
        """
        if os.environ.get(SWITCH) == "0":
            logger.info("Sums of ranks go through NCCL, as %s is 0", SWITCH)
            return None
        found, cause = None, "another rank cannot"
        try:
            found = _Mapping(rows, row_bytes, device, always=always)
        except Exception as error:
            cause = str(error).partition("\n")[0]
        if not _all_have(found is not None, device):
            logger.warning("Sums of ranks go through NCCL: the GPUs' memory cannot be mapped (%s)", cause)
            return None
        assert found is not None
        if not _all_have(found.arrives(device), device):
            logger.warning("Sums of ranks go through NCCL: what one GPU writes to another's memory does not arrive")
            return None
        found.mailbox.clear()
        # No rank may write before all have cleared their mailboxes.
        _all_have(True, device)
        return PeerMemory(found.mailbox, always=always, mapping=found)

    def takes(self, x: Tensor) -> bool:
        """Return whether sums of x [..., H] go through the mailbox."""
        return self._kernels.fits(x, self._mailbox) and (self._always or x.numel() <= self._rows * x.shape[-1])

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `RankGroup.all_reduce`, for x that this `takes`."""
        for part in torch.split(x.view(-1, x.shape[-1]), self._rows):
            self._kernels.sum_of_ranks(part, self._mailbox)
        return x

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `RankGroup.all_reduce_rms_norm`, for x that this `takes`."""
        if x.numel() > self._rows * x.shape[-1]:
            return kernels.add_rms_norm(self.all_reduce(x), residual, weight, eps)
        return self._kernels.add_sum_rms_norm(x, residual, weight, eps, self._mailbox)


class _Mapping:
    """A new mailbox, and those of the other ranks as mapped by this process."""

    def __init__(self, rows: int, row_bytes: int, device: torch.device, *, always: bool) -> None:
        """See `PeerMemory.open`. Raises RuntimeError if the ranks cannot map each other's memory, or torch does not
        support it."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        from asyncllm.kernels.triton.rank_sum import Mailbox, mailbox_bytes

        group = dist.group.WORLD
        assert group is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        row_bytes = -(-row_bytes // 16) * 16
        rows = max_rows(size, rows, row_bytes, always=always)
        rows = min(rows, _MAX_MAILBOX_BYTES // mailbox_bytes(size, 1, row_bytes))
        count = mailbox_bytes(size, rows, row_bytes)
        own = _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device)
        self._handle: Any = rendezvous(own, group.group_name)
        self._views: list[Tensor] = [self._handle.get_buffer(each, (count,), torch.uint8) for each in range(size)]
        addresses = torch.tensor([view.data_ptr() for view in self._views], device=device)
        turns = torch.zeros(rows, dtype=torch.int32, device=device)
        self.mailbox = Mailbox(rank, size, addresses, own, turns, row_bytes)

    def arrives(self, device: torch.device) -> bool:
        """Write to all ranks' memory. Return whether the data of all ranks has arrived here."""
        rank, size = self.mailbox.rank, self.mailbox.size
        for view in self._views:
            view[rank] = rank + 1
        _all_have(True, device)
        return self.mailbox.own[:size].tolist() == list(range(1, size + 1))


def _all_have(value: bool, device: torch.device) -> bool:
    """Return whether this is true on all ranks, after all work that they have launched."""
    agreed = torch.tensor(int(value), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())
