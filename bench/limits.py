"""The card's own ceilings: what copying, reading and multiplying reach when nothing else is asked of it.

    python bench/limits.py [--json FILE]

Measured through PyTorch on random numbers, each the mean of a train of calls between two events, 3 before them to warm
up: a copy counts the bytes it reads and those it writes; skinny products are rows against one weight of Llama-3-8B's
MLP, eight copies of it in turn, so that none is found in the L2 cache, and count that weight's bytes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from table import emit
from torch import Tensor

__all__ = ["measure"]

BUFFER = 2**31
"""Numbers of a buffer that is read or copied: 4 GiB, many times any cache."""
SQUARE = 8192
WEIGHT = (28672, 4096)
ROWS = (1, 4, 16, 64, 256)
WEIGHT_COPIES = 8


def measure(
    device: str = "cuda",
    *,
    buffer: int = BUFFER,
    square: int = SQUARE,
    weight: tuple[int, int] = WEIGHT,
    rows: tuple[int, ...] = ROWS,
) -> dict[str, Any]:
    """Terabytes and teraflops per second; see the module. Smaller sizes are for tests."""
    figures: dict[str, Any] = {"engine": "limits"}
    figures |= _bandwidths(device, buffer)
    figures["matmul_TFLOPs"] = _matmul(device, square)
    return figures | _skinny_products(device, weight, rows)


def _bandwidths(device: str, buffer: int) -> dict[str, float]:
    source = _random(device, buffer)
    target = torch.empty_like(source)
    size = buffer * source.itemsize
    return {
        "copy_TBs": _tera(2 * size, lambda: target.copy_(source), device),
        "read_TBs": _tera(size, lambda: source.sum(dtype=torch.float32), device),
    }


def _matmul(device: str, square: int) -> int:
    a, b = _random(device, square, square), _random(device, square, square)
    return round(_tera(2 * square**3, lambda: a @ b, device))


def _skinny_products(device: str, weight: tuple[int, int], rows: tuple[int, ...]) -> dict[str, float]:
    copies = itertools.cycle([_random(device, *weight) for _ in range(WEIGHT_COPIES)])
    size = weight[0] * weight[1] * torch.bfloat16.itemsize

    def product(x: Tensor) -> Tensor:
        return x @ next(copies).t()

    calls = 8 * WEIGHT_COPIES
    return {
        f"skinny_m{count}_TBs": _tera(size, partial(product, _random(device, count, weight[1])), device, calls)
        for count in rows
    }


def _random(device: str, *size: int) -> Tensor:
    return torch.randn(size, device=device, dtype=torch.bfloat16)


def _tera(amount: int, call: Callable[[], object], device: str, calls: int = 20) -> float:
    """10^12 units a second, when each call handles `amount`."""
    return round(amount / seconds(call, device, calls) / 1e12, 2)


def seconds(call: Callable[[], object], device: str, calls: int) -> float:
    """Mean duration of a call, on a GPU by its own clock."""
    for _ in range(3):
        call()
    if device == "cpu":
        return _wall_seconds(call, calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls / 1e3


def _wall_seconds(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/limits.py measures a GPU, and torch finds none here.")
    emit(measure(), arguments.json)


if __name__ == "__main__":
    main()
