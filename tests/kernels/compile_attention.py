"""Every config of attention on a GPU, in the Llama-3-8B shape (4 query heads per KV head, blocks of 64 tokens)."""

from __future__ import annotations

from typing import Any

import triton

from asyncllm.kernels.triton.attention.decode import decode_attention_kernel
from asyncllm.kernels.triton.attention.plan import DECODE_CONFIGS, FEW_ROWS_CONFIGS, PREFILL_CONFIGS
from asyncllm.kernels.triton.attention.prefill import prefill_attention_kernel
from tests.kernels.offline import Case

GROUP = 4
PAGE = 64
TYPES = {2: "*bf16", 4: "*fp32"}
HEAD_DIMS = {64: (64,), 128: (80, 128), 256: (256,), 512: (512,)}
EXTRAS: dict[str, dict[str, Any]] = {
    "": {},
    "-all": {"HAS_WINDOW": True, "SOFTCAP": True, "SINKS": True, "ALIBI": True},
}
OWN = {"decode": {"work": "*i32", "partials": "*fp32"}, "prefill": {"entries": "*i32"}}
SHARED = {
    "block_tables": "*i32",
    "sinks": "*fp32",
    "alibi": "*fp32",
    "squeeze": "fp32",
    "steepness": "fp32",
    "window": "i32",
    "table_stride": "i32",
}


def _case(kind: str, config: Any, head_dim: int, itemsize: int, extra: str, **constexprs: int) -> Case:
    dtype = TYPES[itemsize]
    decode = kind == "decode"
    number = f"-{config.blocks_per_processor}" if decode else f"-{config.rows}x{config.tile}"
    return Case(
        name=f"{kind}-{'fp32' if itemsize == 4 else 'bf16'}-{head_dim}{number}{extra}",
        kernel=decode_attention_kernel if decode else prefill_attention_kernel,
        signature=dict.fromkeys(("q", "k", "v", "k_ranges", "v_ranges", "out"), dtype) | OWN[kind] | SHARED,
        constexprs={
            "Q_STRIDE": 8 * GROUP * head_dim,
            "OUT_STRIDE": 8 * GROUP * head_dim,
            "NUM_KV_HEADS": 8,
            "GROUP": GROUP,
            "D": head_dim,
            "PADDED": triton.next_power_of_2(head_dim),
            "PAGE": PAGE,
            "FORMAT": "",
            "TILE": config.tile,
            "USE_PDL": True,
            **dict.fromkeys(("HAS_WINDOW", "SOFTCAP", "SINKS", "ALIBI"), False),
            **EXTRAS[extra],
            **constexprs,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options={"launch_pdl": True} if decode else {"launch_pdl": True, "enable_fp_fusion": False},
    )


def _cases() -> list[Case]:
    cases = []
    for (padded, itemsize), config in (*DECODE_CONFIGS.items(), *FEW_ROWS_CONFIGS.items()):
        for head_dim in HEAD_DIMS[padded] if itemsize == 2 else (padded,):
            for extra in EXTRAS if (head_dim, itemsize) == (128, 2) else ("",):
                constexprs = {"HEADS": 8, "GROUP_BLOCK": GROUP, "PARTS": max(1, 4096 // (padded * GROUP))}
                cases.append(_case("decode", config, head_dim, itemsize, extra, **constexprs))
    for (padded, itemsize), configs in PREFILL_CONFIGS.items():
        for config in dict.fromkeys(configs):
            for head_dim in HEAD_DIMS[padded] if itemsize == 2 else (padded,):
                for extra in EXTRAS if (head_dim, itemsize) == (128, 2) else ("",):
                    cases.append(_case("prefill", config, head_dim, itemsize, extra, ROWS=config.rows))
    return cases


CASES = _cases()
