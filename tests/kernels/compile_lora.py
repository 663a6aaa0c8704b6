"""The configurations of the LoRA kernels for qkv of Llama-3-8B, with few rows and with many."""

from __future__ import annotations

from asyncllm.kernels.lora import GROUP
from asyncllm.kernels.triton.lora import BLOCK_K, expand_kernel, rows_and_splits, shrink_kernel, turns_of
from asyncllm.kernels.triton.lora_groups import (
    expand_group_kernel,
    group_rows_kernel,
    group_starts_kernel,
    shrink_group_kernel,
    splits_of,
)
from tests.kernels.offline import Case

K, SIZES, RANK = 4096, (4096, 1024, 1024, 0), 16
SLOT = 2**26


def _cases(tokens: int) -> list[Case]:
    block_t, splits = rows_and_splits(tokens, K, single=tokens == 48)
    same = {
        "WIDTH": 3 * RANK,
        "RANK": RANK,
        "SLOT_STRIDE": SLOT,
        "RANKS_STRIDE": 128,
        "BLOCK_T": block_t,
        "BLOCK_R": RANK,
        "SPLITS": splits,
        "USE_PDL": True,
    }
    types = {"slots_ptr": "*i32", "ranks_ptr": "*i32", "h_ptr": "*fp32", "tokens": "i32"}
    shrink = {**types, "x_ptr": "*bf16", "a_ptr": "*bf16"}
    expand = {**types, "b_ptr": "*bf16", "y_ptr": "*bf16"}
    sizes = {f"SIZE_{index}": size for index, size in enumerate(SIZES)}
    shrinking, expanding = turns_of(tokens, block_t, num_slots=64)
    return [
        Case(f"shrink {tokens}", shrink_kernel, shrink, {"K": K, "BLOCK_K": BLOCK_K, "TURNS": shrinking, **same}),
        Case(f"expand {tokens}", expand_kernel, expand, {**sizes, "BLOCK_N": 128, "TURNS": expanding, **same}),
    ]


def _group_cases(rank: int) -> list[Case]:
    same = {
        "WIDTH": 3 * rank,
        "RANK": rank,
        "SLOT_STRIDE": SLOT,
        "RANKS_STRIDE": 128,
        "USE_PDL": True,
    }
    shrink = {"K": K, "BLOCK_K": 4096 // rank, **same}
    sizes, splits = {f"SIZE_{index}": size for index, size in enumerate(SIZES)}, splits_of(K, rank)
    expand = {**sizes, "BLOCK_N": 8192 // rank, "SPLITS": splits, "ALL_SPLITS": splits, **same}
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
    *(case for tokens in (48, 300, 4096) for case in _cases(tokens)),
    *(case for rank in (16, 64) for case in _group_cases(rank)),
    *(case for rows in (64, 1024) for case in _grouping_cases(rows)),
]
