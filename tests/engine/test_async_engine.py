"""AsyncEngine over a fake executor: answers, stopping, pipelining, starting, closing and dying."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncllm.batch import Batch, Limits, StepOutput
from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.engine.loop import EngineLoop
from asyncllm.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidMessage,
    InvalidParameter,
    ModelError,
    RequestFailed,
    UnsupportedFeature,
)
from asyncllm.testing import ByteTokenizer, FakeEngine, FakeExecutor, FakeTemplate, hash_oracle
from asyncllm.types import Chunk, Response

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
            ({"messages": "a", "adapter_name": "lora"}, UnsupportedFeature),
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
            original = loop._launch

            def counted() -> None:
                nonlocal turns
                turns += 1
                original()

            monkeypatch.setattr(loop, "_launch", counted)
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

    async def test_instant_steps_starve_nobody(self) -> None:
        """Other tasks of the loop run between any two steps."""
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        class Instant:
            """An executor whose steps are complete when they are submitted."""

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


class TestStartAndClose:
    async def test_before_start_and_after_close(self) -> None:
        engine = FakeEngine("x")
        with pytest.raises(EngineClosed, match="new"):
            await engine.generate("Hi")
        async with engine:
            with pytest.raises(EngineError, match="started before"):
                await engine.start()
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")
        with pytest.raises(EngineClosed):
            engine.session()
        with pytest.raises(EngineError, match="started before"):
            await engine.start()
        await engine.close()

    async def test_closing_a_new_engine(self) -> None:
        engine = FakeEngine("x")
        await engine.close()
        with pytest.raises(EngineError):
            await engine.start()

    async def test_a_failed_start_leaves_nothing(self) -> None:
        engine = FakeEngine("x", start_error=ModelError("no such file"))
        with pytest.raises(ModelError, match="no such file"):
            async with engine:
                pass
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")
        await engine.close()

    async def test_a_start_that_fails_after_the_executor_runs_closes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = FakeEngine("x")

        def broken(*_: object, **__: object) -> None:
            raise ValueError("no scheduler today")

        monkeypatch.setattr("asyncllm.engine.async_engine.Scheduler", broken)
        with pytest.raises(ValueError, match="no scheduler today"):
            await engine.start()
        with pytest.raises(EngineClosed):
            engine.executor.submit(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[]))

    async def test_closing_while_starting(self) -> None:
        engine, started = FakeEngine("x"), asyncio.Event()
        original = engine.executor.start

        async def slow() -> Limits:
            limits = await original()
            started.set()
            await asyncio.sleep(5)
            return limits

        engine.executor.start = slow  # type: ignore[method-assign]
        start = asyncio.create_task(engine.start())
        await started.wait()
        await asyncio.gather(engine.close(), engine.close())
        with pytest.raises(EngineClosed, match="while it was starting"):
            await start

    async def test_cancelling_the_start(self) -> None:
        engine = FakeEngine("x")
        original = engine.executor.start

        async def slow() -> Limits:
            await original()
            await asyncio.sleep(5)
            raise AssertionError

        engine.executor.start = slow  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.start()
        await engine.close()

    async def test_a_cancellation_in_the_turn_in_which_it_succeeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Late(EngineLoop):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                asyncio.get_running_loop().call_soon(start.cancel)

        monkeypatch.setattr("asyncllm.engine.async_engine.EngineLoop", Late)
        engine = FakeEngine("x")
        start = asyncio.create_task(engine.start())
        with pytest.raises(asyncio.CancelledError):
            await start
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")

    async def test_close_ends_open_requests(self) -> None:
        engine = FakeEngine("x" * 200, delay_per_token=0.001)
        await engine.start()
        session = engine.session()
        tasks = [
            asyncio.create_task(engine.generate("Hi").response()),
            asyncio.create_task(collect(engine.generate("Hi"))),
            asyncio.create_task(session.chat("Hi").response()),
        ]
        await asyncio.sleep(0.02)
        await asyncio.gather(engine.close(), engine.close(), engine.close())
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineClosed)
        assert session.closed

    async def test_close_while_prompts_arrive(self) -> None:
        engine = FakeEngine("x")
        await engine.start()
        generations = [engine.generate("Hi") for _ in range(3)]
        for generation in generations:
            await generation.start()
        await engine.close()
        for generation in generations:
            with pytest.raises(EngineClosed):
                await generation

    async def test_close_while_a_long_prompt_is_encoded(self) -> None:
        engine = FakeEngine("x", max_position=100_000, num_blocks=100_000)
        await engine.start()
        task = asyncio.create_task(engine.generate("y" * 20_000).response())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosed):
            await task

    async def test_a_cancelled_close_goes_on(self) -> None:
        engine = FakeEngine("x" * 200, delay_per_token=0.01)
        await engine.start()
        async with engine.generate("Hi"):
            task = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.close()
        with pytest.raises(EngineClosed):
            engine.stats()

    async def test_from_another_event_loop_it_is_refused(self) -> None:
        async with FakeEngine("x") as engine:

            async def elsewhere() -> None:
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.generate("Hi")
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.close()

            in_thread = asyncio.get_running_loop().run_in_executor
            with ThreadPoolExecutor(1) as pool:
                await in_thread(pool, lambda: asyncio.run(elsewhere()))
                with pytest.raises(EngineError, match="another event loop"):
                    await in_thread(pool, engine.stats)
            assert (await engine.generate("Hi")).text == "x"


class TestDeath:
    @pytest.mark.parametrize("fail_at", [0, 1, 5])
    async def test_open_and_later_calls_raise_with_the_cause(self, fail_at: int) -> None:
        async with FakeEngine("x" * 20, fail_at=fail_at, backend_config=EngineConfig(max_batch_size=2)) as engine:
            session = engine.session()
            tasks = [asyncio.create_task(engine.generate(f"q{number}").response()) for number in range(50)]
            tasks.append(asyncio.create_task(session.chat("Hi").response()))
            for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2):
                assert isinstance(error, EngineDead)
                assert isinstance(error.__cause__, RuntimeError)
            with pytest.raises(EngineDead, match="fails at step") as caught:
                await engine.generate("Hi")
            assert isinstance(caught.value.__cause__, RuntimeError)
            with pytest.raises(EngineDead):
                await session.chat("Hi")
            with pytest.raises(EngineDead):
                engine.stats()

    async def test_chunks_before_the_death_are_delivered_first(self) -> None:
        async with FakeEngine("abcdef", fail_at=3) as engine:
            generation = engine.generate("Hi")
            text = (await anext(generation)).text
            while len(text) < 3:
                text += (await anext(generation)).text
            assert text == "abc"
            with pytest.raises(EngineDead):
                await anext(generation)

    async def test_a_loop_that_is_cancelled_from_outside_is_closed(self) -> None:
        async with FakeEngine("x" * 20) as engine:
            generation = engine.generate("Hi")
            await anext(generation)
            engine.running()._task.cancel()
            with pytest.raises(EngineClosed):
                await collect(generation)
            with pytest.raises(EngineClosed):
                await engine.generate("Hi")

    async def test_a_step_that_the_executor_cancels_is_a_death(self) -> None:
        async with FakeEngine("x" * 20) as engine:
            engine.executor.pause()
            async with engine.generate("Hi") as generation:
                await asyncio.sleep(0.01)
                engine.running()._in_flight[0].cancel()
                engine.executor.resume()
                with pytest.raises(EngineDead, match="cancelled a step"):
                    await collect(generation)

    async def test_requests_that_had_only_arrived(self) -> None:
        async with FakeEngine("x" * 20, fail_at=2) as engine:
            first = engine.generate("Hi")
            await anext(first)
            late = engine.generate("late")
            await late.start()
            with pytest.raises(EngineDead):
                await late
            with pytest.raises(EngineDead):
                await collect(first)
