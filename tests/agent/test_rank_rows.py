"""Sampling among ranks: every rank gets to know the tokens, errors and log-probabilities that one process draws, and
has whole logits of no more than its share of the rows, and of none where lists of tokens are enough."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncllm.agent.sampling.rank_rows import RankRows
from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.distributed.group import rows_of, tokens_of
from asyncllm.layers.embedding import Embedding, OutputEmbedding, TiedOutputEmbedding
from asyncllm.protocol import SamplingParams, SlotStart
from tests.agent.test_sampler import PARAMS
from tests.ranks.threads import ThreadGroup, in_ranks

VOCAB_SIZE = 611
HIDDEN = 8
STEPS = 4

WANTED: list[dict[str, Any]] = [
    *PARAMS,
    {"temperature": 1.0, "top_p": 0.999, "seed": 5},
    {"temperature": 1.3, "top_k": 400, "top_p": 0.97, "min_p": 1e-4, "seed": 6},
    {"temperature": 0.0, "logprobs": 3, "logit_bias": ((VOCAB_SIZE - 1, 3.0),)},
]


SHORT: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "top_k": 64, "min_p": 0.01, "seed": 2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "min_p": 0.05, "seed": 4},
    {"temperature": 2.0, "top_k": 10**9, "seed": 5},
    {"temperature": 1e-4, "seed": 6},
    {"temperature": 0.0, "top_p": 0.1},
]
"""What lists are enough for."""


def step_logits(step: int, rows: int) -> Tensor:
    """Near ties and exact ones among them, and a row that is not finite."""
    logits = torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)).mul_(4).round_()
    logits[3 + step, 7] = torch.nan
    return logits


def of_rank(logits: Tensor, group: ThreadGroup | None) -> Tensor:
    """What a rank has of them, and nonsense in the place of tokens that there are not."""
    if group is None:
        return logits
    own = tokens_of(group, VOCAB_SIZE)
    part = logits[:, own]
    return pad(part, (0, own.stop - own.start - part.shape[1]), value=torch.nan)


def run(group: ThreadGroup | None, wanted: list[dict[str, Any]] = WANTED) -> list[Any]:
    """Tokens, log-probabilities and errors of a few steps, whose rows come in an order that changes."""
    sampler = Sampler(2 * len(wanted), VOCAB_SIZE, torch.device("cpu"), group=group)
    for slot, params in enumerate(wanted):
        settings = SamplingParams(**params)
        known = [slot, 7, 6]
        history = known if settings.needs_history else []
        sampler.start(SlotStart(slot=slot, params=settings, num_prompt=3, num_tokens=3, token_ids=history))
    dice, results = random.Random(1), []
    for step in range(STEPS):
        order = dice.sample(range(len(wanted)), len(wanted) - step)
        slots = np.array([*order, *[-1] * step])
        positions = np.full(len(slots), 3 + step)
        logits = of_rank(step_logits(step, len(wanted))[order + [0] * step], group)
        on_device = torch.from_numpy(slots.astype(np.int32)), torch.from_numpy(positions)
        tokens = torch.full((len(slots),), -7)
        flags = torch.full((len(slots),), -7, dtype=torch.int32)
        sampler.upload()
        logprobs: Any = {}
        real = len(order)
        if sampler.takes_lists(slots):
            assert group is not None
            assert wanted is SHORT
            sampler.draw_from_lists(logits, *on_device, tokens, flags)
        else:
            assert group is None or sampler.largest(logits, slots) is None
            logits = sampler.own_rows(logits)
            sampler.draw(logits, *on_device, tokens, flags)
            assert sampler.edit_and_redraw(logits, slots, positions, *on_device, tokens, flags) == (wanted is WANTED)
            logprobs = sampler.logprobs(logits, slots, tokens)
        errors = sampler.errors(slots[:real], flags[:real].numpy())
        sampler.observe(slots[:real].tolist(), tokens[:real].tolist())
        found = logprobs.result(errors) if logprobs else {}
        assert bool(found) == (wanted is WANTED)
        results.append((tokens.tolist(), flags.tolist(), found, errors))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_draw_what_one_process_draws(size: int) -> None:
    expected = run(None)
    assert any(flag for _, flags, _, _ in expected for flag in flags)
    for found in in_ranks(size, run):
        assert found == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_draw_the_same_from_lists(size: int) -> None:
    expected = run(None, SHORT)
    assert any(flag for _, flags, _, _ in expected for flag in flags)
    for found in in_ranks(size, lambda group: run(group, SHORT)):
        assert found == expected


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 65}, {"logprobs": 0}, {"temperature": 0.0, "bad_words": ((5,),)}]
)
def test_whole_rows_are_for_what_lists_have_no_room_for(params: dict[str, Any]) -> None:
    [taken] = in_ranks(1, lambda group: Sampler(4, VOCAB_SIZE, torch.device("cpu"), group=group))
    for slot, wanted in enumerate((SHORT[1], params)):
        taken.start(SlotStart(slot=slot, params=SamplingParams(**wanted), num_prompt=1, num_tokens=1, token_ids=[]))
    assert taken.takes_lists(np.array([0, -1]))
    assert not taken.takes_lists(np.array([0, 1]))
    taken.start(SlotStart(slot=1, params=SamplingParams(), num_prompt=1, num_tokens=1, token_ids=[]))
    assert taken.takes_lists(np.array([0, 1]))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("vocab_size", [5, 130, 256])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_gives_each_rank_its_tokens_and_then_its_rows(tied: bool, vocab_size: int, num_rows: int) -> None:
    torch.manual_seed(0)
    table, x = torch.randn(vocab_size, HIDDEN), torch.randn(num_rows, HIDDEN)

    def head(group: ThreadGroup | None) -> OutputEmbedding | TiedOutputEmbedding:
        embedding = Embedding(vocab_size, HIDDEN)
        made = TiedOutputEmbedding(embedding, softcap=3.0) if tied else OutputEmbedding(HIDDEN, vocab_size, scale=0.5)
        if group is not None:
            made.divide(group)
        (embedding if isinstance(made, TiedOutputEmbedding) else made).load_part("weight", None, None, table)
        return made

    whole = head(None)(x)

    def of_each(group: ThreadGroup) -> tuple[ThreadGroup, Tensor, Tensor, Tensor]:
        own, divided = RankRows(group, vocab_size), head(group)
        tokens = divided.of_rank(x)
        out = torch.full_like(tokens, torch.nan)
        divided.of_rank(x, out)
        existing = max(0, vocab_size - tokens_of(group, vocab_size).start)
        torch.testing.assert_close(out[:, :existing], tokens[:, :existing])
        return group, tokens, own.whole(tokens), divided(x)

    for group, tokens, rows, both in in_ranks(4, of_each):
        torch.testing.assert_close(both, whole)
        expected = whole[:, tokens_of(group, vocab_size)]
        assert tokens.shape == (num_rows, -(-vocab_size // 32) * 8)
        torch.testing.assert_close(tokens[:, : expected.shape[1]], expected)
        own = whole[rows_of(group, num_rows)]
        assert rows.shape == (-(-num_rows // 4), vocab_size)
        torch.testing.assert_close(rows[: len(own)], own)
