"""Latent attention's ops against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LatentKV, latent
from tests.kernels.device import DEVICE, interpreted, random
from tests.kernels.latent_cases import LatentCase

pytestmark = interpreted

SCALE = 0.3
CASES = [
    LatentCase([5, 1, 33]),
    LatentCase([7, 0, 2], heads=3, rank=17, rope=6, block_size=5),
    LatentCase([40, 3, -1, -1], heads=1, rank=32, rope=2, block_size=7),
    LatentCase([9], heads=20, rank=8, rope=4),
]
PROMPTS = [
    LatentCase([5, 1, 33], [5, 1, 20]),
    LatentCase([7, 0, 2], [3, 2, 2], heads=3, rank=17, rope=6, block_size=5),
    LatentCase([600], [550], heads=2, rank=8, rope=4),
]


@pytest.mark.parametrize("case", CASES)
def test_decode(case: LatentCase) -> None:
    cache, tables, kv_lens = case.cache()
    q_latent, q_rope = case.queries()
    plan = kernels.plan_latent_decode(tables, kv_lens, cache, num_heads=case.heads)
    result = kernels.latent_decode_attention(q_latent, q_rope, cache, plan, scale=SCALE)
    torch.testing.assert_close(result.double(), case.expected(SCALE), rtol=0, atol=1e-5)
    out = torch.full_like(result, torch.nan)
    assert kernels.latent_decode_attention(q_latent, q_rope, cache, plan, scale=SCALE, out=out) is out
    assert torch.equal(out, result)


def test_decode_in_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "DECODE_TILE", 2 * 33 * 32)
    test_decode(LatentCase([5, 1, 33, 0, 8]))


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("invariant", [False, True])
def test_prefill(case: LatentCase, invariant: bool) -> None:
    cache, tables, kv_lens = case.cache()
    q_latent, q_rope = (torch.cat([torch.full_like(part[:2], torch.nan), part]) for part in case.queries())
    plan = kernels.plan_latent_prefill(
        tables, case.offsets(2), kv_lens, cache, num_heads=case.heads, max_q_len=max(case.counts), invariant=invariant
    )
    out = torch.full(q_latent.shape, 7.0)
    kernels.latent_prefill_attention(q_latent, q_rope, cache, plan, scale=SCALE, out=out)
    torch.testing.assert_close(out[2:].double(), case.expected(SCALE), rtol=0, atol=1e-5)
    assert (out[:2] == 7).all(), "tokens of other rows are left alone"


@pytest.mark.parametrize("interleaved", [False, True])
def test_fill_norms_turns_and_writes(interleaved: bool) -> None:
    """Written out for each token and feature."""
    heads, rank, rope, places = 2, 5, 4, [7, 3, 12]
    q, kv, norm = random(3, heads, 6 + rope), random(3, rank + rope, seed=1), random(rank, seed=2)
    positions, frequencies = torch.tensor([0, 2, 9]), torch.tensor([0.3, 0.05])
    cache = LatentKV(torch.full((4, 4, rank + rope), 7.0), rank)
    before = q.clone()
    rotation = kernels.rotation(positions, frequencies)
    kernels.rope_fill_latent(q, kv, rotation, cache, torch.tensor(places), norm=norm, eps=1e-3, interleaved=interleaved)

    def turned(x: Tensor, position: int) -> list[float]:
        result = x.tolist()
        for pair, frequency in enumerate(frequencies.tolist()):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 2)
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            a, b = float(x[first]), float(x[second])
            result[first] = a * float(angle.cos()) - b * float(angle.sin())
            result[second] = b * float(angle.cos()) + a * float(angle.sin())
        return result

    for token, (place, position) in enumerate(zip(places, positions.tolist(), strict=True)):
        latent_part = kv[token, :rank].double()
        normed = latent_part / (latent_part.square().mean() + 1e-3).sqrt() * norm.double()
        line = torch.tensor([*normed.tolist(), *turned(kv[token, rank:], position)])
        torch.testing.assert_close(cache.lines[place], line, rtol=1e-5, atol=1e-5)
        for head in range(heads):
            expected = torch.tensor([*before[token, head, :6].tolist(), *turned(before[token, head, 6:], position)])
            torch.testing.assert_close(q[token, head], expected, rtol=1e-5, atol=1e-5)
    others = [place for place in range(16) if place not in places]
    assert (cache.lines[others] == 7).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_head(transposed: bool) -> None:
    x, weight = random(7, 3, 10).to(DEVICE), random(3, 10 if transposed else 4, 4 if transposed else 10, seed=1)
    operand = weight.transpose(1, 2) if transposed else weight
    expected = torch.stack([x[:, head].double() @ operand[head].double().t() for head in range(3)], 1)
    for product in (kernels.linear_by_head, kernels.linear_by_head_invariant):
        torch.testing.assert_close(product(x, operand).double(), expected, rtol=0, atol=1e-5)
        out = torch.full(expected.shape, torch.nan, device=DEVICE)
        assert product(x, operand, out=out) is out
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    invariant = kernels.linear_by_head_invariant(x, operand)
    for row in range(7):
        assert torch.equal(kernels.linear_by_head_invariant(x[row : row + 1], operand)[0], invariant[row])
