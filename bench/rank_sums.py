"""How long the ranks of `tp` take for a sum: with what follows it in one kernel of our own, and by NCCL.

    python bench/rank_sums.py [--ranks 2] [--size 4096] [--rows 1,16,64,256,1024,8192] [--warps N] [--json FILE]

Each rank is a process with a GPU of its own, as in the engine. On GPUs a figure is the median of a CUDA graph of 64
sums, by the device's events, of bfloat16 rows: `fused_us` is the sum, its addition to the residual stream and the norm,
`sum_us` the sum alone, `library_us` NCCL's sum, and `library_norm_us` that and the norm's kernel. Before any is timed,
results are compared bit by bit: with NCCL's for two ranks, and between the ranks. Without GPUs, gloo's sums are timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from table import emit
from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.group import Rendezvous, TorchGroup
from asyncllm.ranks.process import rank_environment

ROWS = (1, 16, 64, 256, 1024, 8192)
IN_A_GRAPH = 64
REPEATS = 9
EPS = 1e-5


def timed(launch: Callable[[], object], group: TorchGroup, device: torch.device) -> float:
    """Microseconds of one launch."""
    if device.type == "cpu":
        launch()
        began = time.perf_counter()
        for _ in range(REPEATS):
            launch()
        return (time.perf_counter() - began) * 1e6 / REPEATS
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(IN_A_GRAPH):
            launch()
        graph.capture_end()
        found = []
        for _ in range(REPEATS):
            group.all_reduce_min(0)  # the ranks begin together
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            found.append(began.elapsed_time(ended) * 1e3 / IN_A_GRAPH)
    del graph
    return statistics.median(found)


def by_library(x: Tensor) -> Tensor:
    """Return the ranks' sum, in x's memory."""
    dist.all_reduce(x)
    return x


def check(group: TorchGroup, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise AssertionError where the group's results are not the library's, or not the same on all ranks."""
    for number in range(4):
        share = torch.randn_like(x)
        fused = group.all_reduce_rms_norm(share.clone(), residual, weight, EPS)
        alone = group.all_reduce(share.clone())
        expected = by_library(share.clone())
        if group.size == 2:
            assert torch.equal(alone, expected), f"sum {number} is off by {float((alone - expected).abs().max())}"
        torch.testing.assert_close(alone, expected, rtol=2**-6, atol=2**-6)
        for found, wanted in zip(fused, kernels.add_rms_norm(alone, residual, weight, EPS), strict=True):
            assert torch.equal(found, wanted), f"fused sum {number} is off by {float((found - wanted).abs().max())}"
        everywhere = group.all_gather(fused[0])
        assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere)), "ranks differ"


def run_rank(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = [int(each) for each in options.rows.split(",")]
    group = TorchGroup(Rendezvous(options.rank, options.ranks, options.file), device)
    group.prepare_sums(max(rows), options.size * dtype.itemsize)
    if options.warps and device.type == "cuda":
        from asyncllm.kernels.triton import rank_sum

        rank_sum.tile = lambda size: (1 << (size - 1).bit_length(), options.warps)
    torch.manual_seed(0)
    weight = torch.rand(options.size, device=device, dtype=dtype)
    torch.manual_seed(options.rank)
    for count in rows:
        x, residual = (torch.zeros(count, options.size, device=device, dtype=dtype) for _ in range(2))
        check(group, x, residual, weight)
        record: dict[str, Any] = {"ranks": options.ranks, "size": options.size, "rows": count, "warps": options.warps}
        runs: dict[str, Callable[[], object]] = {
            "fused_us": lambda x=x, r=residual: group.all_reduce_rms_norm(x, r, weight, EPS),
            "sum_us": lambda x=x: group.all_reduce(x),
            "library_us": lambda x=x: by_library(x),
            "library_norm_us": lambda x=x, r=residual: kernels.add_rms_norm(by_library(x), r, weight, EPS),
        }
        for key, launch in runs.items():
            record[key] = round(timed(launch, group, device), 2)
        record["ours"] = group.peers is not None
        if options.rank == 0:
            emit(record, options.json)
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", type=int, default=4096, help="numbers of a row")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--warps", type=int, default=0, help="of our kernel's programs; 0: as in the engine")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        with torch.inference_mode():
            run_rank(options)
        return
    with TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--file", os.path.join(folder, "rendezvous")]
        programs = [
            subprocess.Popen([*command, "--rank", str(rank)], env=rank_environment(rank))
            for rank in range(options.ranks)
        ]
        try:
            # A rank that has failed leaves the others waiting for it.
            while not any(program.poll() for program in programs) and None in [each.returncode for each in programs]:
                time.sleep(0.05)
        finally:
            for program in programs:
                program.kill()
                program.wait()
    sys.exit(any(program.returncode for program in programs))


if __name__ == "__main__":
    main()
