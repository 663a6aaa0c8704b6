"""Pooled hidden states, in chunks and beside other rows, against plain forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.agent import prompt_outputs
from asyncllm.agent.step.mixed_steps import OUT_OF_MEMORY
from asyncllm.layers.step_inputs import SampledRows
from asyncllm.protocol import PrefillRow, SamplingParams, StepOutput
from tests.agent.tiny_model import (
    GREEDY,
    NAN_TOKEN,
    Driver,
    plain_greedy,
    plain_hidden,
    prompt_of,
    tiny_agent,
    tiny_llama,
)


def assert_pooled(output: StepOutput, slot: int, expected: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(output.pooled[slot]), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("overrides", [{}, {"num_hidden_layers": 1}], ids=["two layers", "one layer"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
def test_chunks_add_up_to_the_whole(chunk: int, overrides: dict[str, Any]) -> None:
    agent = tiny_agent(tiny_llama(**overrides))
    driver = Driver(agent)
    prompt = prompt_of(21)
    hidden = plain_hidden(agent.model, prompt)
    driver.start(3, prompt)
    driver.start(5, prompt)
    for begin in range(0, 21, chunk):
        tokens = prompt[begin : begin + chunk]
        last = begin + chunk >= 21
        output = driver.step(
            prefill=[
                driver.chunk(3, tokens, sample=False, pooling="mean"),
                driver.chunk(5, tokens, sample=False, pooling="last" if last else None),
            ]
        )
        assert_pooled(output, 3, hidden[begin : begin + len(tokens)].sum(0))
        assert (5 in output.pooled) == last
    assert_pooled(output, 5, hidden[-1])
    assert output.errors == {}


@pytest.mark.parametrize("mean", [False, True])
def test_all_kinds_of_rows_in_one_step(mean: bool) -> None:
    """Rows that sample, pool, do neither or are scored, in an order that mixes them, beside rows that decode."""
    agent = tiny_agent()
    driver = Driver(agent)
    prompts = {slot: prompt_of(4 + slot, seed=slot) for slot in range(8)}
    hidden = {slot: plain_hidden(agent.model, prompt) for slot, prompt in prompts.items()}
    for slot in (7, 1):
        driver.start(slot, prompts[slot])
    first = driver.step(prefill=[driver.chunk(slot, prompts[slot]) for slot in (7, 1)])
    wishes: dict[int, dict[str, Any]] = {
        4: {"sample": False, "pooling": "last"},
        2: {"sample": True},
        0: {"sample": False, "pooling": "mean" if mean else "last"},
        6: {"sample": False},
        3: {"sample": True, "prompt_logprobs": 1 if mean else None},
        5: {"sample": False, "pooling": "last"},
    }
    for slot in wishes:
        driver.start(slot, prompts[slot])
    output = driver.step([1, 7], [driver.chunk(slot, prompts[slot], **wish) for slot, wish in wishes.items()])
    assert output.slots == [1, 7, 2, 3]
    greedy = {slot: plain_greedy(agent.model, prompts[slot], 2) for slot in output.slots}
    assert first.tokens == [greedy[7][0], greedy[1][0]]
    assert output.tokens == [greedy[1][1], greedy[7][1], greedy[2][0], greedy[3][0]]
    assert output.pooled.keys() == {4, 0, 5}
    assert_pooled(output, 4, hidden[4][-1])
    assert_pooled(output, 0, hidden[0].sum(0) if mean else hidden[0][-1])
    assert_pooled(output, 5, hidden[5][-1])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_row_that_is_not_finite_harms_no_other(pooling: Any) -> None:
    prompts = {slot: prompt_of(5 + slot, seed=slot) for slot in range(4)}

    def run(bad: bool) -> StepOutput:
        driver = Driver(tiny_agent())
        rows: list[PrefillRow] = []
        for slot, prompt in prompts.items():
            tokens = [NAN_TOKEN, *prompt[1:]] if bad and slot == 2 else prompt
            driver.start(slot, tokens, GREEDY)
            rows.append(driver.chunk(slot, tokens, sample=slot == 3, pooling=None if slot == 3 else pooling))
        return driver.step(prefill=rows)

    good, bad = run(False), run(True)
    assert list(bad.errors) == [2]
    assert "not finite" in bad.errors[2]
    assert 2 not in bad.pooled
    assert good.errors == {}
    assert bad.tokens == good.tokens
    assert [bad.pooled[slot] for slot in (0, 1)] == [good.pooled[slot] for slot in (0, 1)]


def test_embedding_and_generating_do_not_change_each_other_by_a_bit() -> None:
    """In steps of the same rows, a row depends neither on the other rows' tokens nor on their sampling."""

    def run(*, temperature: float = 1.0, embedded: int = 0, pools: bool = True) -> tuple[list[StepOutput], Any]:
        agent = tiny_agent()
        driver = Driver(agent)
        for slot in (0, 1, 2):
            driver.start(slot, prompt_of(24, slot), SamplingParams(temperature=temperature, seed=slot, logprobs=2))
        outputs = [driver.step(prefill=[driver.chunk(slot, prompt_of(24, slot)) for slot in (0, 1, 2)])]
        prompts = {slot: prompt_of(24, slot + embedded) for slot in (3, 4)}
        for slot, prompt in prompts.items():
            driver.start(slot, prompt)
        for begin in range(0, 24, 8):
            wishes: dict[int, Any] = {3: "mean", 4: "last" if begin == 16 else None} if pools else {3: None, 4: None}
            rows = [
                driver.chunk(slot, prompts[slot][begin : begin + 8], sample=False, pooling=pooling)
                for slot, pooling in wishes.items()
            ]
            outputs.append(driver.step([0, 1, 2], rows))
        assert [sorted(output.pooled) for output in outputs] == ([[], [3], [3], [3, 4]] if pools else [[]] * 4)
        return outputs, [output.pooled for output in outputs]

    answers, vectors = run()
    with_others, other_vectors = run(embedded=50)
    assert [(step.tokens, step.logprobs) for step in answers] == [(step.tokens, step.logprobs) for step in with_others]
    assert vectors != other_vectors
    other_answers, same_vectors = run(temperature=0.0)
    assert [step.tokens for step in answers] != [step.tokens for step in other_answers]
    assert vectors == same_vectors
    without, _ = run(pools=False)
    for step, other in zip(answers, without, strict=True):
        assert step.tokens == other.tokens
        # The last layer has more rows when it pools, and a product of more rows rounds differently.


def test_what_only_the_last_layer_makes_infinite_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of all tokens is looked at before it."""
    model = tiny_llama()
    agent = tiny_agent(model)
    whole = model.last_hidden

    def broken(residual: Tensor, inputs: Any, sampled: SampledRows) -> Tensor:
        hidden = whole(residual, inputs, sampled)
        hidden[1, 3] = torch.inf
        return hidden

    monkeypatch.setattr(model, "last_hidden", broken)
    driver = Driver(agent)
    for slot in (0, 1):
        driver.start(slot, prompt_of(6))
    output = driver.step(prefill=[driver.chunk(slot, prompt_of(6), sample=False, pooling="last") for slot in (0, 1)])
    assert list(output.errors) == [1]
    assert list(output.pooled) == [0]


def test_sums_are_taken_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().to(torch.bfloat16)
    agent = tiny_agent(model, dtype="bfloat16")
    hidden = torch.ones(100, 64, dtype=torch.bfloat16)
    hidden[99] = 300.0
    monkeypatch.setattr(model, "forward", lambda step: hidden)
    driver = Driver(agent)
    driver.start(0, [1] * 100)
    output = driver.step(prefill=[driver.chunk(0, [1] * 100, sample=False, pooling="mean")])
    assert list(output.pooled[0]) == [399.0] * 64, "which bfloat16 does not have"


def test_only_what_is_asked_for_keeps_the_last_layer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    agent = tiny_agent(model)
    whole: list[int] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *step: (whole.append(1), forward(*step))[1])
    driver = Driver(agent)
    for slot, pooling in enumerate(("last", None, "mean")):
        driver.start(slot, prompt_of(6))
        driver.step(prefill=[driver.chunk(slot, prompt_of(6), sample=False, pooling=pooling)])
        assert len(whole) == (pooling == "mean")


def test_only_vectors_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[torch.Size] = []

    def fetch(tensor: Tensor) -> Tensor:
        fetched.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(prompt_outputs, "fetch", fetch)
    agent = tiny_agent()
    driver = Driver(agent)
    for slot in range(3):
        driver.start(slot, prompt_of(20, seed=slot))
    driver.step(
        prefill=[
            driver.chunk(slot, prompt_of(20, seed=slot), sample=False, pooling="mean" if slot else "last")
            for slot in range(3)
        ]
    )
    assert fetched == [(3, agent.limits.hidden_size)]


def test_pooling_without_memory_fails_these_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*step: Any) -> Any:
        raise torch.OutOfMemoryError("as the test asked")

    monkeypatch.setattr(prompt_outputs, "fetch", short)
    model = tiny_llama()
    driver = Driver(tiny_agent(model))
    for slot in (0, 1):
        driver.start(slot, prompt_of(6))
    rows = [driver.chunk(0, prompt_of(6), sample=False, pooling="mean"), driver.chunk(1, prompt_of(6))]
    output = driver.step(prefill=rows)
    assert output.errors == {0: OUT_OF_MEMORY}
    assert output.tokens == plain_greedy(model, prompt_of(6), 1)
