"""The ops of sparse attention, on odd sizes: in tiles of any size, with padding, and over blocks full of nan."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import (
    ChosenTokens,
    IndexTile,
    LatentKV,
    chosen_latent_attention,
    fill_index_keys,
    plan_index,
    select_tokens,
    token_index,
)

HEADS, DIM, BLOCK, TOP_K = 5, 12, 4, 6
COUNTS, CONTEXTS = [1, 1, 1, 9, 2, 1], [13, 1, 30, 21, 2, 17]
"""Of rows: decode rows, a chunk, a whole prompt, and a chunk of one token."""


class Rows(NamedTuple):
    """Rows over blocks in random order; what no row has is nan."""

    tables: Tensor
    positions: Tensor
    pages: Tensor
    keys: list[Tensor]
    """Of each row, [S, DIM]."""
    q: Tensor
    weights: Tensor

    def tiles(self) -> list[IndexTile]:
        return plan_index(self.tables, self.positions, COUNTS, CONTEXTS, block_size=BLOCK, num_heads=HEADS, key_dim=DIM)


@pytest.fixture
def rows() -> Rows:
    dice = torch.Generator().manual_seed(3)
    width = -(-max(CONTEXTS) // BLOCK)
    tables = torch.randperm(64, generator=dice)[: len(CONTEXTS) * width].view(-1, width).int()
    pages = torch.full((64, BLOCK, DIM), torch.nan)
    keys = [torch.randn(length, DIM, generator=dice) for length in CONTEXTS]
    for row, own in enumerate(keys):
        for position, key in enumerate(own):
            pages[tables[row, position // BLOCK], position % BLOCK] = key
    ranges = [torch.arange(end - count, end) for count, end in zip(COUNTS, CONTEXTS, strict=True)]
    q = torch.randn(sum(COUNTS), HEADS, DIM, generator=dice)
    return Rows(tables, torch.cat(ranges), pages, keys, q, torch.randn(sum(COUNTS), HEADS, generator=dice))


def expected(rows: Rows) -> list[set[int]]:
    """The places of each query's tokens, one query after the other."""
    found = []
    owners = [row for row, count in enumerate(COUNTS) for _ in range(count)]
    for query, (row, position) in enumerate(zip(owners, rows.positions.tolist(), strict=True)):
        products = (rows.keys[row][: position + 1] @ rows.q[query].T).clamp(min=0)
        best = (products @ rows.weights[query]).topk(min(TOP_K, position + 1)).indices.tolist()
        found.append({int(rows.tables[row, each // BLOCK]) * BLOCK + each % BLOCK for each in best})
    return found


def of_queries(chosen: ChosenTokens) -> list[set[int]]:
    present = [places[~absent].tolist() for places, absent in zip(*chosen, strict=True)]
    assert all(len(set(each)) == len(each) for each in present)
    return [set(each) for each in present]


@pytest.mark.parametrize("tile", [2**24, 500, 1])
def test_each_query_gets_the_tokens_of_the_highest_scores(
    rows: Rows, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_index, "TILE", tile)
    tiles = rows.tiles()
    assert len(tiles) == {2**24: 4, 500: 7, 1: 15}[tile]
    chosen = select_tokens(rows.q, rows.weights, rows.pages, tiles, top_k=TOP_K)
    assert of_queries(chosen) == expected(rows)
    some = torch.tensor([14, 3])
    assert of_queries(chosen.of_queries(some)) == [expected(rows)[each] for each in some.tolist()]


def test_fewer_tokens_than_are_chosen_are_all_attended_to(rows: Rows) -> None:
    chosen = select_tokens(rows.q, rows.weights, rows.pages, rows.tiles(), top_k=1000)
    assert [len(each) for each in of_queries(chosen)] == (rows.positions + 1).tolist()


@pytest.mark.parametrize("tile", [2**24, 300, 1])
def test_attention_is_to_the_chosen_tokens_alone(rows: Rows, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "TILE", tile)
    rank, rope, heads = 8, 4, 3
    dice = torch.Generator().manual_seed(4)
    lines = torch.full((64, BLOCK, rank + rope), torch.nan)
    written = ~rows.pages.isnan()[..., 0]
    lines[written] = torch.randn(int(written.sum()), rank + rope, generator=dice)
    cache = LatentKV(lines, rank)
    q = torch.randn(sum(COUNTS), heads, rank + rope, generator=dice)
    chosen = select_tokens(rows.q, rows.weights, rows.pages, rows.tiles(), top_k=TOP_K)
    actual = chosen_latent_attention(q[..., :rank], q[..., rank:], cache, chosen, scale=0.3)
    for query, places in enumerate(expected(rows)):
        own = cache.lines[sorted(places)]
        attended = (0.3 * q[query] @ own.T).softmax(-1) @ own[:, :rank]
        assert (actual[query] - attended).abs().max() < 1e-5


@pytest.mark.parametrize("places", [[5, 0, 9], [5, -1, 9, -1], [0, 7, -1], [-1, -1]])
def test_padding_writes_no_key(places: list[int]) -> None:
    pages = torch.arange(12.0).repeat_interleave(2).view(3, BLOCK, 2)
    before = pages.clone().view(-1, 2)
    keys = 100 + torch.arange(2.0 * len(places)).view(-1, 2)
    fill_index_keys(keys, pages, torch.tensor(places))
    for place, line in enumerate(pages.view(-1, 2)):
        assert torch.equal(line, keys[places.index(place)] if place in places else before[place])
