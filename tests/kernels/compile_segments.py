"""The configurations of attention within segments, at the shapes of vision towers."""

from __future__ import annotations

import torch
import triton

from asyncllm.kernels.segments import FEW_QUERIES, MANY_QUERIES
from asyncllm.kernels.triton import rotary
from asyncllm.kernels.triton.attention import segments
from tests.kernels.offline import Case

TYPES = {2: "*bf16", 4: "*fp32"}


def _attention(head_dim: int, rows: int, *, even: bool, itemsize: int = 2, heads: int = 16) -> Case:
    padded = max(16, triton.next_power_of_2(head_dim))
    config = segments.config_of(rows, padded, itemsize)
    token = 3 * heads * head_dim
    strides = {f"{part}_{name}": value for part in "QKV" for name, value in (("TOKEN", token), ("HEAD", head_dim))}
    numbers = {"tiles": "*i32", "steepness": "fp32", "length": "i32", "tiles_each": "i32"}
    return Case(
        f"attention-{head_dim}-{rows}-{TYPES[itemsize][1:]}-{'even' if even else 'table'}",
        segments.segment_attention_kernel,
        dict.fromkeys(("q", "k", "v", "out"), TYPES[itemsize]) | numbers,
        {
            **strides,
            "OUT_TOKEN": heads * head_dim,
            "D": head_dim,
            "PADDED": padded,
            "ROWS": config.rows,
            "TILE": config.tile,
            "EVEN": even,
            "USE_PDL": True,
        },
        config.num_warps,
        config.num_stages,
        {"launch_pdl": True},
    )


def _rotation(head_dim: int) -> Case:
    constexprs = {
        "TOKEN_STRIDE": 3 * 16 * head_dim,
        "HEAD_STRIDE": head_dim,
        "HEADS": 32,
        "PAIRS": head_dim // 2,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
        "INTERLEAVED": False,
        "ROWS": rotary.ROWS,
        "USE_PDL": True,
    }
    signature = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "tokens": "i32"}
    return Case(f"rotation-{head_dim}", rotary.rotate_heads_kernel, signature, constexprs)


CASES = [
    *(
        _attention(head_dim, rows, even=even)
        for head_dim, even in ((64, True), (80, True), (80, False), (128, False), (256, False))
        for rows in (FEW_QUERIES, MANY_QUERIES)
    ),
    _attention(80, MANY_QUERIES, even=False, itemsize=torch.float32.itemsize),
    _rotation(80),
]
