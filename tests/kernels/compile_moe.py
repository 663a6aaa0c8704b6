"""The mixture-of-experts kernels as they run for Mixtral 8x7B, Qwen3-30B-A3B, Gemma 4 26B-A4B, Step 3.5 Flash and, the
routing, DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import expert_blocks, few_experts, moe
from asyncllm.kernels.triton.linear import hopper_experts
from tests.kernels.offline import Case

MODELS = {
    "mixtral": (4096, 14336, 2, 8),
    "qwen3": (2048, 768, 8, 128),
    "deepseek_v3": (7168, 2048, 8, 256),
    "gemma4": (2816, 704, 8, 128),
    "step3p5": (4096, 1280, 8, 288),
}
"""hidden size, expert size, top k, experts"""


def matmul(model: str, swiglu: bool, block_tokens: int, dtype: str = "bf16") -> Case:
    width, hidden, top_k, _ = MODELS[model]
    tile = moe.TILES[block_tokens][not swiglu]
    if dtype == "fp32":
        tile = moe.FLOAT32_TILE
    constexprs: dict[str, Any] = {
        "ROWS": 2 * hidden if swiglu else width,
        "COLUMNS": width if swiglu else hidden,
        "ASSIGNMENTS_PER_X": top_k if swiglu else 1,
        "SWIGLU": swiglu,
        "BIAS": False,
        "LIMIT": {"gemma4": moe.GELU, "step3p5": -7.0}.get(model, 0.0),
        "SLOPE": moe.GATE_SLOPE,
        "BLOCK_TOKENS": block_tokens,
        "TILE_ROWS": tile.rows,
        "TILE_DEPTH": tile.depth,
        "BLOCKS_PER_GROUP": moe.BLOCKS_PER_GROUP,
        "USE_PDL": True,
    }
    signature = {
        "x_ptr": f"*{dtype}",
        "weight_ptr": f"*{dtype}",
        "y_ptr": f"*{dtype}",
        "assignments_ptr": "*i32",
        "block_experts_ptr": "*i32",
        "bias_ptr": f"*{dtype}",
        "num_assignments": "i32",
        "max_blocks": "i32",
    }
    name = f"{model} {'gate_up' if swiglu else 'down'} {block_tokens} {dtype}"
    return Case(
        name, moe.grouped_matmul_kernel, signature, constexprs, tile.warps, tile.stages, options={"launch_pdl": True}
    )


def few(model: str, second: bool) -> Case:
    """By few_experts' kernels."""
    width, hidden, top_k, _ = MODELS[model]
    tile = few_experts.second_tile(hidden) if second else few_experts.FIRST_TILE
    size = {"N": width, "K": hidden} if second else {"N": 2 * hidden, "K": width}
    constexprs = {**size, "TOP_K": top_k, "BIAS": False, "ROWS": tile.rows, "TILE": tile.columns, "USE_PDL": True}
    types = {**dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*bf16"), "ids_ptr": "*i64"}
    if second:
        kernel, types = few_experts.second_kernel, types | {"weights_ptr": "*fp32", "out_ptr": "*bf16"}
    else:
        kernel, types = few_experts.first_kernel, types | {"y_ptr": "*bf16"}
        constexprs |= {"GATED": True, "LIMIT": 0.0, "SLOPE": moe.GATE_SLOPE}
    name = f"{model} few {'second' if second else 'first'}"
    return Case(name, kernel, types, constexprs, tile.warps, options={"launch_pdl": True})


def route(model: str, groups: int = 1) -> Case:
    """Softmax over all experts, or with groups all that DeepSeek-V3 asks for."""
    _, _, top_k, experts = MODELS[model]
    return Case(
        f"{model} route {groups}",
        moe.route_kernel,
        {
            "logits_ptr": "*bf16",
            "correction_ptr": "*fp32",
            "weights_ptr": "*fp32",
            "expert_ids_ptr": "*i64",
            "scale": "fp32",
        },
        {
            "NUM_EXPERTS": experts,
            "TOP_K": top_k,
            "SIGMOID": groups > 1,
            "CORRECTED": groups > 1,
            "RENORMALIZE": True,
            "GROUPS": groups,
            "TOP_GROUPS": -(-groups // 2),
            "TOP2": groups > 1,
            "PADDED_EXPERTS": experts,
            "PADDED_GROUPS": groups,
            "PADDED_K": top_k,
            "USE_PDL": True,
        },
        num_warps=1,
        options={"launch_pdl": True},
    )


def group(model: str, chunk: expert_blocks.Chunk, counted: bool = False) -> Case:
    return Case(
        f"{model} group {chunk.size}{' counted' if counted else ''}",
        expert_blocks.group_kernel,
        {
            "expert_ids_ptr": "*i64",
            **dict.fromkeys(("counts_ptr", "assignments_ptr", "block_experts_ptr"), "*i32"),
            **dict.fromkeys(("num_assignments", "max_blocks"), "i32"),
        },
        {"PADDED_EXPERTS": MODELS[model][3], "BLOCK_TOKENS": 16, "CHUNK": chunk.size, "COUNTED": counted,
         "CHUNKS_EACH": expert_blocks.CHUNKS_EACH, "USE_PDL": True},
        num_warps=chunk.warps,
        options={"launch_pdl": True},
    )  # fmt: skip


def count(model: str, chunk: expert_blocks.Chunk) -> Case:
    return Case(
        f"{model} count",
        expert_blocks.count_kernel,
        {"expert_ids_ptr": "*i64", "counts_ptr": "*i32", "num_assignments": "i32"},
        {"PADDED_EXPERTS": MODELS[model][3], "CHUNK": chunk.size, "USE_PDL": True},
        num_warps=chunk.warps,
        options={"launch_pdl": True},
    )


def arranged(model: str) -> Case:
    width, _, top_k, _ = MODELS[model]
    return Case(
        f"{model} arranged",
        hopper_experts.arrange_kernel,
        {
            **dict.fromkeys(("x_ptr", "y_ptr"), "*bf16"),
            **dict.fromkeys(("assignments_ptr", "block_experts_ptr", "places_ptr"), "*i32"),
            "num_assignments": "i32",
        },
        {
            "TOP_K": top_k,
            "COLUMNS": width,
            "BLOCK": hopper_experts.BLOCK,
            "PLACES": hopper_experts.COPY_TILE.places,
            "TILE": hopper_experts.COPY_TILE.numbers,
            "USE_PDL": True,
        },
        num_warps=hopper_experts.COPY_TILE.warps,
        options={"launch_pdl": True},
    )


def weighted_sum(model: str, placed: bool = False) -> Case:
    width, _, top_k, _ = MODELS[model]
    return Case(
        f"{model} weighted sum{' by place' if placed else ''}",
        moe.weighted_sum_kernel,
        {"y_ptr": "*bf16", "weights_ptr": "*fp32", "places_ptr": "*i32", "out_ptr": "*bf16"},
        {"WIDTH": width, "TOP_K": top_k, "PLACED": placed, "TILE": 1024, "USE_PDL": True},
        options={"launch_pdl": True},
    )


CASES = [
    *(matmul("mixtral", swiglu, tokens) for tokens in moe.TILES for swiglu in (True, False)),
    *(few(model, second) for model in ("mixtral", "qwen3") for second in (False, True)),
    matmul("qwen3", True, 16, dtype="fp32"),
    matmul("gemma4", True, 64),
    matmul("step3p5", True, 64),
    route("qwen3"),
    route("deepseek_v3", groups=8),
    group("qwen3", expert_blocks.FEW_ASSIGNMENTS),
    group("qwen3", expert_blocks.MANY_ASSIGNMENTS),
    group("deepseek_v3", expert_blocks.MANY_ASSIGNMENTS, counted=True),
    count("deepseek_v3", expert_blocks.MANY_ASSIGNMENTS),
    weighted_sum("qwen3"),
    weighted_sum("qwen3", placed=True),
    arranged("qwen3"),
]
