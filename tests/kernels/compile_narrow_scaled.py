"""Configurations of the narrow product of 8 bits to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import narrow_scaled
from asyncllm.kernels.triton.linear.small import NarrowConfig
from tests.kernels.offline import Case

_POINTERS = {
    **{"out_ptr": "*bf16", "x_scales_ptr": "*fp32", "scales_ptr": "*fp32", "bias_ptr": "*bf16"},
    **{"counter_ptr": "*i32"},
}


def narrow_case(tokens: int, config: NarrowConfig, *, integer: bool = False, with_bias: bool = False) -> Case:
    options = narrow_scaled.compile_options(config, integer=integer, with_bias=with_bias)
    num_warps, kind = options.pop("num_warps"), "i8" if integer else "fp8e4nv"
    maps = [
        f"tensordesc<{kind}[{rows}, {narrow_scaled.LINE}],{narrow_scaled.LINES!r}>" for rows in (tokens, config.rows)
    ]
    return Case(
        name=f"{kind}-{tokens}-{'-'.join(map(str, vars(config).values()))}",
        kernel=narrow_scaled.narrow_scaled_kernel,
        signature={
            "x": maps[0],
            "weight": maps[1],
            **_POINTERS,
            "partial_ptr": "*i32" if integer else "*fp32",
            **dict.fromkeys(("num_tokens", "out_size", "steps"), "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True},
    )


CASES = [
    narrow_case(16, NarrowConfig(64, 2, 10, splits=2)),
    narrow_case(64, NarrowConfig(64, 2, 6, splits=4), with_bias=True),
    narrow_case(32, NarrowConfig(64, 1, 16), integer=True),
    narrow_case(16, NarrowConfig(256, 1, 6)),
    narrow_case(64, NarrowConfig(256, 1, 5)),
    narrow_case(128, NarrowConfig(128, 1, 6, splits=4)),
    narrow_case(256, NarrowConfig(128, 1, 4, splits=4)),
    narrow_case(128, NarrowConfig(128, 1, 6, splits=2), integer=True),
    narrow_case(128, NarrowConfig(256, 1, 4)),
]
