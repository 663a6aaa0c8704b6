"""Configurations of the kernels for numbers of 8 bits to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import scaled
from asyncllm.kernels.triton.linear.tiles import Tile
from tests.kernels.offline import Case

_PDL = {"launch_pdl": True}


def product_case(tile: Tile, *, integer: bool = False, grouped: bool = False, k: int = 4096) -> Case:
    constexprs = {
        "N": 4096, "K": k, "GROUPS": -(-k // 128) if grouped else 1, "INTEGER": integer, "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.rows, "BLOCK_K": 128,
        "SPLITS": 4 if tile.programs > 1 else 1, "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr"), "*i8" if integer else "*fp8e4nv"),
        **dict.fromkeys(("x_scales_ptr", "scales_ptr", "partial_ptr"), "*fp32"),
        **{"bias_ptr": "*bf16", "out_ptr": "*bf16", "counter_ptr": "*i32", "tokens": "i32"},
    }
    name = f"product-{tile.tokens}-{'int8' if integer else 'fp8'}{'-grouped' if grouped else ''}-{k}"
    return Case(name, scaled.scaled_kernel, signature, constexprs, tile.warps, tile.stages, options=_PDL)


def round_case(*, integer: bool) -> Case:
    constexprs = {
        "K": 14336, "SIZE": 14336, "BLOCK": 2048, "LARGEST_CODE": 127.0 if integer else 448.0, "INTEGER": integer,
        "STATIC": False, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **{"x_ptr": "*bf16", "codes_ptr": "*i8" if integer else "*u8"},
        **{"scales_ptr": "*fp32", "input_scale_ptr": "*fp32"},
    }
    return Case(f"round-{'int8' if integer else 'fp8'}", scaled.round_rows_kernel, signature, constexprs, options=_PDL)


CASES = [
    *(product_case(scaled.TILES[index]) for index in (0, 2, 3)),
    product_case(scaled.TILES[3], grouped=True),
    product_case(scaled.TILES[3], integer=True),
    product_case(scaled.TILES[0], k=4000),
    round_case(integer=False),
]
