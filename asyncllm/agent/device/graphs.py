"""StepGraphs: parts of steps captured as CUDA graphs of fixed sizes.

A step consists of some three hundred kernels, many of a few microseconds each; launching them one by one takes longer
than running them. A graph launches them all in one call. Its tensors are fixed: the inputs of a step are copied to
where the graph reads them, and everything else is already on the device. A smaller step is padded to the graph's size,
and the padding is never read or kept.

A decode step has two parts, forward pass and sampling, so that work that delays only the choice of tokens does not
delay the forward pass. A mixed step, with prompts and decode rows, has one part: all layers but the last
(`agent/step/graph_sizes.py`).
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

__all__ = ["LARGEST_BATCH", "StepGraphs", "bucket_sizes", "capture", "smallest_for"]

_Size = TypeVar("_Size", bound=Hashable)

_EVERY_SIZE_TO = 16
_STEP = 8
LARGEST_BATCH = 512
"""Larger batches are launched kernel by kernel: such a step takes longer than its launches."""


def bucket_sizes(max_batch_size: int) -> list[int]:
    """Return the sizes of captured batches: every size up to 16, then multiples of 8. So there are at most 7 rows of
    padding, and none where a row costs most."""
    largest = min(max_batch_size, LARGEST_BATCH)
    sizes = list(range(1, min(largest, _EVERY_SIZE_TO) + 1))
    sizes += range(_EVERY_SIZE_TO + _STEP, largest + _STEP, _STEP)
    return sizes


def smallest_for(num_rows: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending `sizes` that holds `num_rows` rows. The last size does."""
    return sizes[bisect_left(sizes, num_rows)]


@contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the launches of the block, with memory from `pool`, into the graph that is yielded. Their kernels must be
    compiled."""
    graph = torch.cuda.CUDAGraph()
    # A garbage collection during a capture could free tensors of other streams, which breaks the capture.
    enabled = gc.isenabled()
    gc.disable()
    try:
        # Other threads may meanwhile use their own streams.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if enabled:
            gc.enable()


class StepGraphs:
    """Captured launches, by the name of the part of a step and by size.

    The graphs share their memory, because they run one after another. All methods run in the thread and on the stream
    that launch steps, or in another thread while no step runs.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._graphs: dict[tuple[str, Hashable], torch.cuda.CUDAGraph] = {}
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, part: str, size: _Size, launch: Callable[[_Size], None]) -> None:
        """Capture `launch(size)`. It is called once beforehand, so that nothing is compiled during the capture."""
        launch(size)
        self._stream.synchronize()
        with capture(self._pool) as graph:
            launch(size)
        self._graphs[part, size] = graph

    def replay(self, part: str, size: Hashable) -> None:
        """Launch a captured size of a part on the current stream."""
        self._graphs[part, size].replay()
