"""Configurations of the linear kernels to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import linear_small
from tests.kernels.offline import Case

_POINTERS = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "norm_ptr", "out_ptr")}
_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"HAS_RESIDUAL": True},
    "norm": {"NORM": True},
    "norm-silu": {"NORM": True, "GATED": True},
}


def _options(form: str) -> dict[str, Any]:
    base = {"EPS": 1e-5, "NORM": False, "ROUND_FIRST": True, "HAS_BIAS": False, "HAS_RESIDUAL": False, "GATED": False}
    return {**base, **_FORMS[form], "EARLY": True, "USE_PDL": True}


def gemv_case(name: str, form: str, n: int, k: int, tokens: int, rows: int, columns: int, warps: int) -> Case:
    shape = {"N": n, "K": k, "TOKENS": tokens, "BLOCK_N": rows, "BLOCK_K": columns}
    return Case(
        name, linear_small._gemv, _POINTERS, {**shape, **_options(form)}, warps, options={"launch_pdl": True}
    )


def skinny_case(
    name: str, form: str, n: int, k: int, block_m: int, config: linear_small.SkinnyConfig
) -> Case:
    shape = {
        "N": n, "K": k, "BLOCK_M": block_m, "BLOCK_N": config.rows, "BLOCK_K": config.columns,
        "SPLITS": config.splits, "PREFETCH": config.prefetch, "BULK": False,
    }  # fmt: skip
    signature = {**_POINTERS, "partial_ptr": "*fp32", "counter_ptr": "*i32", "tokens": "i32"}
    return Case(
        name, linear_small._skinny, signature, {**shape, **_options(form)}, config.warps, config.stages,
        options={"launch_pdl": True},
    )  # fmt: skip


CASES = [
    gemv_case(f"gemv-{form}-{tokens}-{rows}x{columns}", form, 4096, 4096, tokens, rows, columns, 4)
    for form in _FORMS
    for tokens in (1, 2, 4)
    for rows, columns in ((4, 1024), (4, 2048), (2, 2048), (8,1024))
] + [
    skinny_case(f"skinny-{form}-{block_m}-{splits}-{rows}", form, 4096, 4096, block_m, linear_small.SkinnyConfig(splits=splits, rows=rows))
    for form in _FORMS
    for block_m in (16, 32, 64)
    for splits in (1, 4)
    for rows in (64, 128)
]
