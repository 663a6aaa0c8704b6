"""Configurations of the linear kernels to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import linear_invariant, linear_small
from asyncllm.kernels.triton.linear_small import GemvConfig, SkinnyConfig
from tests.kernels.offline import Case

_POINTERS = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "norm_ptr", "out_ptr")}
_PDL = {"launch_pdl": True}


def _form(**enabled: bool) -> dict[str, Any]:
    flags = {"NORM": False, "ROUND_FIRST": True, "HAS_BIAS": False, "HAS_RESIDUAL": False, "GATED": False}
    return {"EPS": 1e-5, "EARLY": True, "USE_PDL": True, **flags, **enabled}


def gemv_case(name: str, tokens: int, config: GemvConfig, **form: bool) -> Case:
    shape = {"N": 4096, "K": 4096, "TOKENS": tokens, "BLOCK_N": config.rows, "BLOCK_K": config.columns}
    return Case(name, linear_small._gemv, _POINTERS, {**shape, **_form(**form)}, config.warps, options=_PDL)


def skinny_case(name: str, block_m: int, config: SkinnyConfig, **form: bool) -> Case:
    shape = {
        "N": 4096, "K": 4096, "BLOCK_M": block_m, "BLOCK_N": config.rows, "BLOCK_K": config.columns,
        "SPLITS": config.splits, "PREFETCH": config.prefetch, "BULK": True, **_form(**form),
    }  # fmt: skip
    signature = {**_POINTERS, "partial_ptr": "*fp32", "counter_ptr": "*i32", "tokens": "i32"}
    return Case(name, linear_small._skinny, signature, shape, config.warps, config.stages, options=_PDL)


def invariant_case(tokens: int) -> Case:
    tile = linear_invariant.TILES[tokens]
    constexprs = {
        "N": 4096, "K": 4096, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "BLOCK_K": tile.columns,
        "GROUP": 8, "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    signature = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")} | {"tokens": "i32"}
    return Case(
        f"invariant-{tokens}", linear_invariant._invariant, signature, constexprs, tile.warps, tile.stages, options=_PDL
    )


CASES = [
    *(invariant_case(tokens) for tokens in linear_invariant.TILES),
    gemv_case("gemv-1", 1, GemvConfig(4, 2048)),
    gemv_case("gemv-4", 4, GemvConfig(4, 2048), HAS_BIAS=True, HAS_RESIDUAL=True),
    gemv_case("gemv-1-norm-gated", 1, GemvConfig(4, 2048), NORM=True, GATED=True),
    skinny_case("skinny-16", 16, SkinnyConfig(), HAS_BIAS=True),
    skinny_case("skinny-16-split", 16, SkinnyConfig(splits=4), HAS_RESIDUAL=True),
    skinny_case("skinny-32", 32, SkinnyConfig(splits=2), NORM=True),
    skinny_case("skinny-64-gated", 64, SkinnyConfig(columns=64, stages=5), GATED=True),
]
