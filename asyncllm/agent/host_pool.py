"""The host's side of the KV cache: its blocks, and the copies that bring blocks down from a device and up again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from asyncllm.agent.kv_cache import block_bytes, zeros
from asyncllm.agent.upload import upload
from asyncllm.batch import SwapPlan
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.models.config import ModelConfig

__all__ = ["MIN_COPIED_TOKENS", "BlockTransfers", "allocate_host_pool", "staging_bytes", "swap_blocks"]

STAGING_BYTES = 256 * 2**20
"""Memory on the device that blocks pass through: 32 blocks of Llama-3-8B, some 5 ms of a PCIe 5 link."""

MIN_COPIED_TOKENS = 16
"""Fewer cached tokens than this are computed again on a GPU, as they ride along with a step. Llama-3-8B on one H200
(`bench/swap.py`): up to 64 tokens copying and computing take the same 8 to 10 ms, which is what the host needs to
launch the step; from 127 on copying is faster, 9.0 ms instead of 25.1 at 1,024. A block of 64 tokens takes 0.2 ms."""


def allocate_host_pool(model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """Zeros [num_blocks, layers, 2, kv_heads, block_size, head_dim] in host memory: a block lies in one piece there.

    Raises ModelError when the memory is not there.
    """
    shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    try:
        return zeros(shape, dtype, torch.device("cpu"))
    except MemoryError as error:
        raise _does_not_fit(num_blocks, num_blocks * block_bytes(model, block_size, dtype)) from error


def swap_blocks(plan: SwapPlan, pool: Tensor, host: Tensor) -> None:
    """Copy blocks between `pool` [layers, 2, blocks, kv_heads, block_size, head_dim] and `host`, here and now."""
    for block, host_block in plan.swap_out:
        host[host_block] = pool[:, :, block]
    for host_block, block in plan.swap_in:
        pool[:, :, block] = host[host_block]


def staging_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Most bytes of the device that `BlockTransfers` takes."""
    size = block_bytes(model, config.tokens_per_block, dtype)
    return _staged_blocks(size) * size if config.uses_host_blocks else 0


def _staged_blocks(num_bytes: int) -> int:
    """How many blocks of `num_bytes` are staged at a time."""
    return max(1, STAGING_BYTES // num_bytes)


class BlockTransfers:
    """Copies blocks between a device's pool and the host's while steps are launched; nobody waits for them here.

    A block lies in 2 * layers pieces on the device and in one on the host. On their way down, blocks are gathered in a
    staging area by the stream that computes, which is quick, and leave it over a stream of their own, while the step
    goes on. On their way up they hold the step up, which needs them. What comes up, or is staged next, waits for what
    goes down, so that all copies happen as if in the order of their launches.

    On a CPU the same copies are made one after another, so that what launches them can be tested without a GPU. All
    methods belong to the thread that launches steps.
    """

    def __init__(self, pool: Tensor, host: Tensor) -> None:
        """Pin the memory of `host`. Raises ModelError when the driver does not take it."""
        self._device = pool.device
        # Copied as whole words, as a gather takes time by the element.
        self._blocks = _words(pool).permute(2, 0, 1, 3, 4, 5)
        self._host = _words(host)
        self._staging = self._host.new_empty(
            (min(_staged_blocks(host[0].nbytes), len(host)), *self._host.shape[1:]), device=self._device
        )
        self._stream: torch.cuda.Stream | None = None
        self._down: torch.cuda.Event | None = None
        """The staging area has been left."""
        if pool.is_cuda:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            _pin(host, self._device)
            # The memory must not be given away while a copy still writes to it.
            weakref.finalize(self, _unpin, host, self._stream).atexit = False

    def launch(self, plan: SwapPlan) -> None:
        """Launch the copies of a step, ahead of what is launched next on the current stream."""
        for pairs in _portions(plan.swap_out, len(self._staging)):
            self.wait_for_copies()
            blocks = upload(np.array([block for block, _ in pairs]), self._device)
            torch.index_select(self._blocks, 0, blocks, out=self._staging[: len(pairs)])
            self._leave_staging([host_block for _, host_block in pairs])
        for pairs in _portions(plan.swap_in, len(self._staging)):
            self.wait_for_copies()
            for first, count, host_block in _runs([host_block for host_block, _ in pairs]):
                self._staging[first : first + count].copy_(
                    self._host[host_block : host_block + count], non_blocking=True
                )
            blocks = upload(np.array([block for _, block in pairs]), self._device)
            self._blocks.index_copy_(0, blocks, self._staging[: len(pairs)])

    def wait_for_copies(self) -> None:
        """Let what is launched from now on, on the current stream, begin after all copies: the staging area is free."""
        if self._down is not None:
            torch.cuda.current_stream(self._device).wait_event(self._down)

    def _leave_staging(self, host_blocks: Sequence[int]) -> None:
        """Copy what is staged to these blocks of the host."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # None: the current stream.
        with torch.cuda.stream(self._stream):
            for first, count, host_block in _runs(host_blocks):
                self._host[host_block : host_block + count].copy_(
                    self._staging[first : first + count], non_blocking=True
                )
            if self._stream is not None:
                self._down = self._stream.record_event()


def _portions(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for first in range(0, len(pairs), size):
        yield pairs[first : first + size]


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, count, block) of each longest run of neighbours: one copy each."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield first, index - first, blocks[first]
            first = index


def _words(tensor: Tensor) -> Tensor:
    """The same memory in the largest words that divide a head."""
    size = tensor.shape[-1] * tensor.itemsize
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0:
            return tensor.view(dtype)
    return tensor.view(torch.uint8)


def _pin(host: Tensor, device: torch.device) -> None:
    """Page-lock memory. torch's own pinned memory comes in powers of two, of which up to half would be wasted."""
    error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))  # type: ignore[no-untyped-call]
    if error:
        # The next launch would report the driver's last error; let one do it that does not matter.
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
