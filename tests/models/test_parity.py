"""Logits equal those of transformers, whatever way the tokens go through the paged cache.

Every parameter of the checkpoints is perturbed, and sequences are longer than windows and original contexts, so that
each detail of a family moves the logits by far more than the tolerance (test_parity_controls.py shows it).
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.models.parity import (
    FAMILIES,
    PROMPT,
    TOKENS,
    Case,
    Runner,
    hub_model,
    open_case,
    random_tokens,
    reference,
    scalings_of,
)
from tests.remote_layouts import LAYOUTS, RELATIVES

TOLERANCE = 1e-4

SCHEMAS = [
    pytest.param(Case(family, scaling, legacy), id=f"{family}-{scaling}-{'legacy' if legacy else 'v5'}")
    for family in FAMILIES
    for scaling in scalings_of(family)
    for legacy in (False, True)
]
SIZES = cycle((16, 5))
"""Of blocks: in turns, besides the families that are held to several scalings."""

PAGED = [
    pytest.param(Case(family, scaling), block_size, id=f"{family}-{scaling}-{block_size}")
    for family in FAMILIES
    for scaling in scalings_of(family)
    for block_size in ((16, 5) if scaling == "default" and len(scalings_of(family)) > 1 else (next(SIZES),))
]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e}"


@pytest.mark.parametrize("case", SCHEMAS)
def test_whole_prefill(case: Case) -> None:
    tokens = random_tokens(1)
    runner = Runner(open_case(case), block_size=16)
    row = runner.row(tokens)
    runner.step((row, TOKENS))
    assert_close(row.result, reference(case, tokens))


@pytest.mark.parametrize(("case", "block_size"), PAGED)
def test_decode_step_by_step(case: Case, block_size: int) -> None:
    tokens = random_tokens(2)
    runner = Runner(open_case(case), block_size)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    runner.decode(row, TOKENS)
    assert_close(row.result, reference(case, tokens))


@pytest.mark.parametrize(("case", "block_size"), PAGED)
def test_chunked_prefill(case: Case, block_size: int) -> None:
    tokens = random_tokens(3)
    runner = Runner(open_case(case), block_size)
    row = runner.row(tokens)
    sizes = cycle((1, 7, 13, 2, 29))
    while row.computed < TOKENS:
        runner.step((row, min(next(sizes), TOKENS - row.computed)))
    assert_close(row.result, reference(case, tokens))


@pytest.mark.parametrize(("case", "block_size"), PAGED)
def test_prefix_cache_hit(case: Case, block_size: int) -> None:
    first_tokens = random_tokens(4)
    runner = Runner(open_case(case), block_size)
    first = runner.row(first_tokens)
    runner.step((first, PROMPT))
    shared = 50 // block_size
    second_tokens = first_tokens[: shared * block_size] + random_tokens(5, TOKENS - shared * block_size)
    second = runner.row(second_tokens, shared=first.blocks[:shared])
    runner.step((first, 1), (second, PROMPT - second.computed))
    while second.computed < TOKENS:
        runner.step((first, 1), (second, 1)) if first.computed < TOKENS else runner.step((second, 1))
    assert_close(first.result, reference(case, first_tokens))
    assert_close(second.result, reference(case, second_tokens)[shared * block_size :])


@pytest.mark.parametrize(("case", "block_size"), PAGED)
def test_recompute_after_preemption(case: Case, block_size: int) -> None:
    tokens = random_tokens(6)
    runner = Runner(open_case(case), block_size)
    before = runner.row(tokens)
    runner.step((before, PROMPT))
    runner.decode(before, PROMPT + 8)
    after = runner.row(tokens)
    runner.step((after, 61))
    runner.step((after, PROMPT + 8 - 61))
    runner.decode(after, TOKENS)
    assert_close(before.result, reference(case, tokens)[: PROMPT + 8])
    assert_close(after.result, reference(case, tokens))


@pytest.mark.parametrize(("case", "block_size"), PAGED)
def test_mixed_batch(case: Case, block_size: int) -> None:
    runner = Runner(open_case(case), block_size, num_blocks=128)
    prompts = (PROMPT, 40, 3, 70)
    rows = [
        runner.row(random_tokens(10 + index, length + 4), prompt_len=length) for index, length in enumerate(prompts)
    ]
    long, middle, short, late = rows
    runner.step((long, 80), (middle, 17))
    runner.step((long, 1), (middle, 23), (short, 3))
    runner.step((long, 1), (short, 1), (middle, 2), (late, 33))
    runner.step((long, 1), (middle, 1), (short, 1), (late, 37))
    runner.step((long, 1), (middle, 1), (short, 1), (late, 1))
    runner.step((short, 1), (late, 3))
    for row, length in zip(rows, prompts, strict=True):
        assert row.computed == length + 4
        if case.scaling in ("longrope_long", "longrope_mscale") and length + 4 <= 32:
            # The oracle picks its divisors by the length of the call; below the original context it takes the others.
            continue
        assert_close(row.result, reference(case, row.tokens, length))


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if "dynamic" in scalings_of(each) and each not in LAYOUTS]
)
def test_dynamic_base_is_that_of_transformers_at_the_prompt(family: str) -> None:
    """The other tests compare dynamic scaling with a formula of their own; here, with the hub's implementation."""
    case = Case(family, "dynamic")
    tokens = random_tokens(7, PROMPT)
    runner = Runner(open_case(case), block_size=16)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    with torch.inference_mode():
        expected = hub_model(case)(torch.tensor([tokens])).logits[0]
    assert_close(row.result, expected)


@pytest.mark.parametrize(
    ("family", "scaling"), [(family, scaling) for family in FAMILIES for scaling in scalings_of(family)]
)
def test_legacy_and_v5_schemas_read_alike(family: str, scaling: str) -> None:
    assert open_case(Case(family, scaling, True)).config == open_case(Case(family, scaling, False)).config


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives(name: str) -> None:
    """Checkpoints of other names that a family reads: a prompt, and tokens one by one."""
    case = Case(name, "default")
    tokens = random_tokens(8)
    runner = Runner(open_case(case), block_size=16)
    row = runner.row(tokens)
    runner.step((row, PROMPT))
    runner.decode(row, TOKENS)
    assert_close(row.result, reference(case, tokens))
    assert open_case(case).config.architecture == LAYOUTS[name].architecture
