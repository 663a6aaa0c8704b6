"""ModelAgent gives the same answers with steps in flight as step by step."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent import open_model, prompt_outputs, warm_up
from asyncllm.agent.device.graphs import smallest_for
from asyncllm.agent.device.streams import MAX_STEPS_IN_FLIGHT
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.agent.open_model import OpenedModel
from asyncllm.agent.pending_step import PendingStep
from asyncllm.agent.step.mixed_steps import OUT_OF_MEMORY
from asyncllm.agent.warm_up import warm_up_mlps
from asyncllm.config import EngineConfig
from asyncllm.kernels import PagedKV
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, StepOutput
from tests.agent.schedules import Answered, RandomSchedule, assert_same_output
from tests.agent.tiny_model import GREEDY, NAN_TOKEN, VOCAB_SIZE, tiny_agent, tiny_llama

NUM_BLOCKS = 120

DECODE_SIZES = [3, 6, 8]
"""So few that most steps have padding."""


def sound_llama(**overrides: Any) -> DecoderLM:
    """No token of it is poisonous, so that any may be drawn."""
    model = tiny_llama(**overrides)
    model.embed.weight[NAN_TOKEN] = model.embed.weight[0]
    return model


def agent_of(model: DecoderLM, **settings: Any) -> ModelAgent:
    fields = {"device_type": "cpu", "block_size": 4, "num_gpu_blocks": NUM_BLOCKS, "max_batch_size": 8, **settings}
    return ModelAgent(EngineConfig(**fields).checked(), Path("tiny"), model=model)


class EagerGraphs:
    """Stands in for StepGraphs: a replay calls the part."""

    def __init__(self, agent: ModelAgent) -> None:
        self._parts = {part.name: part.launch for part in agent._captured_parts()}
        self.replayed: list[tuple[str, Any]] = []

    def replay(self, part: str, size: Any) -> None:
        self.replayed.append((part, size))
        self._parts[part](size)

    def sizes(self, part: str) -> list[Any]:
        """Of the replays of a part, in order."""
        return [size for name, size in self.replayed if name == part]


def decode_only(steps: list[Answered]) -> list[Batch]:
    """Batches that are decode steps out of graphs: none of their swaps keeps them from being one."""
    return [
        step.batch
        for step in steps
        if step.batch.decode
        and not step.batch.prefill
        and not step.batch.copies
        # Tables of more blocks are brought up kernel by kernel.
        and sum(len(blocks) for *_, blocks in step.batch.new_blocks) <= DECODE_SIZES[-1]
    ]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelAgent], EagerGraphs]:
    """Gives an agent graphs. The reference of the cache write takes no padding, so what padding rows compute goes to
    a block that no row owns: one past those of the schedules."""
    plan = kernels.plan_cache_write

    def plan_with_padding(places: Tensor, cache: PagedKV) -> Tensor:
        block_size = cache.k.shape[2]
        return plan(torch.where(places < 0, NUM_BLOCKS * block_size, places), cache)

    def give(agent: ModelAgent) -> EagerGraphs:
        assert agent.limits.num_blocks > NUM_BLOCKS
        monkeypatch.setattr(kernels, "plan_cache_write", plan_with_padding)
        agent._decode_sizes = DECODE_SIZES
        fake = EagerGraphs(agent)
        agent._graphs = fake  # type: ignore[assignment]
        return fake

    return give


class InFlight:
    """Launches steps and reads them in order, as an executor does."""

    def __init__(self, agent: ModelAgent) -> None:
        self.agent = agent
        self.pending: deque[PendingStep] = deque()
        self.outputs: list[StepOutput] = []
        self.most = 0
        self.num_blocked = 0

    def launch(self, batch: Batch, most: int) -> None:
        """Launch behind at most `most` unread steps."""
        while self.agent.blocked or len(self.pending) > min(most, MAX_STEPS_IN_FLIGHT - 1):
            self.read()
        pending = self.agent.launch(batch)
        self.num_blocked += not pending.launched
        self.pending.append(pending)
        self.most = max(self.most, len(self.pending))

    def read(self) -> StepOutput:
        pending = self.pending[0]
        if not pending.launched:
            assert self.agent.blocked
            assert self.agent.resume() is pending
        assert pending.launched
        self.pending.popleft()
        pending.wait()
        self.outputs.append(pending.output())
        if self.pending and self.agent.blocked:
            # Completed as soon as all before it are read, and no sooner.
            resumed = self.agent.resume()
            assert resumed is (self.pending[0] if len(self.pending) == 1 else None)
        return self.outputs[-1]

    def run(self, steps: list[Answered], lag: Callable[[], int]) -> None:
        for step in steps:
            self.launch(step.batch, lag())
        while self.pending:
            self.read()
        assert len(self.outputs) == len(steps)
        for output, step in zip(self.outputs, steps, strict=True):
            assert_same_output(output, step.output)


def schedule_of(model: DecoderLM, seed: int, num_cpu_blocks: int = 0, **wishes: Any) -> RandomSchedule:
    agent = tiny_agent(model, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=num_cpu_blocks)
    return RandomSchedule(agent, random.Random(seed), **wishes)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_in_flight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer prompts are scored piece by piece.
    monkeypatch.setattr(prompt_outputs, "_SCORED_POSITIONS", 3)
    model = sound_llama()
    steps = schedule_of(model, seed).steps(120)
    assert any(step.batch.copies for step in steps)
    in_flight = InFlight(agent_of(model))
    dice = random.Random(seed)
    in_flight.run(steps, lambda: dice.choice([0, 2, 7, 7]))
    assert in_flight.most >= 4


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_out_of_graphs(seed: int, graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    model = sound_llama()
    steps = schedule_of(model, seed, max_rows=7).steps(120)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    fake = graphs(agent)
    dice = random.Random(seed)
    InFlight(agent).run(steps, lambda: dice.randint(0, 7))
    sizes = [smallest_for(len(batch.decode), DECODE_SIZES) for batch in decode_only(steps)]
    assert fake.sizes("forward") == fake.sizes("sample") == sizes
    captured = [
        batch
        for batch in (step.batch for step in steps)
        if batch.prefill and not any(row.scored or row.pooling == "mean" for row in batch.prefill)
    ]
    tokens = [len(batch.decode) + sum(len(row.tokens) for row in batch.prefill) for batch in captured]
    room = sorted({size.tokens for size in agent._mixed_sizes})
    assert [size.tokens for size in fake.sizes("mixed")] == [smallest_for(count, room) for count in tokens]
    assert any(not batch.decode for batch in captured)
    assert any(not any(row.sample for row in batch.prefill) for batch in captured)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_swaps_in_flight(seed: int, graphed: bool, graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    """Also in front of a step out of graphs, which none of its copies keeps from being one."""
    model = sound_llama()
    steps = schedule_of(model, seed, num_cpu_blocks=20, max_rows=7, scoring=False).steps(150)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1, num_cpu_blocks=20)
    swapping = [step.batch for step in steps if step.batch.swaps]
    assert any(batch.swaps.swap_in for batch in swapping)
    if graphed:
        fake = graphs(agent)
    dice = random.Random(seed)
    InFlight(agent).run(steps, lambda: dice.randint(0, 7))
    if graphed:
        assert len(fake.sizes("forward")) == len(fake.sizes("sample")) == len(decode_only(steps))
        assert any(batch.swaps for batch in decode_only(steps))
        assert any(step.batch.swaps and step.batch.prefill for step in steps)


@pytest.mark.parametrize("graphed", [False, True])
def test_dynamic_rope_in_flight(graphed: bool, graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    """Each row's prompt length, which fixes its rotary base, comes up with the step."""
    model = sound_llama(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=16)
    steps = schedule_of(model, 1, max_rows=7).steps(60)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    if graphed:
        graphs(agent)
    InFlight(agent).run(steps, lambda: 4)


@pytest.mark.parametrize(
    "around", [torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16)], ids=["device", "autocast"]
)
def test_what_the_program_switched_on_in_the_loops_thread_does_not_matter(around: AbstractContextManager[Any]) -> None:
    model = sound_llama()
    steps = schedule_of(model, 1).steps(30)
    agent = agent_of(model)
    with around:
        InFlight(agent).run(steps, lambda: 3)
    assert torch.empty(1).device.type == "cpu"


def single_steps(model: DecoderLM, prompt: list[int], count: int, params: SamplingParams) -> list[Answered]:
    """A prompt, and decode steps of its row."""
    agent = tiny_agent(model, num_gpu_blocks=NUM_BLOCKS)
    start = SlotStart(slot=3, params=params, num_prompt=len(prompt), num_tokens=len(prompt), token_ids=prompt)
    row = PrefillRow(slot=3, tokens=prompt, position=0, sample=True)
    blocks: list[tuple[int, int, int, list[int]]] = [(3, 0, 0, list(range(5, 15)))]
    batches = [Batch(step=0, starts=[start], new_blocks=blocks, copies=[], decode=[], prefill=[row])]
    batches += [
        Batch(step=step, starts=[], new_blocks=[], copies=[], decode=[3], prefill=[]) for step in range(1, count)
    ]
    return [Answered(batch, agent.step(batch)) for batch in batches]


def tokens_of(steps: list[Answered]) -> list[int]:
    return [step.output.tokens[0] for step in steps]


@pytest.mark.parametrize("graphed", [False, True])
def test_bad_words_of_several_tokens_wait_for_their_tokens(
    graphed: bool, graphs: Callable[[ModelAgent], EagerGraphs]
) -> None:
    model = sound_llama()
    free = tokens_of(single_steps(model, [1, 2, 3], 8, GREEDY))
    params = SamplingParams(temperature=0.0, bad_words=((free[2], free[3]), (3, free[0]), (free[4], free[5], free[6])))
    steps = single_steps(model, [1, 2, 3], 8, params)
    assert tokens_of(steps)[0] != free[0]
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    if graphed:
        graphs(agent)
    in_flight = InFlight(agent)
    in_flight.run(steps, lambda: 7)
    # The first step has nothing before it.
    assert in_flight.num_blocked == 7
    assert not agent.blocked
    assert agent.resume() is None


def test_a_blocked_agent_launches_nothing() -> None:
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 3, SamplingParams(temperature=0.0, bad_words=((5, 6),)))
    agent = agent_of(model)
    first, second = agent.launch(steps[0].batch), agent.launch(steps[1].batch)
    assert (first.launched, second.launched, agent.blocked) == (True, False, True)
    assert agent.resume() is None
    with pytest.raises(RuntimeError, match="before another one has been read"):
        agent.launch(steps[2].batch)
    first.wait()
    assert_same_output(first.output(), steps[0].output)
    assert agent.resume() is second
    second.wait()
    assert_same_output(second.output(), steps[1].output)


def test_so_many_steps_may_be_in_flight_and_no_more() -> None:
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 12, GREEDY)
    agent = agent_of(model)
    pending = [agent.launch(step.batch) for step in steps[:MAX_STEPS_IN_FLIGHT]]
    with pytest.raises(RuntimeError, match="before another one has been read"):
        agent.launch(steps[MAX_STEPS_IN_FLIGHT].batch)
    pending[0].wait()
    pending[0].output()
    agent.launch(steps[MAX_STEPS_IN_FLIGHT].batch)


class ShortOfMemory:
    """Makes forward passes over prompt tokens run out of memory as planned: True fails; without a plan they pass."""

    def __init__(self, model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan: list[bool] = []
        self.failures = 0
        self._layers = model._layers
        monkeypatch.setattr(model, "_layers", self.layers)

    def layers(self, inputs: StepInputs, count: int) -> tuple[Tensor, Tensor]:
        if len(inputs.kv_lens) > inputs.num_decode and self.plan and self.plan.pop(0):
            self.failures += 1
            raise torch.OutOfMemoryError("as the test asked")
        return self._layers(inputs, count)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}])
def test_out_of_memory_once_gives_the_same_tokens(rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound_llama(max_position_embeddings=40, **rope)
    steps = schedule_of(model, 3).steps(100)
    memory = ShortOfMemory(model, monkeypatch)
    dice = random.Random(3)

    def lag() -> int:
        memory.plan = [True]
        return dice.randint(0, 7)

    InFlight(agent_of(model)).run(steps, lag)
    assert memory.failures == sum(1 for step in steps if step.batch.prefill)


@pytest.mark.parametrize("plan", [[True, True], [True, False, True]])
def test_prompts_without_memory_fail_alone(plan: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 5, GREEDY)
    memory = ShortOfMemory(model, monkeypatch)
    starts = [
        SlotStart(slot=slot, params=SamplingParams(logprobs=1), num_prompt=9, num_tokens=9, token_ids=[])
        for slot in (5, 6)
    ]
    sampled = PrefillRow(slot=5, tokens=list(range(9)), position=0, sample=True)
    scored = PrefillRow(slot=6, tokens=[7] * 7, position=0, sample=False, prompt_logprobs=1, output_logits=True)
    in_flight = InFlight(agent_of(model))
    for step in steps:
        batch = step.batch
        if batch.step == 3:
            batch.starts, batch.prefill = starts, [sampled, scored]
            batch.new_blocks = [(5, 0, 0, [40, 41, 42]), (6, 0, 0, [50, 51, 52])]
            memory.plan = plan
        in_flight.launch(batch, 7)
    outputs = [in_flight.read() for _ in steps]
    assert not memory.plan
    assert [output.tokens[0] for output in outputs] == tokens_of(steps)
    assert [output.errors for output in outputs] == [{}] * 3 + [dict.fromkeys((5, 6), OUT_OF_MEMORY)] + [{}]
    assert outputs[3].slots == [3, 5]
    assert (outputs[3].logprobs, outputs[3].prompt_logprobs, outputs[3].logits) == ({}, {}, {})


def test_scores_without_memory_fail_their_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound_llama()
    logits = model.logits

    def short(hidden: Tensor) -> Tensor:
        if len(hidden) == 6:
            raise torch.OutOfMemoryError("as the test asked")
        return logits(hidden)

    monkeypatch.setattr(model, "logits", short)
    starts = [SlotStart(slot=slot, params=GREEDY, num_prompt=6, num_tokens=6, token_ids=[]) for slot in (0, 1)]
    rows = [
        PrefillRow(slot=0, tokens=[1, 2, 3, 4, 5, 6], position=0, sample=True, output_logits=True),
        PrefillRow(slot=1, tokens=[1, 2, 3, 4, 5, 6], position=0, sample=True),
    ]
    blocks: list[tuple[int, int, int, list[int]]] = [(0, 0, 0, [4, 2]), (1, 0, 0, [1, 3])]
    agent = agent_of(model)
    pending = agent.launch(Batch(step=0, starts=starts, new_blocks=blocks, copies=[], decode=[], prefill=rows))
    output = pending.output()
    assert output.errors == {0: OUT_OF_MEMORY}
    assert output.tokens[0] == output.tokens[1]


def test_decode_rows_without_memory_fail_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 2, GREEDY)
    agent = agent_of(model)
    agent.launch(steps[0].batch).output()

    def short(inputs: StepInputs) -> Tensor:
        raise torch.OutOfMemoryError("as the test asked")

    monkeypatch.setattr(model, "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        agent.launch(steps[1].batch)


def test_parameters_that_cannot_be_sampled_with_fail_their_row() -> None:
    """Such a row's flags are clean, since its token was drawn without them."""
    steps = single_steps(sound_llama(), [1, 2, 3], 2, SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)))
    assert "logit_bias" in steps[0].output.errors[3]
    InFlight(agent_of(sound_llama())).run(steps, lambda: 1)


@pytest.mark.parametrize("graphed", [False, True])
def test_warming_up_leaves_no_trace(graphed: bool, graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    model = sound_llama()
    steps = schedule_of(model, 2, max_rows=7).steps(40)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    fake = graphs(agent) if graphed else None
    agent._warm_up(40)
    if fake is not None:
        assert fake.sizes("forward") == fake.sizes("sample") == [3] * 7, "after 1, 2, 4, 8, 16, 32 and 40 tokens"
        assert [size.tokens for size in fake.sizes("mixed")] == [32] * 11 + [64] * 3, (
            "and one of decode with the second"
        )
    assert not agent._unread
    InFlight(agent).run(steps, lambda: 3)


@pytest.mark.parametrize(("num_blocks", "session_len"), [(1, None), (2, None), (80, 3), (80, 4)])
def test_warming_up_keeps_within_a_small_pool_and_a_short_session(
    num_blocks: int, session_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_of(tiny_llama(), num_gpu_blocks=num_blocks, session_len=session_len)
    launched: list[Batch] = []
    launch = agent.launch
    monkeypatch.setattr(agent, "launch", lambda batch: (launched.append(batch), launch(batch))[1])
    agent._warm_up(agent.limits.max_position)
    assert launched
    assert not agent._unread


def test_mlps_are_warmed_up_beyond_the_longest_session(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    sizes: list[int] = []
    forward = GatedMLP.forward
    monkeypatch.setattr(GatedMLP, "forward", lambda mlp, x, step: (sizes.append(len(x)), forward(mlp, x, step))[1])
    warm_up_mlps(model, 70)
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 70], "of one layer"


def test_adapters_are_grouped_as_in_the_largest_steps_while_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch-invariant step groups all of its tokens, by a kernel for each power of two."""
    grouped: list[int] = []
    monkeypatch.setattr(
        warm_up, "group_adapters", lambda step: grouped.append(step.batch_invariant and len(step.input_ids))
    )
    warm_up_mlps(tiny_llama(), 70, adapted=True, batch_invariant=True)
    assert {1 << (size - 1).bit_length() for size in grouped} == {1, 2, 4, 8, 16, 32, 64, 128}


def test_short_steps_are_launched_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    size = sum(parameter.nbytes for parameter in model.parameters())
    for steps, expected in ((1, 2), (2, 2), (3.5, 4), (5, 5), (100, MAX_STEPS_IN_FLIGHT)):
        monkeypatch.setattr(open_model, "_LOOK_AHEAD_BYTES", steps * size)
        opened = OpenedModel(model, torch.device("cpu"), torch.float32, [], 128, Path())
        assert opened.steps_ahead() == expected


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(bad_words=((5, 6),), logprobs=1)])
def test_an_agent_is_gone_with_its_last_reference(params: SamplingParams) -> None:
    """Its memory is free for the next model then, without a collection of cycles."""
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 3, params)
    agent = agent_of(model)
    InFlight(agent).run(steps, lambda: 1)
    reference = weakref.ref(agent)
    gc.disable()
    try:
        del agent
        assert reference() is None
    finally:
        gc.enable()


def test_more_new_blocks_than_fit_beside_decode_rows(graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    """A step's fixed bytes have room for one new block per row; with more, it is launched kernel by kernel."""
    model = sound_llama()
    steps = single_steps(model, [1, 2, 3], 4, GREEDY)
    agent = agent_of(model, num_gpu_blocks=NUM_BLOCKS + 1)
    fake = graphs(agent)
    steps[2].batch.new_blocks = [(6, 0, 0, list(range(40, 70)))]
    InFlight(agent).run(steps, lambda: 2)
    assert fake.sizes("forward") == [3, 3]
    assert agent._tables.block_tables[0, 6, :30].tolist() == list(range(40, 70))
