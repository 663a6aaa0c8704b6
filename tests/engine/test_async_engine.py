"""AsyncEngine over a fake executor: answers, stopping, lengths, bad input, pipelining, stats."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import (
    ContextLengthExceeded,
    InvalidMessage,
    InvalidParameter,
    RequestFailed,
)
from asyncllm.protocol import Batch, Limits, StepOutput
from asyncllm.testing import ByteTokenizer, FakeEngine, FakeExecutor, FakeTemplate, hash_oracle
from asyncllm.types import Chunk, Response
from tests.cycles import no_cycles

pytestmark = pytest.mark.anyio


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**{"random_seed": 1, **fields})


async def collect(generation: Any) -> list[Chunk]:
    return [chunk async for chunk in generation]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - gauges have no event
        await asyncio.sleep(0.002)


class TestAnswers:
    async def test_chunks_add_up_and_the_last_one_says_why_it_ends(self) -> None:
        async with FakeEngine("grüße, 世界!") as engine:
            chunks = await collect(engine.generate("Hi"))
        assert "".join(chunk.text for chunk in chunks) == "grüße, 世界!"
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert "\ufffd" not in "".join(chunk.text for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == [*"grüße, 世界!".encode(), 257]
        assert chunks[-1].generate_token_len == len(tokens)
        assert {chunk.input_token_len for chunk in chunks} == {len("\x02user\x1fHi\x03\x02assistant\x1f")}

    async def test_an_answer_is_the_coroutine_of_a_task(self) -> None:
        async with FakeEngine() as engine, engine.session() as session:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(engine.generate(text)) for text in ("one", "two")]
                asked.append(tasks.create_task(session.chat("three")))
            assert [task.result().text for task in asked] == ["one", "two", "three"]
            async with anyio.create_task_group() as group:
                group.start_soon(engine.generate, "four")
            assert engine.stats().requests_finished == 4
            with pytest.raises(InvalidMessage):
                await asyncio.create_task(engine.generate(""))
            with no_cycles():
                cancelled = asyncio.create_task(engine.generate("five"))
                await asyncio.sleep(0)
                cancelled.cancel()
                await asyncio.wait([cancelled])
                del cancelled

    async def test_awaiting_gives_the_whole_response(self) -> None:
        async with FakeEngine("pong") as engine:
            response = await engine.generate("ping")
            one_chunk = await collect(engine.generate("ping", stream_response=False))
            twice = engine.generate("ping")
            assert await twice is await twice
        assert isinstance(response, Response)
        assert (response.text, response.finish_reason, response.generate_token_len) == ("pong", "stop", 5)
        assert [chunk.text for chunk in one_chunk] == ["pong"]

    async def test_several_answers_to_one_prompt(self) -> None:
        async with FakeEngine(oracle=hash_oracle(258)) as engine:
            settings = config(n=3, temperature=1.0, top_k=0, max_new_tokens=8, ignore_eos=True, random_seed=7)
            response = await engine.generate("Hi", settings)
            chunks = await collect(engine.generate("Hi", settings))
            single = await engine.generate("Hi", config(temperature=1.0, top_k=0, max_new_tokens=8, random_seed=7))
        assert len(response.choices) == 3
        assert len({tuple(choice.token_ids) for choice in response.choices}) == 3
        assert single.token_ids == response.choices[0].token_ids[: len(single.token_ids)]
        streamed = Response.collect(chunks)
        assert [choice.token_ids for choice in streamed.choices] == [choice.token_ids for choice in response.choices]
        assert [chunk.finish_reason for chunk in chunks].count("length") == 3

    async def test_logprobs_come_with_their_tokens(self) -> None:
        async with FakeEngine("pong") as engine:
            settings = config(logprobs=2, prompt_logprobs=1)
            chunks = await collect(engine.generate("ping", settings))
            whole = await engine.generate("ping", settings)
        for chunk in chunks:
            assert chunk.logprobs is not None
            assert [next(iter(entry)) for entry in chunk.logprobs] == chunk.token_ids
        assert [chunk.prompt_logprobs is not None for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        assert whole.prompt_logprobs is not None
        assert whole.prompt_logprobs[0] is None
        assert len(whole.prompt_logprobs) == whole.input_token_len
        assert [next(iter(entry)) for entry in whole.logprobs or []] == whole.token_ids

    async def test_tokens_by_id_and_raw_text(self) -> None:
        async with FakeEngine(lambda question: question[::-1]) as engine:
            assert (await engine.generate(input_ids=[97, 98, 99])).text == "cba"
            assert (await engine.generate("abc", do_preprocess=False)).text == "cba"
            assert (await engine.generate([{"role": "user", "content": "abc"}])).text == "cba"

    async def test_a_batch_keeps_its_order_and_streams_as_it_comes(self) -> None:
        prompts = [str(number) * (9 - number) for number in range(8)]
        done: list[int] = []
        async with FakeEngine() as engine:
            responses = await engine.batch_infer(prompts, on_response=lambda response: done.append(response.index))
            texts = [""] * 8
            async for chunk in engine.stream_infer(prompts):
                texts[chunk.index] += chunk.text
            single = await engine.batch_infer("one")
        assert isinstance(responses, list)
        assert [response.text for response in responses] == prompts == texts
        assert done == list(range(8))
        assert isinstance(single, Response)

    async def test_a_batch_starts_its_longest_answers_first_and_keeps_the_order_of_equals(self) -> None:
        lengths = [3, 9, None, 9]
        async with FakeEngine("x" * 12, EngineConfig(max_batch_size=1, session_len=64)) as engine:
            responses = await engine.batch_infer(
                [[70 + index] for index in range(4)], [config(max_new_tokens=length) for length in lengths]
            )
            admitted = [row.tokens[0] - 70 for batch in engine.executor.batches for row in batch.prefill]
        assert isinstance(responses, list)
        assert [response.index for response in responses] == [0, 1, 2, 3]
        assert [response.generate_token_len for response in responses] == [3, 9, 13, 9]
        assert admitted == [2, 1, 3, 0]

    async def test_parallel_requests_answer_as_if_alone(self) -> None:
        async with FakeEngine(
            oracle=hash_oracle(258),
            backend_config=EngineConfig(max_batch_size=5, max_prefill_token_num=16),
            num_blocks=40,
        ) as engine:
            settings = config(max_new_tokens=20)
            alone = [(await engine.generate(f"question {number}", settings)).token_ids for number in range(10)]
            together = await asyncio.gather(
                *(engine.generate(f"question {number}", settings).response() for number in range(10))
            )
            again = await asyncio.gather(
                *(engine.generate("same", settings, session_id=5).response() for _ in range(50))
            )
        assert [response.token_ids for response in together] == alone
        assert len({tuple(response.token_ids) for response in again}) == 1


class TestStopping:
    async def test_a_stop_word_across_chunks_is_cut_and_never_shown(self) -> None:
        async with FakeEngine("one STOP two") as engine:
            chunks = await collect(engine.generate("Hi", config(stop_words=["STOP"])))
            kept = await engine.generate("Hi", config(stop_words=["STOP"], include_stop_str_in_output=True))
            whole = await engine.generate("Hi", config(stop_words=["STOP"]))
        assert "".join(chunk.text for chunk in chunks) == whole.text == "one "
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", "STOP")
        assert kept.text == "one STOP"

    async def test_a_word_that_only_begins_is_shown_in_the_end(self) -> None:
        async with FakeEngine("one STO") as engine:
            response = await engine.generate("Hi", config(stop_words=["STOP"]))
            cut = await engine.generate("Hi", config(stop_words=["STOP"], max_new_tokens=6))
        assert (response.text, response.stop_reason) == ("one STO", None)
        assert (cut.text, cut.finish_reason) == ("one ST", "length")

    async def test_a_stop_word_with_the_last_token_is_a_stop(self) -> None:
        async with FakeEngine("abcdef") as engine:
            response = await engine.generate("Hi", config(stop_words=["cd"], max_new_tokens=4))
        assert (response.text, response.finish_reason, response.stop_reason) == ("ab", "stop", "cd")

    async def test_stop_token_ids(self) -> None:
        async with FakeEngine("abcdef") as engine:
            cut = await engine.generate("Hi", config(stop_token_ids=[ord("d")]))
            kept = await engine.generate("Hi", config(stop_token_ids=[ord("d")], include_stop_str_in_output=True))
            unnamed = await engine.generate("Hi")
        assert (cut.text, cut.finish_reason, cut.stop_reason) == ("abc", "stop", ord("d"))
        assert cut.token_ids == list(b"abcd")
        assert kept.text == "abcd"
        assert unnamed.stop_reason is None

    async def test_ignore_eos_goes_on(self) -> None:
        async with FakeEngine("ab") as engine:
            response = await engine.generate("Hi", config(ignore_eos=True, max_new_tokens=5))
        assert response.token_ids == [97, 98, 257, 257, 257]
        assert (response.text, response.finish_reason) == ("ab", "length")

    async def test_no_stop_before_min_new_tokens(self) -> None:
        async with FakeEngine("ab") as engine:
            response = await engine.generate("Hi", config(min_new_tokens=4, max_new_tokens=9))
        assert response.generate_token_len >= 5
        assert response.finish_reason in ("stop", "length")


class TestLength:
    async def test_none_means_up_to_the_session_length(self) -> None:
        async with FakeEngine("x" * 500, EngineConfig(session_len=64)) as engine:
            response = await engine.generate("Hi", config(max_new_tokens=None))
            assert response.finish_reason == "length"
            assert response.input_token_len + response.generate_token_len == 64

    @pytest.mark.parametrize(
        ("settings", "device", "limit"),
        [
            ({"session_len": 20}, {}, 19),
            ({}, {"max_position": 24}, 23),
            ({}, {"num_blocks": 3, "block_size": 8}, 23),
            ({"session_len": 99}, {"num_blocks": 2, "block_size": 8}, 15),
        ],
    )
    async def test_the_longest_prompt_answers_and_one_token_more_is_refused(
        self, settings: dict[str, int], device: dict[str, int], limit: int
    ) -> None:
        async with FakeEngine("xyz", EngineConfig(**settings), **device) as engine:
            response = await engine.generate(input_ids=[65] * limit)
            assert (response.text, response.finish_reason) == ("x", "length")
            with pytest.raises(ContextLengthExceeded, match=f"has {limit + 1} tokens") as caught:
                await engine.generate(input_ids=[65] * (limit + 1))
            assert (caught.value.prompt_len, caught.value.limit) == (limit + 1, limit)
            assert (await engine.generate(input_ids=[65] * limit)).text == "x"


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"messages": ""}, InvalidMessage),
            ({"messages": 42}, InvalidMessage),
            ({"messages": None}, InvalidMessage),
            ({"messages": [{"role": "user", "content": "a"}], "do_preprocess": False}, InvalidMessage),
            ({"input_ids": [258]}, InvalidParameter),
            ({"input_ids": [True]}, InvalidParameter),
            ({"input_ids": "abc"}, InvalidParameter),
            ({"input_ids": []}, InvalidMessage),
            ({"messages": "a", "step": 3}, InvalidParameter),
            ({"messages": "a", "sequence_end": False}, InvalidParameter),
            ({"messages": "a", "adapter_name": "lora"}, InvalidParameter),
            ({"messages": "a", "gen_config": {"n": 2}}, InvalidParameter),
            ({"messages": "a", "gen_config": GenerationConfig(top_p=2)}, InvalidParameter),
            ({"messages": "a", "gen_config": GenerationConfig(stop_token_ids=[9999])}, InvalidParameter),
            ({"messages": "a", "gen_config": GenerationConfig(logit_bias={-1: 1.0})}, InvalidParameter),
        ],
    )
    async def test_it_is_refused_by_the_first_await_and_the_engine_goes_on(
        self, arguments: dict[str, Any], error: type[Exception]
    ) -> None:
        async with FakeEngine("fine") as engine:
            generation = engine.generate(**arguments)
            with pytest.raises(error):
                await anext(generation)
            with pytest.raises(error):
                await generation
            assert (await engine.generate("good")).text == "fine"
            assert engine.stats().requests_started == 1

    async def test_a_row_that_fails_does_not_touch_the_others(self) -> None:
        def failure(history: list[int]) -> str | None:
            return "not finite" if history[-2:] == [ord("b")] * 2 else None

        async with FakeEngine({"bad": "abbbb", "good": "abc"}, row_failure=failure) as engine:
            with pytest.raises(RequestFailed, match="not finite"):
                await engine.generate("bad")
            responses = await engine.batch_infer(["good", "bad", "good"])
            assert isinstance(responses, list)
            assert [response.text for response in responses] == ["abc", "", "abc"]
            assert "not finite" in (responses[1].error_message or "")
            ends = [chunk.finish_reason async for chunk in engine.stream_infer(["good", "bad"]) if chunk.finish_reason]
            assert sorted(ends) == ["error", "stop"]
            with pytest.raises(RequestFailed):
                await engine.generate("bad", config(n=3))
            assert engine.stats().requests_failed == 4

    async def test_an_answer_that_cannot_be_detokenized_fails_alone(self) -> None:
        class Broken:
            def push(self, ids: list[int]) -> str:
                raise ValueError("no such byte")

        async with FakeEngine() as engine:
            good, bad = engine.generate("long answer" * 3), engine.generate("bad" * 10)
            async with good, bad:
                await anext(good)
                await anext(bad)
                request = bad._request
                assert request is not None
                request.sequences[0].answer._detokenizer = Broken()  # type: ignore[assignment]
                with pytest.raises(RequestFailed, match="no such byte"):
                    await collect(bad)
                assert (await collect(good))[-1].finish_reason == "stop"


class TestPipelining:
    async def test_two_steps_are_in_flight_before_the_first_is_read_and_never_three(self) -> None:
        async with FakeEngine("x" * 50) as engine:
            engine.executor.pause()
            async with engine.generate("Hi") as generation:
                await asyncio.sleep(0.02)
                assert len(engine.executor.batches) == 2
                assert engine.stats().steps_in_flight == 2
                assert engine.executor.num_completed == 0
                engine.executor.advance(1)
                await anext(generation)
                await asyncio.sleep(0.02)
                assert (len(engine.executor.batches), engine.executor.num_completed) == (3, 1)
                engine.executor.resume()
        assert engine.executor.max_in_flight == 2

    async def test_late_steps_change_no_answer(self) -> None:
        answers = []
        for latency in (0.0, 0.002):
            async with FakeEngine(oracle=hash_oracle(258), latency=latency, num_blocks=16) as engine:
                responses = await asyncio.gather(
                    *(engine.generate(f"q{number}", config(max_new_tokens=12)).response() for number in range(6))
                )
                answers.append([response.token_ids for response in responses])
        assert answers[0] == answers[1]

    async def test_the_idle_engine_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with FakeEngine("pong") as engine:
            await engine.generate("ping")
            await until(lambda: not engine.stats().steps_in_flight)
            loop = engine.running()
            turns = 0
            original = loop._steps.launch

            def counted() -> None:
                nonlocal turns
                turns += 1
                original()

            monkeypatch.setattr(loop._steps, "launch", counted)
            before = resource.getrusage(resource.RUSAGE_SELF)
            await asyncio.sleep(0.25)
            after = resource.getrusage(resource.RUSAGE_SELF)
            assert turns == 0
            assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05
            await engine.generate("ping")
            assert turns > 0

    async def test_a_slow_reader_gets_longer_chunks(self) -> None:
        async with FakeEngine("y" * 100) as engine:
            fast = await collect(engine.generate("Hi"))
            async with engine.generate("Hi") as slow:
                await until(lambda: not engine.stats().running and not engine.stats().waiting)
                chunks = await collect(slow)
        assert len(fast) > 50
        assert len(chunks) == 1
        assert chunks[0].text == "y" * 100
        assert len(chunks[0].token_ids) == 101

    async def test_instant_steps_starve_no_task(self) -> None:
        """Other tasks of the loop run between any two steps."""
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        class Instant:
            """An executor whose steps are complete when they are submitted."""

            isolated = False

            def watch(self, *_: Any) -> None:
                pass

            def __init__(self) -> None:
                self.device = FakeExecutor(num_blocks=256).device

            async def start(self) -> Limits:
                return self.device.limits

            def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
                future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
                future.set_result(self.device.step(batch))
                return future

            async def close(self) -> None:
                pass

        engine = AsyncEngine("fake", executor=Instant(), tokenizer=ByteTokenizer(), chat_template=FakeTemplate())  # type: ignore[arg-type]
        task = asyncio.create_task(other())
        async with engine:
            response = await engine.generate("Hi", config(max_new_tokens=200, ignore_eos=True))
        task.cancel()
        assert response.generate_token_len == 200
        assert turns >= 200

    async def test_two_readers_of_one_answer_are_told(self) -> None:
        async with FakeEngine("x" * 50) as engine:
            engine.executor.pause()
            async with engine.generate("Hi") as generation:
                first = asyncio.create_task(anext(generation))  # type: ignore[arg-type]
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="Two coroutines"):
                    await anext(generation)
                engine.executor.resume()
                assert (await first).text == "x"


async def test_several_engines_at_once() -> None:
    async with FakeEngine("one") as one, FakeEngine("two") as two:
        answers = await asyncio.gather(one.generate("a").response(), two.generate("a").response())
    assert [answer.text for answer in answers] == ["one", "two"]


async def test_stats_add_up() -> None:
    async with FakeEngine("x" * 30, block_size=4) as engine:
        await engine.generate("Hello there")
        await engine.generate("Hello there")
        async with engine.generate("Hi") as generation:
            await anext(generation)
            busy = engine.stats()
        with pytest.raises(InvalidMessage):
            await engine.generate("")
        stats = engine.stats()
    assert busy.running == 1
    assert busy.blocks_held > 0
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0) or stats.steps_in_flight
    assert (stats.requests_started, stats.requests_finished, stats.requests_cancelled) == (3, 2, 1)
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
    assert stats.prefix_hit_rate > 0.2
    with pytest.raises(AttributeError):
        stats.running = 5  # type: ignore[misc]


@pytest.mark.anyio
async def test_a_scored_prompt_may_fill_the_session() -> None:
    async with FakeEngine("x", EngineConfig(session_len=8)) as engine:
        with pytest.raises(ContextLengthExceeded) as refused:
            await engine.get_ppl([1] * 9)
        assert refused.value.limit == 8
        assert "one new token" not in str(refused.value)


@pytest.mark.anyio
async def test_a_scored_prompt_that_fails_in_a_step_says_so() -> None:
    async with FakeEngine(row_failure=lambda history: "not finite" if 9 in history else None) as engine:
        with pytest.raises(RequestFailed, match="not finite"):
            await engine.get_ppl([1, 2, 9])
        assert await engine.get_ppl([1, 2, 3]) > 0


@pytest.mark.anyio
async def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    async with FakeEngine("fine", vocab_size=200) as engine:
        with pytest.raises(InvalidMessage, match=r"token id 240.*end at 199"):
            await engine.generate("\U0001f600", do_preprocess=False)
        async with engine.session() as session:
            with pytest.raises(InvalidMessage, match="token id 240"):
                await session.chat("\U0001f600", do_preprocess=False)
            assert session.token_ids == []
        assert (await engine.generate("Hi", config(max_new_tokens=2))).generate_token_len == 2
