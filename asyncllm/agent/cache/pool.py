"""The KV pool: its number of blocks and their memory."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError

__all__ = [
    "CPU_POOL_BYTES",
    "HOST_POOL_BYTES",
    "allocate_pool",
    "available_memory",
    "host_blocks",
    "pool_blocks",
    "zeros",
]

logger = logging.getLogger("asyncllm")

CPU_POOL_BYTES = 2 * 2**30
"""Maximum size of a KV pool on a CPU that is sized by fraction: a library must not take a laptop's whole memory."""

HOST_POOL_BYTES = 8 * 2**30
"""Default maximum of host memory for swapped blocks: page-locking this much takes a second or two."""


def pool_blocks(
    config: EngineConfig,
    layout: CacheLayout,
    *,
    max_position: int,
    device: torch.device,
    reserve: int = 0,
) -> int:
    """Return the number of blocks of the pool. `reserve`: bytes of the free memory that steps will need.

    `num_gpu_blocks` > 0 sets the number, otherwise `cache_max_entry_count` > 1 does. A smaller `cache_max_entry_count`
    is a fraction of the free memory; the pool then takes no more than `max_batch_size` sequences of `max_position`
    tokens can fill, and no more than `CPU_POOL_BYTES` on a CPU. Raises ModelError if not even one block fits.
    """
    if config.num_gpu_blocks > 0:
        return config.num_gpu_blocks
    if config.cache_max_entry_count > 1:
        return int(config.cache_max_entry_count)
    free = max(0, available_memory(device) - reserve)
    budget = int(free * config.cache_max_entry_count)
    if device.type == "cpu":
        budget = min(budget, CPU_POOL_BYTES)
    size = layout.block_bytes
    if layout.state_bytes > size // 2:
        logger.warning(
            "A block of %d tokens holds %.1f MiB of states, and %.1f MiB of keys and values. A larger block_size (up "
            "to 1024) keeps fewer states, so that more tokens fit.",
            layout.block_size,
            layout.state_bytes / 2**20,
            (size - layout.state_bytes) / 2**20,
        )
    usable = config.max_batch_size * len(layout.windows) * -(-max_position // config.tokens_per_block)
    blocks = min(budget // size, usable)
    if blocks < 1:
        raise ModelError(
            f"The KV cache does not fit: one block of {config.tokens_per_block} tokens takes {size / 2**20:.1f} MiB, "
            f"and cache_max_entry_count={config.cache_max_entry_count} leaves {budget / 2**20:.1f} MiB of "
            f"{free / 2**20:.1f} MiB free on {device}. Free memory, raise cache_max_entry_count or lower block_size."
        )
    return blocks


def host_blocks(config: EngineConfig, layout: CacheLayout, num_blocks: int) -> int:
    """Return the number of blocks in host memory, besides `num_blocks` on the device.

    `num_cpu_blocks` > 0 sets the number. Otherwise it is 0, unless `eviction_type` is 'copy': then as many as fit in a
    quarter of the free memory, at most `HOST_POOL_BYTES`, and at most as many as the device has, because no more can be
    preempted. Raises ModelError if they do not fit.
    """
    if not config.uses_host_blocks:
        return 0
    size = layout.block_bytes
    free = available_memory(torch.device("cpu"))
    count = config.num_cpu_blocks or min(min(free // 4, HOST_POOL_BYTES) // size, num_blocks)
    if count < 1 or count * size > free:
        raise ModelError(
            f"{max(count, 1)} KV blocks in host memory take {max(count, 1) * size / 2**20:.1f} MiB, and "
            f"{free / 2**20:.1f} MiB are free. Lower num_cpu_blocks, or use eviction_type='recompute'."
        )
    return count


def available_memory(device: torch.device) -> int:
    """Return how many bytes could be allocated now on `device` without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available_host_memory()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text()
        used = Path("/sys/fs/cgroup/memory.current").read_text()
        return min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        # There is no control group, or one without a limit ("max").
        return free


def _available_host_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Systems without /proc do not report available memory; half of the installed memory is a conservative guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def allocate_pool(layout: CacheLayout, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    """Return zeros [planes, num_blocks, *shape] for each part of the layout.

    Raises ModelError if memory is short.
    """
    try:
        return [zeros((part.planes, num_blocks, *part.shape), part.dtype, device) for part in layout.parts]
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(
            f"{num_blocks} KV blocks take {num_blocks * layout.block_bytes / 2**20:.0f} MiB, which {device} does not "
            f"have free. Lower num_gpu_blocks or cache_max_entry_count."
        ) from error


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros rather than uninitialised memory, so that a block that no step has written holds finite numbers.

    Raises MemoryError or torch.OutOfMemoryError.
    """
    count = math.prod(shape) * dtype.itemsize
    if count > sys.maxsize:
        raise MemoryError(f"{count} bytes are more than a machine addresses")
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeroed pages are allocated on first touch, so a pool takes only the memory that is used.
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)
