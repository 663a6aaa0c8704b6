"""Configurations of the kernels for packed weights to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import packed, packed_experts
from asyncllm.kernels.triton.linear.tiles import Tile
from tests.kernels.offline import Case

_PDL = {"launch_pdl": True}


def product_case(
    tile: Tile, bits: int, group: int, dtype: str = "*bf16", n: int = 4096, k: int = 4096, *, gated: bool = False
) -> Case:
    constexprs = {
        "N": n, "K": k, "BITS": bits, "GROUP": group, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows,
        "SPLITS": 4 if tile.programs > 1 else 1, "HAS_BIAS": False, "USE_PDL": True,
        "ROUNDED": tile.tokens >= packed.LEAST_ROUNDED, "GATED": gated,
    }  # fmt: skip
    signature = {
        **dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), dtype),
        **{"words_ptr": "*i16", "scales_ptr": "*fp16", "zeros_ptr": "*u8", "partial_ptr": "*fp32"},
        **{"counter_ptr": "*i32", "tokens": "i32"},
    }
    name = f"product-{tile.tokens}-{bits}-{group}-{dtype[1:]}-{n}x{k}{'-gated' if gated else ''}"
    return Case(name, packed.packed_kernel, signature, constexprs, tile.warps, tile.stages, options=_PDL)


def dequantize_case(bits: int) -> Case:
    constexprs = {"N": 4096, "K": 4096, "BITS": bits, "GROUP": 128, "BLOCK_N": 64}
    constexprs |= {"ORDERED": True, "USE_PDL": True}
    signature = {
        "words_ptr": "*i16",
        "scales_ptr": "*fp16",
        "zeros_ptr": "*u8",
        "order_ptr": "*i64",
        "out_ptr": "*bf16",
    }
    return Case(f"dequantize-{bits}", packed.dequantize_kernel, signature, constexprs, options=_PDL)


def experts_case(block: int) -> Case:
    """In the shape of Qwen3-30B-A3B."""
    tile = packed_experts.TILES[block]
    constexprs = {
        "N": 1536, "K": 2048, "BITS": 4, "GROUP": 128, "ORDERED": False, "ASSIGNMENTS_PER_X": 8, "SWIGLU": True,
        "UNGROUPED": block == 16, "ROUNDED": tile.tokens >= packed_experts.LEAST_ROUNDED, "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows, "BLOCKS_PER_GROUP": 16, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **{"x_ptr": "*bf16", "words_ptr": "*i16", "scales_ptr": "*fp16", "zeros_ptr": "*u8", "order_ptr": "*i64"},
        **{"y_ptr": "*bf16", "assignments_ptr": "*i32", "block_experts_ptr": "*i32"},
        **{"num_assignments": "i32", "max_blocks": "i32"},
    }
    kernel = packed_experts.packed_experts_kernel
    return Case(f"experts-{block}", kernel, signature, constexprs, tile.warps, tile.stages, options=_PDL)


CASES = [
    *(experts_case(block) for block in packed_experts.TILES),
    *(product_case(tile, 4, 128) for tile in packed.TILES),
    *(product_case(tile, 4, 128, gated=True) for tile in packed.TILES),
    product_case(packed.TILES[-1], 4, 128, "*fp16"),
    product_case(packed.TILES[0], 4, 32, "*fp16", k=14336 + 32),
    product_case(packed.TILES[3], 8, 32),
    dequantize_case(4),
]
