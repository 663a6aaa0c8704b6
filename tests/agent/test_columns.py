"""A column is one declaration: its values arrive on every path that a step can take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.agent.model_agent import ModelAgent
from asyncllm.kernels import Rotation
from asyncllm.layers.rotary import RotaryEmbedding
from asyncllm.layers.step_inputs import Column, SampledRows, StepInputs
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch
from tests.agent.schedules import RandomSchedule
from tests.agent.test_steps_in_flight import NUM_BLOCKS, EagerGraphs, InFlight, agent_of, graphs, sound_llama
from tests.agent.tiny_model import tiny_agent

__all__ = ["graphs"]

AGE = Column(name="age", dtype=torch.float32, per="token", padding=-5, of_step=lambda batch, positions: positions / 2)
"""Of each token: half its position."""
OWNER = Column(name="owner", dtype=torch.int64, per="row", padding=-6, of_slot=lambda start: start.num_prompt)
"""Of each row: the length of its sequence's prompt."""


@dataclass
class Witness:
    """Looks at the columns of every forward pass."""

    passes: list[StepInputs] = field(default_factory=list)
    sampled: list[SampledRows] = field(default_factory=list)

    def look(self, step: StepInputs) -> None:
        rows = len(step.kv_lens)
        assert step[AGE].shape == step.positions.shape
        assert step[OWNER].shape == (rows,)
        used = step.places >= 0
        assert torch.equal(step[AGE][used], step.positions[used].float() / 2)
        lengths = step.q_offsets.diff()
        for row in range(rows):
            # Rows of padding have no key, or none yet: no decode row and no prompt has fewer than one.
            if step.kv_lens[row] > 0 and lengths[row] > 0:
                assert step[OWNER][row] > 0, "the length of a prompt"
                assert step[OWNER][row] <= step.kv_lens[row] or row >= step.num_decode
        assert set(step[AGE][~used].tolist()) <= {-5.0}
        self.passes.append(step)


def watched(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> Witness:
    witness = Witness()
    model.rotaries[0].columns = (AGE, OWNER)
    turn, finish = RotaryEmbedding.forward, model.last_hidden

    def forward(rotary: RotaryEmbedding, step: StepInputs) -> Rotation:
        witness.look(step)
        return turn(rotary, step)

    def last_hidden(residual: Tensor, inputs: StepInputs, sampled: SampledRows) -> Tensor:
        rows = sampled.inputs
        assert torch.equal(rows[AGE], inputs[AGE][sampled.indices])
        assert torch.equal(rows[AGE], (rows.kv_lens - 1).float() / 2)
        assert rows[OWNER].shape == rows.kv_lens.shape
        assert (rows[OWNER] > 0).all()
        witness.sampled.append(sampled)
        return finish(residual, inputs, sampled)

    monkeypatch.setattr(RotaryEmbedding, "forward", forward)
    monkeypatch.setattr(model, "last_hidden", last_hidden)
    return witness


@pytest.mark.parametrize("graphed", [False, True])
def test_columns_arrive_in_every_kind_of_step(
    graphed: bool, graphs: Callable[[ModelAgent], EagerGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sound_llama()
    steps = RandomSchedule(tiny_agent(model, num_gpu_blocks=NUM_BLOCKS), random.Random(4), max_rows=7).steps(80)
    witness = watched(model, monkeypatch)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    if graphed:
        graphs(agent)
    witness.passes.clear()
    InFlight(agent).run(steps, lambda: 4)
    kinds = {(bool(step.num_decode), bool(len(step.kv_lens) > step.num_decode)) for step in witness.passes}
    assert (True, False) in kinds, "decode"
    assert (True, True) in kinds, "mixed"
    padded = [step for step in witness.passes if (step.places < 0).any()]
    assert bool(padded) == graphed
    assert witness.sampled


def test_columns_are_halved_with_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound_llama()
    steps = RandomSchedule(tiny_agent(model, num_gpu_blocks=NUM_BLOCKS), random.Random(4)).steps(40)
    witness = watched(model, monkeypatch)
    agent = agent_of(model)
    halved = 0

    def short(*step: Any) -> Tensor:
        nonlocal halved
        halved += 1
        raise torch.OutOfMemoryError("as the test asked")

    monkeypatch.setattr(model, "before_last", short)
    InFlight(agent).run(steps, lambda: 0)
    assert halved > 5
    assert sum(step.num_decode == 0 for step in witness.passes) > halved, "most of them in two halves"


def test_values_follow_their_tokens_and_rows() -> None:
    """Row by row, against the batch."""
    model = sound_llama()
    steps = RandomSchedule(tiny_agent(model, num_gpu_blocks=NUM_BLOCKS), random.Random(5)).steps(40)
    model.rotaries[0].columns = (AGE, OWNER)
    agent = agent_of(model)
    seen: list[StepInputs] = []
    turn = model.rotaries[0].forward
    model.rotaries[0].forward = lambda step: (seen.append(step), turn(step))[1]  # type: ignore[method-assign]
    owners: dict[int, int] = {}
    for answered in steps:
        batch: Batch = answered.batch
        seen.clear()
        agent.step(batch)
        owners |= {start.slot: start.num_prompt for start in batch.starts}
        slots = [*batch.decode, *(row.slot for row in batch.prefill)]
        for step in seen[:1]:
            assert step[OWNER].tolist() == [owners[slot] for slot in slots]
            positions = [row.position + index for row in batch.prefill for index in range(len(row.tokens))]
            assert step[AGE][len(batch.decode) :].tolist() == [position / 2 for position in positions]


def test_a_column_has_one_source() -> None:
    for sources in ({}, {"of_slot": AGE.of_step, "of_step": AGE.of_step}):
        with pytest.raises(ValueError, match="'lost' needs one of of_slot and of_step"):
            Column(name="lost", dtype=torch.int64, per="token", **sources)  # type: ignore[arg-type]
