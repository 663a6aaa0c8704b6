"""How bench/kernels.py times an entry of kernel_entries.py, and judges it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_entries import Call, Entry

__all__ = ["attempt", "copies_of", "format_line", "judge", "measure", "time_calls"]

COLD_BYTES = 512 * 2**20
"""Inputs in turn take at least this much memory, many times the L2 cache, where one set is smaller."""
MOST_COPIES = 256
CALLS = 20
REPLAYS = (5, 40)
"""Least and most replays; in between, as many as fit in REPLAY_SECONDS."""
REPLAY_SECONDS = 0.1


def copies_of(entry: Entry) -> int:
    """How many sets of inputs the entry is timed on."""
    return min(MOST_COPIES, math.ceil(COLD_BYTES / entry.size)) if entry.cold else 1


def time_calls(calls: Sequence[Call], device: str) -> float:
    """Median microseconds of a call, when all of `calls` run one after the other again and again."""
    for call in calls:
        call()
    rounds = -(-CALLS // len(calls))
    if device == "cpu":
        spans = [_wall_seconds(calls) for _ in range(3)]
        return statistics.median(spans) / len(calls) * 1e6
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    first = _replay_ms(graph)
    fitting = int(REPLAY_SECONDS * 1e3 / max(first, 1e-3))
    spans = [_replay_ms(graph) for _ in range(min(max(fitting, REPLAYS[0]), REPLAYS[1]))]
    return statistics.median(spans) / (rounds * len(calls)) * 1e3


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _wall_seconds(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def attempt(build: Callable[[], Call], copies: int, device: str) -> tuple[float | None, str | None]:
    """Microseconds, or why it could not be timed: one entry that fails leaves the others their turn."""
    try:
        with torch.inference_mode():
            return time_calls([build() for _ in range(copies)], device), None
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()


def measure(entry: Entry, device: str, ceilings: dict[str, float], *, peers: bool = True) -> dict[str, Any]:
    """The figures of one entry. `ceilings`: read_TBs and matmul_TFLOPs."""
    copies = copies_of(entry)
    took, failure = attempt(entry.build, copies, device)
    result: dict[str, Any] = {"engine": "asyncllm", "kernel": entry.name, "bytes": entry.size, "flops": entry.flops}
    if took is None:
        return result | {"failed": failure}
    result |= judge(entry, took, ceilings)
    if peers and entry.peer is not None:
        peer_took, failure = attempt(entry.peer, copies, device)
        result |= {"torch_failed": failure} if peer_took is None else {"torch_us": round(peer_took, 2)}
        if peer_took is not None:
            result["torch_ratio"] = round(peer_took / took, 3)
    return result


def judge(entry: Entry, took: float, ceilings: dict[str, float]) -> dict[str, Any]:
    """Speeds of an entry that took so many microseconds, and the share of the ceiling that it reaches."""
    least = max(entry.size / ceilings["read_TBs"], entry.flops / ceilings["matmul_TFLOPs"]) / 1e6
    figures = {
        "us": round(took, 2),
        "TBs": round(entry.size / took / 1e6, 3),
        "of_ceiling": round(least / took, 3),
    }
    return figures | ({"TFLOPs": round(entry.flops / took / 1e6, 1)} if entry.flops else {})


def format_line(result: dict[str, Any]) -> str:
    name = f"{result['kernel']:32}"
    if "failed" in result:
        return f"{name} failed: {result['failed']}"
    speeds = f"{result['us']:10.2f} us {result['TBs']:7.2f} TB/s"
    speeds += f" {result['TFLOPs']:7.1f} TFLOP/s" if "TFLOPs" in result else " " * 16
    peer = f" torch {result['torch_ratio']:6.2f}" if "torch_ratio" in result else ""
    return f"{name}{speeds} ceiling {result['of_ceiling']:6.1%}{peer}"
