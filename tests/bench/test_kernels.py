"""bench/kernels.py: each entry runs, on a CPU with the references, and its share of the ceiling is the right one."""

from __future__ import annotations

import kernel_entries
import pytest
import torch
from kernel_entries import LLAMA_3_8B, Entry, Shapes, entries
from kernel_timing import copies_of, format_line, judge, measure

CEILINGS = {"read_TBs": 4.0, "matmul_TFLOPs": 800.0}

SMALL = Shapes(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=256,
    block_size=16,
    dtype=torch.float32,
    device="cpu",
    rows=(1, 3),
    gated=(5,),
    chunk=20,
    decode=((1, 20), (3, 40)),
    prefill=((2, 24),),
    segments=((2, 16, (9, 9)), (2, 16, (3, 7))),
    latent=(3, 32, 8),
    latent_decode=((2, 20),),
)


@pytest.mark.parametrize("entry", entries(SMALL), ids=lambda entry: entry.name)
def test_an_entry_and_its_peer_run(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_timing.MOST_COPIES", 2)
    result = measure(entry, "cpu", CEILINGS)
    assert "failed" not in result
    assert "torch_failed" not in result
    assert result["us"] > 0
    assert ("torch_ratio" in result) == (entry.peer is not None)
    if entry.peer is not None:
        ours, theirs = entry.build()(), entry.peer()()
        shapes = [
            each[0].shape if isinstance(each, tuple) else each.shape for each in (ours, theirs) if each is not None
        ]
        assert len({shape.numel() for shape in shapes}) == 1


def test_names_are_unique_and_cover_the_model() -> None:
    names = [entry.name for entry in entries(LLAMA_3_8B)]
    assert len(set(names)) == len(names)
    for expected in (
        "add_rms_norm 64",
        "linear gate_up 256",
        "linear head 1",
        "linear_packed gate_up 64",
        "rope_fill_kv 8192",
        "decode_attention 256x1024",
        "decode_attention 1x256",
        "prefill_attention 1x8192",
        "latent_decode 64x4096",
        "latent_prefill 4x2048",
        "expanded_prefill 1x8192",
        "linear_silu_mul 1024",
        "silu_mul 16",
        "sample greedy 256",
        "sample top-k top-p 64",
    ):
        assert expected in names


def test_bytes_and_operations_are_those_of_llama_3_8b() -> None:
    table = {entry.name: entry for entry in entries(LLAMA_3_8B)}
    linear = table["linear gate_up 16"]
    assert linear.flops == 2 * 16 * 28672 * 4096
    assert linear.size == (28672 * 4096 + 16 * (4096 + 28672)) * 2
    decode = table["decode_attention 256x1024"]
    assert decode.size == 256 * 1024 * 4096 + 2 * 256 * 8192
    assert decode.flops == 4 * 256 * 1024 * 4096
    assert table["prefill_attention 1x8192"].flops == 4 * 4096 * 8192 * 8193 / 2
    assert table["add_rms_norm 256"].size == 4 * 256 * 8192
    assert table["silu_mul 64"].size == 3 * 64 * 28672
    gated = table["linear_silu_mul 128"]
    assert gated.flops == 2 * 128 * 28672 * 4096
    assert gated.size == (28672 * 4096 + 128 * (4096 + 14336)) * 2
    assert table["rope_fill_kv 1"].size == 2 * 6144 * 2 + 2 * 128 * 4
    assert table["sample greedy 1"].size == 256512


def test_the_ceiling_is_the_longer_of_moving_and_computing() -> None:
    moving = Entry("moving", lambda: lambda: None, size=4e6, flops=8e3)
    assert judge(moving, 2.0, CEILINGS) == {"us": 2.0, "TBs": 2.0, "of_ceiling": 0.5, "TFLOPs": 0.0}
    computing = Entry("computing", lambda: lambda: None, size=4.0, flops=1.6e9)
    assert judge(computing, 8.0, CEILINGS)["of_ceiling"] == 0.25


def test_cold_entries_have_inputs_that_no_cache_holds() -> None:
    for entry in entries(LLAMA_3_8B):
        copies = copies_of(entry)
        assert copies == 1 or entry.cold
        if entry.cold:
            assert copies * entry.size >= 4 * 60e6 or copies == 256


def test_an_entry_that_fails_says_why() -> None:
    def build() -> kernel_entries.Call:
        raise RuntimeError("no such shape\nand more")

    result = measure(Entry("broken", build, size=1.0), "cpu", CEILINGS)
    assert result["failed"] == "RuntimeError: no such shape"
    assert "failed: RuntimeError: no such shape" in format_line(result)
