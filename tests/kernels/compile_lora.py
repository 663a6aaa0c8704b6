"""The configurations of the LoRA kernels for qkv of Llama-3-8B, with few rows and with many."""

from __future__ import annotations

from asyncllm.kernels.triton.lora import BLOCK_K, expand_kernel, rows_and_splits, shrink_kernel, turns_of
from tests.kernels.offline import Case

K, SIZES, RANK = 4096, (4096, 1024, 1024, 0), 16
SLOT = 2**26


def _cases(tokens: int) -> list[Case]:
    block_t, splits = rows_and_splits(tokens, K, batch_invariant=False)
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


CASES = [case for tokens in (48, 300, 4096) for case in _cases(tokens)]
