"""Every config of attention over a quantized cache, and what writes one, in the Llama-3-8B shape (4 query heads per KV
head, blocks of 64 tokens)."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.quantized_kv import FORMATS
from asyncllm.kernels.triton import cache, rotary
from asyncllm.kernels.triton.attention.decode import decode_attention_kernel
from asyncllm.kernels.triton.attention.plan import (
    QUANTIZED_DECODE_CONFIGS,
    QUANTIZED_PREFILL_CONFIGS,
    padded_head_dim,
)
from asyncllm.kernels.triton.attention.prefill import prefill_attention_kernel
from tests.kernels.compile_attention import EXTRAS, GROUP, OWN, PAGE, SHARED
from tests.kernels.offline import Case

KV_HEADS = 8


def _stored(form: str) -> str:
    return "*i8" if form == "int8" else "*u8"


def _attention(kind: str, config: Any, head_dim: int, form: str, extra: str, **constexprs: int) -> Case:
    decode = kind == "decode"
    number = config.blocks_per_processor if decode else f"{config.rows}x{config.tile}"
    codes, ranges = dict.fromkeys("kv", _stored(form)), dict.fromkeys(("k_ranges", "v_ranges"), "*i32")
    return Case(
        name=f"{kind}-{form}-{head_dim}-{number}{extra}",
        kernel=decode_attention_kernel if decode else prefill_attention_kernel,
        signature={"q": "*bf16", "out": "*bf16", **codes, **ranges, **OWN[kind], **SHARED},
        constexprs={
            "Q_STRIDE": KV_HEADS * GROUP * head_dim,
            "OUT_STRIDE": KV_HEADS * GROUP * head_dim,
            "NUM_KV_HEADS": KV_HEADS,
            "GROUP": GROUP,
            "D": head_dim,
            "PADDED": padded_head_dim(head_dim),
            "PAGE": PAGE,
            "FORMAT": form,
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


def _fill(form: str, head_dim: int) -> Case:
    pointers = ("keys", "values", "place", "k", "v", "k_range", "v_range")
    types = {"place": "*i64", "k": _stored(form), "v": _stored(form), "k_range": "*i32", "v_range": "*i32"}
    constexprs = {
        "STRIDE": 6144,
        "NUM_KV_HEADS": KV_HEADS,
        "HALF": head_dim // 2,
        "BLOCK": 1 << (head_dim // 2 - 1).bit_length(),
        "BLOCK_SIZE": PAGE,
        "FORMAT": form,
        "LINES": cache.LINES,
        "USE_PDL": True,
    }
    signature = {f"{pointer}_ptr": types.get(pointer, "*bf16") for pointer in pointers}
    return Case(f"fill-{form}-{head_dim}", cache.fill_quantized_kernel, {**signature, "tokens": "i32"}, constexprs)


def _rope(form: str, head_dim: int, *, norm: bool) -> Case:
    pointers = ("qkv", "cos", "sin", "place", "k", "v", "k_range", "v_range", "q_norm", "k_norm", "q")
    types = {"cos": "*fp32", "sin": "*fp32", "place": "*i64", "k": _stored(form), "v": _stored(form)}
    types |= {"k_range": "*i32", "v_range": "*i32"}
    signature = {f"{pointer}_ptr": types.get(pointer, "*bf16") for pointer in pointers}
    constexprs = {
        "NUM_HEADS": KV_HEADS * GROUP,
        "NUM_KV_HEADS": KV_HEADS,
        "HEAD_DIM": head_dim,
        "PAIRS": head_dim // 2,
        "BLOCK": 1 << (head_dim // 2 - 1).bit_length(),
        "REST": 0,
        "BLOCK_SIZE": PAGE,
        "FORMAT": form,
        "NORM": norm,
        "INTERLEAVED": False,
        "ROWS": rotary.ROWS,
        "USE_PDL": True,
    }
    name = f"rope-{form}-{head_dim}{'-norm' if norm else ''}"
    return Case(name, rotary.rope_fill_kv_kernel, {**signature, "tokens": "i32", "eps": "fp32"}, constexprs)


def _cases() -> list[Case]:
    cases = []
    for form in FORMATS:
        for padded, config in QUANTIZED_DECODE_CONFIGS.items():
            own = {"HEADS": 8, "GROUP_BLOCK": GROUP, "PARTS": max(1, 4096 // (padded * GROUP))}
            cases.append(_attention("decode", config, padded, form, "-all" if padded == 128 else "", **own))
        for padded, (long, _) in QUANTIZED_PREFILL_CONFIGS.items():
            cases.append(_attention("prefill", long, padded, form, "-all" if padded == 128 else "", ROWS=long.rows))
        cases += [_fill(form, 128)] if FORMATS[form].shared else [_fill(form, 128), _rope(form, 128, norm=True)]
    return cases


CASES = _cases()
