"""Neither padding rows nor a GPU change what a sampler draws."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncllm.agent.sampling.sampler import Sampler
from asyncllm.protocol import SamplingParams, SlotStart, TokenLogprobs
from tests.agent.sampler_steps import Steps, never_waiting

NUM_SLOTS = 12
CPU = torch.device("cpu")


def random_params(dice: random.Random, vocab_size: int) -> dict[str, Any]:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(dice.randrange(vocab_size) for _ in range(dice.randint(1, most)))

    chances: dict[str, Any] = {
        "temperature": dice.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": dice.choice([0, 0, 1, 7]),
        "top_p": dice.choice([1.0, 1.0, 0.8]),
        "min_p": dice.choice([0.0, 0.0, 0.1]),
        "seed": dice.getrandbits(64),
    }
    extras: dict[str, Any] = {
        "repetition_penalty": dice.choice([0.7, 1.4]),
        "presence_penalty": dice.uniform(-1, 1),
        "frequency_penalty": dice.uniform(-1, 1),
        "logit_bias": tuple((token, dice.uniform(-3, 3)) for token in tokens(5)),
        "min_new_tokens": dice.randint(1, 6),
        "stop_token_ids": tokens(10),
        "bad_words": tuple(tokens(dice.choice([1, 3])) for _ in range(dice.randint(1, 12))),
        "logprobs": dice.choice([0, 3]),
    }
    return chances | {name: value for name, value in extras.items() if dice.random() < 0.3}


def slot_start(slot: int, prompt: list[int], **params: Any) -> SlotStart:
    settings = SamplingParams(**params)
    return SlotStart(
        slot=slot,
        params=settings,
        num_prompt=len(prompt),
        num_tokens=len(prompt),
        token_ids=prompt if settings.needs_history else [],
    )


def same_logprobs(one: dict[int, TokenLogprobs], other: dict[int, TokenLogprobs]) -> bool:
    assert one.keys() == other.keys()
    for slot, entries in one.items():
        assert [token for token, _ in entries] == [token for token, _ in other[slot]]
        assert [value for _, value in entries] == pytest.approx([value for _, value in other[slot]], abs=1e-4)
    return True


def compare(device: torch.device, vocab_size: int, steps: int, seed: int) -> None:
    dice = random.Random(seed)
    """Steps on `device` with rows of padding give what the same steps give on a CPU without."""
    plain_steps, device_steps = Steps(vocab_size, CPU, NUM_SLOTS), Steps(vocab_size, device, NUM_SLOTS)
    position = dict.fromkeys(range(NUM_SLOTS), 0)
    owned: list[int] = []
    for step in range(steps):
        for slot in dice.sample(range(NUM_SLOTS), dice.randint(0, 4) if step else NUM_SLOTS // 2):
            prompt = dice.choices(range(vocab_size), k=dice.randint(1, 9))
            start = slot_start(slot, prompt, **random_params(dice, vocab_size))
            position[slot] = len(prompt)
            plain_steps.sampler.start(start)
            with never_waiting(device):
                device_steps.sampler.start(start)
            owned = sorted({*owned, slot})
        slots = dice.sample(owned, dice.randint(1, len(owned)))
        logits = torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(seed + step)) * 2
        if dice.random() < 0.2:
            logits[0, 3] = dice.choice([torch.nan, torch.inf])
        if dice.random() < 0.1:
            logits[-1] = -torch.inf
        positions = [position[slot] for slot in slots]
        drawn, drawn_logprobs, drawn_errors = plain_steps.finish(slots, *plain_steps.launch(logits, slots, positions))
        launched = device_steps.launch(logits, slots, positions, fill=dice.randint(0, 3))
        tokens, logprobs, errors = device_steps.finish(slots, *launched)
        assert errors == drawn_errors, f"seed {seed}"
        assert same_logprobs(logprobs, drawn_logprobs)
        for slot, one, other in zip(slots, tokens, drawn, strict=True):
            assert one == other or slot in errors, f"seed {seed}"
            position[slot] += 1
        # A failed row's token means nothing and may differ, and so may then what its slot counts.
        for slot in errors:
            owned.remove(slot)
        if not owned:
            return


@pytest.mark.parametrize("seed", range(0, 800, 100))
def test_padding_changes_no_row(seed: int) -> None:
    compare(CPU, 40, 40, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [500, 128_256])
def test_equals_a_cpu_and_never_waits(vocab_size: int) -> None:
    compare(torch.device("cuda"), vocab_size, 20, int.from_bytes(os.urandom(4), "little"))


def array(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_settings_reach_the_device_with_upload() -> None:
    steps = Steps(30, CPU)
    logits = torch.zeros(2, 30)
    logits[:, 3] = 1.0
    for slot in (4, 2):
        steps.sampler.start(slot_start(slot, [1], temperature=0.0))
    tokens, flags, _ = steps.launch(logits, [2, 4], [1, 1])
    assert tokens.tolist() == [3, 3]
    steps.sampler.start(slot_start(2, [1], temperature=1.0, seed=5))
    sampled = {int(steps.launch(logits, [2, 4], [position] * 2)[0][0]) for position in range(20)}
    assert len(sampled) > 3
    assert not flags.any()


def test_only_bad_words_of_several_tokens_need_the_host() -> None:
    sampler = Sampler(NUM_SLOTS, 30, CPU)
    sampler.start(slot_start(0, [1], bad_words=((3,), (4,))))
    sampler.start(slot_start(1, [1], repetition_penalty=2.0))
    sampler.start(slot_start(11, [1], bad_words=((3,), (4, 5))))
    assert not sampler.needs_host(array(0, 1, -1))
    assert sampler.needs_host(array(-1, 11))
    sampler.start(slot_start(11, [1]))
    assert not sampler.needs_host(array(0, 11, 1))


def test_a_bad_word_is_not_completed_over_steps() -> None:
    steps = Steps(30, CPU)
    steps.sampler.start(slot_start(3, [7, 8], temperature=0.0, bad_words=((5, 6),)))
    logits = torch.zeros(1, 30)
    logits[0, 6], logits[0, 5] = 2.0, 3.0
    drawn = []
    for step in range(2):
        tokens, _, _ = steps.finish([3], *steps.launch(logits, [3], [2 + step]))
        drawn += tokens
        logits[0, 5] = 1.0
    assert drawn == [5, 5]
    assert steps.finish([3], *steps.launch(logits.index_fill(1, torch.tensor([5]), 0.5), [3], [4]))[0] == [5]


def test_a_batch_without_wishes_is_drawn_once() -> None:
    steps = Steps(30, CPU)
    steps.sampler.start(slot_start(3, [7, 8], temperature=0.0))
    tokens, _flags, pending = steps.launch(torch.eye(30)[4:5], [3], [2], fill=2)
    assert tokens.tolist() == [4, 0, 0]
    assert pending is None


@pytest.mark.parametrize("logits_left", [(), (3,)])
def test_a_row_that_bans_leave_nothing_of_says_so(logits_left: tuple[int, ...]) -> None:
    steps = Steps(30, CPU)
    banned = tuple((token,) for token in range(30) if token not in logits_left)
    steps.sampler.start(slot_start(0, [1], bad_words=banned))
    _tokens, _, errors = steps.finish([0], *steps.launch(torch.zeros(1, 30), [0], [1]))
    assert (errors == {}) == bool(logits_left)
    if errors:
        assert "No token is left" in errors[0]


def test_ids_outside_the_vocabulary_fail_their_own_row_only() -> None:
    steps = Steps(30, CPU)
    steps.sampler.start(slot_start(0, [1], logit_bias=((30, 1.0),), logprobs=1))
    steps.sampler.start(slot_start(1, [1], temperature=0.0, logprobs=1))
    tokens, logprobs, errors = steps.finish([0, 1], *steps.launch(torch.eye(30)[:2], [0, 1], [1, 1]))
    assert list(errors) == [0]
    assert "logit_bias" in errors[0]
    assert tokens[1] == 1
    assert list(logprobs) == [1]
