"""Products of many tokens for Hopper, in Gluon: x weight^T, or silu(x gate^T) * (x up^T) with the gate applied in
registers. Operands are 16-bit numbers, or 8-bit codes with scales.

A block has one warp that loads (the producer) and two or three warpgroups that multiply (the consumers). A tile is 128
or 192 tokens by 256 rows of the weight: 256 adjacent rows, or 128 gate rows and the 128 corresponding up rows. Each
consumer holds the gate and up values of its 64 tokens in one accumulator of 64 x 256, and stores 64 x 128 results, or
both halves of a plain product in sequence. The producer keeps a ring of STAGES full. Each stage holds a step of 128
bytes along the input features: the tokens' part and the two halves of the weight's part, copied by TMA, which pads with
zeros beyond the last token and does not store there.

Barriers, one pair per stage, each with a phase bit that flips when it completes:

- `full`: the producer arrives once and announces the number of bytes; it completes when the copies have brought them.
  The consumers wait for it before they multiply.
- `empty`: each consumer arrives once its product of the stage is done, which is one step late, when the next product
  is already running. The producer waits for it before it refills the stage, except in the first round.

Producer and consumers iterate over the same (tile, step) list, so each derives the phase from its number of rounds.

Without SHARES a block processes whole tiles in turn, which leaves multiprocessors idle if there are few tiles and they
do not divide evenly. With SHARES each block gets an equal share of all steps ("stream-K": Osama et al., 2023), which
may begin and end inside a tile. The consumer with a tile's first step owns the tile. The others store their sums to
`partial` and then set their flag (release). The owner waits for each flag (acquire), adds the sums in the order of the
steps, so that results are reproducible to the bit, and resets the flag: flags are zero between launches. An owner's
block has a higher number than those that it waits for, which have therefore started before it.

Codes are summed in int32 or, as cuBLAS does, in the tensor cores' own float32 of about 14 bits, and the sums are
multiplied by the scales of their tokens and rows. Blocks exchange int32 sums unscaled.

Registers: a consumer needs 128 for the accumulator and as many to add another block's sums or to apply the gate, so two
consumers get 240 each and the producer 24. Three get 160 each, and multiply 128 columns at a time, since ptxas has no
product of 256 columns for a kernel that starts with 128 registers per thread. Shared memory: 4 stages of 48 KiB and 32
KiB of results, or 3 of 56 KiB and 48 KiB. One block runs per multiprocessor.

No kernel writes weights, so the producer loads those of the first stages before it waits for the preceding kernel.
Everything else depends on tokens, which are loaded after that wait.
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
    "biased",
    "compile_options",
    "gated_product",
    "gated_results",
    "launch_product",
    "multiply_steps",
    "next_stage",
    "places",
    "processors",
    "product_kernel",
    "share_of",
    "store_tile",
    "synchronize",
    "tile_place",
    "wait_for_flag",
]

CONSUMER_TOKENS = 64
"""Number of tokens of a consumer."""

WIDTH = 128
"""Rows of the weight in half a tile, for example its gate rows."""

STEP = 64
"""Number of 16-bit input features of a stage: 128 bytes, one line of the swizzled layout."""

TOKENS_TOGETHER = 2048
"""Number of tokens whose tiles are consecutive for the same weights, so that these come from the L2 cache."""

LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Layout of every tile in shared memory."""

synchronize: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""The barrier of the warps of one partition, which Triton 3.7 renames."""


@gluon.jit
def tile_place(tile, token_tiles, column_tiles, GROUP: gl.constexpr):
    """Return the tile of tokens and the tile of columns of a tile. GROUP adjacent tiles of tokens come first."""
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    size = min(token_tiles - first, GROUP)
    inside = tile % in_group
    return first + inside % size, inside // size


@gluon.jit
def share_of(block, token_tiles, column_tiles, shares, steps):
    """Return a block's tile of tokens, the number of its share of the tile's steps over all tiles of columns, and the
    share's first and end step.

    Adjacent blocks read the same weights, one block for each tile of tokens. Later blocks get earlier steps.
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
    """Copy a stage's tokens: 128 at once, or 64 at a time for 192, since TMA copies powers of two."""
    COPIES: gl.constexpr = tokens_memory.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens_memory.shape[1]
    K: gl.constexpr = tokens_memory.shape[2]
    for copy in gl.static_range(COPIES):
        row = (token_tile * COPIES + copy) * ROWS
        tma.async_copy_global_to_shared(
            x, [row, step * K], full.index(stage), tokens_memory.index(COPIES * stage + copy)
        )


@gluon.jit
def _load_weights(weight, halves, full, stage, column_tile, step, out_size, GATED: gl.constexpr):
    """Copy a stage's gate rows and the corresponding up rows, or as many adjacent rows in all."""
    ROWS: gl.constexpr = halves.shape[1]
    K: gl.constexpr = halves.shape[2]
    if GATED:
        first = column_tile * ROWS
        second = first + out_size
    else:
        first = column_tile * 2 * ROWS
        second = first + ROWS
    tma.async_copy_global_to_shared(weight, [first, step * K], full.index(stage), halves.index(2 * stage))
    tma.async_copy_global_to_shared(weight, [second, step * K], full.index(stage), halves.index(2 * stage + 1))


@gluon.jit
def _load_steps(
    x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, begin, end, stage, phase, out_size,
    BYTES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    for step in range(begin, end):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _load_weights(weight, halves, full, stage, column_tile, step, out_size, GATED)
        _load_tokens(x, tokens_memory, full, stage, token_tile, step)
        stage, phase = next_stage(stage, phase, full.shape[0])
    return stage, phase


@gluon.jit
def _produce(
    work, BYTES: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr, GATED: gl.constexpr, USE_PDL: gl.constexpr
):
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
        _load_weights(weight, halves, full, stage, column_tile, begin + stage, out_size, GATED)
    wait_for_producers(USE_PDL)
    for stage in range(first):
        _load_tokens(x, tokens_memory, full, stage, token_tile, begin + stage)
    release_consumers(USE_PDL)
    stage = first % STAGES
    phase = first // STAGES
    stage, phase = _load_steps(
        x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, begin + first, end, stage, phase,
        out_size, BYTES, GATED,
    )  # fmt: skip
    if SHARES:
        at += end - begin
        while at < stop:
            end = min(steps, stop - at)
            stage, phase = _load_steps(
                x, weight, tokens_memory, halves, full, empty, token_tile, at // steps, 0, end, stage, phase, out_size,
                BYTES, GATED,
            )  # fmt: skip
            at += end
    else:
        for tile in range(block + gl.num_programs(0), token_tiles * column_tiles, gl.num_programs(0)):
            token_tile, column_tile = tile_place(tile, token_tiles, column_tiles, GROUP)
            stage, phase = _load_steps(
                x, weight, tokens_memory, halves, full, empty, token_tile, column_tile, 0, steps, stage, phase,
                out_size, BYTES, GATED,
            )  # fmt: skip


@gluon.jit
def multiply_steps(tokens, weights, full, empty, CONSUMER: gl.constexpr, begin, end, stage, phase, ACC: gl.constexpr):
    """Return the sums over steps begin to end - 1, at least one, as two halves [64, WIDTH] in int32 for integers and
    otherwise in float32, and the next stage and phase."""
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = tokens.shape[0] // STAGES
    ROWS: gl.constexpr = tokens.shape[1]
    COLUMNS: gl.constexpr = weights.shape[1]
    SUMS: gl.constexpr = gl.int32 if tokens.dtype == gl.int8 else gl.float32
    acc = gl.zeros([ROWS, COLUMNS], SUMS, ACC)
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
    first, second = acc.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
    return first, second, stage, phase


@gluon.jit
def _sigmoid(x):
    """Return the sigmoid. The exponent is never positive, so nothing overflows."""
    decay = gl.exp(-gl.abs(x))
    return gl.where(x < 0.0, decay, 1.0) / (1.0 + decay)


@gluon.jit
def gated_results(gate, up, dtype: gl.constexpr):
    """Return silu(gate) * up of float32 sums, rounded where the product and `activation.gate_kernel` round."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    active = (gate * _sigmoid(gate)).to(dtype).to(gl.float32)
    return (active * up).to(dtype)


@gluon.jit
def store_tile(finished, results, out, row, column):
    """Store finished [64, WIDTH] to out by TMA. `results`: this consumer's buffer."""
    # Wait until the previous tile's store has read the buffer.
    tma.store_wait(0)
    synchronize()
    results.store(finished)
    fence_async_shared()
    synchronize()
    tma.async_copy_shared_to_global(out, [row, column], results)


@gluon.jit
def _scaled(half, x_scales, weight_scales, row, column, num_tokens, out_size):
    """Return sums of codes [64, WIDTH] times the scales of tokens and of rows of the weight, in float32."""
    token = row + gl.arange(0, half.shape[0], layout=gl.SliceLayout(1, half.type.layout))
    feature = column + gl.arange(0, half.shape[1], layout=gl.SliceLayout(0, half.type.layout))
    of_token = gl.load(x_scales + token, mask=token < num_tokens, other=0.0)
    own = gl.load(weight_scales + feature, mask=feature < out_size, other=0.0)
    return half.to(gl.float32) * own[None, :] * of_token[:, None]


@gluon.jit
def biased(half, bias, column, out_size):
    """Return float32 sums [64, WIDTH] plus the bias [out_size] from a column on."""
    feature = column + gl.arange(0, half.shape[1], layout=gl.SliceLayout(0, half.type.layout))
    return half + gl.load(bias + feature, mask=feature < out_size, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _plain_results(half, scales, row, column, dtype: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr):
    x_scales, weight_scales, bias, num_tokens, out_size = scales
    if SCALED:
        half = _scaled(half, x_scales, weight_scales, row, column, num_tokens, out_size)
    if HAS_BIAS:
        half = biased(half, bias, column, out_size)
    return half.to(dtype)


@gluon.jit
def _store_results(
    first, second, scales, results, out, row, column_tile,
    GATED: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Store the complete sums of a consumer's tokens, which begin at `row`, to out."""
    WIDTH: gl.constexpr = results.shape[1]
    if GATED:
        x_scales, weight_scales, _, num_tokens, out_size = scales
        column = column_tile * WIDTH
        if SCALED:
            first = _scaled(first, x_scales, weight_scales, row, column, num_tokens, out_size)
            second = _scaled(second, x_scales, weight_scales + out_size, row, column, num_tokens, out_size)
        store_tile(gated_results(first, second, out.dtype), results, out, row, column)
    else:
        column = column_tile * 2 * WIDTH
        store_tile(_plain_results(first, scales, row, column, out.dtype, SCALED, HAS_BIAS), results, out, row, column)
        column += WIDTH
        store_tile(_plain_results(second, scales, row, column, out.dtype, SCALED, HAS_BIAS), results, out, row, column)


@gluon.jit
def places(half):
    """Return the offsets of the elements of half [64, WIDTH] in a stored sum, in blocks of 8 x 8, one for each store of
    a warp."""
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
    out, tokens, weights, results, full, empty, partial, flags, scales, token_tiles, column_tiles, shares, steps,
    CONSUMER: gl.constexpr, ACC: gl.constexpr, GATED: gl.constexpr, SCALED: gl.constexpr, HAS_BIAS: gl.constexpr,
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
        first, second, stage, phase = multiply_steps(
            tokens, weights, full, empty, CONSUMER, begin, end, stage, phase, ACC
        )
        inside = places(first)
        if begin > 0:
            mine = block * CONSUMERS + CONSUMER
            gl.store(partial + mine * 2 * HALF + inside, first)
            gl.store(partial + (mine * 2 + 1) * HALF + inside, second)
            # All threads must have stored before one of them sets the flag.
            synchronize()
            gl.atomic_xchg(flags + mine, 1, sem="release", scope="gpu")
        else:
            other = share
            while (other + 1) * total // shares < (column_tile + 1) * steps:
                other += 1
                theirs = ((shares - 1 - other) * token_tiles + token_tile) * CONSUMERS + CONSUMER
                wait_for_flag(flags + theirs)
                first += gl.load(partial + theirs * 2 * HALF + inside, cache_modifier=".cg")
                second += gl.load(partial + (theirs * 2 + 1) * HALF + inside, cache_modifier=".cg")
                synchronize()
                gl.store(flags + theirs, 0)
            _store_results(first, second, scales, results, out, row, column_tile, GATED, SCALED, HAS_BIAS)
        at += end - begin


@gluon.jit
def _consume(
    work, CONSUMER: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr, GATED: gl.constexpr, SCALED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    (
        out, tokens, weights, all_results, full, empty, partial, flags, scales, token_tiles, column_tiles, shares, steps
    ) = work  # fmt: skip
    CONSUMERS: gl.constexpr = tokens.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens.shape[1]
    # Triton has no product of 256 columns for integers.
    WHOLE: gl.constexpr = CONSUMERS == 2 and tokens.dtype != gl.int8
    COLUMNS: gl.constexpr = weights.shape[1] if WHOLE else weights.shape[1] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 if SCALED else 16])
    results = all_results.index(CONSUMER)
    if SHARES:
        _consume_share(
            out, tokens, weights, results, full, empty, partial, flags, scales, token_tiles, column_tiles, shares,
            steps, CONSUMER, ACC, GATED, SCALED, HAS_BIAS,
        )  # fmt: skip
    else:
        stage = 0
        phase = 0
        for tile in range(gl.program_id(0), token_tiles * column_tiles, gl.num_programs(0)):
            token_tile, column_tile = tile_place(tile, token_tiles, column_tiles, GROUP)
            first, second, stage, phase = multiply_steps(
                tokens, weights, full, empty, CONSUMER, 0, steps, stage, phase, ACC
            )
            row = (token_tile * CONSUMERS + CONSUMER) * ROWS
            _store_results(first, second, scales, results, out, row, column_tile, GATED, SCALED, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["token_tiles", "column_tiles", "shares", "steps", "num_tokens", "out_size"])
def product_kernel(
    x, weight, out, partial, flags, x_scales, weight_scales, bias, token_tiles, column_tiles, shares, steps, num_tokens,
    out_size,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SHARES: gl.constexpr, GATED: gl.constexpr,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [num_tokens, K], weight [out_size, K], or [2 * out_size, K] with GATED, and out [num_tokens, out_size] are
    tensor descriptors. x and the weight have blocks of 128 (64 with three consumers) and WIDTH rows by STEP 16-bit
    numbers, or by 128 codes with SCALED; out has blocks of [64, WIDTH].

    x_scales [num_tokens] and weight_scales [rows of the weight], float32: the scales of codes. bias [out_size]: for
    plain products. partial [blocks, CONSUMERS, 2, 64, WIDTH]: float32, or int32 for integers. flags [blocks,
    CONSUMERS]: int32, zero before and after. Both are unused without SHARES.
    """
    dtype: gl.constexpr = x.dtype
    LOADED: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    WIDTH: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = out.block_type.shape[0]
    BYTES: gl.constexpr = (CONSUMERS * ROWS + 2 * WIDTH) * K * (1 if SCALED else 2)
    COPIES: gl.constexpr = CONSUMERS * ROWS // LOADED
    tokens_memory = gl.allocate_shared_memory(dtype, [COPIES * STAGES, LOADED, K], x.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * WIDTH, K], weight.layout)
    results = gl.allocate_shared_memory(out.dtype, [CONSUMERS, ROWS, WIDTH], out.layout)
    tokens = tokens_memory._reinterpret(dtype, [CONSUMERS * STAGES, ROWS, K], x.layout)
    halves = weights._reinterpret(dtype, [2 * STAGES, WIDTH, K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    synchronize()
    scales = (x_scales, weight_scales, bias, num_tokens, out_size)
    produce = (x, weight, tokens_memory, halves, full, empty, token_tiles, column_tiles, shares, steps, out_size)
    consume = (
        out, tokens, weights, results, full, empty, partial, flags, scales, token_tiles, column_tiles, shares, steps
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (consume, 0, GROUP, SHARES, GATED, SCALED, HAS_BIAS)),
                (_consume, (consume, 1, GROUP, SHARES, GATED, SCALED, HAS_BIAS)),
                (_produce, (produce, BYTES, GROUP, SHARES, GATED, USE_PDL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consume, 0, GROUP, SHARES, GATED, SCALED, HAS_BIAS)),
                (_consume, (consume, 1, GROUP, SHARES, GATED, SCALED, HAS_BIAS)),
                (_consume, (consume, 2, GROUP, SHARES, GATED, SCALED, HAS_BIAS)),
                (_produce, (produce, BYTES, GROUP, SHARES, GATED, USE_PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def compile_options(
    tokens: int, *, shares: bool, gated: bool = True, scaled: bool = False, with_bias: bool = False
) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options for tiles of 128 or 192 tokens."""
    consumers = tokens // CONSUMER_TOKENS
    return {
        "CONSUMERS": consumers,
        "STAGES": 4 if consumers == 2 else 3,
        "GROUP": -(-TOKENS_TOGETHER // tokens),
        "SHARES": shares,
        "GATED": gated,
        "SCALED": scaled,
        "HAS_BIAS": with_bias,
        "num_warps": 4,
        # The share of 65,536 registers that 12 or 16 warps (the producer's count as 4) have before their reallocation.
        "maxnreg": 168 if consumers == 2 else 128,
    }


def gated_product(x: Tensor, weight: Tensor, tokens: int, *, shares: bool) -> Tensor:
    """Return silu(gate) * up [T, N] of x [T, K] and weight [2 * N, K], in tiles of `tokens` (128 or 192).

    Both are 16-bit, contiguous and aligned to 16 bytes; K and N are multiples of 8. T is at least 1, and with `shares`
    at most `tokens` times the number of multiprocessors.
    """
    out = torch.empty((len(x), weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    loaded = CONSUMER_TOKENS if tokens % 128 else 128
    maps = (
        TensorMap(x, (loaded, STEP), LINES),
        TensorMap(weight, (WIDTH, STEP), LINES),
        TensorMap(out, (CONSUMER_TOKENS, WIDTH), LINES),
    )
    launch_product(_configured(tokens, shares), maps, (out, out, out), tokens, shares=shares, sums=torch.float32)
    return out


@functools.cache
def _configured(tokens: int, shares: bool) -> Configured:
    return Configured(product_kernel, **compile_options(tokens, shares=shares))


def launch_product(
    kernel: Configured,
    maps: tuple[TensorMap, TensorMap, TensorMap],
    scales: tuple[Tensor, Tensor, Tensor],
    tokens: int,
    *,
    shares: bool,
    sums: torch.dtype,
) -> None:
    """Launch `product_kernel` for `maps` of x, the weight and the results, in tiles of `tokens`. `scales`: those of x
    and of the weight, and the bias. `sums`: the dtype of partial sums."""
    x, weight, out = (each.base for each in maps)
    num_tokens, in_size = x.shape
    out_size = out.shape[1]
    width = WIDTH if weight.shape[0] == 2 * out_size else 2 * WIDTH
    token_tiles, column_tiles = -(-num_tokens // tokens), -(-out_size // width)
    steps = -(-in_size // maps[0].block_shape[1])
    at_once = processors(x.device)
    if shares:
        count = min(at_once // token_tiles, column_tiles * steps)
        blocks = count * token_tiles
        size = blocks * tokens * 2 * WIDTH
        partial = torch.empty(size, dtype=sums, device=x.device)
        flags = zero_counters(x.device)
    else:
        count, blocks = 1, min(at_once, token_tiles * column_tiles)
        partial = flags = out
    numbers = (token_tiles, column_tiles, count, steps, num_tokens, out_size)
    kernel((blocks, 1, 1), (partial, flags, *scales), numbers, maps)


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
