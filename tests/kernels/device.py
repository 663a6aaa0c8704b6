"""Where launchers run in tests: compiled on a GPU, interpreted on a CPU; and inputs that differ in each GPU run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="small sizes are for the interpreter")
"""Tests of references and of interpreted kernels, beside which others try the compiled kernels at sizes of models."""


def fresh_seed() -> int:
    """A seed of its own for each run, in the test's output if it fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return seed


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers on the test device, drawn on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def poison(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave NaN, or the largest integer, in the memory that the allocator is about to hand out for tensors of these
    shapes."""
    fill = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    kept = [torch.full(shape, fill, dtype=dtype, device=DEVICE) for shape in shapes]
    del kept


def assert_a_graph_repeats(x: Tensor, product: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor]) -> None:
    """Six products in a row, each of what the one before has stored, in a graph that is replayed with other x: each
    result is what `alone` gives for its input."""
    stream = torch.cuda.Stream()

    def chain() -> list[Tensor]:
        found = [x]
        for _ in range(6):
            found.append(product(found[-1]))
        return found[1:]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = chain()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for result in results:
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        before = x
        for result in results:
            assert torch.equal(result, alone(before))
            before = result


def assert_repeatable(run: Callable[[], Tensor]) -> Tensor:
    """The result of `run`, which is bit for bit the same when it runs again."""
    first, second = run().clone(), run()
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    return first
