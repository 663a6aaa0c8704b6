"""One rank of those whose interpreted sums `test_rank_sum` compares: a process of its own, over memory that all map.

`python -m tests.kernels.rank_sum_process RANK RANKS FOLDER` leaves its results in the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from asyncllm.kernels.triton import rank_sum

ROWS, ROW_BYTES = 5, 1024
EPS = 1e-5
SUMS = 5
CASES = [(torch.bfloat16, 70), (torch.float32, 256), (torch.float16, 33), (torch.bfloat16, 512)]
"""Types and sizes of rows, all in one mailbox, in turns."""


def shares(number: int, ranks: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """What the ranks have in sum `number`: x [1 to ROWS, size] of each, the residual and the norm's weight."""
    dtype, size = CASES[number % len(CASES)]
    generator = torch.Generator().manual_seed(number)
    rows = 1 + number % ROWS
    x = [torch.randn(rows, size, generator=generator).to(dtype) for _ in range(ranks)]
    for each in x:
        each[0, 0] = torch.nan if number == 1 else -0.0
    residual = torch.randn(rows, size, generator=generator).to(dtype)
    return x, residual, torch.randn(size, generator=generator).to(torch.float32 if number % 2 else dtype)


def open_mailbox(rank: int, ranks: int, folder: Path) -> rank_sum.Mailbox:
    """Map the mailboxes of all ranks, which are cleared already."""
    count = rank_sum.mailbox_bytes(ranks, ROWS, ROW_BYTES)
    maps = [
        torch.from_file(str(folder / str(each)), shared=True, size=count, dtype=torch.uint8) for each in range(ranks)
    ]
    addresses = torch.tensor([each.data_ptr() for each in maps])
    kept.extend(maps)
    return rank_sum.Mailbox(rank, ranks, addresses, maps[rank], torch.zeros(ROWS, dtype=torch.int32), ROW_BYTES)


kept: list[Tensor] = []
"""What is mapped for as long as the process lives."""


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    box = open_mailbox(rank, ranks, folder)
    found = []
    for number in range(SUMS):
        x, residual, weight = shares(number, ranks)
        assert rank_sum.fits(x[rank], box)
        normed, total = rank_sum.add_sum_rms_norm(x[rank], residual, weight, EPS, box)
        found.append((rank_sum.sum_of_ranks(x[rank], box), normed, total))
    torch.save(found, folder / f"found-{rank}")
    assert bool((box.own == 255).all()), "a place is not empty"


if __name__ == "__main__":
    main()
