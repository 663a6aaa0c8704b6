"""Sessions: history in host memory, blocks only pinned, one turn at a time, and every way a turn can end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.requests.generation import Session
from asyncllm.errors import (
    ContextLengthExceeded,
    InvalidMessage,
    InvalidParameter,
    InvalidRequest,
    QueueFull,
    SessionBusy,
    SessionNotFound,
)
from asyncllm.testing import FakeEngine, hash_oracle

pytestmark = pytest.mark.anyio

ANSWERS = {"one": "first answer", "two": "second answer", "three": "third answer"}
FIRST = "\x02user\x1fone\x03\x02assistant\x1f"


def text(token_ids: list[int]) -> str:
    return bytes(token for token in token_ids if token < 256).decode()


def kept(engine: FakeEngine, session_id: int) -> Session:
    """The session that calls with this id have kept."""
    return Session(engine._lifecycle, engine._lifecycle.sessions.find(session_id))


async def test_turns_add_up_to_one_conversation() -> None:
    async with FakeEngine(ANSWERS) as engine, engine.session() as session:
        first = await session.chat("one")
        second = await session.chat("two")
        assert session.history == [("one", "first answer"), ("two", "second answer")]
        assert session.response is not None
        assert session.response.text == second.text == "second answer"
        assert text(session.token_ids) == FIRST + "first answer\x03\x02user\x1ftwo\x03\x02assistant\x1fsecond answer"
        assert session.token_ids.count(257) == 1, "the template says how earlier answers end"
        assert first.history_token_len == 0
        assert second.history_token_len + second.input_token_len + second.generate_token_len == session.step
        assert session.response.history_token_len == second.history_token_len
    assert session.closed


@pytest.mark.parametrize("cache_salt", [None, "acme"])
async def test_the_next_turn_finds_the_pinned_blocks(cache_salt: str | None) -> None:
    async with FakeEngine(ANSWERS, num_blocks=24, block_size=8) as engine, engine.session() as session:
        await session.chat("one", cache_salt=cache_salt)
        known = session.step
        for number in range(20):
            await engine.generate(f"other {number}", GenerationConfig(max_new_tokens=2))
        second = await session.chat("two", cache_salt=cache_salt)
        assert second.cached_token_len == known // 8 * 8 - 8 * (known % 8 == 0)
        assert second.cached_token_len > 0


async def test_a_turn_that_the_queue_refuses_is_no_history() -> None:
    config = EngineConfig(max_batch_size=1, max_queued_requests=1)
    async with FakeEngine(ANSWERS, config) as engine, engine.session() as session:
        await session.chat("one")
        before = list(session.token_ids)
        engine.executor.pause()
        others = [engine.generate("running"), engine.generate("waiting")]
        for generation in others:
            await generation.start()
        with pytest.raises(QueueFull):
            await session.chat("two")
        engine.executor.resume()
        assert session.token_ids == before
        assert session.history == [("one", "first answer")]
        assert [(await generation).text for generation in others] == ["running", "waiting"]


async def test_eviction_between_turns_costs_only_time() -> None:
    answers = []
    for crowd in (False, True):
        async with FakeEngine(oracle=hash_oracle(256), num_blocks=20, block_size=8) as engine:
            session = engine.session()
            settings = GenerationConfig(max_new_tokens=10)
            await session.chat("one", settings)
            if crowd:
                await engine.generate("x" * 120, settings)
            second = await session.chat("two", settings)
            answers.append(second.token_ids)
            assert (second.cached_token_len == 0) == crowd
    assert answers[0] == answers[1]


async def test_sessions_survive_preemption() -> None:
    settings = GenerationConfig(max_new_tokens=24)
    answers = []
    for num_blocks in (256, 22):
        async with FakeEngine(oracle=hash_oracle(256), num_blocks=num_blocks, block_size=8) as engine:
            sessions = [engine.session() for _ in range(4)]
            histories = []
            for question in ("one", "two"):
                await asyncio.gather(
                    *(session.chat(question + str(session.id), settings).response() for session in sessions)
                )
            histories = [session.token_ids for session in sessions]
            answers.append(histories)
            preemptions = engine.stats().preemptions
    assert preemptions > 0
    assert answers[0] == answers[1]


class TestByIdAndStep:
    async def test_start_end_and_step_are_views_on_a_session(self) -> None:
        async with FakeEngine(ANSWERS) as engine:
            first = await engine.generate("one", session_id=7, sequence_end=False)
            assert engine.stats().sessions == 1
            second = await engine.generate("two", session_id=7, sequence_start=False, sequence_end=False)
            assert second.history_token_len == first.input_token_len + first.generate_token_len
            last = await engine.generate("three", session_id=7, sequence_start=False)
            assert last.text == "third answer"
            assert engine.stats().sessions == 0
            with pytest.raises(SessionNotFound, match="no session 7"):
                await engine.generate("two", session_id=7, sequence_start=False)

    async def test_starting_again_forgets(self) -> None:
        async with FakeEngine(ANSWERS) as engine:
            await engine.generate("one", session_id=7, sequence_end=False)
            again = await engine.generate("two", session_id=7, sequence_end=False)
            assert again.history_token_len == 0
            assert engine.stats().sessions == 1

    async def test_numbers_of_callers_are_not_those_of_other_sessions(self) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            await session.chat("one")
            for number in range(10):
                await engine.generate("two", session_id=number, sequence_end=False)
            assert session.history == [("one", "first answer")]
            assert not session.closed
            assert engine.stats().sessions == 11

    async def test_a_refused_first_turn_begins_nothing(self) -> None:
        config = EngineConfig(session_len=200, max_batch_size=1, max_queued_requests=1)
        async with FakeEngine(ANSWERS, config) as engine:
            for prompt, settings in (("x" * 300, None), ("", None), ("one", GenerationConfig(n=2))):
                with pytest.raises(InvalidRequest):
                    await engine.generate(prompt, settings, session_id=7, sequence_end=False)
            engine.executor.pause()
            others = [engine.generate("running"), engine.generate("waiting")]
            for generation in others:
                await generation.start()
            with pytest.raises(QueueFull):
                await engine.generate("one", session_id=7, sequence_end=False)
            engine.executor.resume()
            assert engine.stats().sessions == 0
            await asyncio.gather(*others)
            await engine.generate("one", session_id=7, sequence_end=False)
            with pytest.raises(ContextLengthExceeded):
                await engine.generate("x" * 300, session_id=7, sequence_start=False, sequence_end=False)
            with pytest.raises(InvalidParameter):
                await engine.generate("one", GenerationConfig(n=2), session_id=7, sequence_end=False)
            assert kept(engine, 7).history == [("one", "first answer")]

    async def test_going_back_into_the_middle_of_an_answer(self) -> None:
        async with FakeEngine(ANSWERS) as engine:
            first = await engine.generate("one", session_id=7, sequence_end=False)
            step = first.input_token_len + len("first")
            second = await engine.generate("two", session_id=7, sequence_start=False, sequence_end=False, step=step)
            session = kept(engine, 7)
            assert second.history_token_len == step
            assert session.history == [("one", "first"), ("two", "second answer")]
            assert text(session.token_ids) == FIRST + "first\x03\x02user\x1ftwo\x03\x02assistant\x1fsecond answer"

    async def test_going_back_over_whole_turns(self) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            await session.chat("one")
            step = session.step
            await session.chat("two")
            session.rewind(step)
            assert session.history == [("one", "first answer")]
            session.rewind(0)
            assert (session.history, session.token_ids) == ([], [])
            assert (await session.chat("three")).history_token_len == 0

    @pytest.mark.parametrize("step", [-1, 10_000, "3", 1.5, True])
    async def test_a_step_outside_of_the_history_is_refused(self, step: Any) -> None:
        async with FakeEngine(ANSWERS) as engine:
            await engine.generate("one", session_id=7, sequence_end=False)
            before = list(kept(engine, 7).token_ids)
            with pytest.raises(InvalidParameter):
                await engine.generate("two", session_id=7, sequence_start=False, sequence_end=False, step=step)
            assert kept(engine, 7).token_ids == before

    async def test_token_ids_as_a_turn(self) -> None:
        async with FakeEngine(ANSWERS) as engine:
            await engine.generate(input_ids=[97, 98], session_id=7, sequence_end=False)
            second = await engine.generate("two", session_id=7, sequence_start=False, sequence_end=False)
            assert second.text == "second answer"
            assert kept(engine, 7).history[0] == ("ab", "ab")


class TestRefusedTurns:
    async def test_a_refused_turn_leaves_the_conversation_as_it_was(self) -> None:
        async with FakeEngine(ANSWERS, EngineConfig(session_len=200)) as engine, engine.session() as session:
            await session.chat("one")
            before = (session.token_ids, session.history)
            generation = engine.generate("x" * 300, session_id=session.id, sequence_start=False, step=9)
            with pytest.raises(ContextLengthExceeded):
                await generation
            with pytest.raises(InvalidMessage):
                await session.chat("")
            with pytest.raises(InvalidParameter, match="fork"):
                await session.chat("two", GenerationConfig(n=2))
            assert (session.token_ids, session.history) == before
            assert not session.busy
            assert (await session.chat("two")).text == "second answer"

    async def test_one_turn_at_a_time(self) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            engine.executor.pause()
            async with session.chat("one") as running:
                before = session.turns
                with pytest.raises(SessionBusy, match="one at a time"):
                    await session.chat("two")
                with pytest.raises(SessionBusy):
                    await engine.generate("two", session_id=session.id, sequence_start=False, step=1)
                with pytest.raises(SessionBusy):
                    session.fork()
                with pytest.raises(SessionBusy, match="before rewinding"):
                    session.rewind(0)
                assert session.turns is before
                engine.executor.resume()
                assert (await running).text == "first answer"
            assert (await session.chat("two")).text == "second answer"

    async def test_of_many_tasks_one_has_its_turn(self) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            results = await asyncio.gather(*(session.chat("one").response() for _ in range(64)), return_exceptions=True)
        assert sum(isinstance(result, SessionBusy) for result in results) == 63
        assert len(session.turns) == 1

    async def test_ended_and_unknown_sessions(self) -> None:
        async with FakeEngine(ANSWERS) as engine:
            session = engine.session()
            session.close()
            session.close()
            for call in (lambda: session.chat("one").response(), lambda: engine.end_session(session.id)):
                with pytest.raises(SessionNotFound):
                    await call()
            with pytest.raises(SessionNotFound):
                session.fork()
            with pytest.raises(SessionNotFound):
                session.rewind(0)
            await engine.stop_session(12345)
            assert engine.session().id != session.id, "an id is not given twice"


class TestStopping:
    async def test_stop_session_keeps_the_partial_answer(self) -> None:
        async with FakeEngine("abcdefghij", delay_per_token=0.001) as engine, engine.session() as session:
            generation = session.chat("one")
            chunks = [await anext(generation)]
            await engine.stop_session(session.id)
            chunks += [chunk async for chunk in generation]
            answer = "".join(chunk.text for chunk in chunks)
            assert chunks[-1].finish_reason == "abort"
            assert "abcdefghij".startswith(answer)
            assert session.history == [("one", answer)]
            assert session.response is not None
            assert session.response.finish_reason == "abort"
            assert (await session.chat("two")).history_token_len == session.turns[0].end

    async def test_stop_of_a_turn_that_is_still_being_encoded(self) -> None:
        async with (
            FakeEngine("y" * 50, max_position=100_000, num_blocks=100_000) as engine,
            engine.session() as session,
        ):
            task = asyncio.create_task(session.chat("x" * 10_000).response())
            await asyncio.sleep(0)
            assert session.busy
            await engine.stop_session(session.id)
            response = await task
            assert (response.finish_reason, response.text) == ("abort", "")

    @pytest.mark.parametrize("kept", [True, False])
    async def test_stop_of_an_answer_that_waits_for_its_adapter(self, kept: bool) -> None:
        config = EngineConfig(adapters={"a": "p", "b": "q"}, max_loras=2)
        async with FakeEngine("x" * 50, config, num_host_adapters=1) as engine:
            engine.executor.pause()
            running = engine.generate("one", adapter_name="a")
            await running.start()
            stopped = asyncio.create_task(
                engine.generate("two", adapter_name="b", session_id=7, sequence_end=not kept).response()
            )
            other = asyncio.create_task(engine.generate("two", adapter_name="b", session_id=8).response())
            await asyncio.sleep(0.01)
            await engine.stop_session(7)
            engine.executor.resume()
            assert (await running).text == (await other).text == "x" * 50
            response = await stopped
            assert (response.finish_reason, response.text) == ("abort", "")
            assert engine.stats().sessions == kept

    async def test_stop_of_an_answer_that_is_still_being_encoded(self) -> None:
        async with FakeEngine("y" * 50, max_position=100_000, num_blocks=100_000) as engine:
            task = asyncio.create_task(engine.generate("x" * 10_000, session_id=7).response())
            await asyncio.sleep(0)
            assert not engine.running().requests
            await engine.stop_session(7)
            response = await task
            assert (response.finish_reason, response.text) == ("abort", "")

    async def test_end_session_during_a_turn(self) -> None:
        async with FakeEngine("a" * 100) as engine:
            session = engine.session()
            generation = session.chat("one")
            await anext(generation)
            await engine.end_session(session.id)
            assert session.closed
            assert [chunk.finish_reason async for chunk in generation][-1] == "abort"
            assert engine.stats().sessions == 0
            with pytest.raises(SessionNotFound):
                await session.chat("two")

    async def test_an_abandoned_turn_counts_as_far_as_it_came(self) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            engine.executor.pause()
            generation = session.chat("one")
            await generation.start()
            engine.executor.advance(3)
            await anext(generation)
            generation.cancel()
            second = session.chat("two")  # without a wait for the first one's end
            start = asyncio.create_task(second.start())
            await asyncio.sleep(0)
            engine.executor.resume()
            await start
            assert (await second).text == "second answer"
            (prompt, answer), _ = session.history
            assert prompt == "one"
            assert "first answer".startswith(answer)

    async def test_two_tasks_after_an_abandoned_turn(self) -> None:
        """Both wait for its end; one goes on, the other is told that the session is busy."""
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:
            engine.executor.pause()
            generation = session.chat("one")
            await generation.start()
            await asyncio.sleep(0.005)
            tasks = [asyncio.create_task(session.chat(prompt).response()) for prompt in ("two", "three")]
            generation.cancel()  # both tasks run before the engine's turn that ends it
            tasks.append(asyncio.create_task(generation.aclose()))
            await asyncio.sleep(0)
            engine.executor.resume()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, SessionBusy) for result in results) == 1
            assert results[2] is None
            assert len(session.turns) == 2

    async def test_a_stop_word_is_no_part_of_the_history(self) -> None:
        async with FakeEngine("abc STOP def") as engine, engine.session() as session:
            response = await session.chat("one", GenerationConfig(stop_words=["STOP"]))
            assert response.text == "abc "
            assert text(session.token_ids) == FIRST + "abc "
            kept = await session.chat("one", GenerationConfig(stop_words=["STOP"], include_stop_str_in_output=True))
            assert text(session.token_ids).endswith("abc STOP")
            assert kept.text == "abc STOP"

    async def test_leaving_a_long_stop_word_out_of_the_history_is_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        word = "S" + "t" * 1600
        async with FakeEngine("ab\u00e9 " + word) as engine, engine.session() as session:
            decoded: list[int] = []
            decode = engine.tokenizer.decode
            monkeypatch.setattr(
                engine.tokenizer, "decode", lambda ids, **k: decoded.append(len(ids)) or decode(ids, **k)
            )
            response = await session.chat("one", GenerationConfig(stop_words=[word], max_new_tokens=3000))
            assert response.text == "ab\u00e9 "
            monkeypatch.undo()
            assert text(session.token_ids) == FIRST + "ab\u00e9 "
            assert sum(decoded) < 100_000, "the fake device decodes the prompt in every step"

    async def test_a_history_that_cannot_be_recorded_is_this_readers_trouble(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with FakeEngine(ANSWERS) as engine, engine.session() as session:

            def broken(*_: object) -> None:
                raise ValueError("no pins today")

            monkeypatch.setattr(engine._lifecycle.sessions, "pin", broken)
            neighbour = engine.generate("one")
            with pytest.raises(ValueError, match="no pins today"):
                await session.chat("one")
            assert (await neighbour).text == "first answer"
            monkeypatch.undo()
            assert not session.busy


class TestFork:
    async def test_a_fork_goes_its_own_way_and_shares_blocks(self) -> None:
        async with FakeEngine(ANSWERS, block_size=4) as engine, engine.session() as session:
            await session.chat("one")
            known = list(session.token_ids)
            with_two, with_three = session.fork(), session.fork()
            two, three = await asyncio.gather(with_two.chat("two").response(), with_three.chat("three").response())
            assert (two.text, three.text) == ("second answer", "third answer")
            assert two.cached_token_len >= len(known) // 4 * 4 - 4
            assert three.cached_token_len >= len(known) // 4 * 4 - 4
            assert session.token_ids == known
            assert with_two.history[0] == with_three.history[0] == session.history[0]
            assert len({session.id, with_two.id, with_three.id}) == 3
            with_two.close()
            assert (await session.chat("three")).text == "third answer"

    async def test_closed_sessions_leave_no_pins(self) -> None:
        async with FakeEngine(ANSWERS, block_size=4) as engine:
            session = engine.session()
            await session.chat("one")
            fork = session.fork()
            await fork.chat("two")
            cache = engine.running().scheduler.prefix_cache
            assert cache is not None
            assert cache._pins
            session.close()
            assert cache._pins
            fork.close()
            assert not cache._pins

    async def test_a_session_that_closes_in_a_turn_leaves_no_pins(self) -> None:
        async with FakeEngine(ANSWERS, block_size=4, latency=0.001) as engine:
            session = engine.session()
            generation = session.chat("one")
            await anext(generation)
            session.close()
            await generation.aclose()
            cache = engine.running().scheduler.prefix_cache
            assert cache is not None
            assert not cache._pins
            assert session.turns == []


async def test_chat_makes_a_session_and_takes_it_again() -> None:
    async with FakeEngine(ANSWERS) as engine:
        first = engine.chat("one")
        await first
        assert first.session is not None
        second = engine.chat("two", first.session)
        assert (await second).text == "second answer"
        assert first.session.history == [("one", "first answer"), ("two", "second answer")]


async def test_without_prefix_cache_sessions_still_answer() -> None:
    async with FakeEngine(ANSWERS, EngineConfig(enable_prefix_caching=False)) as engine, engine.session() as session:
        await session.chat("one")
        second = await session.chat("two")
        assert (second.text, second.cached_token_len) == ("second answer", 0)
