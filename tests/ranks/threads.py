"""Ranks as threads of one process, for tests of what they compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncllm import kernels

__all__ = ["ThreadGroup", "in_ranks"]

Result = TypeVar("Result")


class ThreadGroup:
    """A rank in a thread. `meet` is shared by all of them, and so is `said`."""

    def __init__(self, rank: int, meet: threading.Barrier, said: list[Any]) -> None:
        self.rank, self.size = rank, meet.parties
        self._meet, self._said = meet, said
        self.fused_sums = 0
        """Those that a norm has taken."""

    def _say(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._meet.wait(30)
        said = list(self._said)
        self._meet.wait(30)
        return said

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._say(x.clone())
        return x.copy_(torch.stack(parts).sum(0))

    def prepare_sums(self, rows: int, row_bytes: int, *, batch_invariant: bool = False) -> None:
        pass

    def all_reduce_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.fused_sums += 1
        return kernels.add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._say(x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self._say(x)])

    def all_reduce_min(self, value: int) -> int:
        return min(self._say(value))


def in_ranks(size: int, call: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What the call returns in each of so many ranks."""
    meet: threading.Barrier = threading.Barrier(size)
    said: list[Any] = [None] * size

    def run(rank: int) -> Result:
        try:
            with torch.inference_mode():
                return call(ThreadGroup(rank, meet, said))
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
