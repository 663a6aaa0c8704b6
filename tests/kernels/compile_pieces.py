"""The configurations of memories by pieces, at the shapes of Qwen3-Next, Nemotron-H and Bamba."""

from __future__ import annotations

from typing import Any

from asyncllm.kernels.triton import pieces
from tests.kernels.offline import Case

INDICES = {"span_ptr": "*i32", "offset_ptr": "*i32", "end_ptr": "*i32", "source_ptr": "*i64", "target_ptr": "*i64"}
FLOATS = {"decay_ptr", "beta_ptr", "weight_ptr", "length_ptr", "state_ptr"}


def _case(name: str, kernel: Any, item: str, num_stages: int, **constexprs: Any) -> Case:
    names = [each for each in kernel.arg_names if each.endswith("_ptr")]
    types = {each: INDICES.get(each, "*fp32" if each in FLOATS else item) for each in names}
    numbers = {each: "i32" for each in ("first", "count") if each in kernel.arg_names}
    constexprs = {each: value for each, value in constexprs.items() if each in kernel.arg_names}
    return Case(name, kernel, types | numbers, {**constexprs, "USE_PDL": True}, num_stages=num_stages)


def _cases(name: str, item: str, *, delta: bool, heads: int, sharing: int, keys: int, values: int) -> list[Case]:
    config = pieces.pieces_config(keys, values, 4 if item == "*fp32" else 2)
    shape = {
        "HEADS": heads,
        "SHARING": sharing,
        "KEYS": keys,
        "ALL_VALUES": values,
        "KEY_TILE": keys,
        "VALUE_TILE": values,
        "VALUES": config.values,
        "SIZE": 64,
        "TOKENS": 64,
        "DELTA": delta,
    }
    solve = [_case(f"solve {name}", pieces.solve_kernel, item, 3, **shape)] if delta else []
    return [*solve, _case(f"pieces {name}", pieces.pieces_kernel, item, config.num_stages, **shape)]


CASES = [
    *_cases("delta 128", "*bf16", delta=True, heads=32, sharing=2, keys=128, values=128),
    *_cases("delta 128 fp32", "*fp32", delta=True, heads=32, sharing=2, keys=128, values=128),
    *_cases("space 128", "*bf16", delta=False, heads=128, sharing=16, keys=128, values=64),
    *_cases("space 256", "*bf16", delta=False, heads=128, sharing=128, keys=256, values=64),
    *_cases("space 256 fp32", "*fp32", delta=False, heads=128, sharing=128, keys=256, values=64),
]
