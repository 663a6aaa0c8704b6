"""Configurations of the linear kernels to compile for sm_90 without a GPU (tests.kernels.offline)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncllm.kernels.triton.linear import exact as linear_exact
from asyncllm.kernels.triton.linear import gated as linear_gated
from asyncllm.kernels.triton.linear import invariant as linear_invariant
from asyncllm.kernels.triton.linear import product as linear
from asyncllm.kernels.triton.linear import rotary as linear_rotary
from asyncllm.kernels.triton.linear import small as linear_small
from asyncllm.kernels.triton.linear.small import GemvConfig, SkinnyConfig, token_tile
from tests.kernels.offline import Case

_POINTERS = {name: "*bf16" for name in ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")}
_PDL = {"launch_pdl": True}


def gemv_case(tokens: int, config: GemvConfig, n: int = 4096, k: int = 4096, *, gated: bool = False) -> Case:
    constexprs = {
        "N": n, "K": k, "TOKENS": tokens, "BLOCK_N": config.rows, "BLOCK_K": config.columns, "GATED": gated,
        "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    name = f"gemv-{'gated-' if gated else ''}{tokens}-{n}x{k}-{'-'.join(map(str, vars(config).values()))}"
    return Case(name, linear_small.gemv_kernel, _POINTERS, constexprs, config.warps, options=_PDL)


def skinny_case(
    tokens: int, config: SkinnyConfig, n: int = 4096, k: int = 4096, *, gated: bool = False, release_first: bool = True
) -> Case:
    constexprs = {
        "N": n, "K": k, "BLOCK_M": tokens, "BLOCK_N": config.rows, "BLOCK_K": config.columns,
        "SPLITS": config.splits, "GATED": gated, "HAS_BIAS": False, "RELEASE_FIRST": release_first,
        "USE_PDL": True,
    }  # fmt: skip
    kind = f"{'gated' if gated else 'skinny'}{'' if release_first else '-beside'}"
    name = f"{kind}-{tokens}-{n}x{k}-{'-'.join(map(str, vars(config).values()))}"
    signature = {**_POINTERS, "partial_ptr": "*fp32", "counter_ptr": "*i32", "tokens": "i32"}
    return Case(name, linear_small.skinny_kernel, signature, constexprs, config.warps, config.stages, options=_PDL)


def rotary_case(tokens: int, config: SkinnyConfig) -> Case:
    """In the Llama-3-8B shape."""
    constexprs = {
        "K": 4096, "BLOCK_M": tokens, "BLOCK_N": config.rows, "BLOCK_K": config.columns, "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 64, "USE_PDL": True,
    }  # fmt: skip
    signature = {
        **dict.fromkeys(("x_ptr", "weight_ptr", "q_ptr", "k_ptr", "v_ptr"), "*bf16"),
        **{"cos_ptr": "*fp32", "sin_ptr": "*fp32", "place_ptr": "*i64", "tokens": "i32"},
    }
    name = f"rotary-{tokens}-{'-'.join(map(str, vars(config).values()))}"
    kernel = linear_rotary.skinny_rotary_kernel
    return Case(name, kernel, signature, constexprs, config.warps, config.stages, options=_PDL)


def invariant_case(name: str, tile: linear_invariant.Tile, dtype: str = "*bf16") -> Case:
    constexprs = {
        "N": 4096, "K": 4096, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "BLOCK_K": tile.columns,
        "GROUP": 8, "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    return Case(
        f"invariant-{name}",
        linear_invariant.invariant_kernel,
        dict.fromkeys(_POINTERS, dtype) | {"tokens": "i32"},
        constexprs,
        tile.warps,
        tile.stages,
        options=_PDL,
    )


def exact_case(n: int, k: int, config: linear_exact.ExactConfig) -> Case:
    constexprs = {
        "N": n, "K": k, "BLOCK_M": config.tokens, "BLOCK_N": config.rows, "BLOCK_K": config.columns,
        "SPLITS": config.splits, "HAS_BIAS": False, "USE_PDL": True,
    }  # fmt: skip
    names = ("weight_ptr", "bias_ptr", "out_ptr", "partial_ptr")
    signature = {"x_ptr": "*bf16", **dict.fromkeys(names, "*fp32"), "counter_ptr": "*i32", "tokens": "i32"}
    return Case(
        f"exact-{config.tokens}-{n}x{k}", linear_exact.exact_kernel, signature, constexprs, config.warps, options=_PDL
    )


def _of_tables() -> Iterator[Case]:
    """Every entry of the tables, as it is for the most tokens it serves."""
    for table in linear.TABLES.values():
        for (n, k), entries in table.items():
            for most, config in entries:
                if isinstance(config, GemvConfig):
                    yield gemv_case(most, config, n, k)
                elif isinstance(config, SkinnyConfig):
                    yield skinny_case(token_tile(most), config, n, k)
    for gated_table in linear_gated.TABLES.values():
        for (n, k), gated_entries in gated_table.items():
            for most, gated_config in gated_entries:
                if isinstance(gated_config, SkinnyConfig):
                    yield skinny_case(token_tile(most), gated_config, n // 2, k, gated=True)
    for rotary_table in linear_rotary.TABLES.values():
        for rotary_entries in rotary_table.values():
            for most, rotary_config in rotary_entries:
                if rotary_config is not None:
                    yield rotary_case(token_tile(most), rotary_config)


CASES = [
    *_of_tables(),
    *(invariant_case(str(tokens), tile) for tokens, tile in linear_invariant.TILES.items()),
    invariant_case("float32", linear_invariant.FLOAT32_TILE, "*fp32"),
    *(
        exact_case(n, k, config)
        for n, k in ((64, 2048), (160, 5120))
        for config in (linear_exact.FEW, linear_exact.MANY)
    ),
    gemv_case(4, GemvConfig(4, 1024)),
    gemv_case(1, linear.ONE_TOKEN, 4544, 4544),
    gemv_case(1, linear.ONE_TOKEN, 8192, 3072, gated=True),
    gemv_case(1, linear.ONE_TOKEN_FEW_FEATURES, 32, 2880),
    skinny_case(16, SkinnyConfig(splits=4)),
    skinny_case(64, SkinnyConfig()),
    skinny_case(64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8), 28672, release_first=False),
]
