"""Configurations of the narrow product to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncllm.kernels.triton.linear import hopper as linear_hopper
from asyncllm.kernels.triton.linear import narrow as linear_narrow
from asyncllm.kernels.triton.linear import product as linear
from asyncllm.kernels.triton.linear.small import NarrowConfig
from tests.kernels.offline import Case

_POINTERS = {"out_ptr": "*bf16", "bias_ptr": "*bf16", "partial_ptr": "*fp32", "counter_ptr": "*i32"}


def _map(rows: int) -> str:
    return f"tensordesc<bf16[{rows}, {linear_hopper.STEP}],{linear_hopper.LINES!r}>"


def narrow_case(tokens: int, config: NarrowConfig, *, with_bias: bool = False, release_first: bool = True) -> Case:
    options = linear_narrow.compile_options(config, with_bias=with_bias, release_first=release_first)
    num_warps = options.pop("num_warps")
    kind = f"{'bias' if with_bias else 'plain'}{'' if release_first else '-beside'}"
    return Case(
        name=f"{kind}-{tokens}-{'-'.join(map(str, vars(config).values()))}",
        kernel=linear_narrow.narrow_kernel,
        signature={
            "x": _map(tokens),
            "weight": _map(config.rows),
            **_POINTERS,
            **dict.fromkeys(("num_tokens", "out_size", "steps"), "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True},
    )


def _of_tables() -> Iterator[Case]:
    """Every entry of the table, with the tokens of each tile that it is used for."""
    for table in linear.TABLES.values():
        for entries in table.values():
            fewest = 0
            for most, config in entries:
                if isinstance(config, NarrowConfig):
                    for tokens in (16, 32, 64):
                        if tokens // 2 < most and fewest < tokens:
                            yield narrow_case(tokens, config)
                fewest = most


CASES = [
    *_of_tables(),
    narrow_case(16, NarrowConfig(64, 2, 8), with_bias=True),
    narrow_case(16, NarrowConfig(128, 1, 8)),
    narrow_case(16, NarrowConfig(64, 2, 10, splits=2), release_first=False),
    narrow_case(64, NarrowConfig(64, 2, 6, splits=2), with_bias=True),
    narrow_case(64, NarrowConfig(128, 2, 4)),
    narrow_case(64, NarrowConfig(256, 1, 4, splits=8)),
]
