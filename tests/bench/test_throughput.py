"""bench/throughput.py, with engines that take as long as they are told, and with ours on a tiny model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import limits
import pytest
import torch
from engines import Timed, answer, engine_config
from table import emit, format_table, read_records
from throughput import measure, parse_arguments
from workloads import Work, plan, static, warm_up

from asyncllm import AsyncEngine
from asyncllm.errors import InvalidParameter

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _no_monitor_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm starts a thread that outlives its bars."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def test_engines_take_turns_and_the_best_run_counts() -> None:
    turns: list[str] = []

    def engine(name: str, seconds_per_token: float) -> Timed:
        def run(work: Work) -> float:
            turns.append(name)
            # Every run of an engine is slower than the one before.
            return work.num_new * seconds_per_token + 1e-3 * turns.count(name)

        return run

    plans = [plan("b2", prompt_len=4, new_tokens=11), plan("b4", prompt_len=4, new_tokens=11)]
    warm_ups = warm_up(plans)
    records: list[dict[str, Any]] = []
    engines = {"fast": engine("fast", 0.01), "slow": engine("slow", 0.02)}
    measure(plans, engines, warm_ups, records.append, repeat=2)
    assert turns == ["fast", "slow"] * (2 + 2 * 8)
    assert [(each["work"], each["engine"]) for each in records] == [
        ("b2", "fast"),
        ("b2", "slow"),
        ("b4", "fast"),
        ("b4", "slow"),
    ]
    # Warm-ups are runs 1 and 2, firsts 3 to 6, wholes 7 to 10: the best of each are runs 3 and 7.
    assert records[0]["first_s"] == pytest.approx(2 * 0.01 + 0.003)
    assert records[0]["step_ms"] == pytest.approx((20 * 0.01 + 0.004) / 10 * 1000)


def test_the_bundled_model_has_small_defaults_and_others_the_works_own() -> None:
    bundled = parse_arguments([])
    assert (bundled.work, bundled.against, bundled.prompt_len, bundled.new_tokens) == (
        "b1,b16,b64",
        "transformers",
        64,
        128,
    )
    other = parse_arguments(["--model", "folder"])
    assert other.work == "b1,b16,b64,b256,prefill,mix,mix_sample"
    assert (other.against, other.prompt_len, other.new_tokens) == ("none", None, None)


def test_engine_settings_are_those_of_the_works_unless_overridden(tiny_checkpoint: Path) -> None:
    config = engine_config(str(tiny_checkpoint), '{"max_prefill_token_num": 512, "max_batch_size": 8}')
    assert not config.enable_prefix_caching
    assert (config.session_len, config.cache_max_entry_count) == (8192, 0.85)
    assert (config.max_prefill_token_num, config.max_batch_size) == (512, 8)
    assert engine_config("tiny-chat").session_len == 2048
    assert engine_config("tiny-chat").max_batch_size == 256
    with pytest.raises(InvalidParameter, match="no field"):
        engine_config("tiny-chat", '{"max_prefil_token_num": 512}')


@pytest.mark.parametrize("sampled", [False, True])
def test_ours_answers_every_request_to_its_full_length(tiny_checkpoint: Path, sampled: bool) -> None:
    batch = static(5, 9, 6, seed=0, ids=range(64, 300))
    work = Work(batch.prompts, [6, 1, 4, 6, 2], sampled)
    engine = AsyncEngine(str(tiny_checkpoint), engine_config(str(tiny_checkpoint), '{"num_gpu_blocks": 40}'))

    async def run() -> float:
        async with engine:
            seconds = await answer(engine, work)
            assert engine.stats().requests_finished == 5
            return seconds

    assert asyncio.run(run()) > 0


def test_the_table_holds_the_lines_of_all_engines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [
        {"engine": "limits", "copy_TBs": 4.26},
        {"work": "b16", "step_ms": 4.0, "total_s": 1.5, "engine": "ours"},
        {"work": "mix", "out_tok_s": 12000.0, "engine": "ours"},
        {"work": "b16", "step_ms": 5.0, "total_s": 1.2, "engine": "theirs"},
        {"work": "mix", "out_tok_s": 10000.0, "engine": "theirs"},
        {"work": "prefill", "prefill_tok_s": 42000, "engine": "theirs"},
        {"work": "b16", "step_ms": 6.0, "engine": "third"},
    ]
    path.write_text("loading...\n" + "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_records(path) == lines
    assert format_table(lines).splitlines() == [
        "| work | figure | ours | theirs | ratio | third | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| b16 | step ms | 4.000 | 5.000 | 1.25 | 6.000 | 1.50 |",
        "| b16 | seconds in all | 1.500 | 1.200 | 0.80 |  |  |",
        "| mix | output tok/s | 12,000 | 10,000 | 1.20 |  |  |",
        "| prefill | prompt tok/s |  | 42,000 |  |  |  |",
        "ceilings: copy_TBs 4.26",
    ]


def test_figures_are_appended_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.jsonl"
    records = [{"work": "b1", "step_ms": 4.0, "engine": "ours"}, {"work": "b16", "step_ms": 5.0, "engine": "ours"}]
    for record in records:
        emit(record, path)
    emit(records[0], None)
    assert read_records(path) == records
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*records, records[0]]


def test_ceilings_have_the_keys_of_other_benchmarks() -> None:
    figures = limits.measure("cpu", buffer=4096, square=8, weight=(16, 8), rows=(1, 4, 16, 64, 256))
    skinny = [f"skinny_m{rows}_TBs" for rows in (1, 4, 16, 64, 256)]
    assert list(figures) == ["engine", "copy_TBs", "read_TBs", "matmul_TFLOPs", *skinny]
    assert figures["engine"] == "limits"


def test_ceilings_count_what_a_call_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "seconds", lambda call, device, calls: (call(), 1e-9)[1])
    figures = limits.measure("cpu", buffer=10_000, square=100, weight=(50, 40), rows=(3,))
    assert figures["copy_TBs"] == 40.0, "a copy reads and writes 2 bytes for each of 10,000 numbers"
    assert figures["read_TBs"] == 20.0
    assert figures["matmul_TFLOPs"] == 2000
    assert figures["skinny_m3_TBs"] == 4.0


def test_the_program_times_the_bundled_model_and_prints_one_table(tmp_path: Path) -> None:
    peers, out = tmp_path / "peers.jsonl", tmp_path / "result.jsonl"
    peers.write_text('{"work": "b2", "step_ms": 1000.0, "engine": "peer"}\n', encoding="utf-8")
    command = [sys.executable, "bench/throughput.py", "--against", "none", "--work", "b2", "--prompt-len", "8"]
    command += ["--new-tokens", "4", "--config", '{"max_batch_size": 2}', "--json", str(out), "--beside", str(peers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    (figures,) = read_records(out)
    assert list(figures) == ["work", "first_s", "total_s", "decode_tok_s", "step_ms", "engine"]
    assert figures["engine"] == "asyncllm"
    assert json.loads(done.stdout.splitlines()[0]) == figures
    assert "| work | figure | asyncllm | peer | ratio |" in done.stdout
    assert "b2:" in done.stderr, "the progress bar"


def test_what_only_a_gpu_has_is_not_measured_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse_arguments(["--limits"])
    assert "torch finds none here" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["limits.py"])
    with pytest.raises(SystemExit, match="torch finds none here"):
        limits.main()
