"""Every configuration of the gated product's table, and experts of many tokens, to compile for sm_90 without a GPU
(tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import gated as linear_gated
from asyncllm.kernels.triton.linear import hopper as linear_hopper
from asyncllm.kernels.triton.linear import hopper_experts, hopper_scaled, narrow_scaled
from asyncllm.kernels.triton.linear.gated import GatedConfig
from tests.kernels.offline import Case

_SCALES = {"x_scales": "*fp32", "weight_scales": "*fp32", "bias": "*bf16"}
_NUMBERS = ("token_tiles", "column_tiles", "shares", "steps", "num_tokens", "out_size")


def _map(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}],{linear_hopper.LINES!r}>"


def _codes_map(kind: str, rows: int) -> str:
    return f"tensordesc<{kind}[{rows}, {narrow_scaled.LINE}],{narrow_scaled.LINES!r}>"


def scaled_case(kind: str, *, shares: bool, gated: bool) -> Case:
    options = hopper_scaled.compile_options(shares=shares, gated=gated, with_bias=not gated)
    num_warps, maxnreg = options.pop("num_warps"), options.pop("maxnreg")
    return Case(
        name=f"{kind}-{'shares' if shares else 'tiles'}-{'gated' if gated else 'plain'}",
        kernel=linear_hopper.product_kernel,
        signature={
            "x": _codes_map(kind, hopper_scaled.TOKENS),
            "weight": _codes_map(kind, linear_hopper.WIDTH),
            "out": _map(linear_hopper.CONSUMER_TOKENS, linear_hopper.WIDTH),
            "partial": "*i32" if kind == "i8" else "*fp32",
            "flags": "*i32",
            **_SCALES,
            **dict.fromkeys(_NUMBERS, "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True, "maxnreg": maxnreg},
    )


def gated_case(config: GatedConfig) -> Case:
    options = linear_hopper.compile_options(config.tokens, shares=config.shares)
    num_warps, maxnreg = options.pop("num_warps"), options.pop("maxnreg")
    width, step, rows = linear_hopper.WIDTH, linear_hopper.STEP, linear_hopper.CONSUMER_TOKENS
    return Case(
        name=f"{'shares' if config.shares else 'tiles'}-{config.tokens}",
        kernel=linear_hopper.product_kernel,
        signature={
            "x": _map(128 if config.tokens == 128 else rows, step),
            "weight": _map(width, step),
            "out": _map(rows, width),
            "partial": "*fp32",
            "flags": "*i32",
            **_SCALES,
            **dict.fromkeys(_NUMBERS, "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True, "maxnreg": maxnreg},
    )


def experts_case(gated: bool, limit: float | None = None) -> Case:
    """With a limit, with biases."""
    options = hopper_experts.compile_options(gated=gated, bias=limit is not None, limit=limit)
    num_warps, maxnreg = options.pop("num_warps"), options.pop("maxnreg")
    width, step, rows = linear_hopper.WIDTH, linear_hopper.STEP, linear_hopper.CONSUMER_TOKENS
    return Case(
        name=f"experts-{'gated' if gated else 'plain'}{'' if limit is None else '-biased'}",
        kernel=hopper_experts.experts_kernel,
        signature={
            "x": _map(hopper_experts.BLOCK, step),
            "weight": _map(width, step),
            "out": _map(rows, width),
            "experts_ptr": "*i32",
            "bias_ptr": "*bf16",
            **dict.fromkeys(("blocks", "column_tiles", "steps", "out_size"), "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True, "maxnreg": maxnreg},
    )


CONFIGS = {
    config
    for table in linear_gated.TABLES.values()
    for entries in table.values()
    for _, config in entries
    if isinstance(config, GatedConfig)
}

CASES = [
    *(gated_case(config) for config in sorted(CONFIGS, key=repr)),
    *(experts_case(gated, limit) for gated in (True, False) for limit in (None, 7.0)),
    *(
        scaled_case(kind, shares=shares, gated=gated)
        for kind in ("fp8e4nv", "i8")
        for shares in (False, True)
        for gated in (True, False)
    ),
]
