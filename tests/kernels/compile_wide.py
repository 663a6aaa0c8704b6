"""Configurations of the packed product for many tokens to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import hopper_packed, hopper_packed_wide
from asyncllm.kernels.triton.linear.tiles import WideConfig
from tests.kernels.offline import Case


def wide_case(
    config: WideConfig, *, dtype: str = "bf16", k: int = 4096, gated: bool = False, bias: bool = False,
    scales: str = "*fp16",
) -> Case:  # fmt: skip
    options = hopper_packed_wide.compile_options(config, k, 128, gated=gated, bias=bias)
    num_warps, maxnreg = options.pop("num_warps"), options.pop("maxnreg")
    lines = repr(hopper_packed.LINES)
    return Case(
        name=f"{'-'.join(map(str, config))}-{dtype}{'-gated' if gated else ''}{'-bias' if bias else ''}",
        kernel=hopper_packed_wide.wide_kernel,
        signature={
            "x": f"tensordesc<{dtype}[{config.tokens}, 32],{lines}>",
            "words": f"tensordesc<i16[{hopper_packed_wide.RUN}, 32],{lines}>",
            **dict.fromkeys(("out_ptr", "bias_ptr"), f"*{dtype}"),
            **{"scales_ptr": scales, "zeros_ptr": "*u8", "partial": "*fp32", "flags": "*i32"},
            **dict.fromkeys(("num_tokens", "token_tiles", "column_tiles", "shares", "out_size"), "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True, "maxnreg": maxnreg},
    )


CASES = [
    wide_case(WideConfig(128, 4), gated=True),
    wide_case(WideConfig(16, 8, halves=1, rounded=False), dtype="fp16", bias=True),
]
