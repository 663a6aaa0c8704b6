"""Sparse attention (DeepSeek-V3.2): an index chooses, for each query, the tokens that it attends to.

Every token has an index key of D numbers in the paged cache, beside its line (`kernels.latent`). A query has H index
queries of D numbers and a weight for each. Its score of a token is the weighted sum, over the H, of their products with
the token's key, negative ones replaced by 0. The query attends to the `top_k` tokens of the highest scores, itself
included or not, and to all tokens if there are no more.

All devices run the torch ops here, in float32; there is no kernel of its own. Which of several tokens with the same
score is chosen is unspecified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.latent import LatentKV

__all__ = [
    "ChosenTokens",
    "IndexTile",
    "IndexedLatentKV",
    "chosen_latent_attention",
    "fill_index_keys",
    "plan_index",
    "select_tokens",
]

TILE = 2**24
"""Maximum numbers of an intermediate result, unless a single query has more: 64 MiB of float32."""


class IndexedLatentKV(NamedTuple):
    """The lines of one layer, and the tokens' index keys."""

    latents: LatentKV
    keys: Tensor
    """[blocks, block_size, D], contiguous."""


class IndexTile(NamedTuple):
    """Queries that are scored at a time: n consecutive ones of each of G rows."""

    tokens: slice
    """The G * n queries among the step's tokens, row by row."""
    block_tables: Tensor
    """[G, N] int64: the blocks of the longest of the rows."""
    positions: Tensor
    """[G, n] int64."""


class ChosenTokens(NamedTuple):
    """What each query attends to."""

    places: Tensor
    """[T, K] int32. Entries that are absent have the query's own place."""
    absent: Tensor
    """[T, K] bool: entries beyond the number of tokens that the query sees."""

    def of_queries(self, indices: Tensor) -> ChosenTokens:
        """Return the choice of the queries at `indices` [R] int64."""
        return ChosenTokens(self.places.index_select(0, indices), self.absent.index_select(0, indices))


def fill_index_keys(keys: Tensor, pages: Tensor, places: Tensor) -> None:
    """Write index keys [T, D] to pages [blocks, block_size, D]. places [T] int64: distinct; -1 marks a token without a
    place. Launches the same kernels whatever the places are, so that it can be captured."""
    lines = pages.view(-1, pages.shape[-1])
    padding = places < 0
    # Padding writes what the first token writes, to the same place, or what is already there.
    first = places[:1].clamp(min=0)
    written = torch.where(padding[:1, None], lines.index_select(0, first), keys[:1])
    lines.index_copy_(0, torch.where(padding, first, places), torch.where(padding[:, None], written, keys))


def plan_index(
    block_tables: Tensor,
    positions: Tensor,
    counts: Sequence[int],
    contexts: Sequence[int],
    *,
    block_size: int,
    num_heads: int,
    key_dim: int,
) -> list[IndexTile]:
    """Return the tiles of one step, for all layers with an index of `num_heads` heads of `key_dim` numbers.

    block_tables [B, N] int32, positions [T] int64. `counts`, `contexts`: numbers of tokens of each row in the step, and
    in the cache once they are written.
    """
    tiles: list[IndexTile] = []
    row = start = 0
    while row < len(counts):
        count, longest, rows = counts[row], contexts[row], 1
        if count == 1:
            # As many rows of one token as fit.
            while row + rows < len(counts) and counts[row + rows] == 1:
                wider = max(longest, contexts[row + rows])
                if (rows + 1) * wider * max(num_heads, key_dim) > TILE:
                    break
                longest, rows = wider, rows + 1
        width = -(-max(longest, 1) // block_size)
        tables = block_tables[row : row + rows, :width].long()
        step = max(1, TILE // (width * block_size * num_heads)) if rows == 1 else 1
        for first in range(0, count, step):
            queries = min(step, count - first)
            tokens = slice(start + first, start + first + rows * queries)
            tiles.append(IndexTile(tokens, tables, positions[tokens].view(rows, queries)))
        row, start = row + rows, start + rows * count
    return tiles


def select_tokens(q: Tensor, weights: Tensor, pages: Tensor, tiles: Sequence[IndexTile], *, top_k: int) -> ChosenTokens:
    """Return the tokens that the index chooses for each query. q [T, H, D], weights [T, H]; pages [blocks, block_size,
    D] with the keys, those of the queries' own tokens included."""
    block_size = pages.shape[1]
    widest = min(top_k, max(tile.block_tables.shape[1] for tile in tiles) * block_size)
    places = torch.empty(len(q), widest, dtype=torch.int32, device=q.device)
    absent = torch.ones(len(q), widest, dtype=torch.bool, device=q.device)
    for tokens, tables, positions in tiles:
        scores = _scores(q[tokens], weights[tokens], pages, tables, positions)
        best = scores.topk(min(widest, scores.shape[-1]), -1, sorted=False)
        hidden = best.values == float("-inf")
        own = positions[..., None]
        chosen = torch.where(hidden, own, best.indices)
        count = chosen.shape[-1]
        places[tokens] = _places(own, tables, block_size).flatten(0, 1)
        places[tokens, :count] = _places(chosen, tables, block_size).flatten(0, 1)
        absent[tokens, :count] = hidden.flatten(0, 1)
    return ChosenTokens(places, absent)


def chosen_latent_attention(
    q_latent: Tensor, q_rope: Tensor, cache: LatentKV, chosen: ChosenTokens, *, scale: float
) -> Tensor:
    """Attend with each token to the tokens chosen for it. Returns sums of latents [T, H, C].

    q_latent [T, H, C] and q_rope [T, H, R], as in `latent_decode_attention`.
    """
    places, absent = chosen
    width, size = places.shape[1], cache.lines.shape[1]
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    tile = max(1, TILE // (width * max(size, q_latent.shape[1])))
    for first in range(0, len(places), tile):
        some = slice(first, first + tile)
        lines = cache.lines.index_select(0, places[some].reshape(-1)).view(-1, width, size).float()
        query = torch.cat([q_latent[some], q_rope[some]], -1).float()
        scores = torch.bmm(query, lines.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(absent[some, None], float("-inf"))
        out[some] = torch.bmm(scores.softmax(-1), lines[..., : cache.rank]).to(out.dtype)
    return out


def _scores(q: Tensor, weights: Tensor, pages: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """q [G * n, H, D], weights [G * n, H] -> scores [G, n, S] of the S places in the tables' blocks, -inf for tokens
    after the query."""
    rows, queries = positions.shape
    keys = pages.index_select(0, tables.reshape(-1)).view(rows, -1, pages.shape[-1]).float()
    products = torch.bmm(q.float().view(rows, -1, q.shape[-1]), keys.transpose(1, 2)).relu_()
    products = products.view(rows * queries, q.shape[1], -1)
    scores = torch.bmm(weights.float()[:, None], products).view(rows, queries, -1)
    later = torch.arange(scores.shape[-1], device=q.device) > positions[..., None]
    return scores.masked_fill_(later, float("-inf"))


def _places(positions: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Return the places of positions [G, n, K] in rows with these block tables [G, N]."""
    blocks = positions.div(block_size, rounding_mode="floor")
    ids = tables.gather(1, blocks.flatten(1)).view_as(positions)
    return ids * block_size + positions.remainder(block_size)
