"""The configurations of norms, gates, gathers, rotary, cache and step kernels, at the shapes of real models."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import activation, cache, embedding, memory, norm, recurrent, rotary, selective_scan, step
from tests.kernels.offline import Case

PDL = {"USE_PDL": True}


def _norm(name: str, size: int, *, add: bool, weight: str = "*bf16") -> Case:
    rows, columns, warps = norm.row_tile(size)
    signature = {
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16",
        "weight_ptr": weight,
        "out_ptr": "*bf16",
        "sum_ptr": "*bf16",
    }
    constexprs = {"SIZE": size, "ROWS": rows, "COLUMNS": columns, "ADD": add, **PDL}
    return Case(name, norm.rms_norm_kernel, {**signature, "rows": "i32", "eps": "fp32"}, constexprs, num_warps=warps)


def _layer_norm(name: str, size: int, *, add: bool) -> Case:
    rows, columns, warps = norm.row_tile(size)
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr", "sum_ptr")
    signature = dict.fromkeys(pointers, "*bf16")
    constexprs = {"SIZE": size, "ROWS": rows, "COLUMNS": columns, "HAS_BIAS": True, "ADD": add, **PDL}
    return Case(name, norm.layer_norm_kernel, {**signature, "rows": "i32", "eps": "fp32"}, constexprs, num_warps=warps)


def _mean_squares(first: int, second: int) -> Case:
    rows, columns, warps = norm.row_tile(first)
    signature = {"x_ptr": "*bf16", "out_ptr": "*fp32", "rows": "i32"}
    sizes = {"STRIDE": first + 2 * second, "FIRST": first, "SECOND": second}
    constexprs = {**sizes, "ROWS": rows, "COLUMNS": columns, **PDL}
    return Case(f"mean_squares {first}", norm.mean_squares_kernel, signature, constexprs, num_warps=warps)


def _rope(name: str, heads: int, kv_heads: int, head_dim: int, pairs: int, **flags: Any) -> Case:
    pointers = ("qkv", "cos", "sin", "place", "k", "v", "k_range", "v_range", "q_norm", "k_norm", "q")
    types = {"cos": "*fp32", "sin": "*fp32", "place": "*i64"}
    signature = {f"{pointer}_ptr": types.get(pointer, "*bf16") for pointer in pointers}
    rest = head_dim - 2 * pairs
    constexprs = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAIRS": pairs,
        "BLOCK": 1 << (pairs - 1).bit_length(),
        "REST": 1 << (rest - 1).bit_length() if rest else 0,
        "BLOCK_SIZE": 64,
        "FORMAT": "",
        "NORM": False,
        "INTERLEAVED": False,
        "ROWS": rotary.ROWS,
        **PDL,
        **flags,
    }
    return Case(name, rotary.rope_fill_kv_kernel, {**signature, "tokens": "i32", "eps": "fp32"}, constexprs)


def _gate(name: str, *, gelu: bool) -> Case:
    constexprs = {"SIZE": 14336, "COLUMNS": activation.COLUMNS, "GELU": gelu, **PDL}
    return Case(name, activation.gate_kernel, {"x_ptr": "*bf16", "out_ptr": "*bf16"}, constexprs)


def _activation(kind: str) -> Case:
    constexprs = {"COLUMNS": activation.COLUMNS, "KIND": kind, **PDL}
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32"}
    return Case(f"activate {kind}", activation.activation_kernel, signature, constexprs)


CASES = [
    _activation("gelu"),
    _activation("gelu_tanh"),
    _activation("squared_relu"),
    _norm("add_rms_norm 4096", 4096, add=True),
    _norm("add_rms_norm 8192", 8192, add=True),
    _norm("add_rms_norm 16384", 16384, add=True),
    _norm("add_rms_norm 3584 float32 weight", 3584, add=True, weight="*fp32"),
    _norm("rms_norm 128", 128, add=False),
    _mean_squares(3072, 512),
    _layer_norm("layer_norm 4096", 4096, add=False),
    _layer_norm("add_layer_norm 4096", 4096, add=True),
    _gate("silu_mul 14336", gelu=False),
    _gate("gelu_tanh_mul 14336", gelu=True),
    _rope("rope 128", 32, 8, 128, 64),
    _rope("rope 128 normed", 32, 8, 128, 64, NORM=True),
    _rope("rope 128 partial", 32, 8, 128, 32),
    _rope("rope 128 interleaved", 32, 8, 128, 64, INTERLEAVED=True),
    _rope("rope 256", 16, 8, 256, 128),
    _rope("rope 80 normed", 32, 32, 80, 40, NORM=True),
    Case(
        "rotation 128",
        rotary.rotation_kernel,
        {"position_ptr": "*i64", "frequency_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "factor": "fp32"},
        {"PAIRS": 64, "BLOCK": 64, "OWN": False, **PDL},
        num_warps=1,
    ),
    Case(
        "fill_kv_cache 128",
        cache.fill_kv_cache_kernel,
        {"kv_ptr": "*bf16", "place_ptr": "*i64", "k_ptr": "*bf16", "v_ptr": "*bf16", "tokens": "i32"},
        {
            "STRIDE": 6144,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": 128,
            "FEATURES": 128,
            "BLOCK_SIZE": 64,
            "LINES": cache.LINES,
            **PDL,
        },
    ),
    Case(
        "copy_blocks",
        cache.copy_blocks_kernel,
        {"source_ptr": "*i64", "destination_ptr": "*i64", "pool_ptr": "*bf16", "num_blocks": "i32"},
        {"SIZE": 65536, "CHUNK": cache.CHUNK, **PDL},
    ),
    Case(
        "embed 4096",
        embedding.gather_kernel,
        {"index_ptr": "*i64", "table_ptr": "*bf16", "out_ptr": "*bf16", "scale": "fp32"},
        {"STRIDE": 4096, "SIZE": 4096, "COLUMNS": embedding.COLUMNS, "SCALED": True, **PDL},
    ),
    Case(
        "prepare_decode",
        step.prepare_decode_kernel,
        {
            **{"slot_ptr": "*i32", "position_ptr": "*i64", "last_token_ptr": "*i64", "table_ptr": "*i32"},
            **{"out_id_ptr": "*i64", "out_position_ptr": "*i64", "out_place_ptr": "*i64", "out_kv_len_ptr": "*i32"},
            **{"out_table_ptr": "*i32", "width": "i32", "table_stride": "i32", "out_stride": "i32"},
        },
        {"BLOCK_SIZE": 64, "ENTRIES": step.ENTRIES, **PDL},
    ),
    Case(
        "segments_finite 4096",
        step.segments_finite_kernel,
        {"hidden_ptr": "*bf16", "offset_ptr": "*i32", "flag_ptr": "*i32", "segments": "i32"},
        {"SIZE": 4096, "COLUMNS": 4096, **PDL},
    ),
    Case(
        "convolution 2048",
        recurrent.convolution_kernel,
        {
            **{"x_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": "*bf16", "state_ptr": "*bf16"},
            **{"row_ptr": "*i64", "offset_ptr": "*i32", "source_ptr": "*i64", "y_ptr": "*bf16"},
        },
        {"SIZE": 2048, "LENGTH": 4, "COLUMNS": recurrent.COLUMNS, "HAS_BIAS": True, "SILU": True, **PDL},
    ),
    Case(
        "scan 16",
        selective_scan.selective_scan_kernel,
        {
            **{"x_ptr": "*bf16", "size_ptr": "*fp32", "rate_ptr": "*fp32", "write_ptr": "*bf16", "read_ptr": "*bf16"},
            **{"state_ptr": "*fp32", "end_ptr": "*i32", "source_ptr": "*i64", "target_ptr": "*i64", "first": "i32"},
            **{"span_ptr": "*i32", "offset_ptr": "*i32", "out_ptr": "*bf16"},
        },
        {
            **{"ALL_FEATURES": 8192, "STATE": 16, "STATE_TILE": 16, "FEATURES": selective_scan.FEATURES},
            **{"TOKENS": selective_scan.TOKENS, "SIZE": 64, **PDL},
        },
    ),
    Case(
        "scan 1",
        selective_scan.selective_scan_kernel,
        {
            **{"x_ptr": "*fp32", "size_ptr": "*fp32", "rate_ptr": "*fp32", "write_ptr": "*fp32", "read_ptr": "*fp32"},
            **{"state_ptr": "*fp32", "end_ptr": "*i32", "source_ptr": "*i64", "target_ptr": "*i64", "first": "i32"},
            **{"span_ptr": "*i32", "offset_ptr": "*i32", "out_ptr": "*fp32"},
        },
        {
            **{"ALL_FEATURES": 2560, "STATE": 1, "STATE_TILE": 1, "FEATURES": selective_scan.FEATURES},
            **{"TOKENS": selective_scan.TOKENS, "SIZE": 64, **PDL},
        },
    ),
    Case(
        "inputs 2048",
        recurrent.inputs_kernel,
        {
            **{"x_ptr": "*bf16", "state_ptr": "*bf16", "row_ptr": "*i64", "offset_ptr": "*i32"},
            **{"source_ptr": "*i64", "target_ptr": "*i64"},
        },
        {"SIZE": 2048, "KEPT": 3, "COLUMNS": recurrent.COLUMNS, **PDL},
    ),
    *(
        Case(
            name,
            memory.delta_kernel,
            {
                **{"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "decay_ptr": "*fp32", "beta_ptr": "*fp32"},
                **{"state_ptr": "*fp32", "offset_ptr": "*i32", "source_ptr": "*i64", "target_ptr": "*i64"},
                "out_ptr": "*bf16",
            },
            {
                **{"HEADS": 32, "SHARING": sharing, "KEYS": 128, "ALL_VALUES": values},
                **{"KEY_TILE": 128, "VALUES": memory.VALUES, "DELTA": delta, "BY_KEY": by_key, **PDL},
            },
        )
        for name, sharing, values, delta, by_key in (
            ("delta 128", 2, 128, True, False),
            ("delta of features 128", 1, 128, True, True),
            ("space 128", 32, 64, False, False),
        )
    ),
]
