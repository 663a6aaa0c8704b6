"""Lines of latents in blocks, and attention over them written out in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncllm.kernels import LatentKV
from tests.kernels.device import DEVICE


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class LatentCase:
    """A batch. The pool holds NaN where no row owns it; queries lie in the midst of other numbers."""

    lengths: list[int]
    """Tokens of each row; -1 is an absent one."""
    counts: list[int] = field(default_factory=list)
    """Queries per row, for prefill."""
    heads: int = 4
    rank: int = 24
    rope: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.counts) or sum(length >= 0 for length in self.lengths)

    def queries(self) -> tuple[Tensor, Tensor]:
        """(q_latent [T, H, C], q_rope [T, H, R]), neither contiguous."""
        latent = _draw(self.heads, self.tokens, self.rank, seed=self.seed + 70).to(DEVICE, self.dtype)
        rope = _draw(self.tokens, self.heads, 16 + self.rope, seed=self.seed + 71).to(DEVICE, self.dtype)
        return latent.transpose(0, 1), rope[..., 16:]

    def cache(self) -> tuple[LatentKV, Tensor, Tensor]:
        """(cache, block tables, kv_lens)."""
        width = max(-(-max(length, 0) // self.block_size) for length in self.lengths) + 1
        num_blocks = len(self.lengths) * width + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed))
        tables = order[: len(self.lengths) * width].view(-1, width)
        pages = torch.full((num_blocks, self.block_size, self.rank + self.rope), torch.nan, dtype=self.dtype)
        for row, lines in enumerate(self.lines()):
            positions = torch.arange(len(lines))
            pages[tables[row, positions // self.block_size], positions % self.block_size] = lines
        kv_lens = torch.tensor(self.lengths, dtype=torch.int32)
        return LatentKV(pages.to(DEVICE), self.rank), tables.int().to(DEVICE), kv_lens.to(DEVICE)

    def lines(self) -> list[Tensor]:
        """Each row's, on the CPU."""
        return [
            _draw(max(length, 0), self.rank + self.rope, seed=self.seed + row + 1).to(self.dtype)
            for row, length in enumerate(self.lengths)
        ]

    def offsets(self, base: int = 0) -> Tensor:
        ends = [base + sum(self.counts[: row + 1]) for row in range(len(self.counts))]
        return torch.tensor([base, *ends], dtype=torch.int32, device=DEVICE)

    def expected(self, scale: float) -> Tensor:
        """[T, H, C] float64: causal, the queries at the end of each row."""
        latent, rope = self.queries()
        q = torch.cat([latent, rope], -1).double().cpu()
        counts = self.counts or [int(length >= 0) for length in self.lengths]
        results = []
        for query, lines in zip(q.split(counts), self.lines(), strict=True):
            lines = lines.double()
            if not len(lines):
                results.append(torch.zeros(len(query), self.heads, self.rank, dtype=torch.float64))
                continue
            scores = torch.einsum("thd,sd->ths", query, lines) * scale
            last = len(lines) - len(query) + torch.arange(len(query))
            scores = scores.masked_fill(torch.arange(len(lines)) > last[:, None, None], float("-inf"))
            results.append(torch.einsum("ths,sc->thc", scores.softmax(-1), lines[:, : self.rank]))
        return torch.cat(results)


@dataclass(frozen=True)
class ExpandedCase(LatentCase):
    """A batch of prompts whose heads' keys and values lie one row behind the other; NaN follows them."""

    nope: int = 12
    value: int = 10

    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """(q [T, H, N + R], kv [S, H, N + V], rotated keys [S, R])."""
        total = sum(self.lengths)
        q = _draw(self.tokens, self.heads, self.nope + self.rope, seed=self.seed + 80)
        kv = _draw(total, self.heads, self.nope + self.value, seed=self.seed + 81)
        keys = torch.cat(self.lines())[:, self.rank :]
        return tuple(part.to(DEVICE, self.dtype) for part in (q, kv, keys))  # type: ignore[return-value]

    def expected_values(self, scale: float) -> Tensor:
        """[T, H, V] float64."""
        q, kv, keys = (part.double().cpu() for part in self.expanded())
        k = torch.cat([kv[..., : self.nope], keys[:, None].expand(-1, self.heads, -1)], -1)
        results = []
        for query, key, value in zip(
            q.split(self.counts), k.split(self.lengths), kv[..., self.nope :].split(self.lengths), strict=True
        ):
            scores = torch.einsum("thd,shd->ths", query, key) * scale
            last = len(key) - len(query) + torch.arange(len(query))
            scores = scores.masked_fill(torch.arange(len(key)) > last[:, None, None], float("-inf"))
            results.append(torch.einsum("ths,shv->thv", scores.softmax(-1), value))
        return torch.cat(results)
