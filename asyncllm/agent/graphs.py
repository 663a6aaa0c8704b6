"""DecodeGraphs: the decode step as CUDA graphs, one pair per batch size bucket.

A step of a small batch is some three hundred kernels of a few microseconds each; launching them one by one takes longer
than running them. A graph launches them all in one call. Its tensors are fixed: a step's slots and positions are copied
to where the graph reads them, and everything else a decode step needs lies on the device already. Rows beyond the batch
are padding (slot -1), of which nothing is read or kept.

Forward pass and sampling are two graphs, so that what only delays the choice of tokens does not delay the forward pass.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch

__all__ = ["DecodeGraphs", "bucket_sizes"]

_EVERY_SIZE_TO = 16
_STEP = 8
_LARGEST = 512
"""Larger batches are launched kernel by kernel: such a step takes longer than its launches."""


def bucket_sizes(max_batch_size: int) -> list[int]:
    """Every size to 16, then multiples of 8: at most 7 rows of padding, and none where rows are dearest."""
    largest = min(max_batch_size, _LARGEST)
    sizes = list(range(1, min(largest, _EVERY_SIZE_TO) + 1))
    sizes += range(_EVERY_SIZE_TO + _STEP, largest + _STEP, _STEP)
    return sizes


class DecodeGraphs:
    """Captured launches of `parts`, each a function of the number of rows, for each of `sizes`.

    The graphs share their memory, as they run one after another. All methods run in the thread and on the stream that
    launch steps, or in another one while no step runs.
    """

    def __init__(self, sizes: Iterable[int], parts: Iterable[Callable[[int], None]], stream: torch.cuda.Stream) -> None:
        """Capture. Every part runs once beforehand for each size, so that nothing is compiled during capture."""
        self._sizes = sorted(sizes)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        parts = list(parts)
        # A collection in the midst of a capture could free tensors of other streams, which breaks the capture.
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            # From the largest on: the smaller ones fit into the memory that it took.
            for size in reversed(self._sizes):
                self._graphs[size] = [self._capture(part, size) for part in parts]
        finally:
            if enabled:
                gc.enable()

    def _capture(self, part: Callable[[int], None], size: int) -> torch.cuda.CUDAGraph:
        part(size)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use their own streams meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            part(size)
        finally:
            graph.capture_end()
        return graph

    @property
    def largest(self) -> int:
        """Most rows of a captured step."""
        return self._sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """The smallest captured size for so many rows, of which there are at most `largest`."""
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def replay(self, part: int, size: int) -> None:
        """Launch a part, by its number, for a captured size, on the current stream."""
        self._graphs[size][part].replay()
