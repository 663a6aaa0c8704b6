"""Configurations of the sampling kernels, compiled by `tests.kernels.offline`."""

from __future__ import annotations

from asyncllm.kernels.triton import grammar_mask, sampling
from tests.kernels.offline import Case

_SIZES = {"VOCAB": 128_256, "STRIDE": 128_256, "NUM_GROUPS": 2048, "USE_PDL": True}

CASES = [
    case
    for dtype, shift in (("bf16", 16), ("fp32", 0))
    for case in (
        Case(
            f"maxima {dtype}",
            sampling.group_maxima_kernel,
            {"logits": f"*{dtype}", "maxima": "*i32", "state": "*i64", "groups_per_program": "i32"},
            {**_SIZES, "SHIFT": shift},
            num_warps=8,
        ),
        Case(
            f"draw {dtype}",
            sampling.draw_kernel,
            {
                "logits": f"*{dtype}",
                "settings": "*i64",
                "slots": "*i32",
                "positions": "*i64",
                "tokens": "*i64",
                "flags": "*i32",
                "maxima": "*i32",
                "state": "*i64",
                "chosen": "*i32",
            },
            {**_SIZES, "SHIFT": shift, "HAS_SLOTS": True},
            num_warps=8,
            options={"enable_fp_fusion": False},
        ),
    )
]
CASES += [
    Case(
        "keep_only",
        grammar_mask.keep_only_kernel,
        {"logits_ptr": "*fp32", "row_ptr": "*i64", "word_ptr": "*i32"},
        {"VOCAB": 128_256, "STRIDE": 128_256, "WORDS": 4008, "TOKENS": grammar_mask.TOKENS, "USE_PDL": True},
    )
]
