"""bench/latency.py: the definitions of its figures, and streaming with so many readers at once."""

from __future__ import annotations

import pytest
from latency import Answered, draw, format_table, parse_levels, run_level, summarize
from workloads import mixed

from asyncllm.testing import FakeEngine

KEYS = [
    "completed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{statistic}_{span}_ms" for span in ("ttft", "tpot", "itl", "e2el") for statistic in ("mean", "median", "p99")),
]
"""Those of `vllm bench serve` that apply."""


def test_the_figures_follow_their_definitions() -> None:
    answered = [
        Answered(prompt_tokens=10, asked=1.0, chunk_times=[1.1, 1.2, 1.5], tokens=5),
        Answered(prompt_tokens=20, asked=2.0, chunk_times=[2.3], tokens=1),
    ]
    figures = summarize(answered, duration=2.0, concurrency=2)
    assert set(KEYS) <= figures.keys()
    assert (figures["work"], figures["completed"], figures["max_concurrency"]) == ("stream_c2", 2, 2)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert figures["output_throughput"] == 3.0
    assert figures["total_token_throughput"] == 18.0
    assert figures["request_throughput"] == 1.0
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["p99_ttft_ms"] == pytest.approx(298, abs=0.01)
    assert figures["mean_tpot_ms"] == pytest.approx(100), "0.4 s for the 4 tokens after the first"
    assert figures["mean_itl_ms"] == pytest.approx(200), "gaps between chunks, however many tokens they carry"
    assert figures["mean_e2el_ms"] == pytest.approx(400)
    assert figures["chunks_per_token"] == pytest.approx(4 / 6, abs=1e-3)
    assert "| 2 (2) | 3.00 | 200.00 |" in format_table([figures])


@pytest.mark.anyio
async def test_a_level_keeps_its_concurrency_and_answers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    work = draw(12, 1, prompt_len=5, new_tokens=7, ids=range(97, 120))
    most = 0
    async with FakeEngine() as engine:
        generate = engine.generate

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal most
            stats = engine.stats()
            most = max(most, stats.requests_started - stats.requests_finished)
            return generate(*args, **kwargs)  # type: ignore[arg-type]

        engine.generate = counted  # type: ignore[assignment]
        answered, seconds = await run_level(engine, work, 3)
        assert engine.stats().requests_finished == 12
    assert most <= 3
    assert [each.tokens for each in answered] == [7] * 12
    assert all(each.asked <= each.chunk_times[0] <= each.chunk_times[-1] for each in answered)
    assert 0 < max(each.e2el for each in answered) <= seconds


def test_levels_are_read_and_wrong_ones_refused() -> None:
    assert parse_levels("1:8,16:64") == [(1, 8), (16, 64)]
    for text in ("0:8", "1:0", "16", "1:2:3", "a:b", ""):
        with pytest.raises(ValueError, match=r"."):
            parse_levels(text)


def test_fixed_lengths_replace_the_drawn_ones() -> None:
    ids = range(64, 300)
    drawn = mixed(6, seed=3, ids=ids)
    assert draw(6, 3, None, None, ids) == drawn
    fixed_answers = draw(6, 3, None, 9, ids)
    assert (fixed_answers.prompts, fixed_answers.new_tokens) == (drawn.prompts, [9] * 6)
    fixed_prompts = draw(6, 3, 4, None, ids)
    assert {len(prompt) for prompt in fixed_prompts.prompts} == {4}
    assert fixed_prompts.new_tokens == drawn.new_tokens
