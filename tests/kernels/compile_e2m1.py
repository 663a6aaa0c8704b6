"""Configurations of the kernels for experts of e2m1 to compile for sm_90 without a GPU (tests.kernels.offline), in the
shape of gpt-oss."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import e2m1_experts
from asyncllm.kernels.triton.linear.tiles import Tile
from tests.kernels.offline import Case

_PDL = {"launch_pdl": True}


def experts_case(name: str, tile: Tile, dtype: str = "*bf16", *, ungrouped: bool = False) -> Case:
    constexprs = {
        "N": 5760, "K": 2880, "ASSIGNMENTS_PER_X": 4, "SWIGLU": True, "BIAS": True, "LIMIT": 7.0, "SLOPE": 1.702,
        "UNGROUPED": ungrouped, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "BLOCKS_PER_GROUP": 16, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **{"x_ptr": dtype, "words_ptr": "*i16", "exponents_ptr": "*i32", "y_ptr": dtype, "bias_ptr": dtype},
        **{"assignments_ptr": "*i32", "block_experts_ptr": "*i32", "num_assignments": "i32", "max_blocks": "i32"},
    }
    return Case(name, e2m1_experts.e2m1_experts_kernel, signature, constexprs, tile.warps, tile.stages, options=_PDL)


CASES = [
    *(experts_case(f"blocks of {size}", tile) for size, (tile, _) in e2m1_experts.TILES.items()),
    experts_case("one token each", e2m1_experts.UNGROUPED_TILE, ungrouped=True),
    *(experts_case(f"float16 in blocks of {size}", e2m1_experts.TILES[size][0], "*fp16") for size in (16, 32)),
    Case(
        "expand",
        e2m1_experts.expand_kernel,
        {"words_ptr": "*i16", "exponents_ptr": "*i32", "out_ptr": "*bf16"},
        {"N": 5760, "K": 2880, "BLOCK_N": e2m1_experts.EXPANDED_ROWS, "USE_PDL": True},
        options=_PDL,
    ),
]
