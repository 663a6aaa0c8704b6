"""bench/roofline.py: the limit of a step of Llama-3-8B on an H200, worked out by hand."""

from __future__ import annotations

import pytest
from roofline import Model, mean_context, step_limit_ms, steps_by_engine


def test_the_model_is_llama_3_8b() -> None:
    assert Model().weights == 7_504_658_432
    assert Model().kv_bytes == 131_072


@pytest.mark.parametrize(("name", "expected"), [("b1", 3.466), ("b16", 3.768), ("b64", 4.695), ("b256", 9.668)])
def test_the_limit_is_reading_weights_or_computing_and_then_reading_the_context(name: str, expected: float) -> None:
    assert step_limit_ms(int(name[1:]), mean_context(name), model=Model()) == pytest.approx(expected, abs=2e-3)


def test_contexts_are_those_of_the_works() -> None:
    assert mean_context("b1") == 256
    assert mean_context("b64") == 640


def test_steps_are_found_among_all_lines() -> None:
    lines = [
        {"engine": "limits", "read_TBs": 4.3},
        {"engine": "ours", "work": "b16", "step_ms": 9.0},
        {"engine": "ours", "work": "mix", "out_tok_s": 1.0},
        {"engine": "theirs", "work": "b16", "step_ms": 5.0},
        {"engine": "ours", "work": "b16", "step_ms": 4.0},
        {"engine": "ours", "work": "cpu_b1", "step_ms": 1.0},
    ]
    assert steps_by_engine(lines) == {"ours": {16: 4.0}, "theirs": {16: 5.0}}
