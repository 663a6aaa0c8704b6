"""bench/images.py: its figures on the bundled model, where all of them can be had in seconds."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from images import format_table, measure, parse_sizes, picture, spread

from asyncllm import AsyncEngine, EngineConfig
from bench.table import read_records


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_figures_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr("images.NEW_TOKENS", 4)
    monkeypatch.setattr("images.ALONE", 2)
    monkeypatch.setattr("images.STREAM_SECONDS", 0.2)
    engine = AsyncEngine("tiny-vlm", EngineConfig(device_type="cpu", num_gpu_blocks=200))
    arguments = argparse.Namespace(sizes="32x32", requests=3, same=3, json=tmp_path / "figures.jsonl")
    (figures,) = await measure(engine, arguments)
    assert read_records(arguments.json) == [figures]
    assert (figures["work"], figures["requests"]) == ("images_32x32", 3)
    assert (figures["same_asked"], figures["same_encodings"]) == (3, 1)
    assert all(value > 0 for key, value in figures.items() if key.endswith(("_ms", "_per_s")))
    assert f"| images_32x32 | {figures['ttft_ms']:,} |" in format_table([figures])


def test_parts() -> None:
    assert parse_sizes("448x448,64x32") == [(448, 448), (64, 32)]
    for text in ("448", "0x3", "", "axb"):
        with pytest.raises(ValueError, match=r"."):
            parse_sizes(text)
    assert picture(1, 5, 3).size == (5, 3)
    assert np.array_equal(picture(1, 5, 3), picture(1, 5, 3))
    assert not np.array_equal(picture(1, 5, 3), picture(2, 5, 3))
    assert spread("gap", [0.001, 0.002, 0.009]) == {"gap_p50_ms": 2.0, "gap_p99_ms": 8.86, "gap_max_ms": 9.0}
