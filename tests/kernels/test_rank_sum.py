"""Sums of ranks over memory that they map of each other, by interpreted kernels in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncllm import kernels
from asyncllm.distributed.peer_memory import PeerMemory, max_rows
from asyncllm.kernels.triton import rank_sum
from tests.kernels import offline
from tests.kernels import rank_sum_process as ranks_process
from tests.kernels.device import DEVICE, interpreted, poison, random

RANKS = 3


@interpreted
def test_all_ranks_have_the_bits_of_the_reference(tmp_path: Path) -> None:
    """Types, sizes and numbers of rows take turns in one mailbox."""
    count = rank_sum.mailbox_bytes(RANKS, ranks_process.ROWS, ranks_process.ROW_BYTES)
    for rank in range(RANKS):
        (tmp_path / str(rank)).write_bytes(b"\xff" * count)
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.rank_sum_process", str(rank), str(RANKS), str(tmp_path)],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        for rank in range(RANKS)
    ]
    try:
        assert [program.wait(50) for program in programs] == [0] * RANKS
    finally:
        for program in programs:
            program.kill()
            program.wait()
    found = [torch.load(tmp_path / f"found-{rank}") for rank in range(RANKS)]
    for number, results in enumerate(zip(*found, strict=True)):
        x, residual, weight = ranks_process.shares(number, RANKS)
        whole = x[0].float()
        for share in x[1:]:
            whole = whole + share.float()
        whole = whole.to(x[0].dtype)
        normed, total = kernels.add_rms_norm(whole, residual, weight, ranks_process.EPS)
        for sums, normed_there, total_there in results:
            torch.testing.assert_close(sums, whole, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(total_there, total, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(normed_there, normed, equal_nan=True)


def mailbox_of_one(rows: int) -> rank_sum.Mailbox:
    """What a single rank has: no other one sends it anything."""
    addresses, turns = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(rows, dtype=torch.int32)
    own = torch.zeros(16, dtype=torch.uint8, device=DEVICE)
    return rank_sum.Mailbox(0, 1, addresses, own, turns.to(DEVICE), 256)


def test_rows_that_do_not_fit_are_told() -> None:
    memory = PeerMemory(mailbox_of_one(4), always=False)
    fitting = random(4, 128, dtype=torch.bfloat16)
    assert memory.takes(fitting)
    assert memory.takes(fitting.view(2, 2, 128))
    for other in (fitting.float(), random(5, 128, dtype=torch.bfloat16), fitting.t(), fitting.long()):
        assert not memory.takes(other)


def test_more_rows_than_there_is_room_for_are_added_up_in_parts() -> None:
    memory = PeerMemory(mailbox_of_one(2), always=True)
    x, residual, weight = random(5, 64), random(5, 64, seed=1), random(64, seed=2)
    assert memory.takes(x)
    assert torch.equal(memory.all_reduce(x.clone()), x)
    for found, expected in zip(
        memory.all_reduce_rms_norm(x.clone(), residual, weight, 1e-5),
        kernels.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert torch.equal(found, expected)
    assert memory._mailbox.turns.tolist() == [6, 4]


def test_memory_is_for_sums_that_are_faster_than_the_librarys() -> None:
    assert [max_rows(ranks, 8192, 8192, always=False) for ranks in (2, 3, 4, 8)] == [8192, 2048, 512, 128]
    assert max_rows(8, 8192, 8192, always=True) == 8192
    assert max_rows(8, 64, 8192, always=False) == 64
    assert max_rows(8, 64, 2**21, always=False) == 1


@pytest.mark.parametrize(
    "name", ["norm 4096", "norm 8192", "norm 16384", "norm 3584 of four", "sum 4096", "sum 4096 float32"]
)
def test_compiled(name: str, compile_kernels: offline.Compile) -> None:
    kernel = compile_kernels("compile_rank_sum")[name]
    assert kernel.spilled_bytes <= 16
    assert kernel.registers <= 128


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
def test_a_graph_of_two_ranks_of_one_device(norm: bool) -> None:
    """Two ranks as two streams, whose mailboxes lie in one memory: both give the reference's bits, replay by replay."""
    rows, size = 7, 4096
    own = [torch.empty(rank_sum.mailbox_bytes(2, rows, 2 * size), dtype=torch.uint8, device="cuda") for _ in range(2)]
    addresses = torch.tensor([each.data_ptr() for each in own], device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    boxes, x, results, graphs = [], [], [[], []], []
    weight = torch.rand(size, device="cuda").bfloat16()
    residual = torch.randn(rows, size, device="cuda").bfloat16()
    for rank in range(2):
        turns = torch.zeros(rows, dtype=torch.int32, device="cuda")
        boxes.append(rank_sum.Mailbox(rank, 2, addresses, own[rank], turns, 2 * size))
        boxes[rank].clear()
        x.append(torch.empty(rows, size, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()

    def run(rank: int, sums: int = 5) -> list[torch.Tensor]:
        found = []
        for _ in range(sums):
            if norm:
                poison((rows, size), (rows, size), dtype=torch.bfloat16)
                found += rank_sum.add_sum_rms_norm(x[rank], residual, weight, 1e-5, boxes[rank])
            else:
                found.append(rank_sum.sum_of_ranks(x[rank].clone(), boxes[rank]))
        return found

    # Loading a kernel and taking memory may wait for the device, so both are done before a rank waits for the other: a
    # mailbox full of zeros is one in which everything has arrived.
    kept = []
    for rank in range(2):
        with torch.cuda.stream(streams[rank]):
            for _ in range(5):
                own[rank].zero_()
                kept += run(rank, 1)
    torch.cuda.synchronize()
    kept.clear()
    for box in boxes:
        box.clear()
    torch.cuda.synchronize()
    for rank in range(2):
        with torch.cuda.stream(streams[rank]):
            run(rank)
    torch.cuda.synchronize()
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            results[rank] = run(rank)
        graphs.append(graph)
    for _ in range(3):
        for each in x:
            each.copy_(torch.randn_like(each))
        torch.cuda.synchronize()
        for rank in range(2):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
        torch.cuda.synchronize()
        whole = x[0] + x[1]
        expected = kernels.add_rms_norm(whole, residual, weight, 1e-5) if norm else (whole,)
        for rank in range(2):
            for index, result in enumerate(results[rank]):
                assert torch.equal(result, expected[index % len(expected)])
