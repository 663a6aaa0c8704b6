"""Random steps, as a scheduler would send them, with what a ModelAgent answers to each of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from asyncllm.agent.model_agent import ModelAgent
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, StepOutput, TokenLogprobs
from tests.agent.tiny_model import NAN_TOKEN, VOCAB_SIZE

__all__ = ["Answered", "RandomSchedule", "assert_same_output"]

UNREAD_STEPS = 8
"""A slot changes hands no sooner than so many steps later: its last step may be unread until then."""


class Answered(NamedTuple):
    """A step and its result."""

    batch: Batch
    output: StepOutput


class _Row:
    """A sequence in a slot."""

    def __init__(self, slot: int, params: SamplingParams, prompt: list[int], answer: list[int], length: int) -> None:
        self.slot = slot
        self.params = params
        self.prompt = prompt
        self.answer = answer
        self.length = length
        """Tokens to answer."""
        self.num_known = len(prompt) + len(answer)
        """Tokens to compute before the next one is sampled."""
        self.num_computed = 0
        self.blocks: list[int] = []
        self.last_step = -1
        self.scored = False
        self.host_blocks: list[int] = []
        """Where its tokens lie while it has no slot."""

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.num_known


class RandomSchedule:
    """Sequences that start, go on in chunks, decode, are preempted, copied and replaced, in steps of an agent's size.

    Where the agent has blocks in host memory, most preempted ones wait there and go on where they were.

    The agent runs every step at once, so that a preempted sequence can be started anew with its tokens.
    """

    def __init__(
        self, agent: ModelAgent, dice: random.Random, *, max_rows: int = 8, scoring: bool = True, **params: Any
    ) -> None:
        """`params` are wishes of every sequence; others are drawn by `random_params`, if there are none."""
        self._agent, self._dice, self._max_rows = agent, dice, max_rows
        self._scoring, self._params = scoring, params
        self._rows: dict[int, _Row] = {}
        self._last_use = dict.fromkeys(range(agent.limits.num_slots), -UNREAD_STEPS)
        size = agent.limits.num_blocks
        self._free = sorted(range(size), key=lambda block: block * 37 % size)
        self._references: Counter[int] = Counter()
        self._free_host = list(range(agent.limits.num_host_blocks))
        self._swapped: list[_Row] = []
        self._step = 0

    def steps(self, count: int) -> list[Answered]:
        return [self.step() for _ in range(count)]

    def step(self) -> Answered:
        batch = Batch(step=self._step, starts=[], new_blocks=[], copies=[], decode=[], prefill=[])
        dice = self._dice
        for row in list(self._rows.values()):
            if len(row.answer) >= row.length:
                self._leave(row)
            elif row.answer and dice.random() < 0.04:
                swapped = self._swap_out(batch, row)
                self._leave(row)
                if not swapped:
                    self._start(batch, row.params, row.prompt, row.answer, row.length)
        if self._swapped and dice.random() < 0.3:
            self._swap_in(batch)
        if dice.random() < 0.3 or not self._rows:
            length = dice.choice([1, 5, 8, 9, 21])
            prompt = dice.choices(range(NAN_TOKEN), k=length)
            self._start(batch, self._draw_params(), prompt, [], dice.randint(1, 14))
        if dice.random() < 0.3:
            self._start_sibling(batch)
        rows = dice.sample(list(self._rows.values()), min(len(self._rows), dice.randint(1, self._max_rows)))
        for row in rows:
            if row.decoding and len(row.answer) < row.length:
                self._cover(batch, row, row.num_computed + 1)
                batch.decode.append(row.slot)
        if dice.random() < 0.6:
            for row in rows:
                if not row.decoding:
                    batch.prefill.append(self._chunk(batch, row))
        output = self._agent.step(batch)
        self._step += 1
        for slot, token in zip(output.slots, output.tokens, strict=True):
            self._rows[slot].answer.append(token)
        return Answered(batch, output)

    def _draw_params(self) -> SamplingParams:
        from tests.agent.test_sampler_steps import random_params

        return SamplingParams(**(self._params or random_params(self._dice, VOCAB_SIZE)))

    def _start(
        self, batch: Batch, params: SamplingParams, prompt: list[int], answer: list[int], length: int
    ) -> _Row | None:
        slots = [slot for slot, step in self._last_use.items() if step <= self._step - UNREAD_STEPS]
        if not slots or len(self._rows) >= self._max_rows or len(self._free) < 30:
            return None
        row = _Row(self._dice.choice(slots), params, prompt, list(answer), length)
        known = [*prompt, *answer]
        batch.starts.append(
            SlotStart(
                slot=row.slot,
                params=params,
                num_prompt=len(prompt),
                num_tokens=len(known),
                token_ids=known if params.needs_history else [],
            )
        )
        self._rows[row.slot] = row
        self._last_use[row.slot] = self._step
        return row

    def _start_sibling(self, batch: Batch) -> None:
        """Another answer to a prompt that is computed: full blocks are shared, the last one is copied."""
        computed = [row for row in self._rows.values() if row.decoding and row.last_step >= 0]
        if not computed:
            return
        leader = self._dice.choice(computed)
        row = self._start(batch, self._draw_params(), leader.prompt, [], self._dice.randint(1, 9))
        if row is None:
            return
        full, rest = divmod(len(row.prompt) - 1, self._agent.limits.block_size)
        row.blocks = leader.blocks[:full]
        self._references.update(row.blocks)
        row.num_computed = len(row.prompt) - 1 if rest else full * self._agent.limits.block_size
        if rest:
            (own,) = self._take(1)
            batch.copies.append((leader.blocks[full], own))
            row.blocks = [*row.blocks, own]
        if row.blocks:
            batch.new_blocks.append((row.slot, 0, 0, list(row.blocks)))

    def _swap_out(self, batch: Batch, row: _Row) -> bool:
        """Copy what the row has computed to the host, if that has room. Its blocks may be taken in this very step."""
        count = -(-row.num_computed // self._agent.limits.block_size)
        if not 0 < count <= len(self._free_host):
            return False
        row.host_blocks, self._free_host = self._free_host[:count], self._free_host[count:]
        batch.swaps.swap_out.extend(zip(row.blocks, row.host_blocks, strict=False))
        self._swapped.append(row)
        return True

    def _swap_in(self, batch: Batch) -> None:
        """Let a row go on in another slot, with the blocks that it had."""
        before = self._swapped[0]
        row = self._start(batch, before.params, before.prompt, before.answer, before.length)
        if row is None:
            return
        self._swapped.pop(0)
        row.blocks = self._take(len(before.host_blocks))
        row.num_computed = before.num_computed
        batch.new_blocks.append((row.slot, 0, 0, list(row.blocks)))
        batch.swaps.swap_in.extend(zip(before.host_blocks, row.blocks, strict=True))
        self._free_host = self._free_host + before.host_blocks

    def _leave(self, row: _Row) -> None:
        del self._rows[row.slot]
        for block in row.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def _take(self, count: int) -> list[int]:
        blocks, self._free = self._free[:count], self._free[count:]
        self._references.update(blocks)
        return blocks

    def _cover(self, batch: Batch, row: _Row, end: int) -> None:
        """Give the row the blocks of its tokens up to `end`, and compute them in this step."""
        needed = -(-end // self._agent.limits.block_size) - len(row.blocks)
        if needed > 0:
            blocks = self._take(needed)
            batch.new_blocks.append((row.slot, 0, len(row.blocks), blocks))
            row.blocks = row.blocks + blocks
        row.num_computed = end
        row.last_step = self._last_use[row.slot] = self._step

    def _chunk(self, batch: Batch, row: _Row) -> PrefillRow:
        known = [*row.prompt, *row.answer]
        begin = row.num_computed
        end = min(row.num_known, begin + self._dice.choice([1, 3, 7, 40]))
        self._cover(batch, row, end)
        wants = self._scoring and self._dice.random() < 0.3
        pools = self._scoring and self._dice.random() < 0.2
        return PrefillRow(
            slot=row.slot,
            tokens=known[begin:end],
            position=begin,
            sample=end == row.num_known,
            prompt_logprobs=self._dice.choice([0, 2]) if wants else None,
            next_token=known[end] if wants and end < row.num_known else None,
            output_logits=wants and self._dice.random() < 0.5,
            pooling=self._dice.choice(["last", "mean"]) if pools else None,
        )


def assert_same_output(one: StepOutput, other: StepOutput) -> None:
    """Equal, and the same numbers but for rounding."""
    assert (one.step, one.slots, one.tokens, one.errors) == (other.step, other.slots, other.tokens, other.errors)
    assert one.logprobs.keys() == other.logprobs.keys()
    assert one.prompt_logprobs.keys() == other.prompt_logprobs.keys()
    for slot, entry in one.logprobs.items():
        _assert_same_entries([entry], [other.logprobs[slot]])
    for slot, entries in one.prompt_logprobs.items():
        _assert_same_entries(entries, other.prompt_logprobs[slot])
    assert one.pooled.keys() == other.pooled.keys()
    for slot, values in one.pooled.items():
        assert list(values) == pytest.approx(list(other.pooled[slot]), abs=1e-4, rel=1e-4)
    assert one.logits.keys() == other.logits.keys()
    for slot, logits in one.logits.items():
        torch.testing.assert_close(logits, other.logits[slot], atol=1e-4, rtol=1e-4)


def _assert_same_entries(one: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> None:
    assert len(one) == len(other)
    for entry, expected in zip(one, other, strict=True):
        assert [token for token, _ in entry] == [token for token, _ in expected]
        assert [value for _, value in entry] == pytest.approx([value for _, value in expected], abs=1e-3)
