"""The configurations of the LoRA kernels for qkv of Llama-3-8B, with few rows and with many."""

from __future__ import annotations

from asyncllm.kernels.lora import GROUP
from asyncllm.kernels.triton.lora import BLOCK_K, BLOCK_N, BLOCK_T, expand_kernel, shrink_kernel, splits_of
from asyncllm.kernels.triton.lora_groups import (
    A_NUMBERS,
    B_NUMBERS,
    expand_group_kernel,
    group_rows_kernel,
    group_starts_kernel,
    shrink_group_kernel,
)
from asyncllm.kernels.triton.lora_rows import (
    MAX_RANK,
    SPAN,
    expand_gated_row_kernel,
    expand_row_kernel,
    shrink_row_kernel,
)
from asyncllm.kernels.triton.lora_rows import splits_of as splits_of_row
from tests.kernels.offline import Case

K, SIZES, RANK = 4096, (4096, 1024, 1024, 0), 16
SLOT = 2**26


SIZES_BY_NAME = {f"SIZE_{index}": size for index, size in enumerate(SIZES)}


def _same(rank: int) -> dict[str, int]:
    return {"WIDTH": 3 * rank, "RANK": rank, "SLOT_STRIDE": SLOT, "RANKS_STRIDE": 128, "USE_PDL": True}


def _tile_cases(tokens: int) -> list[Case]:
    same = {**_same(RANK), "BLOCK_T": BLOCK_T, "BLOCK_R": RANK, "SPLITS": splits_of(tokens, K)}
    types = {"slots_ptr": "*i32", "ranks_ptr": "*i32", "h_ptr": "*fp32", "tokens": "i32"}
    shrink = {**types, "x_ptr": "*bf16", "a_ptr": "*bf16"}
    expand = {**types, "b_ptr": "*bf16", "y_ptr": "*bf16"}
    return [
        Case(f"shrink {tokens}", shrink_kernel, shrink, {"K": K, "BLOCK_K": BLOCK_K, **same}),
        Case(f"expand {tokens}", expand_kernel, expand, {**SIZES_BY_NAME, "BLOCK_N": BLOCK_N, **same}),
    ]


def _row_cases(rank: int, *, beside: bool = False) -> list[Case]:
    splits = splits_of_row(K)
    shrink = {**_same(rank), "K": K, "SPAN": SPAN, "BLOCK_K": 8192 // rank, "BESIDE": beside}
    expand = {**_same(rank), **SIZES_BY_NAME, "BLOCK_N": 8192 // rank, "SPLITS": splits, "ALL_SPLITS": splits}
    gated = {**_same(rank), "WIDTH": 2 * rank, "SIZE": 14336, "BLOCK_N": 4096 // rank, "GELU": False}
    types = {"slots_ptr": "*i32", "ranks_ptr": "*i32", "h_ptr": "*fp32", "tokens": "i32"}
    return [
        Case(
            f"shrink a row {rank}{' beside' * beside}",
            shrink_row_kernel,
            {**types, "x_ptr": "*bf16", "a_ptr": "*bf16"},
            shrink,
        ),
        Case(f"expand a row {rank}", expand_row_kernel, {**types, "b_ptr": "*bf16", "y_ptr": "*bf16"}, expand),
        Case(
            f"expand a row with its gate {rank}",
            expand_gated_row_kernel,
            {**types, "b_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*bf16"},
            {**gated, "SPLITS": splits, "ALL_SPLITS": splits},
        ),
    ]


def _group_cases(rank: int) -> list[Case]:
    shrink = {**_same(rank), "GROUP": GROUP, "K": K, "SPAN": SPAN, "BLOCK_K": A_NUMBERS // rank}
    expand = {**_same(rank), "GROUP": GROUP, **SIZES_BY_NAME, "BLOCK_N": B_NUMBERS // rank, "SPLITS": splits_of_row(K)}
    groups = {"group_slots_ptr": "*i32", "group_rows_ptr": "*i32"}
    types = {**groups, "ranks_ptr": "*i32", "h_ptr": "*fp32", "tokens": "i32"}
    return [
        Case(f"shrink groups {rank}", shrink_group_kernel, {**types, "x_ptr": "*bf16", "a_ptr": "*bf16"}, shrink),
        Case(f"expand groups {rank}", expand_group_kernel, {**types, "b_ptr": "*bf16", "y_ptr": "*bf16"}, expand),
    ]


def _grouping_cases(rows: int) -> list[Case]:
    types = {"slots_ptr": "*i32", "starts_ptr": "*i32", "num_rows": "i32"}
    groups = {"group_slots_ptr": "*i32", "group_rows_ptr": "*i32"}
    same = {"GROUP": GROUP, "ALL_ROWS": rows}
    return [
        Case(f"group starts {rows}", group_starts_kernel, types, same),
        Case(f"group rows {rows}", group_rows_kernel, {**types, **groups}, same),
    ]


CASES = [
    *(case for tokens in (300, 4096) for case in _tile_cases(tokens)),
    *(case for rank in (16, 64, MAX_RANK) for case in _row_cases(rank)),
    _row_cases(16, beside=True)[0],
    *(case for rank in (16, 64, MAX_RANK) for case in _group_cases(rank)),
    *(case for rows in (64, 1024) for case in _grouping_cases(rows)),
]
