"""The works that engines are timed on: the draws, and the arithmetic of the figures."""

from __future__ import annotations

import hashlib
import json

import pytest
from workloads import ALL_WORKS, LARGE_VOCAB_IDS, mixed, plan, record, static, token_ids, warm_up

BATCH_KEYS = ["work", "first_s", "total_s", "decode_tok_s", "step_ms", "engine"]
PREFILL_KEYS = ["work", "total_s", "prefill_tok_s", "engine"]
MIX_KEYS = ["work", "total_s", "out_tok_s", "total_tok_s", "rps", "n_in", "n_out", "engine"]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("batch", "length", "seed", "expected"),
    [
        (1, 128, 3, "fea55b06a159185b"),
        (16, 512, 5, "47e7f01c726f8b5f"),
        (32, 2048, 8, "15087ec4151521f9"),
        (4, 64, 99, "e2cc387625678936"),
        (300, 32, 98, "d67724d483de0dbe"),
    ],
)
def test_batches_are_those_that_other_engines_were_timed_on(batch: int, length: int, seed: int, expected: str) -> None:
    assert digest(static(batch, length, 1, seed=seed).prompts) == expected


def test_the_mix_is_the_one_that_other_engines_were_timed_on() -> None:
    work = plan("mix").whole[0]
    assert digest(work.prompts) == "c13eec9b50b7b04e"
    assert digest(work.new_tokens) == "d6907f5dc678947c"
    assert (work.num_prompt, work.num_new, len(work.prompts)) == (200_219, 192_573, 1000)
    assert not work.sampled
    sampled = plan("mix_sample").whole[0]
    assert sampled.sampled
    assert sampled.prompts == work.prompts


@pytest.mark.parametrize(("name", "length", "wholes"), [("b1", 128, 3), ("b16", 512, 2), ("b3", 512, 2)])
def test_a_batch_is_timed_with_one_token_and_with_257(name: str, length: int, wholes: int) -> None:
    batch = int(name[1:])
    planned = plan(name)
    assert [work.new_tokens for work in planned.whole] == [[257] * batch] * wholes
    assert [work.new_tokens for work in planned.first] == [[1] * batch] * 2
    works = planned.whole + planned.first
    assert {len(prompt) for work in works for prompt in work.prompts} == {length}
    assert len({digest(work.prompts) for work in works}) == wholes + 2, "a run repeats the prompts of another"


def test_lengths_can_be_replaced() -> None:
    planned = plan("b2", prompt_len=7, new_tokens=5)
    assert [len(prompt) for prompt in planned.whole[0].prompts] == [7, 7]
    assert planned.whole[0].new_tokens == [5, 5]
    assert {len(prompt) for prompt in plan("prefill", prompt_len=9).whole[0].prompts} == {9}


@pytest.mark.parametrize("name", ["b0", "b", "x16", "mixed", "", "b1.5", "b-1"])
def test_unknown_works_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no work"):
        plan(name)


def test_a_batch_without_decode_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 new tokens"):
        plan("b1", new_tokens=1)


def test_ids_fit_the_vocabulary() -> None:
    assert token_ids(128_256) == LARGE_VOCAB_IDS
    small = token_ids(300)
    drawn = {
        token
        for work in (static(4, 200, 1, seed=0, ids=small), mixed(20, ids=small))
        for p in work.prompts
        for token in p
    }
    assert min(drawn) >= 64
    assert max(drawn) < 300


def test_the_warm_up_is_as_large_as_the_works_but_not_larger() -> None:
    assert [len(work.prompts) for work in warm_up([plan("b16"), plan("b1")])] == [4, 16]
    assert [len(work.prompts) for work in warm_up([plan("mix")])] == [4, 300]


def test_a_step_is_the_best_whole_less_the_best_first() -> None:
    figures = record(plan("b16"), "someone", [0.5, 0.4], [2.96, 3.5])
    assert list(figures) == BATCH_KEYS
    assert figures["step_ms"] == 10.0
    assert figures["decode_tok_s"] == 1600.0
    assert (figures["first_s"], figures["total_s"]) == (0.4, 2.96)


def test_prefill_counts_prompt_tokens() -> None:
    figures = record(plan("prefill"), "someone", [], [2.0, 1.6])
    assert list(figures) == PREFILL_KEYS
    assert figures["prefill_tok_s"] == 40_960


@pytest.mark.parametrize("name", ["mix", "mix_sample"])
def test_the_mix_counts_all_tokens(name: str) -> None:
    figures = record(plan(name), "someone", [], [20.0])
    assert list(figures) == MIX_KEYS
    assert figures["out_tok_s"] == pytest.approx(192_573 / 20, abs=0.05)
    assert figures["total_tok_s"] == pytest.approx((192_573 + 200_219) / 20, abs=0.05)
    assert figures["rps"] == 50.0


def test_every_work_has_a_plan() -> None:
    assert [plan(name).name for name in ALL_WORKS] == list(ALL_WORKS)
