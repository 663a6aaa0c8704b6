"""Memory of a GPU that the other ranks map as well, for sums by our own kernel (`kernels.triton.rank_sum`)."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from asyncllm.kernels.triton.rank_sum import Mailbox

__all__ = ["SWITCH", "PeerMemory"]

logger = logging.getLogger("asyncllm.ranks")

SWITCH = "ASYNCLLM_PEER_MEMORY"
"""Set to 0 in the environment, all sums go through NCCL."""

_MAX_BYTES = 256 * 2**20
"""Of a rank's mailbox: with two ranks 16,384 rows of 8 KB, with eight 2,340. Sums of more rows are the library's."""


class PeerMemory:
    """A rank's mailbox, and those of the others as it sees them.

    It is torch's symmetric memory, without multicast. Each rank sees one GPU alone, so that all call theirs by the same
    number, which torch takes for one GPU unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES says otherwise.
    """

    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        """See `open`. Raises RuntimeError where the ranks cannot map each other's memory, or torch has no way to."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed._symmetric_memory import rendezvous

        # Only here, as CPUs have no Triton.
        from asyncllm.kernels.triton import rank_sum

        self._kernels = rank_sum
        group = dist.group.WORLD
        assert group is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        row_bytes = -(-row_bytes // 16) * 16
        rows = min(rows, _MAX_BYTES // rank_sum.mailbox_bytes(size, 1, row_bytes))
        count = rank_sum.mailbox_bytes(size, rows, row_bytes)
        own = _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.uint8, device)
        self._handle: Any = rendezvous(own, group.group_name)
        self._views: list[Tensor] = [self._handle.get_buffer(each, (count,), torch.uint8) for each in range(size)]
        addresses = torch.tensor([view.data_ptr() for view in self._views], device=device)
        self.mailbox: Mailbox = rank_sum.Mailbox(
            rank, size, addresses, own, torch.zeros(rows, dtype=torch.int32, device=device), row_bytes
        )

    @staticmethod
    def open(rows: int, row_bytes: int, device: torch.device) -> PeerMemory | None:
        """Return memory for sums of up to `rows` rows, fewer if they would take too much, among the ranks of
        torch.distributed's group, which all call this; None, with a line in the log, where there is no way between
        their GPUs."""
        if os.environ.get(SWITCH) == "0":
            logger.info("Sums of ranks go through NCCL, as %s is 0", SWITCH)
            return None
        found, cause = None, "another rank cannot"
        try:
            found = PeerMemory(rows, row_bytes, device)
        except Exception as error:
            cause = str(error).partition("\n")[0]
        if not _all_have(found is not None, device):
            logger.warning("Sums of ranks go through NCCL: the GPUs' memory cannot be mapped (%s)", cause)
            return None
        assert found is not None
        if not _all_have(found._arrives(device), device):
            logger.warning("Sums of ranks go through NCCL: what one GPU writes to another's memory does not arrive")
            return None
        found.mailbox.clear()
        # No rank writes before all have cleared theirs.
        _all_have(True, device)
        return found

    def takes(self, x: Tensor) -> bool:
        """Return whether there is room for the rows of x [..., H]."""
        return self._kernels.fits(x, self.mailbox)

    def add_up(self, x: Tensor) -> Tensor:
        """As `RankGroup.add_up` of what this `takes`."""
        return self._kernels.sum_of_ranks(x, self.mailbox)

    def add_up_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `RankGroup.add_up_rms_norm` of what this `takes`."""
        return self._kernels.add_sum_rms_norm(x, residual, weight, eps, self.mailbox)

    def _arrives(self, device: torch.device) -> bool:
        """Write to all ranks' memory; return whether what all have written is here."""
        rank, size = self.mailbox.rank, self.mailbox.size
        for view in self._views:
            view[rank] = rank + 1
        _all_have(True, device)
        return self.mailbox.own[:size].tolist() == list(range(1, size + 1))


def _all_have(value: bool, device: torch.device) -> bool:
    """Return whether this holds on all ranks, when all that they have launched before is done."""
    agreed = torch.tensor(int(value), device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())
