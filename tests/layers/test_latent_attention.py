"""Which form of latent attention prompts take: over lines, or over keys and values that are made of them."""

from __future__ import annotations

import pytest
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers import latent_attention
from asyncllm.layers.latent_attention import LatentAttention
from tests.models.parity import Case, Runner, open_case, random_tokens

MODEL = "deepseek_v2"


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lines of each expansion, as they come."""
    seen: list[int] = []
    gather = kernels.gather_lines

    def counted(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        latents, keys = gather(*args, **kwargs)
        seen.append(len(latents))
        return latents, keys

    monkeypatch.setattr(kernels, "gather_lines", counted)
    return seen


def logits(*, alone: bool = False) -> Tensor:
    """Of a decode row, a long prompt and a short one in one step, or of the long prompt alone."""
    runner = Runner(open_case(Case(MODEL, "default")), block_size=16)
    first, long, short = (runner.row(random_tokens(seed, length)) for seed, length in ((1, 31), (2, 90), (3, 7)))
    runner.step((first, 30))
    runner.step((long, 90)) if alone else runner.step((first, 1), (long, 90), (short, 7))
    return long.result


def test_both_forms_give_the_same(expansions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = logits()
    assert expansions == [97, 97], "once in each layer, for both prompts"
    monkeypatch.setattr(LatentAttention, "_expands", lambda self, q, step: False)
    assert (logits() - expanded).abs().max() < 1e-4
    assert len(expansions) == 2


def test_keys_and_values_that_are_too_many_are_not_made(expansions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    features = open_case(Case(MODEL, "default")).layers[0].attn.kv.out_features
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 90 * features * 4)
    logits(alone=True)
    assert len(expansions) == 2
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 90 * features * 4 - 1)
    logits(alone=True)
    assert len(expansions) == 2


def test_short_chunks_over_long_contexts_read_lines(expansions: list[int]) -> None:
    """A key costs as much to make as some queries save."""
    runner = Runner(open_case(Case(MODEL, "default")), block_size=16)
    row = runner.row(random_tokens(1, 90))
    for count in (20, 40, 30):
        runner.step((row, count))
    assert expansions == []
