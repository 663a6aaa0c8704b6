"""silu(x gate^T) * (x up^T) for Hopper in one kernel, in Gluon: the gate is applied before anything leaves registers.

A block has one warp that fetches (the producer) and two or three warpgroups that multiply (the consumers). A tile is
128 or 192 tokens by 128 gate rows and the 128 up rows that belong to them, so that each consumer holds the gate and the
up values of its 64 tokens in one accumulator of 64 x 256, and only 64 x 128 results are stored. The producer keeps a
ring of STAGES full, each stage with one step of 64 along the input size: the tokens' part and the two halves of the
weight's part, copied by TMA, which also fills what lies beyond the last token with zeros and leaves it out of a store.

Barriers, one pair per stage, each with a phase bit that flips when it completes:

- `full`: the producer arrives once and states the bytes to come; it completes when the copies have brought them. The
  consumers wait for it before they multiply.
- `empty`: each consumer arrives once when its product from the stage is done, one step late, as the next product
  already runs. The producer waits for it before it fills the stage again, not in the first round.

Producer and consumers walk over the same (tile, step) list, so each knows the phase from how often it went round.

Without SHARES a block takes whole tiles in turn. That leaves multiprocessors idle where the tiles are few and do not
divide evenly, so with SHARES each block gets an equal share of all steps ("stream-K", Osama et al., 2023), which may
begin and end inside a tile. The consumer that has a tile's first step owns the tile. The others store their sums to
`partial` and then set their flag (release); the owner waits for each flag (acquire), adds the sums in the order of the
steps, so that runs repeat bit by bit, and puts the flag back to zero: flags are zero between launches. An owner's block
has a higher number than those that it waits for, which have therefore been started before it.

Registers: a consumer needs 128 for the accumulator and as many again to add another block's sums or to apply the gate,
so with two of them each gets 240 and the producer 24. Three get 160 each, and multiply 128 columns at a time: ptxas has
no product of 256 columns for a kernel that starts with 128 registers a thread. Shared memory: 4 stages of 48 KiB and 32
KiB of results, or 3 of 56 KiB and 48 KiB. One block per multiprocessor.

No kernel writes weights, so the producer asks for those of the first stages before it waits for the kernel before.
Everything else follows from tokens that it fetches after that wait, stores included.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap

__all__ = [
    "CONSUMER_TOKENS",
    "LINES",
    "STEP",
    "WIDTH",
    "compile_options",
    "gated_kernel",
    "gated_product",
    "gated_results",
    "multiply_steps",
    "next_stage",
    "places",
    "processors",
    "share_of",
    "store_tile",
    "synchronize",
    "tile_place",
    "wait_for_flag",
]

CONSUMER_TOKENS = 64
"""Tokens of one consumer."""

WIDTH = 128
"""Results per token of a tile: as many gate rows, and as many up rows."""

STEP = 64
"""Input features of a stage: 128 bytes, one line of the swizzled layout."""

TOKENS_TOGETHER = 2048
"""Tokens whose tiles follow one another for the same weights, so that these come from the L2 cache."""

LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How every tile lies in shared memory."""

synchronize: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the warps of one partition. Renamed in Triton 3.7."""


@gluon.jit
def tile_place(tile, token_tiles, column_tiles, GROUP: gl.constexpr):
    """Number of a tile -> (tile of tokens, tile of columns): GROUP tiles of tokens beside each other first."""
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    size = min(token_tiles - first, GROUP)
    inside = tile % in_group
    return first + inside % size, inside // size


@gluon.jit
def share_of(block, token_tiles, column_tiles, shares, steps):
    """Return a block's share of the steps of one tile of tokens, through all tiles of columns.

    Blocks beside each other read the same weights, one for each tile of tokens. Later blocks get earlier steps.

    -> tile of tokens, number of the share, its first step, the one after its last.
    """
    share = shares - 1 - block // token_tiles
    total = column_tiles * steps
    return block % token_tiles, share, share * total // shares, (share + 1) * total // shares


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _load_tokens(x, tokens_memory, full, stage, token_tile, step):
    """All of a stage's tokens at once where there are 128, else 64 at a time: TMA copies powers of two."""
    COPIES: gl.constexpr = tokens_memory.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens_memory.shape[1]
    K: gl.constexpr = tokens_memory.shape[2]
    for copy in gl.static_range(COPIES):
        row = (token_tile * COPIES + copy) * ROWS
        tma.async_copy_global_to_shared(
            x, [row, step * K], full.index(stage), tokens_memory.index(COPIES * stage + copy)
        )


@gluon.jit
def _load_weights(weight, halves, full, stage, column_tile, step, out_size):
    """Gate rows beside the up rows that belong to them."""
    ROWS: gl.constexpr = halves.shape[1]
    K: gl.constexpr = halves.shape[2]
    gate = column_tile * ROWS
    tma.async_copy_global_to_shared(weight, [gate, step * K], full.index(stage), halves.index(2 * stage))
    tma.async_copy_global_to_shared(weight, [out_size + gate, step * K], full.index(stage), halves.index(2 * stage + 1))


@gluon.jit
def _load_steps(
    x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, begin, end, stage, phase, out_size,
    BYTES: gl.constexpr,
):  # fmt: skip
    for step in range(begin, end):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _load_weights(weight, halves, full, stage, column_tile, step, out_size)
        _load_tokens(x, tokens_memory, full, stage, token_tile, step)
        stage, phase = next_stage(stage, phase, full.shape[0])
    return stage, phase


@gluon.jit
def _produce(work, BYTES: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr, USE_PDL: gl.constexpr):
    x, weight, tokens_memory, halves, full, empty, token_tiles, column_tiles, shares, steps, out_size = work
    STAGES: gl.constexpr = full.shape[0]
    block = gl.program_id(0)
    if SHARES:
        token_tile, _, at, stop = share_of(block, token_tiles, column_tiles, shares, steps)
        column_tile = at // steps
        begin = at % steps
        end = min(steps, begin + stop - at)
    else:
        token_tile, column_tile = tile_place(block, token_tiles, column_tiles, GROUP)
        begin = 0
        end = steps
    first = min(end - begin, STAGES)
    for stage in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        _load_weights(weight, halves, full, stage, column_tile, begin + stage, out_size)
    wait_for_producers(USE_PDL)
    for stage in range(first):
        _load_tokens(x, tokens_memory, full, stage, token_tile, begin + stage)
    release_consumers(USE_PDL)
    stage = first % STAGES
    phase = first // STAGES
    stage, phase = _load_steps(
        x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, begin + first, end, stage, phase,
        out_size, BYTES,
    )  # fmt: skip
    if SHARES:
        at += end - begin
        while at < stop:
            end = min(steps, stop - at)
            stage, phase = _load_steps(
                x, weight, tokens_memory, halves, full, empty, token_tile, at // steps, 0, end, stage, phase, out_size,
                BYTES,
            )  # fmt: skip
            at += end
    else:
        for tile in range(block + gl.num_programs(0), token_tiles * column_tiles, gl.num_programs(0)):
            token_tile, column_tile = tile_place(tile, token_tiles, column_tiles, GROUP)
            stage, phase = _load_steps(
                x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, 0, steps, stage, phase,
                out_size, BYTES,
            )  # fmt: skip


@gluon.jit
def multiply_steps(tokens, weights, full, empty, CONSUMER: gl.constexpr, begin, end, stage, phase, ACC: gl.constexpr):
    """Return sums over the steps begin to end - 1, at least one: gate and up [64, WIDTH] float32 each, and the next
    stage and phase."""
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = tokens.shape[0] // STAGES
    ROWS: gl.constexpr = tokens.shape[1]
    COLUMNS: gl.constexpr = weights.shape[1]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
    mbarrier.wait(full.index(stage), phase)
    w = weights.index(stage).permute((1, 0))
    acc = warpgroup_mma(tokens.index(CONSUMERS * stage + CONSUMER), w, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    before = stage
    stage, phase = next_stage(stage, phase, STAGES)
    for _ in range(begin + 1, end):
        mbarrier.wait(full.index(stage), phase)
        w = weights.index(stage).permute((1, 0))
        acc = warpgroup_mma(tokens.index(CONSUMERS * stage + CONSUMER), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before), count=1)
    gate, up = acc.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
    return gate, up, stage, phase


@gluon.jit
def _sigmoid(x):
    """Without overflow: the exponent is never positive."""
    decay = gl.exp(-gl.abs(x))
    return gl.where(x < 0.0, decay, 1.0) / (1.0 + decay)


@gluon.jit
def gated_results(gate, up, dtype: gl.constexpr):
    """silu(gate) * up of float32 sums, rounded wherever the product and `activation.gate_kernel` round."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    active = (gate * _sigmoid(gate)).to(dtype).to(gl.float32)
    return (active * up).to(dtype)


@gluon.jit
def store_tile(finished, results, out, row, column):
    """finished [64, WIDTH] -> out. `results` is this consumer's own buffer."""
    # The store of the tile before has read the buffer.
    tma.store_wait(0)
    synchronize()
    results.store(finished)
    fence_async_shared()
    synchronize()
    tma.async_copy_shared_to_global(out, [row, column], results)


@gluon.jit
def places(half):
    """Return where the elements of half [64, WIDTH] lie in a stored sum: in blocks of 8 x 8, one for each store of a
    warp."""
    WIDTH: gl.constexpr = half.shape[1]
    r = gl.arange(0, half.shape[0], layout=gl.SliceLayout(1, half.type.layout))[:, None]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, half.type.layout))[None, :]
    return (r // 8 * (WIDTH // 8) + c // 8) * 64 + r % 8 * 8 + c % 8


@gluon.jit
def wait_for_flag(flag):
    seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while seen == 0:
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    synchronize()


@gluon.jit
def _consume_share(
    out, tokens, weights, results, full, empty, partial, flags, token_tiles, column_tiles, shares, steps,
    CONSUMER: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    CONSUMERS: gl.constexpr = tokens.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens.shape[1]
    HALF: gl.constexpr = ROWS * results.shape[1]
    block = gl.program_id(0)
    token_tile, share, at, stop = share_of(block, token_tiles, column_tiles, shares, steps)
    total = column_tiles * steps
    row = (token_tile * CONSUMERS + CONSUMER) * ROWS
    stage = 0
    phase = 0
    while at < stop:
        column_tile = at // steps
        begin = at % steps
        end = min(steps, begin + stop - at)
        gate, up, stage, phase = multiply_steps(tokens, weights, full, empty, CONSUMER, begin, end, stage, phase, ACC)
        inside = places(gate)
        if begin > 0:
            mine = block * CONSUMERS + CONSUMER
            gl.store(partial + mine * 2 * HALF + inside, gate)
            gl.store(partial + (mine * 2 + 1) * HALF + inside, up)
            # All threads have stored before one of them sets the flag.
            synchronize()
            gl.atomic_xchg(flags + mine, 1, sem="release", scope="gpu")
        else:
            other = share
            while (other + 1) * total // shares < (column_tile + 1) * steps:
                other += 1
                theirs = ((shares - 1 - other) * token_tiles + token_tile) * CONSUMERS + CONSUMER
                wait_for_flag(flags + theirs)
                gate += gl.load(partial + theirs * 2 * HALF + inside, cache_modifier=".cg")
                up += gl.load(partial + (theirs * 2 + 1) * HALF + inside, cache_modifier=".cg")
                synchronize()
                gl.store(flags + theirs, 0)
            store_tile(gated_results(gate, up, out.dtype), results, out, row, column_tile * results.shape[1])
        at += end - begin


@gluon.jit
def _consume(work, CONSUMER: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr):
    out, tokens, weights, all_results, full, empty, partial, flags, token_tiles, column_tiles, shares, steps = work
    CONSUMERS: gl.constexpr = tokens.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens.shape[1]
    COLUMNS: gl.constexpr = weights.shape[1] if CONSUMERS == 2 else weights.shape[1] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    results = all_results.index(CONSUMER)
    if SHARES:
        _consume_share(
            out, tokens, weights, results, full, empty, partial, flags, token_tiles, column_tiles, shares, steps,
            CONSUMER, ACC,
        )  # fmt: skip
    else:
        stage = 0
        phase = 0
        for tile in range(gl.program_id(0), token_tiles * column_tiles, gl.num_programs(0)):
            token_tile, column_tile = tile_place(tile, token_tiles, column_tiles, GROUP)
            gate, up, stage, phase = multiply_steps(tokens, weights, full, empty, CONSUMER, 0, steps, stage, phase, ACC)
            row = (token_tile * CONSUMERS + CONSUMER) * ROWS
            store_tile(gated_results(gate, up, out.dtype), results, out, row, column_tile * results.shape[1])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["token_tiles", "column_tiles", "shares", "steps", "out_size"])
def gated_kernel(
    x, weight, out, partial, flags, token_tiles, column_tiles, shares, steps, out_size,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [T, K], weight [2 * out_size, K] and out [T, out_size] are tensor descriptors of 16-bit numbers, in blocks of
    [128, STEP] ([64, STEP] with three consumers), [WIDTH, STEP] and [64, WIDTH].

    partial: float32 [blocks, CONSUMERS, 2, 64, WIDTH]. flags: int32 [blocks, CONSUMERS], zero before and after. Without
    SHARES neither is read.
    """
    dtype: gl.constexpr = x.dtype
    LOADED: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    WIDTH: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = out.block_type.shape[0]
    BYTES: gl.constexpr = (CONSUMERS * ROWS + 2 * WIDTH) * K * 2
    COPIES: gl.constexpr = CONSUMERS * ROWS // LOADED
    tokens_memory = gl.allocate_shared_memory(dtype, [COPIES * STAGES, LOADED, K], x.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * WIDTH, K], weight.layout)
    results = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, WIDTH], out.layout)
    tokens = tokens_memory._reinterpret(dtype, [CONSUMERS * STAGES, ROWS, K], x.layout)
    halves = weights._reinterpret(dtype, [2 * STAGES, WIDTH, K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    synchronize()
    produce = (x, weight, tokens_memory, halves, full, empty, token_tiles, column_tiles, shares, steps, out_size)
    consume = (out, tokens, weights, results, full, empty, partial, flags, token_tiles, column_tiles, shares, steps)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (consume, 0, GROUP, SHARES)),
                (_consume, (consume, 1, GROUP, SHARES)),
                (_produce, (produce, BYTES, GROUP, SHARES, USE_PDL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, 0, GROUP, SHARES)),
                (_consume, (consume, 1, GROUP, SHARES)),
                (_consume, (consume, 2, GROUP, SHARES)),
                (_produce, (produce, BYTES, GROUP, SHARES, USE_PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def compile_options(tokens: int, *, shares: bool) -> dict[str, Any]:
    """Constexprs (but for USE_PDL) and launch options for tiles of 128 or 192 tokens."""
    consumers = tokens // CONSUMER_TOKENS
    return {
        "CONSUMERS": consumers,
        "STAGES": 4 if consumers == 2 else 3,
        "GROUP": -(-TOKENS_TOGETHER // tokens),
        "SHARES": shares,
        "num_warps": 4,
        # What 12 or 16 warps (the producer's are rounded up to 4) may have of 65,536 before they share them out anew.
        "maxnreg": 168 if consumers == 2 else 128,
    }


def gated_product(x: Tensor, weight: Tensor, tokens: int, *, shares: bool) -> Tensor:
    """x [T, K], weight [2 * N, K] -> [T, N], in tiles of `tokens` (128 or 192).

    16-bit, contiguous, aligned to 16 bytes; K is a multiple of 8, N of 8, T at least 1. With `shares`, T is at most
    `tokens` times the number of multiprocessors.
    """
    rows, in_size = x.shape
    out_size = weight.shape[0] // 2
    out = torch.empty((rows, out_size), dtype=x.dtype, device=x.device)
    token_tiles, column_tiles, steps = -(-rows // tokens), -(-out_size // WIDTH), -(-in_size // STEP)
    at_once = processors(x.device)
    if shares:
        count = min(at_once // token_tiles, column_tiles * steps)
        blocks = count * token_tiles
        consumers = tokens // CONSUMER_TOKENS
        sums = blocks * consumers * 2 * CONSUMER_TOKENS * WIDTH
        partial = torch.empty(sums, dtype=torch.float32, device=x.device)
        flags = zero_counters(x.device)
    else:
        count, blocks = 1, min(at_once, token_tiles * column_tiles)
        partial = flags = out
    maps = (
        TensorMap(x, (CONSUMER_TOKENS if tokens % 128 else 128, STEP), LINES),
        TensorMap(weight, (WIDTH, STEP), LINES),
        TensorMap(out, (CONSUMER_TOKENS, WIDTH), LINES),
    )
    numbers = (token_tiles, column_tiles, count, steps, out_size)
    _configured(tokens, shares)((blocks, 1, 1), (partial, flags), numbers, maps)
    return out


@functools.cache
def _configured(tokens: int, shares: bool) -> Configured:
    return Configured(gated_kernel, **compile_options(tokens, shares=shares))


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
