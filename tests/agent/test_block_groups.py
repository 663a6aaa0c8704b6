"""Block groups on the model's side: how layers are divided, and that no window needs a block that was given back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import allocate_pool
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.engine.cache.block_groups import BlockGroups
from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import Request
from asyncllm.layers.cache_spec import CacheSpec, PagedKVSpec
from asyncllm.models.config import HFConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.mistral import Mistral
from asyncllm.protocol import SamplingParams
from asyncllm.testing import ByteTokenizer
from asyncllm.text.detokenizer import Detokenizer
from tests.agent.test_steps_in_flight import EagerGraphs, graphs
from tests.agent.tiny_model import VOCAB_SIZE, plain_greedy, prompt_of, tiny_agent

__all__ = ["graphs"]

BLOCK_SIZE = 4


def specs_of(*windows: int | None) -> list[CacheSpec]:
    return [PagedKVSpec(2, 8, window) for window in windows]


def layout_of(*windows: int | None, longest: int | None = None) -> CacheLayout:
    return CacheLayout(specs_of(*windows), BLOCK_SIZE, torch.float32, longest=longest)


@pytest.mark.parametrize(
    ("windows", "groups", "layers"),
    [
        ((None, None), (None,), []),
        ((8, 8, 8), (8,), []),
        ((8, None, 8, None), (8, None), [0, 1, 0, 1]),
        ((None, None, 8, None, None, 8), (None, None, 8), [0, 0, 2, 1, 1, 2]),
        ((8,) * 5 + (None,) + (8,) * 5 + (None,), (8,) * 5 + (None,), [0, 0, 1, 1, 2, 5, 2, 3, 3, 4, 4, 5]),
        ((None,) * 11 + (8,), (None,), []),
    ],
)
def test_layers_of_a_kind_share_groups_of_equal_size(
    windows: tuple[int | None, ...], groups: tuple[int | None, ...], layers: list[int]
) -> None:
    layout = layout_of(*windows)
    assert layout.windows == groups
    assert layout.layer_groups == layers
    layer_bytes = 2 * 2 * BLOCK_SIZE * 8 * 4
    assert layout.block_bytes * len(groups) == len(windows) * layer_bytes


def test_a_window_of_the_longest_sequence_frees_nothing() -> None:
    assert layout_of(8, None, 8, longest=8).windows == (None,)
    assert layout_of(8, 8, longest=9).windows == (8,)


def test_groups_lie_over_each_other_and_layers_of_one_do_not() -> None:
    layout = layout_of(8, None, 8, None)
    caches = layout.caches(allocate_pool(layout, 3, torch.device("cpu")))
    for number, cache in enumerate(caches, start=1):
        cache.lines.fill_(number)
    assert [cache.lines.unique().tolist() for cache in caches] == [[2], [2], [4], [4]]


class Engine:
    """A scheduler over a real agent. What no sequence holds after a step has been read becomes NaN."""

    def __init__(self, agent: ModelAgent, depth: int, *, caching: bool, budget: int = 16) -> None:
        self.agent = agent
        self.depth = depth
        self.scheduler = Scheduler(
            agent.limits,
            max_batch_size=4,
            prefill_budget=budget,
            prefill_interval=1,
            prefix_caching=caching,
            swapping=agent.limits.num_host_blocks > 0,
        )
        self.most_held = 0

    def ask(self, number: int, prompt: list[int], count: int, answers: int = 1) -> Request:
        tokenizer = ByteTokenizer()
        request = Request(
            id=number,
            prompt_ids=prompt,
            params=[SamplingParams(temperature=0.0)] * answers,
            stop_ids=frozenset(),
            max_new_tokens=count,
            delivery=Delivery(streaming=True),
            answers=[
                Answer(
                    Detokenizer(tokenizer, skip_special_tokens=True),
                    stop_words=None,
                    hidden_ids=frozenset(),
                    include_stop=False,
                )
                for _ in range(answers)
            ],
        )
        self.scheduler.add(request)
        return request

    def drain(self, dice: random.Random | None = None) -> None:
        """`dice` says when a row is preempted."""
        pending = []
        while True:
            if dice is not None and self.scheduler.num_running and dice.random() < 0.1:
                self.scheduler._preempt(next(reversed(self.scheduler._running)))
            while len(pending) < self.depth and (batch := self.scheduler.schedule()) is not None:
                pending.append(self.agent.launch(batch))
            if not pending:
                return
            step = pending.pop(0)
            step.wait()
            self.scheduler.update(step.output())
            self.poison()
            for row in self.scheduler._running:
                self.most_held = max(self.most_held, len(row.blocks))

    def poison(self) -> None:
        """Steps in flight are computed already, on a CPU."""
        lost = torch.tensor(self.scheduler.blocks._free, dtype=torch.int64)
        with torch.inference_mode():
            for part in self.agent._pool:
                part[:, lost] = torch.nan


def tiny_model(family: type[DecoderLM], **overrides: Any) -> DecoderLM:
    """Random weights, large enough that the logits of different contexts differ well."""
    fields = {**family.tiny, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 4, **overrides}
    config = family.configure(HFConfig(fields), f"{family.__name__}ForCausalLM")
    with torch.device("meta"):
        model = family(config)
    model.allocate(torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


@pytest.mark.parametrize(("family", "windows"), [(Mistral, (8,)), (Gemma2, (8, None))])
@pytest.mark.parametrize("caching", [False, True])
def test_answers_are_those_of_a_cache_that_keeps_everything(
    family: type[DecoderLM], windows: tuple[int | None, ...], caching: bool
) -> None:
    model = tiny_model(family, sliding_window=8)
    count, prompts = 14, [prompt_of(length, seed) for seed, length in enumerate([37, 3, 21, 50, 9])]
    prompts += [[*prompts[0][:30], 1, 2], prompts[3][:46]]
    agent = tiny_agent(model, num_gpu_blocks=24 * len(windows), num_cpu_blocks=16 * caching, eviction_type="copy")
    assert agent.limits.windows == windows
    engine = Engine(agent, depth=3, caching=caching)
    requests = [engine.ask(number, prompt, count, 1 + number % 2) for number, prompt in enumerate(prompts)]
    engine.drain(random.Random(1))
    for prompt, request in zip(prompts, requests, strict=True):
        expected = plain_greedy(model, prompt, count)
        for row in request.sequences:
            assert row.finish_reason == "length"
            assert row.token_ids[len(prompt) :] == expected
    assert engine.scheduler.counts.preemptions > 0
    if caching:
        assert engine.scheduler.counts.cached_tokens > 0
        assert engine.scheduler.host.num_swapped_in > 0


def test_a_block_given_back_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    model = tiny_model(Mistral, sliding_window=8)
    engine = Engine(tiny_agent(model, num_gpu_blocks=24), depth=1, caching=False)
    needed = BlockGroups.first_needed
    monkeypatch.setattr(BlockGroups, "first_needed", lambda self, group, position: needed(self, group, position + 4))
    prompt = prompt_of(21)
    request = engine.ask(0, prompt, 14)
    engine.drain()
    assert request.sequences[0].token_ids[21:] != plain_greedy(model, prompt, 14)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_windowed_sequence_holds_its_window_and_a_chunk(depth: int) -> None:
    model = tiny_model(Mistral, sliding_window=8)
    engine = Engine(tiny_agent(model, num_gpu_blocks=64), depth=depth, caching=False, budget=8)
    engine.ask(0, prompt_of(100), 20)
    engine.drain()
    window, chunk = 8 // BLOCK_SIZE + 1, 8 // BLOCK_SIZE
    assert engine.most_held <= window + chunk * depth


def test_captured_steps_have_a_table_for_each_group(graphs: Callable[[ModelAgent], EagerGraphs]) -> None:
    model = tiny_model(Gemma2, sliding_window=8)
    agent = tiny_agent(model, num_gpu_blocks=130)
    graphs(agent)
    engine = Engine(agent, depth=2, caching=True)
    prompts = [prompt_of(length, seed) for seed, length in enumerate([37, 3, 21])]
    requests = [engine.ask(number, prompt, 14) for number, prompt in enumerate(prompts)]
    engine.drain()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.sequences[0].token_ids[len(prompt) :] == plain_greedy(model, prompt, 14)
