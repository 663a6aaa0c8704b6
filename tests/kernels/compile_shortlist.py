"""Configurations of the kernels that draw among ranks, compiled by `tests.kernels.offline`."""

from __future__ import annotations

from asyncllm.kernels.triton import shortlist
from tests.kernels.offline import Case

_TABLES = {"settings": "*i64", "slots": "*i32", "positions": "*i64", "maxima": "*fp32"}
_EXACT = {"enable_fp_fusion": False}

CASES = [
    Case(
        "row maxima",
        shortlist.row_maxima_kernel,
        {"groups": "*i32", "maxima": "*fp32"},
        {"NUM_GROUPS": 1024, "SHIFT": 16, "USE_PDL": True},
        num_warps=4,
    ),
    *(
        Case(
            f"shortlist {dtype}",
            shortlist.shortlist_kernel,
            {
                "logits": f"*{dtype}",
                **_TABLES,
                "groups": "*i32",
                "state": "*i64",
                "chosen": "*i32",
                "lists": "*i64",
                "first_token": "i32",
                "vocab_size": "i32",
            },
            {"VOCAB": 64_128, "STRIDE": 64_128, "NUM_GROUPS": 1024, "SHIFT": shift, "USE_PDL": True},
            num_warps=8,
            options=_EXACT,
        )
        for dtype, shift in (("bf16", 16), ("fp32", 0))
    ),
    *(
        Case(
            f"draw from {ranks} lists",
            shortlist.draw_listed_kernel,
            {
                "lists": "*i64",
                **_TABLES,
                "tokens": "*i64",
                "flags": "*i32",
                "num_rows": "i32",
                "vocab_size": "i32",
            },
            {"RANKS": ranks, "ENTRIES": ranks * 64, "USE_PDL": True},
            num_warps=4,
            options=_EXACT,
        )
        for ranks in (2, 8)
    ),
]
