"""The configurations of the sums of ranks, at the shapes of real models."""

from __future__ import annotations

from asyncllm.kernels.triton import rank_sum
from tests.kernels.offline import Case


def _sum(name: str, size: int, *, ranks: int = 2, norm: bool = True, dtype: str = "bf16", weight: str = "bf16") -> Case:
    columns, num_warps = rank_sum.tile(size)
    pointers = {each: f"*{dtype}" for each in ("x_ptr", "residual_ptr", "out_ptr", "total_ptr")}
    own = "*i32" if dtype == "fp32" else "*i16"
    signature = {**pointers, "weight_ptr": f"*{weight}", "own_ptr": own, "address_ptr": "*i64", "turn_ptr": "*i32"}
    return Case(
        name,
        rank_sum.sum_kernel,
        {**signature, "rows": "i32", "eps": "fp32"},
        {
            **{"RANK": 1, "RANKS": ranks, "STRIDE": size, "SIZE": size, "COLUMNS": columns},
            **{"NORM": norm, "USE_PDL": True},
        },
        num_warps=num_warps,
    )


CASES = [
    _sum("norm 4096", 4096),
    _sum("norm 8192", 8192),
    _sum("norm 3584 of four", 3584, ranks=4, weight="fp32"),
    _sum("sum 4096", 4096, norm=False),
    _sum("sum 4096 float32", 4096, norm=False, dtype="fp32"),
    _sum("norm 16384", 16384),
]
