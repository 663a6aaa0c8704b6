"""Configurations of the kernels for numbers of 8 bits to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import rounded
from asyncllm.kernels.triton.linear import scaled, scaled_experts
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.norm import row_tile
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


def one_token_case(*, integer: bool = False, gated: bool = False) -> Case:
    tile = scaled.ONE_TOKEN
    constexprs = {
        "N": 4096, "K": 4096, "INTEGER": integer, "BLOCK_N": tile.rows, "BLOCK_K": tile.columns, "GATED": gated,
        "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr"), "*u8"),
        **dict.fromkeys(("x_scales_ptr", "scales_ptr"), "*fp32"),
        **dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16"),
    }
    name = f"one-{'int8' if integer else 'fp8'}{'-gated' if gated else ''}"
    return Case(name, scaled.one_token_kernel, signature, constexprs, tile.warps, options=_PDL)


_ROUNDED = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "input_scale_ptr": "*fp32", "rows": "i32"}


def _rounding(columns: int, *, grouped: bool) -> dict[str, Any]:
    return {
        "COLUMNS": columns, "WIDTH": 128 if grouped else columns, "LARGEST_CODE": 448.0, "INTEGER": False,
        "STATIC": False, "USE_PDL": True,
    }  # fmt: skip


def round_case(size: int, *, grouped: bool = False) -> Case:
    columns, warps = rounded.row_block(size, grouped)
    constexprs = {"SIZE": size, **_rounding(columns, grouped=grouped)}
    signature = {"x_ptr": "*bf16", **_ROUNDED}
    name = f"round-{size}{'-grouped' if grouped else ''}"
    return Case(name, rounded.round_rows_kernel, signature, constexprs, warps, options=_PDL)


def gate_case(size: int, *, grouped: bool = False) -> Case:
    columns, warps = rounded.row_block(size, grouped)
    constexprs = {"SIZE": size, "GELU": False, **_rounding(columns, grouped=grouped)}
    signature = {"x_ptr": "*bf16", **_ROUNDED}
    name = f"gate-{size}{'-grouped' if grouped else ''}"
    return Case(name, rounded.gate_rounded_kernel, signature, constexprs, warps, options=_PDL)


def norm_case(size: int, *, grouped: bool = False) -> Case:
    rows, columns, warps = row_tile(size)
    constexprs = {"SIZE": size, "ROWS": rows, **_rounding(columns, grouped=grouped)}
    signature = {
        **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "sum_ptr"), "*bf16"),
        **_ROUNDED,
        "eps": "fp32",
    }
    name = f"norm-{size}{'-grouped' if grouped else ''}"
    return Case(name, rounded.add_rms_norm_rounded_kernel, signature, constexprs, warps, options=_PDL)


def experts_case(block: int, *, grouped: bool = False) -> Case:
    tile = scaled_experts.TILES[block]
    constexprs = {
        "N": 1536, "K": 2048, "GROUPS": 16 if grouped else 1, "INTEGER": False, "ASSIGNMENTS_PER_X": 8,
        "UNGROUPED": False, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "BLOCK_K": 128, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv"),
        **dict.fromkeys(("x_scales_ptr", "scales_ptr"), "*fp32"),
        **{"y_ptr": "*bf16", "assignments_ptr": "*i32", "block_experts_ptr": "*i32", "num_assignments": "i32"},
    }
    name = f"product-experts-{block}{'-grouped' if grouped else ''}"
    kernel = scaled_experts.scaled_experts_kernel
    return Case(name, kernel, signature, constexprs, tile.warps, tile.stages, options=_PDL)


CASES = [
    *(product_case(scaled.TILES[index]) for index in (0, 2, 3)),
    product_case(scaled.TILES[3], grouped=True),
    product_case(scaled.TILES[3], integer=True),
    product_case(scaled.TILES[0], k=4000),
    one_token_case(),
    one_token_case(integer=True),
    one_token_case(gated=True),
    experts_case(16),
    experts_case(64, grouped=True),
    experts_case(128),
    round_case(4096),
    round_case(14336),
    round_case(28672),
    gate_case(14336),
    gate_case(1536, grouped=True),
    norm_case(4096),
    norm_case(5120, grouped=True),
]
