"""The card's own ceilings: what copying, reading and multiplying reach when nothing else is asked of it.

    python bench/limits.py [--json FILE]

Measured through PyTorch on random numbers, each the mean of a train of calls between two events, 3 before them to warm
up: a copy counts the bytes it reads and those it writes; skinny products are rows against one weight of Llama-3-8B's
MLP, eight copies of it in turn, so that none is found in the L2 cache, and count that weight's bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    import torch

    dtype = torch.bfloat16
    itemsize = 2
    source = torch.randn(buffer, device=device, dtype=dtype)
    target = torch.empty_like(source)
    size = buffer * itemsize
    figures: dict[str, Any] = {
        "copy_TBs": round(2 * size / seconds(lambda: target.copy_(source), device) / 1e12, 2),
        "read_TBs": round(size / seconds(lambda: source.sum(dtype=torch.float32), device) / 1e12, 2),
    }
    del source, target
    a = torch.randn(square, square, device=device, dtype=dtype)
    b = torch.randn_like(a)
    figures["matmul_TFLOPs"] = round(2 * square**3 / seconds(lambda: a @ b, device) / 1e12)
    del a, b
    copies = [torch.randn(weight, device=device, dtype=dtype) for _ in range(WEIGHT_COPIES)]
    for count in rows:
        x = torch.randn(count, weight[1], device=device, dtype=dtype)
        turns = itertools.cycle(copies)
        took = seconds(lambda x=x, turns=turns: x @ next(turns).t(), device, calls=8 * WEIGHT_COPIES)  # type: ignore[misc]
        figures[f"skinny_m{count}_TBs"] = round(weight[0] * weight[1] * itemsize / took / 1e12, 2)
    return {"engine": "limits", **figures}


def seconds(call: Callable[[], object], device: str, calls: int = 20) -> float:
    """Mean duration of a call, on a GPU by its own clock."""
    import torch

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
    from time import perf_counter

    start = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()
    line = json.dumps(measure())
    print(line)
    if arguments.json:
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
