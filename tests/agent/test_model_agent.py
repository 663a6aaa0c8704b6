"""ModelAgent: steps over a real model, against plain forward passes."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncllm.agent import prompt_outputs
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.agent.open_model import check_block_size
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidCheckpoint, InvalidParameter
from asyncllm.protocol import Batch, SamplingParams
from tests.agent.tiny_model import (
    GREEDY,
    NAN_TOKEN,
    VOCAB_SIZE,
    Driver,
    plain_greedy,
    plain_logits,
    prompt_of,
    tiny_agent,
    tiny_llama,
)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 1000])
def test_chunked_prefill_and_decode_equal_plain_forward(chunk: int) -> None:
    agent = tiny_agent()
    prompt = prompt_of(21)
    assert Driver(agent).generate(3, prompt, 9, chunk=chunk) == plain_greedy(agent.model, prompt, 9)


def test_mixed_batches_equal_each_sequence_alone() -> None:
    agent = tiny_agent()
    prompts = {slot: prompt_of(5 + 6 * index, seed=slot) for index, slot in enumerate((5, 0, 11, 2))}
    driver = Driver(agent)
    answers: dict[int, list[int]] = {slot: [] for slot in prompts}
    begun: dict[int, int] = {}
    pending = list(prompts)
    for step in range(60):
        if step % 2 == 0 and pending:
            slot = pending.pop()
            driver.start(slot, prompts[slot])
            begun[slot] = 0
        rows, decode = [], []
        for slot, done in begun.items():
            if done < len(prompts[slot]):
                tokens = prompts[slot][done : done + 5]
                begun[slot] += len(tokens)
                rows.append(driver.chunk(slot, tokens, sample=begun[slot] == len(prompts[slot])))
            elif len(answers[slot]) < 8:
                decode.append(slot)
        if not rows and not decode:
            break
        random.Random(step).shuffle(decode)
        output = driver.step(decode, rows)
        for slot, token in zip(output.slots, output.tokens, strict=True):
            answers[slot].append(token)
    assert answers == {slot: plain_greedy(agent.model, prompt, 8) for slot, prompt in prompts.items()}


def test_a_reused_slot_keeps_nothing() -> None:
    agent = tiny_agent()
    driver = Driver(agent)
    first = SamplingParams(temperature=1.0, logit_bias=((7, 100.0),), repetition_penalty=2.0, logprobs=2)
    assert driver.generate(4, prompt_of(30, seed=1), 3, first)[0] == 7
    prompt = prompt_of(6, seed=2)
    assert driver.generate(4, prompt, 6) == plain_greedy(agent.model, prompt, 6)


def test_resumed_after_preemption() -> None:
    agent = tiny_agent()
    params = SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, frequency_penalty=0.3, min_new_tokens=5)
    prompt = prompt_of(9)
    whole = Driver(agent).generate(0, prompt, 8, params)
    driver = Driver(agent)
    driver.start(1, prompt, params, answer=whole[:3])
    tokens = driver.step(prefill=[driver.chunk(1, prompt + whole[:3])]).tokens
    while len(tokens) < 5:
        tokens += driver.step(decode=[1]).tokens
    assert whole[3:] == tokens


def test_copies_happen_before_the_step_writes() -> None:
    agent = tiny_agent()
    driver = Driver(agent)
    prompt = prompt_of(10)
    first = driver.generate(0, prompt, 1)
    # A sibling shares the two full blocks, gets a copy of the half-full third, and computes the last token only.
    shared, own = driver.tables[0], driver.free.pop()
    sibling = SamplingParams(temperature=0.0, logit_bias=((first[0], -100.0),))
    driver.start(1, prompt, sibling)
    driver.adopt(1, [*shared[:2], own], 9)
    output = driver.step(decode=[0], prefill=[driver.chunk(1, prompt[9:])], copies=[(shared[2], own)])
    logits = plain_logits(agent.model, prompt)[-1].clone()
    logits[first[0]] -= 100
    assert output.tokens[0] == plain_greedy(agent.model, prompt, 2)[1]
    assert output.tokens[1] == int(logits.argmax())
    later = driver.step(decode=[1, 0]).tokens
    assert later == [
        plain_greedy(agent.model, [*prompt, output.tokens[1]], 1)[0],
        plain_greedy(agent.model, prompt, 3)[2],
    ]


@pytest.mark.parametrize("chunk", [4, 9, 50])
def test_prompt_logprobs_and_logits_equal_plain_forward(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(prompt_outputs, "_SCORED_POSITIONS", 6)
    agent = tiny_agent()
    driver = Driver(agent)
    prompt = prompt_of(25)
    expected = plain_logits(agent.model, prompt)
    driver.start(6, prompt)
    entries, logits = [], []
    for begin in range(0, 25, chunk):
        tokens, following = prompt[begin : begin + chunk], prompt[begin + chunk : begin + chunk + 1]
        row = driver.chunk(
            6,
            tokens,
            sample=not following,
            prompt_logprobs=3,
            next_token=following[0] if following else None,
            output_logits=True,
        )
        output = driver.step(prefill=[row])
        entries += output.prompt_logprobs[6]
        logits.append(output.logits[6])
        assert output.logits[6].shape == (len(tokens), VOCAB_SIZE)
    assert output.tokens == [int(expected[-1].argmax())]
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=1e-4)
    logprobs = expected.log_softmax(-1)
    assert len(entries) == 24
    for position, entry in enumerate(entries):
        successor = prompt[position + 1]
        assert [token for token, _ in entry] == [successor, *logprobs[position].topk(3).indices.tolist()]
        for token, value in entry:
            assert value == pytest.approx(logprobs[position, token].item(), abs=1e-4)


def test_scoring_without_sampling() -> None:
    agent = tiny_agent()
    driver = Driver(agent)
    driver.start(0, prompt_of(5))
    output = driver.step(prefill=[driver.chunk(0, prompt_of(5), sample=False, prompt_logprobs=0)])
    assert output.tokens == []
    assert [len(entry) for entry in output.prompt_logprobs[0]] == [1] * 4
    assert output.logits == {}


def test_a_single_token_has_no_successor_to_score() -> None:
    driver = Driver(tiny_agent())
    driver.start(0, [3])
    assert driver.step(prefill=[driver.chunk(0, [3], prompt_logprobs=2)]).prompt_logprobs == {0: []}


def test_generated_logprobs_are_the_models_own() -> None:
    agent = tiny_agent()
    driver = Driver(agent)
    prompt = prompt_of(8)
    driver.start(0, prompt, SamplingParams(temperature=0.3, top_k=2, presence_penalty=1.5, seed=1, logprobs=2))
    output = driver.step(prefill=[driver.chunk(0, prompt)])
    exact = plain_logits(agent.model, prompt)[-1].log_softmax(-1)
    chosen, *top = output.logprobs[0]
    assert chosen[0] == output.tokens[0]
    assert [token for token, _ in top] == exact.topk(2).indices.tolist()
    for token, value in [chosen, *top]:
        assert value == pytest.approx(exact[token].item(), abs=1e-4)


def test_the_same_seed_gives_the_same_answer_in_any_company() -> None:
    agent = tiny_agent()
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=2**63 + 11)
    prompt = prompt_of(7)
    alone = Driver(agent).generate(0, prompt, 12, params)
    driver = Driver(agent)
    for slot in (1, 2, 3):
        driver.start(slot, prompt_of(4 + slot, seed=slot), SamplingParams(temperature=1.5, seed=slot))
    driver.step(prefill=[driver.chunk(slot, prompt_of(4 + slot, seed=slot)) for slot in (1, 2, 3)])
    driver.start(9, prompt, params)
    tokens = [driver.step([3, 1], [driver.chunk(9, prompt)]).tokens[-1]]
    while len(tokens) < 12:
        output = driver.step([2, 9, 1] if len(tokens) % 2 else [9, 3])
        tokens.append(output.tokens[output.slots.index(9)])
    assert tokens == alone
    assert Driver(agent).generate(0, prompt, 12, SamplingParams(temperature=1.0, top_p=0.95, seed=12)) != alone


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    prompts = {slot: prompt_of(5 + slot, seed=slot) for slot in range(5)}

    def run(bad_slot: int | None) -> list[list[int]]:
        agent = tiny_agent()
        driver = Driver(agent)
        rows = []
        for slot, prompt in prompts.items():
            tokens = [*prompt[:-1], NAN_TOKEN] if slot == bad_slot else prompt
            driver.start(slot, tokens, SamplingParams(temperature=0.8, seed=slot))
            rows.append(driver.chunk(slot, tokens))
        outputs = [driver.step(prefill=rows)]
        outputs += [driver.step(decode=list(prompts)) for _ in range(6)]
        for output in outputs:
            assert set(output.errors) == ({bad_slot} if bad_slot is not None else set())
        # The blocks of the bad row go to a new sequence, whose attention must not find a NaN in their unused part.
        if bad_slot is not None:
            driver.start(bad_slot, prompts[bad_slot])
            tables = set(driver.free[:4])
            output = driver.step(prefill=[driver.chunk(bad_slot, prompts[bad_slot])])
            assert set(driver.tables[bad_slot]) <= tables
            assert output.errors == {}
            assert output.tokens == plain_greedy(agent.model, prompts[bad_slot], 1)
        return [output.tokens for output in outputs]

    good, bad = run(None), run(2)
    for with_bad, without in zip(bad, good, strict=True):
        assert with_bad[:2] + with_bad[3:] == without[:2] + without[3:]
        assert 0 <= with_bad[2] < VOCAB_SIZE


def test_a_chunk_that_is_not_finite_is_named_before_anything_is_sampled() -> None:
    agent = tiny_agent()
    driver = Driver(agent)
    driver.start(1, [1, 2])
    driver.start(0, [1, NAN_TOKEN, 2, 3, 4, 5])
    rows = [driver.chunk(1, [1, 2]), driver.chunk(0, [1, NAN_TOKEN, 2], sample=False, output_logits=True)]
    output = driver.step(prefill=rows)
    assert output.slots == [1]
    assert list(output.errors) == [0]
    assert "not finite" in output.errors[0]


def test_nan_in_the_cache_reaches_no_row_that_does_not_see_it() -> None:
    """Attention reads whole tiles; what it masks is not multiplied by 0, which would leave NaN."""
    prompts = {slot: prompt_of(length, seed=slot) for slot, length in ((0, 3), (1, 14), (2, 6))}
    tokens = []
    for poisoned in (False, True):
        agent = tiny_agent()
        driver = Driver(agent)
        if poisoned:
            with torch.inference_mode():
                for part in agent._pool:
                    part.fill_(torch.nan)
        for slot, prompt in prompts.items():
            driver.start(slot, prompt)
        first = driver.step(prefill=[driver.chunk(slot, prompt) for slot, prompt in prompts.items()])
        steps = [first, *(driver.step(decode=list(prompts)) for _ in range(6))]
        assert not any(step.errors for step in steps)
        tokens.append([step.tokens for step in steps])
    assert tokens[0] == tokens[1]


def test_an_empty_step_does_its_bookkeeping() -> None:
    agent = tiny_agent()
    output = agent.step(
        Batch(step=9, starts=[], new_blocks=[(0, 0, 0, [5, 6])], copies=[(1, 2)], decode=[], prefill=[])
    )
    assert (output.step, output.slots, output.tokens) == (9, [], [])
    assert agent._tables._slots._blocks[0, 0, :3].tolist() == [5, 6, 0]


def test_limits_say_what_was_found() -> None:
    agent = tiny_agent(session_len=100, block_size=16)
    limits = agent.limits
    assert (limits.num_blocks, limits.block_size, limits.max_position, limits.vocab_size) == (80, 16, 100, VOCAB_SIZE)
    assert limits.num_slots == 16
    assert (limits.device, limits.dtype, limits.architecture) == ("cpu", "float32", "LlamaForCausalLM")
    assert limits.num_parameters == sum(parameter.numel() for parameter in agent.model.parameters())
    assert limits.dynamic_rope_from is None


def test_session_len_beyond_the_model_is_warned_about_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    assert tiny_agent(session_len=128).limits.max_position == 128
    assert not caplog.records
    model = tiny_llama()
    agent = tiny_agent(model, session_len=300)
    assert agent.limits.max_position == 300
    (record,) = caplog.records
    assert re.search(r"300.*128.*rope_scaling_factor", record.getMessage())
    prompt = prompt_of(150)
    assert Driver(agent).generate(0, prompt, 1, chunk=64) == [int(plain_logits(model, prompt)[-1].argmax())]


@pytest.mark.parametrize("change", [{"rope": None}, {"position_offset": 0}, {"beyond": "queries see chunks"}])
def test_session_len_beyond_positions_that_end_is_refused(change: dict[str, Any]) -> None:
    model = tiny_llama()
    model.config = msgspec.structs.replace(model.config, **change)
    with pytest.raises(InvalidParameter, match=r"129.*128 positions") as caught:
        tiny_agent(model, session_len=129)
    assert caught.value.param == "session_len"


def test_rotary_scaling_extends_the_session() -> None:
    model = tiny_llama(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert tiny_agent(model).limits.max_position == 256
    # Its base grows with the prompt, so that any length will do.
    agent = tiny_agent(model, session_len=600)
    assert agent.limits.max_position == 600
    assert agent.limits.dynamic_rope_from == 128
    driver = Driver(agent)
    prompt = prompt_of(150)
    assert driver.generate(0, prompt, 1, chunk=64) == [int(plain_logits(model, prompt)[-1].argmax())]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        ModelAgent(EngineConfig(), tmp_path)


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidParameter, match="no CUDA device"):
        tiny_agent(device_type="cuda")


@pytest.mark.parametrize("settings", [{"block_size": 8}, {"cache_block_seq_len": 40}])
def test_a_gpu_refuses_blocks_that_attention_cannot_read_before_it_loads(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter, match=r"block_size is \d+, .* multiple of 16") as refused:
        check_block_size(EngineConfig(**settings), torch.device("cuda"))
    assert refused.value.param == "block_size"
    check_block_size(EngineConfig(**settings), torch.device("cpu"))
    check_block_size(EngineConfig(block_size=48), torch.device("cuda"))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_runs(name: str) -> None:
    model = tiny_llama().to(getattr(torch, name))
    agent = tiny_agent(model, dtype=name)
    assert agent.limits.dtype == name
    assert len(Driver(agent).generate(0, prompt_of(11), 4, GREEDY, chunk=5)) == 4


def test_large_finite_values_in_half_precision_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().to(torch.float16)
    agent = tiny_agent(model, dtype="float16")
    # Their sum is beyond float16.
    large = torch.full((20, 64), 100.0, dtype=torch.float16)
    monkeypatch.setattr(model, "forward", lambda step: large)
    monkeypatch.setattr(model, "before_last", lambda step: large)
    monkeypatch.setattr(model, "last_hidden", lambda residual, step, sampled: residual[:1])
    driver = Driver(agent)
    driver.start(0, prompt_of(20))
    assert driver.step(prefill=[driver.chunk(0, prompt_of(20))]).errors == {}


def test_logits_belong_to_the_user() -> None:
    driver = Driver(tiny_agent())
    driver.start(0, [1, 2, 3])
    logits = driver.step(prefill=[driver.chunk(0, [1, 2, 3], sample=False, output_logits=True)]).logits[0]
    logits += 1.0
    assert not logits.is_inference()


def test_graphs_are_captured_of_what_most_steps_replay() -> None:
    """Each takes tens of milliseconds of a start. Adapters have graphs of their own only where there are slots; ranks
    draw from lists, and what needs whole rows of logits is launched kernel by kernel."""

    def counts(agent: ModelAgent) -> dict[str, int]:
        return {part.name: len(part.sizes) for part in agent._captured_parts() if part.replayed}

    agent = tiny_agent(max_batch_size=256)
    plain = counts(agent)
    assert plain == {"mixed": 28, "forward": 46, "sample": 46}
    agent._in_group = True
    assert counts(agent) == {"mixed": 28, "forward": 46, "sample from lists": 46}
    adapted = counts(tiny_agent(max_batch_size=256, max_loras=1))
    assert adapted == {**plain, "mixed with adapters": 28, "forward with adapters": 46}


def test_no_step_of_a_longer_context_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sparse attention begins to choose: a graph knows no context's length."""
    for longest, captured in ((None, [True] * 7), (8, [True] * 4 + [False] * 3)):
        agent = tiny_agent()
        graphs, seen = object(), list[bool]()
        launch = agent._launch_mixed

        def spied(batch: Batch, pending: Any, given: Any, launch: Any = launch, seen: list[bool] = seen) -> None:
            seen.append(given is not None)
            launch(batch, pending, None)

        monkeypatch.setattr(agent, "_launch_mixed", spied)
        monkeypatch.setattr(agent, "_launch_decode", spied)
        agent._graphs, agent._captured_context = graphs, longest  # type: ignore[assignment]
        Driver(agent).generate(3, prompt_of(5), 7, chunk=1000)
        assert seen == captured
