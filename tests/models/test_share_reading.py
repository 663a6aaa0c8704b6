"""A rank reads its share of a checkpoint: the bytes are counted, and what is read is what loading the whole gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from asyncllm.models.loading import load_plan
from asyncllm.models.loading import stream as stream_module
from asyncllm.models.loading.checkpoint import Checkpoint
from asyncllm.models.loading.load_plan import plan_load, stream_to
from tests.models.parity import FAMILIES, Case, folder_of
from tests.models.test_shares import open_share
from tests.ranks.threads import in_ranks

CPU = torch.device("cpu")


def bytes_read(
    family: str,
    folder: Path,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    buffer_bytes: int,
    by_expert: bool = False,
) -> list[int]:
    """What each of so many ranks reads when its share is streamed; its parameters have to be those of a load."""
    preadv, counted = os.preadv, [0]

    def count(descriptor: int, views: list[memoryview], position: int) -> int:
        found = preadv(descriptor, views, position)
        counted[0] += found
        return found

    monkeypatch.setattr(stream_module.os, "preadv", count)
    found = []
    for share in in_ranks(size, lambda group: open_share(Case(family, "default"), group, by_expert=by_expert)):
        expected = {name: parameter.clone() for name, parameter in share.named_parameters()}
        checkpoint, counted[0] = Checkpoint.open(folder), 0
        with torch.inference_mode():
            for parameter in share.parameters():
                parameter.fill_(7)
            stream_to(
                plan_load(share, checkpoint, share.weight_map), checkpoint, CPU, threads=1, buffer_bytes=buffer_bytes
            )
        for name, parameter in share.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        found.append(counted[0])
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_share_of_what_is_divided(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_MIN_RUN_BYTES", 1)
    folder = folder_of(Case("llama", "default"))
    checkpoint = Checkpoint.open(folder)
    whole = {"embed_tokens.weight", "norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias"}
    common = sum(entry.num_bytes for name, entry in checkpoint.tensors.items() if name.endswith(tuple(whole)))
    heads = 2  # of keys and values: four ranks have each twice
    keys = sum(entry.num_bytes for name, entry in checkpoint.tensors.items() if ".k_proj" in name or ".v_proj" in name)
    divided = checkpoint.num_bytes - common - keys
    for count in bytes_read("llama", folder, size, monkeypatch, buffer_bytes=500):
        assert count == common + divided // size + keys // min(size, heads)


def test_experts_of_other_ranks_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_MIN_RUN_BYTES", 1)
    folder = folder_of(Case("mixtral", "default"))
    shared = bytes_read("mixtral", folder, 2, monkeypatch, buffer_bytes=5000)
    assert bytes_read("mixtral", folder, 2, monkeypatch, buffer_bytes=5000, by_expert=True) == shared


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_loading_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_MIN_RUN_BYTES", 1)
    folder = folder_of(Case(family, "default"))
    for count in bytes_read(family, folder, 2, monkeypatch, buffer_bytes=3000):
        assert count <= Checkpoint.open(folder).num_bytes
