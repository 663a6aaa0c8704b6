"""Sampler: state by slot, and that no row's options reach another row."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asyncllm.config import GenerationConfig
from asyncllm.protocol import SamplingParams, SlotStart, TokenLogprobs
from tests.agent.sampler_steps import Steps

VOCAB_SIZE = 40
NUM_SLOTS = 12


class Sampled(NamedTuple):
    """What one step drew, in the order of its rows."""

    token_list: list[int]
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


def new_sampler() -> Steps:
    return Steps(VOCAB_SIZE, torch.device("cpu"), NUM_SLOTS)


def start(sampler: Steps, slot: int, prompt: list[int], answer: list[int] | None = None, **params: Any) -> None:
    settings = SamplingParams(**params)
    known = prompt + (answer or [])
    sampler.sampler.start(
        SlotStart(
            slot=slot,
            params=settings,
            num_prompt=len(prompt),
            num_tokens=len(known),
            token_ids=known if settings.needs_history else [],
        )
    )


def draw(sampler: Steps, logits: Tensor, slots: list[int], positions: list[int]) -> Sampled:
    return Sampled(*sampler.finish(slots, *sampler.launch(logits, slots, positions)))


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 1, "repetition_penalty": 1.5},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "seed": -1, "frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"temperature": 1.2, "top_p": 0.9, "seed": 2**64 - 2, "logit_bias": ((3, 4.0), (9, -100.0)), "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.1, "seed": 9, "bad_words": ((5,), (6, 7), (1, 2, 3)), "logprobs": 0},
    {"temperature": 0.0, "min_new_tokens": 4, "stop_token_ids": tuple(range(0, 40, 2)), "logprobs": 5},
    {"temperature": 1.0, "seed": 11, "allowed_token_ids": (0, 3, 31, 32, 38), "bad_words": ((3,),), "logprobs": 1},
    {"temperature": 1.1, "seed": 9, "min_new_tokens": 2, "stop_token_ids": (1, 4), "repetition_penalty": 0.7},
]


def run(company: list[int], steps: int, seed: int) -> dict[int, list[Any]]:
    """Run some of PARAMS together, in random slots and row orders; params index -> what each step gave it.

    A row's logits depend on the row and the step only.
    """
    dice = random.Random(seed)
    sampler = new_sampler()
    slots = dict(zip(company, dice.sample(range(NUM_SLOTS), len(company)), strict=True))
    prompts = {index: [index, 7, 6] for index in company}
    for index in company:
        # A former owner that leaves state of every kind behind.
        start(sampler, slots[index], [1, 2, 3], temperature=1.0, bad_words=((8,),), logit_bias=((0, 50.0),), logprobs=1)
        draw(sampler, random_logits(1, 999), [slots[index]], [3])
        start(sampler, slots[index], prompts[index], **PARAMS[index])
    results: dict[int, list[Any]] = {index: [] for index in company}
    for step in range(steps):
        order = dice.sample(company, len(company))
        logits = torch.cat([random_logits(1, 100 * index + step) for index in order])
        kept = logits.clone()
        sampled = draw(sampler, logits, [slots[index] for index in order], [3 + step] * len(order))
        assert torch.equal(logits, kept)
        assert sampled.errors == {}
        for row, index in enumerate(order):
            results[index].append((sampled.token_list[row], sampled.logprobs.get(slots[index])))
    return results


TINY = 5e-324
EXTREMES: dict[str, list[float]] = {
    "temperature": [0, TINY, 1e-38, 1e-3, 2],
    "top_p": [0, TINY, 1],
    "min_p": [0, TINY, 1],
    "repetition_penalty": [0.01, 1 + 1e-16, 10],
    "presence_penalty": [-2, -TINY, TINY, 2],
    "frequency_penalty": [-2, TINY, 2],
}


@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e30])
def test_every_setting_that_is_accepted_keeps_the_numbers_finite(scale: float) -> None:
    dice = random.Random(5)
    sampler = new_sampler()
    for seed in range(60):
        chosen = {name: dice.choice(values) for name, values in EXTREMES.items()}
        config = GenerationConfig(**chosen, logit_bias={1: dice.choice([-100.0, TINY, 100.0])}, top_k=0).checked()
        bias = tuple((config.logit_bias or {}).items())
        start(
            sampler, 1, [1, 2], [3, 3, 4], **chosen, logit_bias=bias, seed=seed, top_k=dice.choice([0, 1, 5, 2**31 - 1])
        )
        assert draw(sampler, random_logits(1, seed) * scale, [1], [5]).errors == {}


def test_every_row_draws_as_if_it_were_alone() -> None:
    together = run(list(range(len(PARAMS))), 8, seed=1)
    for index in range(len(PARAMS)):
        assert run([index], 8, seed=50 + index)[index] == together[index]
    pairs = run([4, 2], 8, seed=3)
    assert pairs == {index: together[index] for index in (4, 2)}


def oracle_logits(logits: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    values = list(logits)
    for token in set(prompt + answer):
        value = values[token]
        values[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in set(answer):
        values[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias:
        values[token] += bias
    history = prompt + answer
    for word in params.bad_words:
        if len(word) == 1 or history[-len(word) + 1 :] == list(word[:-1]):
            values[word[-1]] = -float("inf")
    if len(answer) < params.min_new_tokens:
        for token in params.stop_token_ids:
            values[token] = -float("inf")
    if params.allowed_token_ids:
        values = [value if token in params.allowed_token_ids else -float("inf") for token, value in enumerate(values)]
    return values


@pytest.mark.parametrize("seed", range(5))
def test_greedy_choice_after_all_edits_equals_plain_python(seed: int) -> None:
    dice = random.Random(seed)
    sampler = new_sampler()
    prompt = dice.choices(range(VOCAB_SIZE), k=6)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.0 + dice.random(),
        presence_penalty=dice.uniform(-1, 1),
        frequency_penalty=dice.uniform(0, 1),
        logit_bias=tuple((token, dice.uniform(-3, 3)) for token in dice.sample(range(VOCAB_SIZE), 5)),
        min_new_tokens=6,
        stop_token_ids=tuple(dice.sample(range(VOCAB_SIZE), 10)),
        allowed_token_ids=tuple(dice.sample(range(VOCAB_SIZE), 36)) if seed % 2 else (),
        bad_words=tuple(tuple(dice.choices(range(VOCAB_SIZE), k=length)) for length in (1, 2, 2, 3) for _ in range(9)),
    )
    start(sampler, 4, prompt, **{name: getattr(params, name) for name in params.__struct_fields__})
    answer: list[int] = []
    for step in range(15):
        logits = random_logits(1, seed * 100 + step)
        expected = oracle_logits(logits[0].tolist(), prompt, answer, params)
        token = draw(sampler, logits, [4], [len(prompt) + step]).token_list[0]
        assert token == max(range(VOCAB_SIZE), key=lambda each: expected[each])
        answer.append(token)


def test_a_restarted_sequence_goes_on_as_before() -> None:
    params = {**PARAMS[3], "bad_words": ((1, 2), (4,)), "min_new_tokens": 5, "stop_token_ids": (0, 1)}
    sampler = new_sampler()
    start(sampler, 0, [7, 8], **params)
    whole = [draw(sampler, random_logits(1, step), [0], [2 + step]).token_list[0] for step in range(8)]
    start(sampler, 5, [7, 8], whole[:3], **params)
    resumed = [draw(sampler, random_logits(1, step), [5], [2 + step]).token_list[0] for step in range(3, 8)]
    assert resumed == whole[3:]


def test_a_bad_word_that_the_prompt_begins_is_not_completed() -> None:
    sampler = new_sampler()
    start(sampler, 0, [3, 1, 2], temperature=0.0, bad_words=((1, 2, 9), (2, 2, 8)))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9], logits[0, 8], logits[0, 2] = 5.0, 4.0, 3.0
    assert draw(sampler, logits, [0], [3]).token_list == [8]
    start(sampler, 0, [3, 1, 2], temperature=0.0, bad_words=((1, 2, 9), (2, 8)))
    assert draw(sampler, logits, [0], [3]).token_list == [2]
    assert draw(sampler, logits, [0], [4]).token_list == [9]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_row_that_is_not_finite_changes_no_other(value: float, bad: int) -> None:
    def outcome(spoiled: bool) -> Sampled:
        sampler = new_sampler()
        for slot, params in enumerate(PARAMS):
            start(sampler, slot, [1, 2], **params)
        logits = random_logits(len(PARAMS), 5)
        if spoiled:
            logits[bad, 17] = value
        return draw(sampler, logits, list(range(len(PARAMS))), [2] * len(PARAMS))

    good, spoiled = outcome(False), outcome(True)
    assert list(spoiled.errors) == [bad]
    assert "not finite" in spoiled.errors[bad]
    assert 0 <= spoiled.token_list[bad] < VOCAB_SIZE
    for row in set(range(len(PARAMS))) - {bad}:
        assert spoiled.token_list[row] == good.token_list[row]
        assert spoiled.logprobs.get(row) == good.logprobs.get(row)
    assert bad not in spoiled.logprobs


def test_a_row_with_every_token_banned_fails_alone() -> None:
    sampler = new_sampler()
    everything = tuple(range(VOCAB_SIZE))
    start(sampler, 0, [1], temperature=1.0, min_new_tokens=1, stop_token_ids=everything)
    start(sampler, 1, [1], temperature=0.0)
    start(sampler, 2, [1], temperature=1.0, seed=1, bad_words=tuple((token,) for token in everything[1:]))
    sampled = draw(sampler, random_logits(3, 0), [0, 1, 2], [1, 1, 1])
    assert list(sampled.errors) == [0]
    assert "No token is left" in sampled.errors[0]
    assert sampled.token_list[2] == 0
    # One token later stop tokens are allowed.
    assert draw(sampler, random_logits(1, 0), [0], [2]).errors == {}


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((VOCAB_SIZE, 1.0),)},
        {"stop_token_ids": (-1,), "min_new_tokens": 3},
        {"bad_words": ((1, VOCAB_SIZE + 5),)},
        {"allowed_token_ids": (1, VOCAB_SIZE)},
    ],
)
def test_ids_outside_the_vocabulary_fail_their_own_row_only(params: dict[str, Any]) -> None:
    sampler = new_sampler()
    start(sampler, 3, [1], **params)
    start(sampler, 4, [1], temperature=0.0)
    logits = random_logits(2, 3)
    sampled = draw(sampler, logits, [3, 4], [1, 1])
    assert list(sampled.errors) == [3]
    assert next(iter(params)) in sampled.errors[3]
    assert sampled.token_list[1] == int(logits[1].argmax())
    start(sampler, 3, [1], temperature=0.0)
    assert draw(sampler, logits[:1], [3], [2]).errors == {}


def test_logprobs_are_raw_and_as_many_as_asked() -> None:
    sampler = new_sampler()
    start(sampler, 1, [1], temperature=0.1, top_k=2, logit_bias=((30, 100.0),), logprobs=3)
    start(sampler, 2, [1], temperature=0.0, logprobs=0)
    start(sampler, 3, [1], temperature=0.0)
    logits = random_logits(3, 8)
    sampled = draw(sampler, logits, [3, 1, 2], [1, 1, 1])
    exact = logits.log_softmax(-1)
    assert set(sampled.logprobs) == {1, 2}
    token, value = sampled.logprobs[1][0]
    assert token == 30
    assert value == pytest.approx(exact[1, 30].item())
    assert [token for token, _ in sampled.logprobs[1][1:]] == exact[1].topk(3).indices.tolist()
    ((token, value),) = sampled.logprobs[2]
    assert token == int(exact[2].argmax())
    assert value == pytest.approx(exact[2].max().item())


def test_history_tables_grow_and_are_lent_again() -> None:
    sampler = new_sampler()
    for owner in range(40):
        start(sampler, owner % NUM_SLOTS, [owner % VOCAB_SIZE], temperature=0.0, repetition_penalty=5.0)
    logits = torch.ones(NUM_SLOTS, VOCAB_SIZE)
    slots = list(range(NUM_SLOTS))
    # The latest owner of slot s has the prompt [owner]; of equal logits the lowest unseen id wins, which is 0.
    expected = [1 if owner % VOCAB_SIZE == 0 else 0 for owner in [36, 37, 38, 39, *range(28, 36)]]
    assert draw(sampler, logits, slots, [1] * NUM_SLOTS).token_list == expected
    assert sampler.sampler._history._counts.shape[0] <= 2 * NUM_SLOTS


def test_a_storm_of_new_owners_never_mixes_rows() -> None:
    """Each request may draw one token only; slots change hands at random between steps, as after cancellations."""
    dice = random.Random(0)
    sampler = new_sampler()
    forced: dict[int, int] = {}
    for step in range(150):
        for slot in dice.sample(range(NUM_SLOTS), dice.randint(0, 5)):
            token = dice.randrange(VOCAB_SIZE)
            others = tuple(each for each in range(VOCAB_SIZE) if each != token)
            restriction: dict[str, Any] = dice.choice(
                [
                    {"logit_bias": ((token, 100.0),)},
                    {"bad_words": tuple((each,) for each in others)},
                    {"min_new_tokens": 1000, "stop_token_ids": others},
                ]
            )
            start(sampler, slot, [1, 2, 3], temperature=dice.choice([0.0, 1.0]), seed=step, **restriction)
            forced[slot] = token
        slots = dice.sample(sorted(forced), dice.randint(0, len(forced)))
        if slots:
            sampled = draw(sampler, random_logits(len(slots), step), slots, [3 + step] * len(slots))
            assert sampled.token_list == [forced[slot] for slot in slots]
