from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels import fused_experts, route


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("renormalize", [False, True])
def test_route(renormalize: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 4.0]])
    weights, expert_ids = route(logits, 2, renormalize)
    assert expert_ids.tolist() == [[1, 2], [3, 0]]
    expected = logits.softmax(-1).gather(1, expert_ids)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Token by token, in float64."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for weight, expert in zip(weights[token].tolist(), expert_ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            total += weight * (down[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (3, 3), (8, 1)])
def test_fused_experts(tokens: int, num_experts: int, top_k: int) -> None:
    x, gate_up, down = random(tokens, 6), random(num_experts, 10, 6, seed=1), random(num_experts, 6, 5, seed=2)
    weights, expert_ids = route(random(tokens, num_experts, seed=3), top_k, False)
    actual = fused_experts(x, gate_up, down, weights, expert_ids)
    expected = experts(x, gate_up, down, weights, expert_ids)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
