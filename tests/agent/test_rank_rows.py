"""Sampling among ranks: every rank gets to know the tokens, errors and log-probabilities that one process draws, and
has no more than its share of the rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.distributed.group import rows_of
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


def step_logits(step: int) -> Tensor:
    """Near ties and exact ones among them, and a row that is not finite."""
    logits = torch.randn(len(WANTED), VOCAB_SIZE, generator=torch.Generator().manual_seed(step)).mul_(4).round_()
    logits[3 + step, 7] = torch.nan
    return logits


def run(group: ThreadGroup | None) -> list[Any]:
    """Tokens, log-probabilities and errors of a few steps, whose rows come in an order that changes."""
    sampler = Sampler(2 * len(WANTED), VOCAB_SIZE, torch.device("cpu"), group=group)
    for slot, params in enumerate(WANTED):
        settings = SamplingParams(**params)
        known = [slot, 7, 6]
        history = known if settings.needs_history else []
        sampler.start(SlotStart(slot=slot, params=settings, num_prompt=3, num_tokens=3, token_ids=history))
    dice, results = random.Random(1), []
    for step in range(STEPS):
        order = dice.sample(range(len(WANTED)), len(WANTED) - step)
        slots = np.array([*order, *[-1] * step])
        positions = np.full(len(slots), 3 + step)
        logits = step_logits(step)[order + [0] * step]
        if group is not None:
            mine = range(len(logits))[rows_of(group, len(logits))]
            logits = torch.cat([logits[list(mine)], logits.new_full((99, VOCAB_SIZE), torch.nan)])
            logits = logits[: -(-len(slots) // group.size)]
        on_device = torch.from_numpy(slots.astype(np.int32)), torch.from_numpy(positions)
        tokens = torch.full((len(slots),), -7)
        flags = torch.full((len(slots),), -7, dtype=torch.int32)
        sampler.upload()
        assert group is None or not sampler.take_largest(logits, slots, tokens, flags)
        sampler.draw(logits, *on_device, tokens, flags)
        assert sampler.edit_and_redraw(logits, slots, positions, *on_device, tokens, flags)
        pending = sampler.logprobs(logits, slots, tokens)
        real = len(order)
        errors = sampler.errors(slots[:real], flags[:real].numpy())
        sampler.observe(slots[:real], tokens[:real].numpy())
        assert pending is not None
        results.append((tokens.tolist(), flags.tolist(), pending.result(errors), errors))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_draw_what_one_process_draws(size: int) -> None:
    expected = run(None)
    assert any(flag for _, flags, _, _ in expected for flag in flags)
    for found in in_ranks(size, run):
        assert found == expected


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("vocab_size", [5, 30])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_gives_each_rank_its_rows_whole(tied: bool, vocab_size: int, num_rows: int) -> None:
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
    for group, rows, both in in_ranks(4, lambda group: (group, head(group).of_rank(x), head(group)(x))):
        torch.testing.assert_close(both, whole)
        own = whole[rows_of(group, num_rows)]
        assert rows.shape == (-(-num_rows // 4), vocab_size)
        torch.testing.assert_close(rows[: len(own)], own)
