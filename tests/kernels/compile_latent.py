"""The configurations of latent attention's kernels, at the shapes of DeepSeek and MiniCPM3."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton.latent import expanded, fill, hopper, plan
from asyncllm.kernels.triton.latent.decode import latent_decode_kernel
from asyncllm.kernels.triton.latent.prefill import latent_prefill_kernel
from asyncllm.kernels.triton.linear import by_head
from tests.kernels.offline import Case

TYPES = {2: "*bf16", 4: "*fp32"}
HEADS = 128
OWN = {
    latent_decode_kernel: {"work": "*i32", "partials": "*fp32"},
    latent_prefill_kernel: {"entries": "*i32"},
}


def attention_case(kernel: Any, name: str, config: Any, rank: int, itemsize: int, **constexprs: int) -> Case:
    rope = 64 if rank == 512 else 32
    return Case(
        name=name,
        kernel=kernel,
        signature=dict.fromkeys(("q_latent", "q_rope", "pages", "out"), TYPES[itemsize])
        | OWN[kernel]
        | {"block_tables": "*i32", "steepness": "fp32", "table_stride": "i32"},
        constexprs={
            "LATENT_STRIDE": HEADS * rank,
            "LATENT_HEAD": rank,
            "ROPE_STRIDE": HEADS * (128 + rope),
            "ROPE_HEAD": 128 + rope,
            "OUT_STRIDE": HEADS * rank,
            "NUM_HEADS": HEADS,
            "RANK": rank,
            "RANK_BLOCK": rank,
            "ROPE": rope,
            "ROPE_BLOCK": rope,
            "PAGE": 64,
            "TILE": config.tile,
            "USE_PDL": True,
            **constexprs,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        options={"launch_pdl": True},
    )


def _name(kind: str, itemsize: int, rank: int) -> str:
    return f"{kind}-{'fp32' if itemsize == 4 else 'bf16'}-{rank}"


def _fill(heads: int, rank: int, rope: int) -> Case:
    types = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "place_ptr": "*i64", "eps": "fp32"}
    names = ("q_ptr", "kv_ptr", "norm_ptr", "pages_ptr")
    constexprs = {
        "NUM_HEADS": heads,
        "HEAD_DIM": 128 + rope,
        "RANK": rank,
        "RANK_BLOCK": rank,
        "PAIRS": rope // 2,
        "BLOCK": rope // 2,
        "INTERLEAVED": True,
        "ROWS": min(fill.ROWS, heads),
        "USE_PDL": True,
    }
    return Case(f"fill-{heads}", fill.rope_fill_latent_kernel, dict.fromkeys(names, "*bf16") | types, constexprs)


def _by_head(name: str, dtype: str, tile: Any, *, transposed: bool) -> Case:
    constexprs = {
        "X_TOKEN": 16 * 512,
        "X_HEAD": 512,
        "W_HEAD": 256 * 512,
        "W_ROW": 1 if transposed else 512,
        "W_COLUMN": 512 if transposed else 1,
        "OUT_TOKEN": 16 * 128,
        "N": 128,
        "K": 512,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "COLUMNS": tile.columns,
        "USE_PDL": True,
    }
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), dtype) | {"tokens": "i32"}
    return Case(name, by_head.by_head_kernel, signature, constexprs, tile.warps, tile.stages)


def _expanded(itemsize: int, nope: int, rope: int, value: int) -> Case:
    config = expanded.EXPANDED_CONFIGS[itemsize]
    constexprs = {
        "NUM_HEADS": 16,
        "NOPE": nope,
        "NOPE_BLOCK": nope,
        "ROPE": rope,
        "ROPE_BLOCK": rope,
        "VALUE": value,
        "VALUE_BLOCK": value,
        "ROWS": config.rows,
        "TILE": config.tile,
        "USE_PDL": True,
    }
    signature = dict.fromkeys(("q", "kv", "keys", "out"), TYPES[itemsize])
    signature |= {"entries": "*i32", "starts_ptr": "*i32", "steepness": "fp32"}
    return Case(
        f"expanded-{itemsize}-{nope}",
        expanded.expanded_prefill_kernel,
        signature,
        constexprs,
        config.num_warps,
        config.num_stages,
    )


def _gather(rank: int, rope: int) -> Case:
    names = {"pages_ptr": "*bf16", "latents_ptr": "*bf16", "keys_ptr": "*bf16"}
    integers = {"block_tables": "*i32", "kv_lens_ptr": "*i32", "starts_ptr": "*i32", "table_stride": "i32"}
    constexprs = {
        "RANK": rank,
        "RANK_BLOCK": rank,
        "ROPE": rope,
        "ROPE_BLOCK": rope,
        "PAGE": 64,
        "LINES": expanded.GATHERED,
        "USE_PDL": True,
    }
    return Case(f"gather-{rank}", expanded.gather_lines_kernel, names | integers, constexprs)


def _hopper(heads: int) -> Case:
    rank = 512
    config = plan.HOPPER_CONFIG
    shape = plan.LatentShape(heads, rank, 64, 64)
    options = hopper.compile_options(shape, (heads * rank, rank, heads * 192, 192, heads * rank), config.heads)
    num_warps, maxnreg = options.pop("num_warps"), options.pop("maxnreg")
    maps = {
        name: f"tensordesc<bf16[1, {config.tile}, {width}],{hopper.HOPPER_LINES!r}>"
        for name, width in (("pages", rank), ("turned", 64))
    }
    integers = {"block_tables": "*i32", "work_ptr": "*i32", "table_stride": "i32"}
    signature = maps | dict.fromkeys(("q_latent", "q_rope", "out"), "*bf16") | integers
    return Case(
        f"hopper-{heads}",
        hopper.hopper_decode_kernel,
        signature | {"partials": "*fp32", "steepness": "fp32"},
        {**options, "USE_PDL": True},
        num_warps,
        options={"launch_pdl": True, "maxnreg": maxnreg},
    )


CASES = [
    *(
        attention_case(
            latent_decode_kernel,
            f"{_name('decode', itemsize, rank)}-{config.blocks_per_processor}",
            config,
            rank,
            itemsize,
            HEADS=config.heads,
            CHUNK=64,
        )
        for (rank, itemsize), config in plan.DECODE_CONFIGS.items()
    ),
    *(
        attention_case(
            latent_prefill_kernel,
            _name("prefill", itemsize, rank),
            config,
            rank,
            itemsize,
            HEADS=16,
            ROWS=config.rows,
        )
        for (rank, itemsize), config in plan.PREFILL_CONFIGS.items()
    ),
    *(_hopper(heads) for heads in (5, 16, 128)),
    *(_fill(heads, 512, 64) for heads in (16, 128)),
    *(_expanded(itemsize, *sizes) for itemsize in (2, 4) for sizes in ((128, 64, 128), (64, 32, 64))),
    _gather(512, 64),
    *(_by_head(f"by-head{part}", "*bf16", by_head.TILE, transposed=bool(part)) for part in ("", "-transposed")),
    _by_head("by-head-float32", "*fp32", by_head.FLOAT32_TILE, transposed=False),
]
