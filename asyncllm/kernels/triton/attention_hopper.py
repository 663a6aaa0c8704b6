"""Prefill attention for Hopper's matrix units, in Gluon: the plain form, for 16-bit numbers.

Triton orders the products and the softmax of a tile one after the other. Here the scores of the next tile are asked for
first, then the values of this one, and the next tile's softmax runs beside the latter, as in FlashAttention-3 (Shah et
al., 2024). One thread asks for whole tiles of K and V (TMA), which takes no registers and hardly an instruction.

Each query goes through the same operations in the same order as in `attention_prefill`, so it gets the same bits there
and here. Gluon is not interpreted: on a CPU, tests run the other kernel.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from asyncllm.kernels.cache import PagedKV
from asyncllm.kernels.triton.attention_launch import Variant
from asyncllm.kernels.triton.attention_plan import PrefillTiles
from asyncllm.kernels.triton.attention_tile import FLOOR, LOG2_E
from asyncllm.kernels.triton.language import INTERPRET, release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured

__all__ = ["LINES", "attend_on_hopper", "prefill_hopper_kernel", "runs_on_hopper"]

HEAD_DIM, ROWS, TILE = 128, 64, 64
"""What the kernel is tuned for: rows of the score matrix, and keys per tile, as in the config of long prompts."""

LONG_PROMPT = 512
"""Queries of a row from which on the kernel is used."""

LONGER_PROMPT = 1024
"""Queries of a row from which on FEW_SLOTS is used. Both bounds go by the longest prompt alone, so that each variant is
among those that are compiled before the first request."""

FEW_SLOTS, MORE_SLOTS = (2, 1), (3, 2)
"""Tiles of K and of V that a block holds: with few of them, three blocks share a multiprocessor, otherwise two.

Timed at 32 query heads over 8 on an H200 (Triton 3.6), in TFLOP/s for 4 prompts of 2,048, one of 8,192, 2,048 tokens
after 6,144, 512 after 4,096, and 8 prompts of 256: few 460, 566, 496, 406, 128; more 427, 530, 534, 478, 120; three of
each 385, 506, 525, 473, 116; 128 rows and 8 warps with three of each 327, 440, 448, 418, 113; tiles of 32 keys 347 and
less; the kernel in Triton 396, 499, 463, 458, 140."""

LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How tiles lie in shared memory: TILED of the kernel, which cannot name a global."""

_synchronize: Any = getattr(gl, "barrier", None) or gl.thread_barrier
"""Renamed in Triton 3.7."""


@gluon.jit
def _fetch(lines, page, first_line, tile, end, kv_head, slots, barriers, KVH: gl.constexpr, PAGE: gl.constexpr):
    """Have `tile`, which lies in `page`, copied to its slot, if it comes before `end`. first_line is 0 for keys; for
    values it is the first of theirs."""
    STAGES: gl.constexpr = slots.shape[0]
    TILE: gl.constexpr = slots.shape[1]
    slot = tile % STAGES
    wanted = tile < end
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, TILE * slots.shape[2] * 2, pred=wanted)
    line = first_line + (page * KVH + kv_head) * PAGE + tile * TILE % PAGE
    tma.async_copy_global_to_shared(lines, [line, 0], barrier, slots.index(slot), pred=wanted)


@gluon.jit
def _softmax(
    raw, tile, weight_sum, maximum, positions, steepness, dtype: gl.constexpr, OUT: gl.constexpr, MASKED: gl.constexpr
):
    """One step of the online softmax: `attention_tile.attend_tile` up to the values."""
    if MASKED:
        keys = tile * raw.shape[1] + gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, raw.type.layout))
        raw = gl.where(keys[None, :] <= positions[:, None], raw, -float("inf"))
    new_maximum = gl.maximum(maximum, gl.max(raw, 1))
    offset = (-new_maximum * steepness)[:, None] + gl.zeros_like(raw)
    weights = gl.exp2(gl.fma(raw, gl.zeros_like(raw) + steepness, offset))
    fade = gl.exp2((maximum - new_maximum) * steepness)
    weight_sum = gl.fma(weight_sum, fade, gl.sum(weights, 1))
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2))
    return weights, weight_sum, new_maximum, gl.convert_layout(fade, gl.SliceLayout(1, OUT))


@gluon.jit
def _attend_tiles(
    lines, table, value_line, query, keys, values, key_barriers, value_barriers,
    weights, acc, weight_sum, maximum, positions, begin, stop, end, kv_head, steepness,
    KVH: gl.constexpr, PAGE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Values of tiles begin to stop - 1; weights of the tiles after those."""
    KEYS: gl.constexpr = keys.shape[0]
    VALUES: gl.constexpr = values.shape[0]
    TILE: gl.constexpr = keys.shape[1]
    ROWS: gl.constexpr = query.shape[0]
    for tile in range(begin, stop):
        following = tile + 1
        key_page = gl.load(table + gl.minimum(following + KEYS, end - 1) * TILE // PAGE)
        value_page = gl.load(table + gl.minimum(tile + VALUES, end - 1) * TILE // PAGE)
        mbarrier.wait(key_barriers.index(following % KEYS), following // KEYS & 1)
        nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
        k = keys.index(following % KEYS).permute((1, 0))
        scores = warpgroup_mma(query, k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(value_barriers.index(tile % VALUES), tile // VALUES & 1)
        sums = warpgroup_mma(weights, values.index(tile % VALUES), acc, is_async=True)
        raw = warpgroup_mma_wait(1, deps=(scores,))
        weights, weight_sum, maximum, fade = _softmax(
            raw, following, weight_sum, maximum, positions, steepness, query.dtype, OUT, MASKED
        )
        acc = warpgroup_mma_wait(0, deps=(sums,))
        acc = acc * fade[:, None]
        # All warps are done with these two slots.
        _synchronize()
        _fetch(lines, key_page, 0, following + KEYS, end, kv_head, keys, key_barriers, KVH, PAGE)
        _fetch(lines, value_page, value_line, tile + VALUES, end, kv_head, values, value_barriers, KVH, PAGE)
    return weights, acc, weight_sum, maximum


@gluon.jit(do_not_specialize=["value_line", "table_stride"], do_not_specialize_on_alignment=["block_tables"])
def prefill_hopper_kernel(
    lines,
    q,
    block_tables,
    out,
    entries,
    steepness,
    value_line,
    table_stride,
    Q_STRIDE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    number = gl.program_id(0)
    kv_head = gl.program_id(1)
    num_tiles = gl.load(entries)
    # There is an entry for each block, even if nothing is in it.
    entry = entries + (1 + number) * 4
    row = gl.load(entry)
    first_query = gl.load(entry + 1)
    count = gl.load(entry + 2)
    position = gl.load(entry + 3)
    if number >= num_tiles:
        return
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    TILED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = q.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [KEYS, TILE, D], TILED)
    values = gl.allocate_shared_memory(dtype, [VALUES, TILE, D], TILED)
    key_barriers = gl.allocate_shared_memory(gl.int64, [KEYS, 1], mbarrier.MBarrierLayout())
    value_barriers = gl.allocate_shared_memory(gl.int64, [VALUES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(KEYS):
        mbarrier.init(key_barriers.index(slot), count=1)
    for slot in gl.static_range(VALUES):
        mbarrier.init(value_barriers.index(slot), count=1)
    fence_async_shared()
    _synchronize()

    table = block_tables + row.to(gl.int64) * table_stride
    kv_end = position + count
    end = gl.cdiv(gl.maximum(kv_end, 0), TILE)
    last = gl.maximum(end - 1, 0)
    for tile in gl.static_range(KEYS):
        page = gl.load(table + gl.minimum(tile, last) * TILE // PAGE)
        _fetch(lines, page, 0, tile, end, kv_head, keys, key_barriers, NUM_KV_HEADS, PAGE)
        if tile < VALUES:
            _fetch(lines, page, value_line, tile, end, kv_head, values, value_barriers, NUM_KV_HEADS, PAGE)
    next_page = gl.load(table + gl.minimum(KEYS, last) * TILE // PAGE)

    # Row r of the scores is query r // GROUP with head r % GROUP of those that share this KV head.
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BLOCKED))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, BLOCKED))
    offsets = (first_query + rows // GROUP).to(gl.int64) * Q_STRIDE + (kv_head * GROUP + rows % GROUP) * D
    loaded = gl.load(q + offsets[:, None] + dims[None, :], mask=(rows // GROUP < count)[:, None], other=0.0)
    query = gl.allocate_shared_memory(dtype, [ROWS, D], TILED, loaded)
    fence_async_shared()
    _synchronize()
    positions = position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)) // GROUP
    weight_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    maximum = gl.full([ROWS], FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, D], gl.float32, OUT)

    mbarrier.wait(key_barriers.index(0), 0, pred=end > 0)
    nothing = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(0, deps=(scores,))
    _synchronize()
    _fetch(lines, next_page, 0, KEYS, end, kv_head, keys, key_barriers, NUM_KV_HEADS, PAGE)
    weights, weight_sum, maximum, _ = _softmax(raw, 0, weight_sum, maximum, positions, steepness, dtype, OUT, True)
    # Tiles before this one every query sees whole.
    whole = gl.maximum(gl.maximum(position + 1, 0) // TILE - 1, 0)
    weights, acc, weight_sum, maximum = _attend_tiles(
        lines, table, value_line, query, keys, values, key_barriers, value_barriers,
        weights, acc, weight_sum, maximum, positions, 0, whole, end, kv_head, steepness,
        NUM_KV_HEADS, PAGE, SCORES, OUT, False,
    )  # fmt: skip
    weights, acc, weight_sum, maximum = _attend_tiles(
        lines, table, value_line, query, keys, values, key_barriers, value_barriers,
        weights, acc, weight_sum, maximum, positions, whole, last, end, kv_head, steepness,
        NUM_KV_HEADS, PAGE, SCORES, OUT, True,
    )  # fmt: skip
    slot = last % VALUES
    mbarrier.wait(value_barriers.index(slot), last // VALUES & 1, pred=end > 0)
    if (last + 1) * TILE > kv_end:
        # What nobody owns may be NaN, and 0 times NaN is NaN.
        v = values.index(slot).load(BLOCKED)
        owned = last * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, BLOCKED)) < kv_end
        values.index(slot).store(gl.where(owned[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
    _synchronize()
    sums = warpgroup_mma(weights, values.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(sums,))

    total = gl.convert_layout(gl.where(weight_sum == 0.0, 1.0, weight_sum), gl.SliceLayout(1, OUT))
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    offsets = (first_query + rows // GROUP).to(gl.int64) * OUT_STRIDE + (kv_head * GROUP + rows % GROUP) * D
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    gl.store(out + offsets[:, None] + dims[None, :], result, mask=(rows // GROUP < count)[:, None])


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return not INTERPRET.value and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def runs_on_hopper(variant: Variant, plan: PrefillTiles, q: Tensor) -> bool:
    """Whether `attend_on_hopper` can do it, and is faster."""
    plain = not (variant.has_window or variant.softcap or variant.sinks or variant.alibi)
    shape, config = plan.shape, plan.config
    tiled = (shape.head_dim, config.rows, config.tile, q.element_size()) == (HEAD_DIM, ROWS, TILE, 2)
    long = _longest_prompt(plan) >= LONG_PROMPT
    return plain and tiled and shape.block_size % TILE == 0 and long and _is_hopper(q.device)


def _longest_prompt(plan: PrefillTiles) -> int:
    """In queries, rounded up to whole tiles."""
    return plan.capacity // plan.num_rows * plan.tokens


def attend_on_hopper(
    grid: tuple[int, int, int],
    variant: Variant,
    plan: PrefillTiles,
    q: Tensor,
    cache: PagedKV,
    scale: float,
    out: Tensor,
) -> None:
    """Prefill attention of q [T, H, D] to out [T, H, D]."""
    num_lines, head_dim = cache.lines.shape
    lines = TensorDescriptor(cache.lines, [num_lines, head_dim], [head_dim, 1], [TILE, head_dim], LINES)
    slots = FEW_SLOTS if _longest_prompt(plan) >= LONGER_PROMPT else MORE_SLOTS
    tensors = (q, plan.block_tables, out, plan.entries)
    numbers = (scale * LOG2_E.value, num_lines // 2, plan.table_stride)
    _configured(variant, slots)(grid, tensors, numbers, (lines,))


@functools.cache
def _configured(variant: Variant, slots: tuple[int, int]) -> Configured:
    shape = variant.shape
    return Configured(
        prefill_hopper_kernel,
        num_warps=ROWS // 16,
        fp_fusion=False,
        Q_STRIDE=variant.q_stride,
        OUT_STRIDE=variant.out_stride,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        D=shape.head_dim,
        PAGE=shape.block_size,
        ROWS=ROWS,
        TILE=TILE,
        KEYS=slots[0],
        VALUES=slots[1],
    )
