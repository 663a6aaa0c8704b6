"""Experts of many tokens on Hopper: on a CPU on a model of Gluon, on a GPU as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import Routing
from asyncllm.kernels.triton import expert_blocks, moe
from asyncllm.kernels.triton.linear import hopper_experts
from asyncllm.kernels.triton.linear.hopper import CONSUMER_TOKENS, STEP, WIDTH
from tests.kernels import gluon_model
from tests.kernels.device import fresh_seed, poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def modelled(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    block_experts: Tensor,
    *,
    gated: bool,
    bias: Tensor | None = None,
    limit: float | None = None,
) -> None:
    """`hopper_experts.products` on three multiprocessors."""
    rows, out_size = weight.view(-1, weight.shape[2]), out.shape[1]
    options = hopper_experts.compile_options(gated=gated, bias=bias is not None, limit=limit)
    del options["maxnreg"]
    # What is left out is not among the first tiles alone.
    options["GROUP"] = 2
    gluon_model.run(
        hopper_experts.experts_kernel,
        (3, 1, 1),
        gluon_model.Descriptor(x, (hopper_experts.BLOCK, STEP)),
        gluon_model.Descriptor(rows, (WIDTH, STEP)),
        gluon_model.Descriptor(out, (CONSUMER_TOKENS, WIDTH)),
        block_experts,
        x if bias is None else bias,
        *(len(block_experts), -(-out_size // (WIDTH if gated else 2 * WIDTH)), -(-x.shape[1] // STEP), out_size),
        USE_PDL=False,
        **options,
    )


class Case:
    """Tokens of bfloat16 with experts of which the second has none, and one in five is elsewhere. With a limit, experts
    have biases."""

    def __init__(
        self, tokens: int, width: int, hidden: int, num_experts: int, top_k: int, seed: int, limit: float | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(DEVICE, torch.bfloat16)

        self.gate_up, self.down = normal(num_experts, 2 * hidden, width) * 2, normal(num_experts, width, hidden)
        self.x = normal(tokens, width) * width**0.5
        logits = torch.randn(tokens, num_experts, generator=generator).to(DEVICE)
        logits[:, 1] = -100.0
        self.weights, self.ids = kernels.route(logits, Routing(top_k, renormalize=True))
        elsewhere = (torch.rand(self.ids.shape, generator=generator) < 0.2).to(DEVICE)
        self.weights, self.ids = self.weights.masked_fill(elsewhere, 0.0), self.ids.masked_fill(elsewhere, -1)

        self.limit = limit
        self.biases = (normal(num_experts, 2 * hidden) * hidden**0.5, normal(num_experts, width) * width**0.5)

    def run(self, product: Callable[..., Tensor], x: Tensor | None = None) -> Tensor:
        tensors = (self.x if x is None else x, self.gate_up, self.down, self.weights, self.ids)
        if self.limit is None:
            return product(*tensors)
        return product(*tensors, gate_up_bias=self.biases[0], down_bias=self.biases[1], limit=self.limit)

    def check(self, actual: Tensor) -> None:
        expected = self.run(kernels.fused_experts.reference)  # type: ignore[attr-defined]
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(DEVICE == "cuda", reason="the model runs on a CPU")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("tokens", "width", "hidden", "num_experts", "top_k", "limit"),
    [(300, 264, 136, 4, 2, None), (140, 72, 264, 3, 1, None), (140, 264, 136, 3, 2, 1.5)],
)
def test_a_model_of_the_kernel_gives_what_the_experts_say(
    tokens: int,
    width: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    limit: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither tiles of 128 or 256 outputs nor steps of 64 features divide these evenly."""
    case = Case(tokens, width, hidden, num_experts, top_k, fresh_seed(), limit)
    monkeypatch.setattr(hopper_experts, "products", modelled)
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)
    monkeypatch.setattr(moe, "DENSE_TILES", 16)
    monkeypatch.setattr(moe, "multiply", None)
    for product in (moe.fused_experts, moe.fused_experts_invariant):
        poison((tokens * top_k, width), dtype=torch.bfloat16)
        case.check(case.run(product))


def test_rows_are_arranged_by_expert() -> None:
    case = Case(200, 40, 8, 5, 2, fresh_seed())
    num_assignments = case.ids.numel()
    blocks = expert_blocks.group(case.ids, 5, hopper_experts.BLOCK)
    rows, places = hopper_experts.arrange(case.x, blocks.assignments, blocks.experts, num_assignments)
    here = (case.ids >= 0).flatten()
    places = places.long()[here]
    assert len(places.unique()) == here.sum()
    assert torch.equal(blocks.experts[places // hopper_experts.BLOCK].long(), case.ids.flatten()[here])
    tokens = torch.arange(num_assignments, device=DEVICE)[here] // 2
    assert torch.equal(rows[places], case.x[tokens])


def test_only_what_the_kernel_takes_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, down = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 64), (2, 48, 64), (2, 64, 24)))
    assert not moe._for_dense_tiles(x, gate_up, down, 1 << 20, 2), "not on Hopper"
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)
    assert moe._for_dense_tiles(x, gate_up, down, 1 << 20, 2)
    assert not moe._for_dense_tiles(x, gate_up, down, 2 * moe.DENSE_TILES - 1, 2)
    assert not moe._for_dense_tiles(x, gate_up[:, :24], down, 1 << 20, 2), "no gate"
    assert not moe._for_dense_tiles(x[:, :60], gate_up, down, 1 << 20, 2), "rows that TMA cannot read"
    assert not moe._for_dense_tiles(x.float(), gate_up.float(), down.float(), 1 << 20, 2), "numbers of 32 bits"


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize(("limit", "gelu"), [(-0.75, False), (None, True)])
def test_gates_that_the_kernel_lacks_go_elsewhere(
    limit: float | None, gelu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(140, 72, 40, 3, 1, fresh_seed())
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)
    monkeypatch.setattr(moe, "DENSE_TILES", 1)
    monkeypatch.setattr(moe, "_dense_experts", None)
    tensors = (case.x, case.gate_up, case.down, case.weights, case.ids)
    expected = kernels.fused_experts.reference(*tensors, limit=limit, gelu=gelu)  # type: ignore[attr-defined]
    found = moe.fused_experts(*tensors, limit=limit, gelu=gelu)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8, None),
    "deepseek-v2-lite": (2048, 1408, 64, 6, None),
    "gpt-oss-20b": (2880, 2880, 32, 4, 7.0),
    "odd": (264, 136, 5, 3, None),
    "odd with biases": (264, 136, 5, 3, 0.75),
}
"""Hidden size, expert size, experts, top k, and the gate's limit."""


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [130, 1000, 4096])
def test_experts_on_a_gpu(shape: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same bits as in blocks of any other size."""
    width, hidden, num_experts, top_k, limit = SHAPES[shape]
    case = Case(tokens, width, hidden, num_experts, top_k, int.from_bytes(os.urandom(3), "little"), limit)
    poison((tokens * top_k + 128 * num_experts, width), dtype=torch.bfloat16)

    def dense(*tensors: Tensor, **given: Any) -> Tensor:
        biases = (given.get("gate_up_bias"), given.get("down_bias"))
        return moe._dense_experts(*tensors, biases=biases, limit=given.get("limit"))

    actual = case.run(dense)
    case.check(actual)
    assert torch.equal(case.run(dense), actual), "two runs differ"
    monkeypatch.setattr(moe, "DENSE_TILES", 1 << 30)
    assert torch.equal(case.run(moe.fused_experts_invariant), actual)
    row = int((case.ids >= 0).all(1).nonzero()[0])
    apart = case.x.clone()
    apart[row] = torch.nan
    spoiled = case.run(dense, apart)
    # Limits take NaN for a number.
    assert limit is not None or spoiled[row].isnan().all()
    spoiled[row] = actual[row]
    assert torch.equal(spoiled, actual)
