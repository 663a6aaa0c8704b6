from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import Routing
from asyncllm.kernels.triton import expert_blocks, moe
from tests.kernels import offline
from tests.kernels.device import fresh_seed, poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LAUNCHERS = [
    pytest.param((kernels.route.reference, kernels.fused_experts.reference), id="reference"),  # type: ignore[attr-defined]
    pytest.param((moe.route, moe.fused_experts), id="triton"),
]
"""On a GPU the kernels run compiled, elsewhere under Triton's interpreter."""

UNWRITTEN = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
"""Rows of experts that are elsewhere hold whatever was there, and padding multiplies the first."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture(params=LAUNCHERS)
def ops(request: pytest.FixtureRequest) -> tuple:
    return request.param


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Token by token, in float64."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for weight, expert in zip(weights[token].tolist(), expert_ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            total += weight * (down[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("renormalize", [False, True])
def test_route(ops: tuple, renormalize: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 4.0]], device=DEVICE)
    weights, expert_ids = ops[0](logits, Routing(2, renormalize=renormalize))
    assert expert_ids.tolist() == [[1, 2], [3, 0]]
    expected = logits.softmax(-1).gather(1, expert_ids)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


def test_of_equal_logits_the_lowest_id_comes_first(ops: tuple) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, -0.0, 0.0, -1.0, -0.0], [-3.0] * 5], device=DEVICE)
    weights, expert_ids = ops[0](logits, Routing(4, renormalize=True))
    assert expert_ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 4], [0, 1, 2, 3]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_no_numbers_still_choose_experts_that_exist() -> None:
    logits = torch.tensor([[float("nan")] * 5, [float("-inf")] * 5, [1.0, float("nan"), 0.0, 2.0, 3.0]], device=DEVICE)
    _, expert_ids = moe.route(logits, Routing(3))
    for row in expert_ids.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_route_kernel_chooses_as_its_reference(dtype: torch.dtype) -> None:
    logits = random(5, 60, seed=4).to(dtype)
    expected = kernels.route.reference(logits, Routing(6, renormalize=True))  # type: ignore[attr-defined]
    weights, expert_ids = moe.route(logits, Routing(6, renormalize=True))
    assert torch.equal(expert_ids, expected[1])
    torch.testing.assert_close(weights, expected[0], atol=1e-6, rtol=1e-6)


def choose(logits: Tensor, routing: Routing, correction: Tensor | None) -> dict[int, float]:
    """One token's experts and weights, expert by expert, in Python's numbers."""
    odds = logits.double().tolist()
    if routing.scores == "sigmoid":
        scores = [1 / (1 + math.exp(-each)) for each in odds]
    else:
        scores = [math.exp(each) / sum(map(math.exp, odds)) for each in odds]
    by = [score + (0.0 if correction is None else float(correction[expert])) for expert, score in enumerate(scores)]
    size = len(by) // routing.groups
    members = [range(group * size, (group + 1) * size) for group in range(routing.groups)]
    count = 2 if routing.group_score == "top2" else 1
    members.sort(key=lambda group: -sum(sorted((by[expert] for expert in group), reverse=True)[:count]))
    allowed = [expert for group in members[: routing.top_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -by[expert])[: routing.top_k]
    total = sum(scores[expert] for expert in chosen) if routing.renormalize else 1.0
    return {expert: scores[expert] / total * routing.scale for expert in chosen}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, "sigmoid"),
        Routing(3, "softmax", scale=2.5),
        Routing(4, "sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2"),
        Routing(5, "softmax", groups=6, top_groups=3, group_score="max", scale=16.0),
    ],
    ids=lambda routing: f"{routing.scores}-{routing.groups}",
)
def test_route_by_groups_and_corrections(ops: tuple, routing: Routing, corrected: bool) -> None:
    logits, correction = 2 * random(9, 12, seed=5), random(12, seed=6) if corrected else None
    weights, expert_ids = ops[0](logits, routing, correction)
    for token, row in enumerate(logits):
        expected = choose(row, routing, correction)
        assert expert_ids[token].tolist() == list(expected)
        torch.testing.assert_close(weights[token].cpu(), torch.tensor(list(expected.values())), atol=1e-5, rtol=1e-5)
    if corrected:
        assert not torch.equal(expert_ids, ops[0](logits, routing)[1])


def test_sparsemixer_weighs_each_choice_among_the_logits_near_it(ops: tuple) -> None:
    """Of 4.0, 3.9, 3.0 and -1.0, a tenth away is near and a quarter is not."""
    weights, expert_ids = ops[0](
        torch.tensor([[3.0, 4.0, -1.0, 3.9]], device=DEVICE), Routing(2, "sparsemixer", near=0.1)
    )
    assert expert_ids.tolist() == [[1, 3]]
    first = 1 / (1 + math.exp(-0.1))
    torch.testing.assert_close(weights, torch.tensor([[first, 1.0]], device=DEVICE))


@UNWRITTEN
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_that_are_elsewhere_add_nothing(ops: tuple, tokens: int) -> None:
    """A token may have none, some or all of its experts here; what was never written has no part in the sum."""
    num_experts, top_k = 8, 4
    x, gate_up, down = random(tokens, 6), random(num_experts, 10, 6, seed=1), random(num_experts, 6, 5, seed=2)
    biases = {"gate_up_bias": random(num_experts, 10, seed=7), "down_bias": random(num_experts, 6, seed=8)}
    weights, expert_ids = ops[0](random(tokens, num_experts, seed=3), Routing(top_k))
    whole = ops[1](x, gate_up, down, weights, expert_ids, **biases)
    total = torch.zeros_like(whole)
    for own in (range(2), range(2, 3), range(3, 8)):
        here = slice(own.start, own.stop)
        elsewhere = (expert_ids < own.start) | (expert_ids >= own.stop)
        some = {name: bias[here].contiguous() for name, bias in biases.items()}
        total += ops[1](
            x,
            gate_up[here].contiguous(),
            down[here].contiguous(),
            weights.masked_fill(elsewhere, 0.0),
            (expert_ids - own.start).masked_fill(elsewhere, -1),
            **some,
        )
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (3, 3), (8, 1)])
def test_fused_experts(ops: tuple, tokens: int, num_experts: int, top_k: int) -> None:
    x, gate_up, down = random(tokens, 6), random(num_experts, 10, 6, seed=1), random(num_experts, 6, 5, seed=2)
    weights, expert_ids = ops[0](random(tokens, num_experts, seed=3), Routing(top_k))
    actual = ops[1](x, gate_up, down, weights, expert_ids)
    expected = experts(x, gate_up, down, weights, expert_ids)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_without_a_gate(ops: tuple, tokens: int) -> None:
    """Token by token, in float64."""
    x, up, down = random(tokens, 6), random(8, 5, 6, seed=1), random(8, 6, 5, seed=2)
    weights, expert_ids = ops[0](random(tokens, 8, seed=3), Routing(2))
    actual = ops[1](x, up, down, weights, expert_ids)
    expected = torch.zeros(tokens, 6, dtype=torch.float64, device=DEVICE)
    for token, choice in itertools.product(range(tokens), range(2)):
        expert = expert_ids[token, choice]
        hidden = (up[expert].double() @ x[token].double()).relu().square()
        expected[token] += weights[token, choice] * (down[expert].double() @ hidden)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("limit", "gelu"), [(None, False), (0.5, False), (-0.3, False), (None, True)])
def test_fused_experts_with_biases_and_other_gates(ops: tuple, tokens: int, limit: float | None, gelu: bool) -> None:
    """Token by token, in float64."""
    x, gate_up, down = random(tokens, 6), random(8, 10, 6, seed=1), random(8, 6, 5, seed=2)
    more = {"gate_up_bias": random(8, 10, seed=4), "down_bias": random(8, 6, seed=5), "limit": limit}
    weights, expert_ids = ops[0](random(tokens, 8, seed=3), Routing(2))
    actual = ops[1](x, gate_up, down, weights, expert_ids, gelu=gelu, **more)
    expected = torch.zeros(tokens, 6, dtype=torch.float64, device=DEVICE)
    for token, choice in itertools.product(range(tokens), range(2)):
        expert = expert_ids[token, choice]
        product = gate_up[expert].double() @ x[token].double() + more["gate_up_bias"][expert]
        gate, up = product.chunk(2)
        if limit is None:
            hidden = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        elif limit < 0:
            hidden = F.silu(gate).clamp(max=-limit) * up.clamp(limit, -limit)
        else:
            gate = gate.clamp(max=limit)
            hidden = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)
        expected[token] += weights[token, choice] * (down[expert].double() @ hidden + more["down_bias"][expert])
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_experts_rounds_where_its_reference_does(dtype: torch.dtype) -> None:
    """Most results are the reference's own bits: what differs is a sum of another order, now and then a last bit."""
    x = random(40, 32).to(dtype)
    gate_up, down = (random(5, 48, 32, seed=1) / 6).to(dtype), (random(5, 32, 24, seed=2) / 5).to(dtype)
    weights, expert_ids = moe.route(random(40, 5, seed=3), Routing(2, renormalize=True))
    actual = moe.fused_experts(x, gate_up, down, weights, expert_ids)
    expected = kernels.fused_experts.reference(x, gate_up, down, weights, expert_ids)  # type: ignore[attr-defined]
    assert (actual == expected).float().mean() > 0.9
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@UNWRITTEN
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("limit", "gelu", "gated"),
    [(None, False, True), (0.5, False, True), (-0.3, False, True), (None, True, True), (None, False, False)],
)
def test_few_tokens_are_not_grouped(
    dtype: torch.dtype, limit: float | None, gelu: bool, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tokens' experts one is elsewhere; sizes fill no tile."""
    seed = fresh_seed()
    x, gate_up = random(2, 36, seed=seed).to(dtype), (random(16, 50, 36, seed=1) / 6).to(dtype)
    gate_up = gate_up if gated else gate_up[:, :25].contiguous()
    down = (random(16, 36, 25, seed=2) / 5).to(dtype)
    more = {"gate_up_bias": random(*gate_up.shape[:2], seed=4), "down_bias": random(16, 36, seed=5)}
    more = {name: bias.to(dtype) for name, bias in more.items()} if gated else {}
    weights, ids = moe.route(random(2, 16, seed=seed + 1), Routing(1))
    ids, weights = torch.cat((ids, torch.full_like(ids, -1)), 1), torch.cat((weights, torch.zeros_like(weights)), 1)
    ids[1], weights[1] = ids[1].flip(0), weights[1].flip(0)
    monkeypatch.setattr(moe, "group", None)
    poison((4, 25), dtype=dtype)
    actual = moe.fused_experts(x, gate_up, down, weights, ids, limit=limit, gelu=gelu, num_chosen_from=32, **more)
    expected = kernels.fused_experts.reference(  # type: ignore[attr-defined]
        x, gate_up, down, weights, ids, limit=limit, gelu=gelu, num_chosen_from=32, **more
    )
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_invariant_experts_give_a_token_the_same_bits_in_any_batch() -> None:
    x, gate_up, down = random(40, 64), random(4, 96, 64, seed=1) / 8, random(4, 64, 48, seed=2) / 7
    weights, expert_ids = kernels.route(random(40, 4, seed=3), Routing(2))
    together = kernels.fused_experts_invariant(x, gate_up, down, weights, expert_ids)
    expected = kernels.fused_experts(x, gate_up, down, weights, expert_ids)
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    for rows in (slice(0, 1), slice(3, 20), slice(0, 0)):
        alone = kernels.fused_experts_invariant(x[rows], gate_up, down, weights[rows], expert_ids[rows])
        assert torch.equal(alone, together[rows])


def test_assignments_are_listed_by_expert_in_their_own_order() -> None:
    expert_ids = torch.tensor([[4, 0], [1, 4], [4, 0], [4, 1], [4, 0], [4, 2], [0, 4], [2, 4], [0, 4]], device=DEVICE)
    block_experts, assignments, *_ = expert_blocks.group(expert_ids, 6, 4)
    assert len(block_experts) == 9
    assert block_experts.tolist() == [0, 0, 1, 2, 4, 4, 4, -1, -1]
    flat = expert_ids.flatten().tolist()
    for expert in range(6):
        mine = assignments.view(-1, 4)[block_experts == expert].flatten().tolist()
        expected = [assignment for assignment, chosen in enumerate(flat) if chosen == expert]
        assert mine == expected + [len(flat)] * (-len(expected) % 4)


@pytest.mark.parametrize(
    "num_experts", [3, 8, pytest.param(128, marks=pytest.mark.gpu), pytest.param(300, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("tokens", [4000, 9001])
def test_grouping_many_assignments(num_experts: int, block_tokens: int, tokens: int) -> None:
    """Of 9,001 tokens' the chunks are counted first."""
    assert (-(-2 * tokens // expert_blocks.MANY_ASSIGNMENTS.size) >= 2 * expert_blocks.CHUNKS_EACH) == (tokens == 9001)
    expert_ids = torch.randint(num_experts, (tokens, 2), device=DEVICE)
    block_experts, assignments, *_ = expert_blocks.group(expert_ids, num_experts, block_tokens)
    flat = expert_ids.flatten()
    used = -(-flat.bincount(minlength=num_experts) // block_tokens)
    ids = torch.arange(num_experts, device=DEVICE).repeat_interleave(used)
    assert torch.equal(block_experts[: len(ids)].long(), ids)
    assert (block_experts[len(ids) :] == -1).all()
    filled = assignments[: len(ids) * block_tokens]
    assert torch.equal(filled[filled < len(flat)].long(), flat.argsort(stable=True))


@UNWRITTEN
def test_a_rank_with_some_of_the_experts_takes_blocks_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, down = random(70, 16), random(4, 32, 16, seed=1) / 4, random(4, 16, 16, seed=2) / 4
    x, gate_up, down = (each.bfloat16() for each in (x, gate_up, down))
    weights, expert_ids = moe.route(random(70, 16, seed=3), Routing(2))
    elsewhere = expert_ids >= 4
    weights, expert_ids = weights.masked_fill(elsewhere, 0.0), expert_ids.masked_fill(elsewhere, -1)
    sizes, group = [], expert_blocks.group

    def grouped(ids: Tensor, num_experts: int, block_tokens: int) -> expert_blocks.Blocks:
        sizes.append(block_tokens)
        return group(ids, num_experts, block_tokens)

    monkeypatch.setattr(moe, "group", grouped)
    found = [moe.fused_experts(x, gate_up, down, weights, expert_ids, num_chosen_from=count) for count in (0, 16)]
    assert sizes == [64, 16]
    expected = kernels.fused_experts.reference(  # type: ignore[attr-defined]
        x, gate_up, down, weights, expert_ids, num_chosen_from=16
    )
    for actual in found:
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_blocks_are_no_larger_than_the_experts_need() -> None:
    assert [moe.tokens_per_block(tokens * 2, 8) for tokens in (1, 42, 64, 128, 4096)] == [16, 16, 32, 64, 128]
    assert [moe.tokens_per_block(tokens * 8, 128) for tokens in (1, 64, 256, 4096)] == [16, 16, 32, 128]


def test_kernels_compile_as_intended(compile_kernels: offline.Compile) -> None:
    compiled = compile_kernels("compile_moe")
    for case in compiled.values():
        assert case.spilled_bytes == 0, case
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, case
        assert case.mma == 0, f"{case}: mma.sync adds in another order than wgmma"
        if "bf16" in case.name and "few" not in case.name:
            assert case.wgmma, case
            assert case.async_copies, case


MODELS = {"mixtral": (4096, 14336, 8, 2), "qwen3-30b-a3b": (2048, 768, 128, 8), "odd": (264, 104, 5, 3)}
"""hidden size, expert size, experts, top k"""
SIZES = [*((model, torch.bfloat16) for model in MODELS), ("odd", torch.float16)]


class Case:
    """Random weights and routed tokens of a model's size, from a fresh seed that is printed."""

    def __init__(self, model: str, tokens: int, dtype: torch.dtype) -> None:
        seed = int.from_bytes(os.urandom(4), "little")
        print(f"seed {seed}")
        generator = torch.Generator("cuda").manual_seed(seed)
        width, hidden, num_experts, top_k = MODELS[model]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype) * shape[-1] ** -0.5

        self.gate_up, self.down = normal(num_experts, 2 * hidden, width) * 2, normal(num_experts, width, hidden)
        self.x = normal(tokens, width) * width**0.5
        self.weights, self.expert_ids = moe.route(
            normal(tokens, num_experts) * num_experts**0.5, Routing(top_k, renormalize=True)
        )

    def run(self, rows: slice = slice(None), product: Callable[..., Tensor] = moe.fused_experts) -> Tensor:
        # What the allocator hands out next is poisoned, so whatever a kernel does not write shows.
        poison = torch.full((1 << 27,), float("nan"), device="cuda", dtype=torch.bfloat16)
        del poison
        return product(self.x[rows], self.gate_up, self.down, self.weights[rows], self.expert_ids[rows])

    def exact(self) -> Tensor:
        """In float64, expert by expert."""
        total = torch.zeros(self.x.shape, dtype=torch.float64, device="cuda")
        for expert in range(self.gate_up.shape[0]):
            token, choice = (self.expert_ids == expert).nonzero(as_tuple=True)
            gate, up = (self.x[token].double() @ self.gate_up[expert].double().t()).chunk(2, -1)
            y = (F.silu(gate) * up) @ self.down[expert].double().t()
            total.index_add_(0, token, y * self.weights[token, choice, None].double())
        return total


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Of any row, relative to that row's length. NaN counts as infinite."""
    errors = (actual.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(errors.nan_to_num(nan=float("inf")).max())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 50, 200, 1100])
@pytest.mark.parametrize(("model", "dtype"), SIZES)
def test_large_experts_are_as_exact_as_the_reference(model: str, tokens: int, dtype: torch.dtype) -> None:
    case = Case(model, tokens, dtype)
    actual, exact = case.run(), case.exact()
    reference = kernels.fused_experts.reference(  # type: ignore[attr-defined]
        case.x, case.gate_up, case.down, case.weights, case.expert_ids
    )
    assert largest_error(actual, exact) <= 1.2 * largest_error(reference, exact) + 1e-4
    assert torch.equal(actual, case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_large_experts_in_float32(tokens: int) -> None:
    case = Case("qwen3-30b-a3b", tokens, torch.float32)
    actual = case.run()
    assert largest_error(actual, case.exact()) < 1e-5
    assert torch.equal(actual[:1], case.run(slice(1)))


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "dtype"), SIZES)
def test_a_token_gets_the_same_bits_in_any_batch(model: str, dtype: torch.dtype) -> None:
    """From one to thousands of tokens every size of block takes part."""
    case, product = Case(model, 3000, dtype), moe.fused_experts_invariant
    everything = case.run(product=product)
    sizes = [1, 2, 3, 7, 33, 64, 130, 260, 500, 1500]
    blocks = {moe.tokens_per_block(size * case.expert_ids.shape[1], case.gate_up.shape[0]) for size in sizes}
    assert blocks == set(moe.TILES)
    for size in sizes:
        assert torch.equal(case.run(slice(size), product), everything[:size]), size
        assert torch.equal(case.run(slice(-size, None), product), everything[-size:]), size


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_captured_graph_serves_other_tokens(tokens: int) -> None:
    case = Case("qwen3-30b-a3b", 2 * tokens, torch.bfloat16)
    all_logits = torch.randn(2 * tokens, 128, device="cuda", dtype=torch.bfloat16)
    x, logits = case.x[:tokens].clone(), all_logits[:tokens].clone()

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return moe.fused_experts(x, case.gate_up, case.down, *moe.route(logits, Routing(8, renormalize=True)))

    layer(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, logits)
    for rows in (slice(tokens), slice(tokens, None)):
        x.copy_(case.x[rows])
        logits.copy_(all_logits[rows])
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer(case.x[rows], all_logits[rows]))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(8192, 128, 8), (300, 8, 2), (77, 512, 10), (5, 4096, 3)])
def test_routing_many_tokens(tokens: int, num_experts: int, top_k: int) -> None:
    """Logits in bfloat16 hold many equal ones."""
    logits = torch.randn(tokens, num_experts, device="cuda", dtype=torch.bfloat16)
    expected = kernels.route.reference(logits, Routing(top_k, renormalize=True))  # type: ignore[attr-defined]
    weights, expert_ids = moe.route(logits, Routing(top_k, renormalize=True))
    assert torch.equal(expert_ids, expected[1])
    torch.testing.assert_close(weights, expected[0], atol=1e-6, rtol=1e-5)
