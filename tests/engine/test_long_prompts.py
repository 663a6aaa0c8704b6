"""Long prompts: refused before they are encoded if they cannot fit; users take turns; the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.requests.text_threads import TextThreads
from asyncllm.errors import ContextLengthExceeded, EngineClosed, InvalidMessage, InvalidParameter, QueueFull
from asyncllm.event_loop.request_gate import MAX_PER_ITERATION
from asyncllm.testing import FakeEngine
from tests.engine.waits import until

pytestmark = pytest.mark.anyio

SHORT = EngineConfig(session_len=1000)


class Watched:
    """Counts the characters that a tokenizer encodes, and whether that was in the event loop."""

    def __init__(self, engine: FakeEngine) -> None:
        self.characters = 0
        self.lists = 0
        self.in_loop = 0
        self.largest_in_loop = 0
        self._encode_batch = engine.tokenizer.encode_batch
        self._loop_thread = threading.current_thread()
        engine.tokenizer.encode_batch = self.encode_batch  # type: ignore[method-assign]

    def encode_batch(self, texts: Any, **options: Any) -> Any:
        size = sum(map(len, texts))
        self.lists += len(texts) > 1
        self.characters += size
        if threading.current_thread() is self._loop_thread:
            self.in_loop += size
            self.largest_in_loop = max(self.largest_in_loop, size)
        return self._encode_batch(texts, **options)


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\u00e9" * 1_000_000, "a b " * 250_000])
async def test_what_cannot_fit_is_refused_before_it_is_encoded(text: str) -> None:
    async with FakeEngine(backend_config=SHORT) as engine:
        watched = Watched(engine)
        for call in (
            engine.generate(text).response,
            engine.generate(text, do_preprocess=False).response,
            engine.session().chat(text).response,
            lambda: engine.embed(text),
        ):
            with pytest.raises(ContextLengthExceeded, match="at least") as caught:
                await call()
            assert caught.value.prompt_len > 1000
        assert watched.characters < 100_000


async def test_of_white_space_that_may_vanish_the_beginning_is_encoded() -> None:
    async with FakeEngine(backend_config=SHORT) as engine:
        watched = Watched(engine)
        with pytest.raises(ContextLengthExceeded, match="at least"):
            await engine.generate(" " * 1_000_000)
        assert watched.characters < 20_000


async def test_what_just_fits_and_what_just_does_not_is_encoded_whole() -> None:
    async with FakeEngine("a", SHORT) as engine:
        assert (await engine.generate("a" * 999, do_preprocess=False)).input_token_len == 999
        with pytest.raises(ContextLengthExceeded, match="has 1000 tokens"):
            await engine.generate("a" * 1000, do_preprocess=False)
        assert len(await engine.encode("a" * 100_000, do_preprocess=False)) == 100_000, (
            "what is not answered may be long"
        )


async def test_owners_take_turns() -> None:
    threads, order = TextThreads(), []
    hold = threading.Event()
    held = [asyncio.ensure_future(threads.run(hold.wait, 9, "hold")) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = [
        asyncio.ensure_future(threads.run(lambda name=f"{owner}{number}": order.append(name), 9, owner))
        for owner, count in (("a", 12), ("b", 1), ("c", 2))
        for number in range(count)
    ]
    await asyncio.sleep(0)
    waiting[1].cancel()
    hold.set()
    await asyncio.gather(*held, *waiting, return_exceptions=True)
    assert max(map(order.index, ("b0", "c0"))) < 6, order
    assert "a1" not in order
    await threads.close()
    with pytest.raises(EngineClosed):
        await threads.run(list, 1, "a")


async def test_what_waits_is_bounded_and_ends_with_the_engine() -> None:
    threads, hold = TextThreads(max_waiting=100), threading.Event()
    running = [asyncio.ensure_future(threads.run(hold.wait, 90, "a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="characters"):
        await threads.run(list, 90, "b")
    closing = asyncio.ensure_future(threads.close())
    with pytest.raises(EngineClosed):
        await running[2]
    assert not closing.done()
    hold.set()
    assert await running[0]
    assert await running[1]
    await closing
    await threads.close()


async def test_no_encoding_thread_outlives_its_engine() -> None:
    before, began, hold = set(threading.enumerate()), threading.Event(), threading.Event()
    engine = FakeEngine("x", max_position=100_000, num_blocks=100_000)
    await engine.start()
    encode = engine.tokenizer.encode

    def encode_slowly(*arguments: Any, **options: Any) -> Any:
        began.set()
        assert hold.wait(10)
        return encode(*arguments, **options)

    engine.tokenizer.encode = encode_slowly  # type: ignore[method-assign]
    asking = asyncio.ensure_future(engine.generate("y" * 20_000).response())
    await until(began.is_set)
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    asking.cancel()
    await asyncio.sleep(0.05)
    assert not closing.done()
    hold.set()
    await closing
    assert set(threading.enumerate()) <= before
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_bad_words_of_many_prompts_are_encoded_once_and_in_a_thread() -> None:
    config = GenerationConfig(bad_words=[f"word {number}" for number in range(64)], max_new_tokens=1, n=2)
    async with FakeEngine() as engine:
        watched = Watched(engine)
        await engine.batch_infer(["Hi"] * 50, config, do_preprocess=False)
        assert watched.lists == 1
        assert watched.largest_in_loop < 10


async def test_stop_words_are_bounded() -> None:
    words = [f"{number:03}" + "a" * 8000 for number in range(8)]
    async with FakeEngine("b") as engine:
        assert (await engine.generate("Hi", GenerationConfig(stop_words=words, n=8))).text == "b"
        with pytest.raises(InvalidParameter, match="64024 characters"):
            await engine.generate("Hi", GenerationConfig(stop_words=words, n=16))


async def test_large_chats_and_lists_of_ids_are_rendered_in_a_thread() -> None:
    chat = [{"role": "user", "content": "<eos>" * 3}] * 60
    async with FakeEngine("b") as engine:
        loop_thread, seen = threading.current_thread(), []
        render = engine.chat_template.render
        engine.chat_template.render = lambda *a, **k: (  # type: ignore[method-assign]
            seen.append(threading.current_thread()) or render(*a, **k)
        )
        await engine.generate(chat)
        await engine.encode([chat])
        await engine.generate("Hi")
        async with engine.session() as session:
            await session.chat("Hi")
            await session.chat(chat)
        assert loop_thread not in seen[:2]
        assert seen[2] is loop_thread
        assert seen[-1] is not loop_thread


async def test_a_crowd_begins_a_few_in_each_turn() -> None:
    async with FakeEngine("b") as engine:
        engine.executor.pause()
        crowd = [asyncio.ensure_future(engine.generate(input_ids=[65]).response()) for _ in range(100)]
        begun = [0]
        while begun[-1] < 100:
            await asyncio.sleep(0)
            begun.append(engine.stats().requests_started)
        assert max(after - before for before, after in pairwise(begun)) <= MAX_PER_ITERATION
        engine.executor.resume()
        await asyncio.gather(*crowd)


async def test_a_prompt_is_given_once() -> None:
    async with FakeEngine("b") as engine:
        with pytest.raises(InvalidParameter, match="given twice"):
            await engine.generate("Hi", input_ids=[65])
        with pytest.raises(InvalidMessage, match="input_ids="):
            await engine.generate([1, 2, 3])  # type: ignore[list-item]
        with pytest.raises(InvalidMessage, match="input_ids="):
            await engine.session().chat([1, 2, 3])  # type: ignore[list-item]
