"""The fake device gives the same answer by every legal route, and refuses the illegal ones."""

from __future__ import annotations

import pytest

from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, StepOutput, SwapPlan
from asyncllm.testing import FakeDevice, StepViolation, hash_hidden, hash_oracle, script_oracle

GREEDY = SamplingParams(temperature=0.0)


def start(slot: int, num_tokens: int, num_prompt: int | None = None, params: SamplingParams = GREEDY) -> SlotStart:
    return SlotStart(slot=slot, params=params, num_prompt=num_prompt or num_tokens, num_tokens=num_tokens, token_ids=[])


def prefill(slot: int, tokens: list[int], position: int = 0, sample: bool = True, **fields: object) -> PrefillRow:
    return PrefillRow(slot=slot, tokens=tokens, position=position, sample=sample, **fields)  # type: ignore[arg-type]


class Driver:
    """Numbers the steps."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.steps = 0

    def __call__(
        self,
        *,
        starts: list[SlotStart] | None = None,
        new_blocks: list[tuple[int, int, int, list[int]]] | None = None,
        copies: list[tuple[int, int]] | None = None,
        decode: list[int] | None = None,
        prefill: list[PrefillRow] | None = None,
        swaps: SwapPlan | None = None,
    ) -> StepOutput:
        self.steps += 1
        return self.device.step(
            Batch(
                step=self.steps,
                starts=starts or [],
                new_blocks=new_blocks or [],
                copies=copies or [],
                decode=decode or [],
                prefill=prefill or [],
                swaps=swaps or SwapPlan(),
            )
        )


PROMPT = [10, 11, 12, 13, 14, 15]


def expected(prompt: list[int], count: int) -> list[int]:
    """The answer computed without any device."""
    oracle = hash_oracle(258)
    history = list(prompt)
    for _ in range(count):
        history.append(oracle(history, start(0, len(prompt))))
    return history[len(prompt) :]


@pytest.fixture
def step() -> Driver:
    return Driver(FakeDevice(num_blocks=12, block_size=4, num_slots=4, num_host_blocks=3))


def begin(step: Driver, slot: int = 0, blocks: list[int] | None = None) -> list[int]:
    """Prefill PROMPT whole in one slot."""
    return step(
        starts=[start(slot, 6)], new_blocks=[(slot, 0, 0, blocks or [0, 1])], prefill=[prefill(slot, PROMPT)]
    ).tokens


def test_whole_prefill_then_decode(step: Driver) -> None:
    tokens = begin(step) + step(decode=[0]).tokens + step(decode=[0]).tokens
    tokens += step(new_blocks=[(0, 0, 2, [2])], decode=[0]).tokens
    assert tokens == expected(PROMPT, 4)


def test_a_step_may_give_blocks_alone(step: Driver) -> None:
    tokens = begin(step) + step(decode=[0]).tokens + step(decode=[0]).tokens
    assert step(new_blocks=[(0, 0, 2, [2])]).tokens == []
    assert tokens + step(decode=[0]).tokens == expected(PROMPT, 4)


def test_chunked_prefill_gives_the_same(step: Driver) -> None:
    step(starts=[start(3, 6)], new_blocks=[(3, 0, 0, [7])], prefill=[prefill(3, PROMPT[:3], sample=False)])
    output = step(new_blocks=[(3, 0, 1, [5])], prefill=[prefill(3, PROMPT[3:], position=3)])
    assert (output.slots, output.tokens) == ([3], expected(PROMPT, 1))


def test_prefix_hit_and_preemption_give_the_same(step: Driver) -> None:
    first = begin(step) + step(decode=[0]).tokens
    known = PROMPT + first
    again = step(
        starts=[start(1, 8, num_prompt=6)], new_blocks=[(1, 0, 0, [0, 4])], prefill=[prefill(1, known[4:], position=4)]
    )
    assert first + again.tokens == expected(PROMPT, 3)


def test_copy_on_write_keeps_both_rows(step: Driver) -> None:
    begin(step)
    step(decode=[0])
    forked = step(
        starts=[start(1, 6)],
        new_blocks=[(1, 0, 0, [0, 3])],
        copies=[(1, 3)],
        decode=[0],
        prefill=[prefill(1, PROMPT[5:], position=5)],
    )
    assert forked.slots == [0, 1]
    assert forked.tokens == [expected(PROMPT, 3)[2], expected(PROMPT, 1)[0]]
    assert step(new_blocks=[(0, 0, 2, [2])], decode=[0, 1]).tokens == [expected(PROMPT, 4)[3], expected(PROMPT, 2)[1]]


def swap(out: list[tuple[int, int]] | None = None, back: list[tuple[int, int]] | None = None) -> SwapPlan:
    return SwapPlan(swap_out=out or [], swap_in=back or [])


def test_a_swapped_row_goes_on_from_its_blocks(step: Driver) -> None:
    first = begin(step) + step(decode=[0]).tokens
    known = PROMPT + first
    # Others write over its blocks meanwhile, in the step that copies them and later.
    step(
        starts=[start(2, 6)], new_blocks=[(2, 0, 0, [1, 0])], prefill=[prefill(2, PROMPT)], swaps=swap([(0, 2), (1, 0)])
    )
    step(decode=[2])
    again = step(
        starts=[start(1, 8, num_prompt=6)],
        new_blocks=[(1, 0, 0, [4, 5])],
        prefill=[prefill(1, known[7:], position=7)],
        swaps=swap(back=[(2, 4), (0, 5)]),
    )
    assert first + again.tokens == expected(PROMPT, 3)


def test_a_block_goes_down_before_another_comes_up_in_its_place(step: Driver) -> None:
    begin(step)
    begin(step, 1, [2, 3])
    step(swaps=swap([(0, 1)]))
    step(swaps=swap([(2, 0)], [(0, 4), (1, 2)]))
    assert step(decode=[0]).tokens == [expected(PROMPT, 2)[1]]
    with pytest.raises(StepViolation, match="lost position 0"):
        step(decode=[1])


@pytest.mark.parametrize(
    ("swaps", "why"),
    [
        (swap([(0, 3)]), "does not exist"),
        (swap([(12, 0)]), "does not exist"),
        (swap(back=[(0, 12)]), "does not exist"),
        (swap([(0, 1), (1, 1)]), "to the same place"),
        (swap([(0, 0), (1, 1)], [(0, 5), (1, 5)]), "to the same place"),
        (swap([(7, 0)]), "block 7, which was never written"),
        (swap(back=[(0, 5)]), "host block 0, which was never copied to"),
    ],
)
def test_swaps_that_would_lose_something(step: Driver, swaps: SwapPlan, why: str) -> None:
    begin(step)
    with pytest.raises(StepViolation, match=why):
        step(swaps=swaps)


def test_a_row_that_says_its_tokens_finds_them_in_its_blocks(step: Driver) -> None:
    begin(step)
    params = SamplingParams(repetition_penalty=1.5)
    known = [9, 9, 9, 9, 9]
    with pytest.raises(StepViolation, match="not its own"):
        step(
            starts=[SlotStart(slot=1, params=params, num_prompt=5, num_tokens=5, token_ids=known)],
            new_blocks=[(1, 0, 0, [0, 4])],
            prefill=[prefill(1, known[4:], position=4)],
        )


def test_seeds_matter_only_when_sampling(step: Driver) -> None:
    oracle = hash_oracle(258)
    greedy = [start(0, 6, params=SamplingParams(top_k=1, seed=seed)) for seed in (1, 2)]
    drawn = [start(0, 6, params=SamplingParams(seed=seed)) for seed in (1, 2)]
    assert len({oracle(PROMPT, each) for each in greedy}) == 1
    assert len({oracle(PROMPT, each) for each in drawn}) == 2


def test_script_oracle_says_its_text_and_stops(step: Driver) -> None:
    oracle = script_oracle(lambda prompt: [len(prompt), 99], eos_token_id=257)
    row = start(0, 6)
    assert [oracle(PROMPT + said, row) for said in ([], [6], [6, 99])] == [6, 99, 257]


def test_stop_tokens_and_bad_words_are_held_back() -> None:
    first = expected(PROMPT, 1)[0]
    params = SamplingParams(temperature=0.0, min_new_tokens=1, stop_token_ids=(first,), bad_words=((first + 1,),))
    step = Driver(FakeDevice(num_blocks=4, block_size=4))
    output = step(starts=[start(0, 6, params=params)], new_blocks=[(0, 0, 0, [0, 1])], prefill=[prefill(0, PROMPT)])
    assert output.tokens == [first + 2]
    params = SamplingParams(temperature=0.0, allowed_token_ids=(first + 5, first + 9))
    step = Driver(FakeDevice(num_blocks=4, block_size=4))
    output = step(starts=[start(0, 6, params=params)], new_blocks=[(0, 0, 0, [0, 1])], prefill=[prefill(0, PROMPT)])
    assert output.tokens == [first + 5]


def test_logprobs_logits_and_row_errors() -> None:
    device = FakeDevice(num_blocks=4, block_size=4, row_failure=lambda history: "bad" if history[0] == 10 else None)
    output = Driver(device)(
        starts=[start(0, 6, params=SamplingParams(temperature=0.0, logprobs=2))],
        new_blocks=[(0, 0, 0, [0, 1])],
        prefill=[prefill(0, PROMPT, prompt_logprobs=1, output_logits=True)],
    )
    assert output.errors == {0: "bad"}
    assert [token for token, _ in output.logprobs[0]] == [output.tokens[0], output.tokens[0], output.tokens[0] + 1]
    assert [entry[0][0] for entry in output.prompt_logprobs[0]] == PROMPT[1:]
    assert [row.index(1.0) for row in output.logits[0]] == PROMPT


def test_a_row_that_is_not_sampled_from_pools_and_fails() -> None:
    device = FakeDevice(num_blocks=4, block_size=4, row_failure=lambda history: "bad" if len(history) > 5 else None)
    step = Driver(device)
    first = step(
        starts=[start(0, 6)],
        new_blocks=[(0, 0, 0, [0, 1])],
        prefill=[prefill(0, PROMPT[:4], sample=False, pooling="mean")],
    )
    last = step(prefill=[prefill(0, PROMPT[4:], 4, sample=False, pooling="last")])
    hidden = hash_hidden(PROMPT, 16)
    assert first.pooled == {0: [sum(column) for column in zip(*hidden[:4], strict=True)]}
    assert last.pooled == {0: hidden[-1]}
    assert (first.errors, last.errors) == ({}, {0: "bad"})


class TestRefusals:
    def test_write_into_a_block_that_a_live_row_reads(self, step: Driver) -> None:
        begin(step)
        step(starts=[start(1, 6)], new_blocks=[(1, 0, 0, [1, 2])], prefill=[prefill(1, PROMPT)])
        with pytest.raises(StepViolation, match="slot 0 lost position 4: block 1"):
            step(decode=[0])

    def test_even_when_the_same_tokens_are_written(self, step: Driver) -> None:
        begin(step)
        step(starts=[start(1, 6)], new_blocks=[(1, 0, 0, [0, 2])], prefill=[prefill(1, PROMPT)])
        with pytest.raises(StepViolation, match="slot 0 lost position 0"):
            step(decode=[0])

    def test_two_rows_writing_one_cell(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="another row writes"):
            step(
                starts=[start(0, 2), start(1, 2)],
                new_blocks=[(0, 0, 0, [0]), (1, 0, 0, [0])],
                prefill=[prefill(0, [1, 2]), prefill(1, [1, 2])],
            )

    def test_reading_what_was_never_written(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="reads position 0, which was never written"):
            step(starts=[start(0, 6)], new_blocks=[(0, 0, 0, [0, 1])], prefill=[prefill(0, PROMPT[4:], position=4)])

    def test_position_without_a_block(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="no block for position 4"):
            begin(step, blocks=[0])

    def test_gap_between_chunks(self, step: Driver) -> None:
        step(starts=[start(0, 6)], new_blocks=[(0, 0, 0, [0, 1])], prefill=[prefill(0, PROMPT[:2], sample=False)])
        with pytest.raises(StepViolation, match="prefills at 3, but its cache ends at 2"):
            step(prefill=[prefill(0, PROMPT[3:], position=3)])

    def test_sampling_too_early(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="of 6 known tokens"):
            step(starts=[start(0, 6)], new_blocks=[(0, 0, 0, [0])], prefill=[prefill(0, PROMPT[:2])])

    def test_decode_before_prefill(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="decodes before"):
            step(starts=[start(0, 6)], decode=[0])

    def test_slot_never_started(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="never started"):
            step(decode=[2])

    def test_slot_named_twice(self, step: Driver) -> None:
        begin(step)
        with pytest.raises(StepViolation, match="named twice"):
            step(decode=[0, 0])

    @pytest.mark.parametrize("copies", [[(0, 5), (5, 6)], [(0, 5), (1, 5)], [(9, 5)]])
    def test_ambiguous_or_empty_copies(self, step: Driver, copies: list[tuple[int, int]]) -> None:
        begin(step)
        with pytest.raises(StepViolation, match="cop"):
            step(copies=copies, decode=[0])

    @pytest.mark.parametrize("entry", [(0, 0, 3, [5]), (0, 0, 2, [12]), (0, 0, 2, [1])])
    def test_broken_block_table(self, step: Driver, entry: tuple[int, int, int, list[int]]) -> None:
        begin(step)
        with pytest.raises(StepViolation, match="block"):
            step(new_blocks=[entry], decode=[0])

    def test_steps_out_of_order(self, step: Driver) -> None:
        begin(step)
        step.steps = 0
        with pytest.raises(StepViolation, match="came after"):
            step(decode=[0])

    def test_empty_step(self, step: Driver) -> None:
        with pytest.raises(StepViolation, match="nothing to do"):
            step()
