"""Configurations of the packed product for Hopper to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from asyncllm.kernels.triton.linear import hopper_packed, packed
from asyncllm.kernels.triton.linear.tiles import RingConfig
from tests.kernels.offline import Case


def ring_case(config: RingConfig, *, dtype: str = "bf16", k: int, gated: bool = False, bias: bool = False) -> Case:
    options = hopper_packed.compile_options(config, k, 128, gated=gated, bias=bias)
    num_warps = options.pop("num_warps")
    block = [4, config.tokens, 32] if config.joined else [config.tokens, 32]
    rows = [2, config.rows, 32] if config.joined and gated else [config.rows, 32]
    of_tokens, of_words = (
        hopper_packed.JOINED_LINES if len(each) == 3 else hopper_packed.LINES for each in (block, rows)
    )
    return Case(
        name=f"{'-'.join(map(str, config))}-{dtype}-{k}{'-gated' if gated else ''}{'-bias' if bias else ''}",
        kernel=hopper_packed.ring_kernel,
        signature={
            "x": f"tensordesc<{dtype}{block},{of_tokens!r}>",
            "words": f"tensordesc<i16{rows},{of_words!r}>",
            **dict.fromkeys(("out_ptr", "bias_ptr"), f"*{dtype}"),
            **{"scales_ptr": "*fp16", "zeros_ptr": "*u8", "partial_ptr": "*fp32", "counter_ptr": "*i32"},
            **dict.fromkeys(("num_tokens", "out_size"), "i32"),
        },
        constexprs={**options, "USE_PDL": True},
        num_warps=num_warps,
        options={"launch_pdl": True},
    )


def _of_tables() -> list[Case]:
    """Every entry, each once; gate_up has more rows than its input features."""
    cases = {}
    for (n, k), entries in packed.TABLES["NVIDIA H200"].items():
        for _, config in entries:
            if isinstance(config, RingConfig):
                case = ring_case(config, k=k, gated=n > 2 * k)
                cases[case.name] = case
    return list(cases.values())


CASES = [
    *_of_tables(),
    ring_case(RingConfig(64, 64, 4, splits=2), dtype="fp16", k=4096, bias=True),
    ring_case(RingConfig(64, 16, 6, joined=True), k=4096, gated=True),
]
