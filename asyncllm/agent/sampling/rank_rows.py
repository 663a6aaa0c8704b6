"""RankRows: how ranks draw a step's rows when each has the logits of some tokens (`OutputEmbedding.of_rank`).

`draw` needs no whole rows: the ranks exchange the tokens that can win (`kernels.shortlist`). Other parameters may need
all logits of a row. These are then exchanged once (`whole`): each row goes to the rank that owns it, which draws as if
it were alone, and all ranks learn the token. A row of logits is thus whole on at most one rank, and either way a draw
has the same bits as without ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from asyncllm.agent.device.streams import upload
from asyncllm.distributed.group import RankGroup, rows_of, tokens_of
from asyncllm.kernels.shortlist import TokenRange, draw_listed, row_maxima, shortlist
from asyncllm.layers.embedding import whole_rows

__all__ = ["RankRows", "ScoredRows"]


class ScoredRows(NamedTuple):
    """Rows divided among the ranks, at most `width` per rank."""

    own: NDArray[np.int64]
    """[width]: indices among the rank's rows; 0 beyond their number."""
    places: NDArray[np.int64]
    """Indices of the rows in the result of `RankRows.all_gather`, in the order of the rows."""


class RankRows:
    """This rank's part of the draw. Every rank makes the same calls in the same order."""

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self._group = group
        share = tokens_of(group, vocab_size)
        self._tokens = TokenRange(
            share.start, min(max(vocab_size - share.start, 0), share.stop - share.start), vocab_size
        )

    def draw(
        self, logits: Tensor, settings: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor, flags: Tensor
    ) -> None:
        """Draw, on all ranks, as `sampling.sample` does from whole rows, given this rank's `logits` [R, v]. `shortlist`
        must support the rows."""
        own_maxima, known = row_maxima(logits, self._tokens)
        maxima = self._group.all_gather(own_maxima).amax(0)
        lists = shortlist(logits, self._tokens, known, maxima, settings, slots, positions)
        draw_listed(
            self._group.all_gather(lists), self._tokens.vocab_size, maxima, settings, slots, positions, tokens, flags
        )

    def whole(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """logits [R, v] of this rank's tokens -> those of the rows that `rows_of` gives to this rank [ceil(R / ranks),
        vocab], in `out` if given. Rows beyond R are zeros."""
        size = self._group.size
        if not len(logits):
            return logits.new_empty(0, self._tokens.vocab_size)
        rest = -len(logits) % size
        logits = pad(logits, (0, 0, 0, rest)) if rest else logits
        return whole_rows(self._group.all_to_all(logits.view(size, -1, logits.shape[-1])), self._tokens.vocab_size, out)

    def count(self, num_rows: int) -> int:
        """Return how many of `num_rows` rows each rank owns, rounded up: the last ranks may own rows beyond the end."""
        return -(-num_rows // self._group.size)

    def own(self, values: Tensor, fill: int = 0) -> Tensor:
        """Return the entries of `values` [R] for this rank's rows, the same number on every rank; `fill` stands for
        rows beyond R."""
        rest = -len(values) % self._group.size
        return (pad(values, (0, rest), value=fill) if rest else values)[rows_of(self._group, len(values))]

    def own_indices(self, rows: NDArray[np.int64], num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the ascending `rows`, out of `num_rows`, this rank owns, and their indices among its own."""
        mine = rows_of(self._group, num_rows)
        own = rows[(rows >= mine.start) & (rows < mine.stop)]
        return own, own - mine.start

    def publish(self, own_tokens: Tensor, own_flags: Tensor, tokens: Tensor, flags: Tensor) -> None:
        """Fill `tokens` [R] int64 and `flags` [R] int32 from each rank's results for its own rows."""
        found = self.all_gather(torch.stack([own_tokens, own_flags.to(torch.int64)], -1))
        tokens.copy_(found[: len(tokens), 0])
        flags.copy_(found[: len(flags), 1])

    def scored(self, rows: NDArray[np.int64], num_rows: int) -> ScoredRows:
        """Return how the ranks divide the ascending `rows`, out of `num_rows`."""
        counts = np.bincount(rows // self.count(num_rows), minlength=self._group.size)
        width = int(counts.max())
        own = np.zeros(width, np.int64)
        _, found = self.own_indices(rows, num_rows)
        own[: len(found)] = found
        return ScoredRows(own, np.flatnonzero(np.arange(width) < counts[:, None]))

    def all_gather(self, own: Tensor) -> Tensor:
        """Return every rank's rows [n, ...], of equal shape on all, in rank order: [ranks * n, ...]."""
        return self._group.all_gather(own).flatten(0, 1)

    def gather_scores(self, scored: ScoredRows, ranked: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `sampling.token_logprobs` for all rows, from each rank's results for its own rows."""
        chosen, top, ids = ranked
        places = upload(scored.places, chosen.device)
        logprobs = self.all_gather(torch.cat([chosen.unsqueeze(-1), top], -1))[places]
        return logprobs[:, 0], logprobs[:, 1:], self.all_gather(ids)[places]
