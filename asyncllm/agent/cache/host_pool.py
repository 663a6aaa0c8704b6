"""Blocks of the KV cache in host memory, and the copies from the device and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import zeros
from asyncllm.agent.device.streams import upload
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.protocol import SwapPlan

__all__ = ["MIN_COPIED_TOKENS", "BlockTransfers", "allocate_host_pool", "staging_bytes"]

STAGING_BYTES = 256 * 2**20
"""Size of the staging area on the device: 32 blocks of Llama-3-8B, about 5 ms of a PCIe 5 link."""

MIN_COPIED_TOKENS = 16
"""Fewer cached tokens are recomputed on a GPU, as part of a step that runs anyway. Llama-3-8B on an H200
(`bench/swap.py`): up to 64 tokens, copying and recomputing take the same 8 to 10 ms, the time the host needs to launch
the step; from 127 tokens on copying is faster, 9.0 ms instead of 25.1 at 1,024. Copying a block of 64 tokens takes 0.2
ms."""


def allocate_host_pool(layout: CacheLayout, num_blocks: int) -> list[Tensor]:
    """Return zeros [num_blocks, planes, *shape] in host memory for each part of the layout. Each part of a block is
    contiguous there.

    Raises ModelError if memory is short.
    """
    try:
        return [zeros((num_blocks, part.planes, *part.shape), part.dtype, torch.device("cpu")) for part in layout.parts]
    except MemoryError as error:
        raise _does_not_fit(num_blocks, num_blocks * layout.block_bytes) from error


def staging_bytes(config: EngineConfig, layout: CacheLayout) -> int:
    """Return the maximum bytes of device memory that `BlockTransfers` takes."""
    return _staged_blocks(layout.block_bytes) * layout.block_bytes if config.uses_host_blocks else 0


def _staged_blocks(num_bytes: int) -> int:
    """Return how many blocks of `num_bytes` are staged at a time."""
    return max(1, STAGING_BYTES // num_bytes)


class BlockTransfers:
    """Copies blocks between a device's pool and the host's pool while steps are launched, without waiting for them.

    A block consists of many pieces on the device, and of one piece per part on the host. On the way to the host, blocks
    are first gathered in a staging area by the computing stream, which is quick, and then copied on a separate stream
    while the step continues. Copies to the device delay the step, which needs the data. They, and the next gathering,
    wait for copies to the host, so all copies happen as if in the order of their launches.

    On a CPU the same copies are made one after another, so that they can be tested without a GPU. All methods are for
    the thread that launches steps.
    """

    def __init__(self, pool: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        """`pool`: tensors [planes, blocks, *shape]; `host`: [host blocks, planes, *shape], whose memory is pinned.

        Raises ModelError if the driver cannot pin it.
        """
        self._device = pool[0].device
        # Copies use whole words, because the time of a gather depends on the number of elements.
        self._blocks = [_words(part).transpose(0, 1) for part in pool]
        self._host = [_words(part) for part in host]
        self._num_staged = min(_staged_blocks(sum(part[0].nbytes for part in host)), len(host[0]))
        self._staging = [
            part.new_empty((self._num_staged, *part.shape[1:]), device=self._device) for part in self._host
        ]
        self._stream: torch.cuda.Stream | None = None
        self._down: torch.cuda.Event | None = None
        """Recorded when the staging area is free again."""
        if pool[0].is_cuda:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for part in host:
                _pin(part, self._device)
                # The memory must not be freed while a copy still writes to it.
                weakref.finalize(self, _unpin, part, self._stream).atexit = False

    def launch(self, plan: SwapPlan) -> None:
        """Launch the copies of a step, before the next work of the current stream."""
        for pairs in _portions(plan.swap_out, self._num_staged):
            self.wait_for_copies()
            blocks = upload(np.array([block for block, _ in pairs]), self._device)
            for part, staging in zip(self._blocks, self._staging, strict=True):
                torch.index_select(part, 0, blocks, out=staging[: len(pairs)])
            self._leave_staging([host_block for _, host_block in pairs])
        for pairs in _portions(plan.swap_in, self._num_staged):
            self.wait_for_copies()
            runs = list(_runs([host_block for host_block, _ in pairs]))
            blocks = upload(np.array([block for _, block in pairs]), self._device)
            for part, staging, host in zip(self._blocks, self._staging, self._host, strict=True):
                for first, count, host_block in runs:
                    staging[first : first + count].copy_(host[host_block : host_block + count], non_blocking=True)
                part.index_copy_(0, blocks, staging[: len(pairs)])

    def wait_for_copies(self) -> None:
        """Make the current stream wait for all copies; the staging area is then free."""
        if self._down is not None:
            torch.cuda.current_stream(self._device).wait_event(self._down)

    def _leave_staging(self, host_blocks: Sequence[int]) -> None:
        """Copy the staged blocks to these host blocks."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # None: the current stream.
        with torch.cuda.stream(self._stream):
            for staging, host in zip(self._staging, self._host, strict=True):
                for first, count, host_block in _runs(host_blocks):
                    host[host_block : host_block + count].copy_(staging[first : first + count], non_blocking=True)
            if self._stream is not None:
                self._down = self._stream.record_event()


def _portions(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for first in range(0, len(pairs), size):
        yield pairs[first : first + size]


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, count, block) for each maximal run of adjacent blocks, which takes one copy."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield first, index - first, blocks[first]
            first = index


def _words(tensor: Tensor) -> Tensor:
    """Return the same memory as the largest words that divide its last dimension."""
    size = tensor.shape[-1] * tensor.itemsize
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0:
            return tensor.view(dtype)
    return tensor.view(torch.uint8)


def _pin(host: Tensor, device: torch.device) -> None:
    """Page-lock memory. torch's own pinned memory comes in powers of two, which would waste up to half of it."""
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        # The next launch would report the driver's last error, so launch something that does not matter.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
        raise _does_not_fit(len(host), host.nbytes)


def _unpin(host: Tensor, stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())  # type: ignore[no-untyped-call]


def _does_not_fit(num_blocks: int, num_bytes: int) -> ModelError:
    return ModelError(
        f"{num_blocks} KV blocks in host memory take {num_bytes / 2**20:.0f} MiB, which could not be allocated"
        f" or page-locked. Lower num_cpu_blocks."
    )
