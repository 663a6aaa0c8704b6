"""Mixture of experts on a GPU: routing, and the experts' gated MLPs as two grouped matrix products.

An assignment is one (token, chosen expert) pair, numbered token * top_k + choice. `expert_blocks` lists assignments by
expert in blocks of a fixed number of tokens, so that each block needs the weights of only one expert.
`grouped_matmul_kernel` runs over those blocks: once from the tokens to the experts' hidden rows, with SwiGLU before the
store, and once from there to the experts' outputs. `weighted_sum_kernel` sums the outputs of a token's experts. The
host reads nothing back, so all of it can be captured in a CUDA graph.

The weights are always the left operand of the tensor core product and the tokens the right one. A tile of few tokens
then runs on wgmma like a tile of many, and an output is the same sum in the same order whatever the tile's size: with
`fused_experts_invariant` a token gets the same bits alone and in any batch. For few tokens `few_experts` is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels import moe as reference
from asyncllm.kernels.moe import GATE_SLOPE, Routing
from asyncllm.kernels.triton.activation import GELU, activate, apply_limited_gate
from asyncllm.kernels.triton.device import is_hopper
from asyncllm.kernels.triton.expert_blocks import Blocks, group
from asyncllm.kernels.triton.few_experts import few_experts
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "TILES",
    "Tile",
    "add_up",
    "assignments_of",
    "fused_experts",
    "fused_experts_invariant",
    "multiply",
    "route",
    "rows_of",
    "store_block",
    "tile_of",
    "tokens_per_block",
]


class Tile(NamedTuple):
    """A program's tile of `grouped_matmul_kernel`: `rows` of the weights by a block of tokens, `depth` columns at a
    time."""

    rows: int
    depth: int
    warps: int
    stages: int


TILES: dict[int, tuple[Tile, Tile]] = {
    16: (Tile(128, 128, 8, 4), Tile(128, 128, 4, 3)),
    32: (Tile(128, 128, 8, 4), Tile(128, 128, 8, 4)),
    64: (Tile(256, 64, 8, 4), Tile(256, 64, 8, 4)),
    128: (Tile(256, 64, 8, 4), Tile(256, 64, 8, 4)),
}
"""By tokens per block, for 16-bit dtypes: the tiles of the first and of the second product.

Time of the two products on an H200, relative to what their bytes take at 4.34 TB/s, or their operations at 790 TFLOP/s:

    block  Qwen3-30B-A3B           Mixtral-8x7B
    16     100 %, 90 % (T = 16)    104 %, 98 % (T = 4)
    32      99 %, 80 % (T = 256)   102 %, 99 % (T = 64)
    64      92 %, 76 % (T = 512)    96 %, 92 % (T = 128)
    128     56 %, 45 % (T = 4096)   62 %, 52 % (T = 1024, a third of whose blocks is padding)

Blocks of 16 with tiles of 64 rows reached 92 % and 72 %; blocks of 128 with 3 stages 51 % and 43 %.
"""

FLOAT32_TILE = Tile(32, 32, 4, 2)
"""For float32, always with blocks of 16 tokens: runs on plain FMA, for tests."""

BLOCKS_PER_GROUP = 16
"""Number of blocks that go through the weights together, so that an expert's weights are read from memory once. The
first product of Mixtral takes 1,286 us for 1,024 tokens with 1, 1,069 with 4, 1,061 with 8, 1,046 with 16 and 1,036
with 64."""


DENSE_TILES = 192
"""Average number of tokens per expert from which `linear/hopper_experts.py` multiplies. On an H200, in us for a layer
in blocks of 128 and there: Qwen3-30B-A3B 634, 641 at 128 and 1,442, 1,270 at 512; DeepSeek-V2-Lite 380, 420 at 96, 613,
525 at 192, and 1,692, 1,564 at 768; Mixtral-8x7B 1,128, 994 at 128 and 11,173, 9,075 at 2,048."""

SUM_TILE = 1024
"""Columns per program of `weighted_sum_kernel`."""


@triton.jit
def order(values, places, PADDED: tl.constexpr):
    """Return a sort key that rises with the value and, among equal ones, falls with the place. Its maximum is the next
    choice, and an existing place even if values are NaN. `places` are below PADDED, a power of 2."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (rank << 32) + (PADDED - 1 - places)


@triton.jit
def place_of(key, PADDED: tl.constexpr):
    """Return the place in a key of `order`."""
    return PADDED - 1 - (key & (PADDED - 1)).to(tl.int32)


@triton.jit
def route_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    expert_ids_ptr,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Choose TOP_K experts for each token from logits [T, NUM_EXPERTS] -> weights and expert_ids [T, TOP_K]. A program
    has one token. See `asyncllm.kernels.moe.route`."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)
    exists = expert < NUM_EXPERTS
    lowest = -(1 << 63)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        score = tl.exp(logits - tl.max(logits, 0))
        score = score / tl.sum(score, 0)
    by = logits
    if CORRECTED or GROUPS > 1:
        by = score
    if CORRECTED:
        by += tl.load(correction_ptr + expert, mask=exists, other=0.0)
    key = tl.where(exists, order(by, expert, PADDED_EXPERTS), lowest)

    if GROUPS > 1:
        group = expert // (NUM_EXPERTS // GROUPS)
        groups = tl.arange(0, PADDED_GROUPS)
        best = tl.zeros([PADDED_GROUPS], tl.float32)
        for each in tl.static_range(GROUPS):
            own_key = tl.where(group == each, key, lowest)
            first = tl.max(own_key, 0)
            total = tl.sum(tl.where(expert == place_of(first, PADDED_EXPERTS), by, 0.0), 0)
            if TOP2:
                second = tl.max(tl.where(own_key == first, lowest, own_key), 0)
                total += tl.sum(tl.where(expert == place_of(second, PADDED_EXPERTS), by, 0.0), 0)
            best = tl.where(groups == each, total, best)
        group_key = tl.where(groups < GROUPS, order(best, groups, PADDED_GROUPS), lowest)
        kept = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            winner = tl.max(group_key, 0)
            kept = kept | (group == place_of(winner, PADDED_GROUPS))
            group_key = tl.where(group_key == winner, lowest, group_key)
        key = tl.where(kept & exists, key, lowest)

    place = tl.arange(0, PADDED_K)
    ids = tl.zeros([PADDED_K], tl.int32)
    weights = tl.zeros([PADDED_K], tl.float32)
    for choice in tl.static_range(TOP_K):
        chosen = place_of(tl.max(key, 0), PADDED_EXPERTS)
        weight = tl.sum(tl.where(expert == chosen, score, 0.0), 0)
        ids = tl.where(place == choice, chosen, ids)
        weights = tl.where(place == choice, weight, weights)
        key = tl.where(expert == chosen, lowest, key)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    at = token * TOP_K + place
    tl.store(weights_ptr + at, weights * scale, mask=place < TOP_K)
    tl.store(expert_ids_ptr + at, ids.to(tl.int64), mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def grouped_matmul_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    assignments_ptr,
    block_experts_ptr,
    bias_ptr,
    num_assignments,
    max_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ASSIGNMENTS_PER_X: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """y[a] = weight[expert of a] @ x[a // ASSIGNMENTS_PER_X], through SwiGLU if requested, for every assignment a.

    x [*, COLUMNS], weight [E, ROWS, COLUMNS], y [num_assignments, ROWS or, with SWIGLU, ROWS // 2]. BIAS: bias [E,
    ROWS] is added. SWIGLU's gate is that of `apply_limited_gate`, with LIMIT and SLOPE.
    """
    OUTPUTS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    TILE_OUTPUTS: tl.constexpr = TILE_ROWS // 2 if SWIGLU else TILE_ROWS
    block, first_output = tile_of(max_blocks, OUTPUTS, TILE_OUTPUTS, BLOCKS_PER_GROUP)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    assignments = assignments_of(block, assignments_ptr, num_assignments, BLOCK_TOKENS, False)
    is_filled = assignments < num_assignments
    # Padding loads nothing, since a row that every program reads for it would be a hot spot in the L2 cache. Rows
    # beyond the weights compute the last row again, which costs nothing.
    x_row = tl.where(is_filled, assignments // ASSIGNMENTS_PER_X, 0).to(tl.int64)
    weight_row = rows_of(first_output, OUTPUTS, TILE_ROWS, SWIGLU)

    depth = tl.arange(0, TILE_DEPTH)
    x_ptrs = x_ptr + x_row[None, :] * COLUMNS + depth[:, None]
    weight_ptrs = weight_ptr + expert * (ROWS * COLUMNS) + weight_row[:, None] * COLUMNS + depth[None, :]
    total = tl.zeros([TILE_ROWS, BLOCK_TOKENS], tl.float32)
    for start in range(0, COLUMNS, TILE_DEPTH):
        if COLUMNS % TILE_DEPTH == 0:
            weight = tl.load(weight_ptrs)
            x = tl.load(x_ptrs, mask=is_filled[None, :], other=0.0)
        else:
            weight = tl.load(weight_ptrs, mask=depth[None, :] < COLUMNS - start, other=0.0)
            x = tl.load(x_ptrs, mask=is_filled[None, :] & (depth[:, None] < COLUMNS - start), other=0.0)
        total = dot(weight, x, total)
        weight_ptrs += TILE_DEPTH
        x_ptrs += TILE_DEPTH

    if BIAS:
        total += tl.load(bias_ptr + expert * ROWS + weight_row).to(tl.float32)[:, None]
    store_block(total, y_ptr, assignments, is_filled, first_output, OUTPUTS, SWIGLU, LIMIT, SLOPE)


@triton.jit
def tile_of(max_blocks, OUTPUTS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, BLOCKS_PER_GROUP: tl.constexpr):
    """Return the program's block of assignments and the first of its outputs."""
    NUM_TILES: tl.constexpr = (OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    program = tl.program_id(0)
    group = program // (BLOCKS_PER_GROUP * NUM_TILES)
    within = program % (BLOCKS_PER_GROUP * NUM_TILES)
    group_blocks = tl.minimum(max_blocks - group * BLOCKS_PER_GROUP, BLOCKS_PER_GROUP)
    return group * BLOCKS_PER_GROUP + within % group_blocks, (within // group_blocks) * TILE_OUTPUTS


@triton.jit
def assignments_of(block, assignments_ptr, num_assignments, BLOCK_TOKENS: tl.constexpr, UNGROUPED: tl.constexpr):
    """Return a block's assignments [BLOCK_TOKENS], with num_assignments for padding."""
    lane = tl.arange(0, BLOCK_TOKENS)
    if UNGROUPED:
        return tl.where(lane == 0, block, num_assignments)
    else:
        return tl.load(assignments_ptr + block * BLOCK_TOKENS + lane)


@triton.jit
def rows_of(first_output, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, SWIGLU: tl.constexpr):
    """Return the rows of an expert's weight in a tile. Rows beyond the end repeat the last one."""
    tile_row = tl.arange(0, TILE_ROWS)
    if SWIGLU:
        # 8 rows of the gate alternate with the same 8 of up: tensor cores leave rows r and r + 8 in one thread.
        output = first_output + tile_row // 16 * 8 + tile_row % 8
        return tl.minimum(output, OUTPUTS - 1) + tile_row % 16 // 8 * OUTPUTS
    else:
        return tl.minimum(first_output + tile_row, OUTPUTS - 1)


@triton.jit
def store_block(
    total, y_ptr, assignments, is_filled, first_output,
    OUTPUTS: tl.constexpr, SWIGLU: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Store the products [TILE_ROWS, BLOCK_TOKENS] of a tile, through the gate if requested, to y [*, OUTPUTS]."""
    TILE_ROWS: tl.constexpr = total.shape[0]
    BLOCK_TOKENS: tl.constexpr = total.shape[1]
    TILE_OUTPUTS: tl.constexpr = TILE_ROWS // 2 if SWIGLU else TILE_ROWS
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if SWIGLU:
        pairs = tl.reshape(total, (TILE_ROWS // 16, 2, 8, BLOCK_TOKENS)).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        gate, up = tl.reshape(gate, (TILE_OUTPUTS, BLOCK_TOKENS)), tl.reshape(up, (TILE_OUTPUTS, BLOCK_TOKENS))
        total = apply_limited_gate(gate, up, dtype, LIMIT, SLOPE)
    y_column = first_output + tl.arange(0, TILE_OUTPUTS)
    tl.store(
        y_ptr + assignments[None, :].to(tl.int64) * OUTPUTS + y_column[:, None],
        round_to(total, dtype),
        mask=is_filled[None, :] & (y_column < OUTPUTS)[:, None],
    )


@triton.jit
def weighted_sum_kernel(
    y_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACED: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Sum y [*, WIDTH] of each token's assignments times weights [T, TOP_K] -> out [T, WIDTH]. PLACED: the row of y of
    each assignment is in places [T * TOP_K]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = column < WIDTH
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(TOP_K):
        assignment = token * TOP_K + choice
        weight = tl.load(weights_ptr + assignment)
        row = assignment
        if PLACED:
            row = tl.load(places_ptr + assignment, mask=weight != 0, other=0).to(tl.int64)
        y = tl.load(y_ptr + row * WIDTH + column, mask=exists, other=0.0).to(tl.float32)
        # Nothing has been written for experts on other ranks.
        total += weight * tl.where(weight == 0, 0.0, y)
    tl.store(out_ptr + token * WIDTH + column, round_to(total, out_ptr.dtype.element_ty), mask=exists)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the op of `asyncllm.kernels.moe`: one program per token, top_k passes over the logits in registers. The
    sparsemixer uses the reference's operations."""
    if routing.scores == "sparsemixer":
        return reference.route.reference(logits, routing, correction)  # type: ignore[attr-defined,no-any-return]
    num_tokens, num_experts = logits.shape
    top_k = routing.top_k
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens:
        launch(
            route_kernel,
            (num_tokens, 1, 1),
            (logits.contiguous(), weights if correction is None else correction, weights, expert_ids),
            (routing.scale,),
            num_warps=1 if num_experts <= 256 else 4,
            NUM_EXPERTS=num_experts,
            TOP_K=top_k,
            SIGMOID=routing.scores == "sigmoid",
            CORRECTED=correction is not None,
            RENORMALIZE=routing.renormalize,
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            TOP2=routing.group_score == "top2",
            PADDED_EXPERTS=triton.next_power_of_2(num_experts),
            PADDED_GROUPS=triton.next_power_of_2(routing.groups),
            PADDED_K=triton.next_power_of_2(top_k),
        )
    return weights, expert_ids


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    gelu: bool = False,
    num_chosen_from: int = 0,
) -> Tensor:
    """Launch the op of `asyncllm.kernels.moe`. All arguments are contiguous."""
    num_tokens, top_k = expert_ids.shape
    # So few assignments rarely share an expert. Assignments and experts of all ranks are counted, since those of this
    # rank are in proportion.
    few = num_tokens * top_k <= max(top_k, max(len(gate_up), num_chosen_from) // 8)
    if not few or not num_tokens or x.element_size() != 2:
        return fused_experts_invariant(
            x,
            gate_up,
            down,
            weights,
            expert_ids,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            limit=limit,
            gelu=gelu,
            num_chosen_from=num_chosen_from,
        )
    gate = GELU if gelu else limit
    return few_experts(
        x, gate_up, down, weights, expert_ids, gate_up_bias=gate_up_bias, down_bias=down_bias, limit=gate
    )


def fused_experts_invariant(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    gelu: bool = False,
    num_chosen_from: int = 0,
) -> Tensor:
    """Like `fused_experts`, in blocks on tensor cores: five launches, one more for plain experts, or seven in the tiles
    of a dense layer, whose results have the same bits."""
    num_tokens, top_k = expert_ids.shape
    num_experts, _, width = gate_up.shape
    hidden_size = down.shape[2]
    num_assignments = num_tokens * top_k
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    # The experts of all ranks, to which the assignments refer.
    num_all = max(num_experts, num_chosen_from)
    has_gate = not gelu and (limit is None or limit > 0)
    if has_gate and _for_dense_tiles(x, gate_up, down, num_assignments, num_all):
        biases = (gate_up_bias, down_bias)
        return _dense_experts(x, gate_up, down, weights, expert_ids, biases, limit)
    block_tokens = tokens_per_block(num_assignments, num_all) if x.element_size() == 2 else 16
    tiles = TILES[block_tokens] if x.element_size() == 2 else (FLOAT32_TILE, FLOAT32_TILE)
    blocks = group(expert_ids, num_experts, block_tokens)
    hidden = torch.empty(num_assignments, hidden_size, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, width, dtype=x.dtype, device=x.device)
    gated, gate = gate_up.shape[1] != hidden_size, GELU if gelu else limit
    multiply(x, gate_up, hidden, blocks, tiles[0], top_k=top_k, swiglu=gated, bias=gate_up_bias, limit=gate)
    if not gated:
        hidden = activate(hidden, "squared_relu")
    multiply(hidden, down, outputs, blocks, tiles[1], top_k=1, swiglu=False, bias=down_bias)
    add_up(outputs, weights, out)
    return out


def _for_dense_tiles(x: Tensor, gate_up: Tensor, down: Tensor, num_assignments: int, num_experts: int) -> bool:
    """Return whether `linear/hopper_experts.py` supports these experts and is faster."""
    hidden_size = down.shape[2]
    return (
        num_assignments >= DENSE_TILES * num_experts
        and x.element_size() == 2
        and gate_up.shape[1] == 2 * hidden_size
        and x.shape[1] % 8 == hidden_size % 8 == 0
        and all(each.data_ptr() % 16 == 0 for each in (x, gate_up, down))
        and is_hopper(x.device)
    )


def _dense_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    limit: float | None,
) -> Tensor:
    """Like `fused_experts` without GELU or a limit below 0, on Hopper, with the rows of x sorted by expert."""
    from asyncllm.kernels.triton.linear import hopper_experts

    blocks = group(expert_ids, len(gate_up), hopper_experts.BLOCK)
    rows, places = hopper_experts.arrange(x, blocks.assignments, blocks.experts, expert_ids.numel())
    hidden = torch.empty(len(rows), down.shape[2], dtype=x.dtype, device=x.device)
    hopper_experts.products(rows, gate_up, hidden, blocks.experts, gated=True, bias=biases[0], limit=limit)
    # The experts' outputs overwrite their inputs.
    hopper_experts.products(hidden, down, rows, blocks.experts, gated=False, bias=biases[1])
    out = torch.empty_like(x)
    add_up(rows, weights, out, places)
    return out


def add_up(outputs: Tensor, weights: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """Sum outputs [T * k, W] of each token's assignments times weights [T, k], and write out [T, W]. places [T * k]:
    the row of outputs of each assignment, unless its weight is zero."""
    num_tokens, top_k = weights.shape
    width = out.shape[1]
    tile = min(SUM_TILE, triton.next_power_of_2(width))
    grid = (num_tokens, -(-width // tile), 1)
    launch(
        weighted_sum_kernel,
        grid,
        (outputs, weights, weights if places is None else places, out),
        WIDTH=width,
        TOP_K=top_k,
        PLACED=places is not None,
        TILE=tile,
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    blocks: Blocks,
    tile: Tile,
    *,
    top_k: int,
    swiglu: bool,
    bias: Tensor | None = None,
    limit: float | None = None,
) -> None:
    """y[a] = weight[expert of a] @ x[a // top_k] for every assignment a, through SwiGLU if requested.

    x [*, columns], weight [E, rows, columns], bias [E, rows], y [assignments, rows], or [assignments, rows // 2] with
    swiglu. A limit limits the gate; GELU as the limit selects GELU's gate.
    """
    num_blocks = blocks.experts.shape[0]
    tile_outputs = tile.rows // 2 if swiglu else tile.rows
    launch(
        grouped_matmul_kernel,
        (num_blocks * -(-y.shape[1] // tile_outputs), 1, 1),
        (x, weight, y, blocks.assignments, blocks.experts, weight if bias is None else bias),
        (y.shape[0], num_blocks),
        num_warps=tile.warps,
        num_stages=tile.stages,
        ROWS=weight.shape[1],
        COLUMNS=weight.shape[2],
        ASSIGNMENTS_PER_X=top_k,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        LIMIT=limit or 0.0,
        SLOPE=GATE_SLOPE,
        BLOCK_TOKENS=blocks.size,
        TILE_ROWS=tile.rows,
        TILE_DEPTH=tile.depth,
        BLOCKS_PER_GROUP=BLOCKS_PER_GROUP,
    )


def tokens_per_block(num_assignments: int, num_experts: int) -> int:
    """Return the smallest block size of at least one and a half times the average number of tokens per expert, so that
    most experts need a single block."""
    for block_tokens in TILES:
        if 2 * num_experts * block_tokens >= 3 * num_assignments:
            return block_tokens
    return max(TILES)
