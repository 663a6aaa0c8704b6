"""Every public coroutine is cancelled at each of its suspensions in turn: nothing hangs, nothing is left, no other
call notices, and the canceller learns of it."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator
from types import CodeType
from typing import Any

import anyio
import pytest

import asyncllm
import asyncllm.agent.prompt_outputs  # so that no coroutine is the first to import torch
import asyncllm.locate
from asyncllm.config import GenerationConfig
from asyncllm.errors import EngineClosed
from asyncllm.pipeline import _gather
from asyncllm.testing import FakeEngine
from tests.engine.test_cancellation import LONG, SETTINGS, new_engine
from tests.engine.waits import settle

pytestmark = pytest.mark.anyio

Body = Coroutine[Any, Any, Any]
LIMIT_S = 5.0
"""What takes longer hangs."""


@pytest.fixture(autouse=True)
def _no_adapter_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device reads no files."""
    monkeypatch.setattr(asyncllm.locate, "locate_adapter", lambda path, **_: path)


async def striking_at(body: Body, points: Collection[int], seen: list[int], strike: Callable[[], object]) -> Any:
    """Run `body`, and call `strike` at the suspensions numbered in `points`. Lists all of them in `seen`."""
    return await _striking_at(body, points, seen, strike)


@types.coroutine
def _striking_at(
    body: Body, points: Collection[int], seen: list[int], strike: Callable[[], object]
) -> Generator[Any, Any, Any]:
    call: Callable[..., Any] = body.send
    argument: Any = None
    while True:
        try:
            future = call(argument)
        except StopIteration as stop:
            return stop.value
        seen.append(len(seen))
        if seen[-1] in points:
            strike()
        try:
            argument, call = (yield future), body.send
        except BaseException as error:
            argument, call = error, body.throw


class Left(Exception):
    """An anyio scope was cancelled, and has taken notice."""


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def cancelled(body: Body, point: int, seen: list[int]) -> Any:
    return await striking_at(body, {point}, seen, current_task().cancel)


async def cancelled_twice(body: Body, point: int, seen: list[int]) -> Any:
    """Once more during the clean-up."""
    return await striking_at(body, {point, point + 1}, seen, current_task().cancel)


async def timed_out(body: Body, point: int, seen: list[int]) -> Any:
    async with asyncio.timeout(None) as timeout:
        return await striking_at(body, {point}, seen, lambda: timeout.reschedule(asyncio.get_running_loop().time()))


async def beside_a_task_that_fails(body: Body, point: int, seen: list[int]) -> Any:
    failing = asyncio.Event()

    async def fail() -> None:
        await failing.wait()
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as group:
        sibling = group.create_task(fail())
        result = await striking_at(body, {point}, seen, failing.set)
        sibling.cancel()
        return result


async def in_a_cancelled_scope(body: Body, point: int, seen: list[int]) -> Any:
    """anyio cancels again and again, until the scope is left."""
    with anyio.CancelScope() as scope:
        return await striking_at(body, {point}, seen, scope.cancel)
    raise Left


WAYS: dict[Callable[[Body, int, list[int]], Body], type[BaseException]] = {
    cancelled: asyncio.CancelledError,
    cancelled_twice: asyncio.CancelledError,
    timed_out: TimeoutError,
    beside_a_task_that_fails: ExceptionGroup,
    in_a_cancelled_scope: Left,
}
"""Way to be cancelled -> what its caller gets."""


async def whole_answer(engine: FakeEngine) -> Any:
    return (await engine.generate("sweep", SETTINGS)).token_ids


async def streamed_answer(engine: FakeEngine) -> Any:
    async with engine.generate("sweep", SETTINGS) as generation:
        return [token async for chunk in generation for token in chunk.token_ids]


async def closed_stream(engine: FakeEngine) -> Any:
    generation = engine.generate("sweep", SETTINGS)
    try:
        await anext(generation)
    finally:
        await generation.aclose()


async def several_answers(engine: FakeEngine) -> Any:
    response = await engine.generate("sweep", GenerationConfig(n=3, max_new_tokens=6, random_seed=1, top_k=0))
    return [choice.token_ids for choice in response.choices]


async def long_prompt(engine: FakeEngine) -> Any:
    return (await engine.generate("x" * 5000, SETTINGS)).token_ids


async def batch(engine: FakeEngine) -> Any:
    responses = await engine.batch_infer(["sweep", "swoop", "swap"], SETTINGS)
    assert isinstance(responses, list)
    return [response.token_ids for response in responses]


async def streamed_batch(engine: FakeEngine) -> Any:
    tokens: list[list[int]] = [[], [], []]
    async for chunk in engine.stream_infer(["sweep", "swoop", "swap"], SETTINGS):
        tokens[chunk.index] += chunk.token_ids
    return tokens


async def two_turns(engine: FakeEngine) -> Any:
    async with engine.session() as session:
        first = await session.chat("sweep", SETTINGS)
        second = await session.chat("again", SETTINGS)
        return first.token_ids, second.token_ids


async def turns_by_id(engine: FakeEngine) -> Any:
    await engine.generate("sweep", SETTINGS, session_id=9, sequence_end=False)
    last = await engine.generate("again", SETTINGS, session_id=9, sequence_start=False)
    return last.token_ids


async def perplexity(engine: FakeEngine) -> Any:
    return await engine.get_ppl([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])


async def embeddings(engine: FakeEngine) -> Any:
    return await engine.embed(["sweep", "x" * 5000, "swap"])


async def scores(engine: FakeEngine) -> Any:
    return await engine.classify(["sweep", "swap"]), await engine.get_reward_score([1, 2, 3, 4, 5, 6, 7, 8, 9])


async def logits(engine: FakeEngine) -> Any:
    return (await engine.get_logits([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])).tolist()


async def token_ids(engine: FakeEngine) -> Any:
    ids: Any = await engine.encode(["sweep", "x" * 5000])
    return ids, await engine.decode(ids[1]), await engine.offload(lambda: len(ids), 5000)


async def several_scores(engine: FakeEngine) -> Any:
    """What a pipeline's `get_ppl` does in its loop."""
    return await _gather(engine.get_ppl, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7]])


async def stopped_answer(engine: FakeEngine) -> Any:
    generation = engine.generate("sweep", LONG, session_id=4)
    await generation.start()
    await engine.stop_session(4)
    return (await generation.response()).finish_reason


async def ended_session(engine: FakeEngine) -> Any:
    first = await engine.generate("sweep", SETTINGS, session_id=5, sequence_end=False)
    await engine.end_session(5)
    return first.token_ids


async def chat_and_fork(engine: FakeEngine) -> Any:
    generation = engine.chat("sweep", None, SETTINGS)
    session = generation.session
    assert session is not None
    async with session:
        first = await generation
        async with session.fork() as fork:
            return first.token_ids, (await fork.chat("again", SETTINGS)).token_ids


async def watched_engine(engine: FakeEngine) -> Any:
    try:
        async with asyncio.timeout(0.01):
            return await engine.wait_ended()
    except TimeoutError:
        return "it lives"


async def changed_model(engine: FakeEngine) -> Any:
    await engine.update_weights({"a": 1})
    await engine.sleep()
    await engine.sleep(2)
    await engine.wake(["weights"])
    await engine.wakeup()
    return await whole_answer(engine)


async def paused_engine(engine: FakeEngine) -> Any:
    await engine.reset_prefix_cache()
    await engine.pause()
    await engine.resume()
    await engine.pause("wait")
    await engine.resume()
    await engine.pause("abort")
    await engine.resume()
    return await whole_answer(engine)


async def resumed(engine: FakeEngine) -> None:
    await engine.resume()


async def changed_adapters(engine: FakeEngine) -> Any:
    await engine.load_adapter("x", "folder")
    answer = await engine.generate("Hi", SETTINGS, adapter_name="x")
    await engine.unload_adapter("x")
    return len(answer.token_ids)  # which tokens depends on how often it has been loaded


async def awake(engine: FakeEngine) -> None:
    await engine.wake()


async def without_adapters(engine: FakeEngine) -> None:
    await engine.update_weights({})  # what was asked before is over then
    if engine.adapters:
        await engine.unload_adapter("x")


CHANGES: dict[Callable[[FakeEngine], Body], Callable[[FakeEngine], Body]] = {
    changed_model: awake,
    paused_engine: resumed,
    changed_adapters: without_adapters,
}
"""Changes of the model, and what is enough after they were cut off."""

TARGETS: list[Callable[[FakeEngine], Body]] = [
    whole_answer,
    streamed_answer,
    closed_stream,
    several_answers,
    long_prompt,
    batch,
    streamed_batch,
    two_turns,
    turns_by_id,
    perplexity,
    embeddings,
    scores,
    logits,
    token_ids,
    several_scores,
    stopped_answer,
    ended_session,
    chat_and_fork,
    watched_engine,
]

points_swept: Counter[str] = Counter()
"""Suspensions at which something was cancelled, by test."""


@pytest.fixture
def count_points(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """For tests to say how many points they have swept; `pytest -rP` shows it, and JUnit's report."""

    def count(points: int) -> None:
        points_swept[request.node.name] += points
        request.node.user_properties.append(("points swept", points))
        print(f"{points} points; {points_swept.total()} in all tests so far")

    return count


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
async def test_cancelled_at_every_suspension(
    target: Callable[[FakeEngine], Body],
    way: Callable[[Body, int, list[int]], Body],
    count_points: Callable[[int], None],
) -> None:
    async with new_engine(max_position=8192, num_blocks=2048, latency=0.0002) as engine:
        expected = await target(engine)
        neighbour_expects = (await engine.generate("neighbour", LONG)).token_ids
        neighbour = asyncio.create_task(engine.generate("neighbour", LONG).response())
        for point in range(1000):
            seen: list[int] = []
            task = asyncio.create_task(way(target(engine), point, seen))
            await asyncio.wait([task], timeout=LIMIT_S)
            assert task.done(), f"it hangs when cancelled at suspension {point}"
            if len(seen) <= point:
                assert task.result() == expected
                break
            check_outcome(task, way, point, expected)
            if neighbour.done():
                assert neighbour.result().token_ids == neighbour_expects
                neighbour = asyncio.create_task(engine.generate("neighbour", LONG).response())
        assert point > 0
        count_points(point)
        assert (await neighbour).token_ids == neighbour_expects
        assert await target(engine) == expected
        await settle(engine)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("target", CHANGES, ids=lambda target: target.__name__)
async def test_changes_of_the_model_cancelled_at_every_suspension(
    target: Callable[[FakeEngine], Body],
    way: Callable[[Body, int, list[int]], Body],
    count_points: Callable[[int], None],
) -> None:
    async with new_engine(latency=0.0002, max_loras=1) as engine:
        expected = await target(engine)
        neighbour_expects = (await engine.generate("neighbour", LONG)).token_ids
        for point in range(1000):
            neighbour = asyncio.create_task(engine.generate("neighbour", LONG).response())
            seen: list[int] = []
            task = asyncio.create_task(way(target(engine), point, seen))
            await asyncio.wait([task], timeout=LIMIT_S)
            assert task.done(), f"it hangs when cancelled at suspension {point}"
            await CHANGES[target](engine)
            assert (await neighbour).token_ids == neighbour_expects
            if len(seen) <= point:
                assert task.result() == expected
                break
            check_outcome(task, way, point, expected)
        assert point > 1
        count_points(point)
        await settle(engine)


def check_outcome(task: asyncio.Task[Any], way: Callable[..., Body], point: int, expected: Any) -> None:
    """Whoever cancelled learns of it, unless the result was there first: a timeout, a scope and a sibling need a turn
    of the loop to strike."""
    if way in (cancelled, cancelled_twice):
        assert task.cancelled(), f"the cancellation at suspension {point} was swallowed"
        return
    assert not task.cancelled(), f"the cancellation at suspension {point} got out"
    error = task.exception()
    if error is None:
        assert task.result() == expected
    else:
        assert type(error) is WAYS[way]
        if isinstance(error, ExceptionGroup):
            assert [type(inner) for inner in error.exceptions] == [ZeroDivisionError]


async def life(engine: FakeEngine) -> Any:
    async with engine:
        return (await engine.generate("Hi", GenerationConfig(max_new_tokens=2))).text


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_start_and_close_cancelled_at_every_suspension(
    way: Callable[[Body, int, list[int]], Body], count_points: Callable[[int], None]
) -> None:
    for point in range(100):
        engine, seen = FakeEngine("ok"), []  # type: ignore[var-annotated]
        task = asyncio.create_task(way(life(engine), point, seen))
        await asyncio.wait([task], timeout=LIMIT_S)
        assert task.done(), f"it hangs when cancelled at suspension {point}"
        await engine.close()
        if len(seen) <= point:
            assert task.result() == "ok"
            break
        check_outcome(task, way, point, "ok")
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")
    assert point > 0
    count_points(point)


def public_coroutines() -> dict[CodeType, str]:
    """Code -> name of everything public that has to be awaited or iterated asynchronously."""
    found = {}
    for class_name in asyncllm.__all__:
        cls = getattr(asyncllm, class_name)
        if not inspect.isclass(cls):
            continue
        for name, member in vars(cls).items():
            private = name.startswith("_") and not name.startswith("__")
            if not inspect.isfunction(member) or private:
                continue
            returns = str(member.__annotations__.get("return"))
            awaitable = returns == "Generation" or returns.startswith(("AsyncIterator", "Awaitable", "Coroutine"))
            if awaitable or name == "__await__" or inspect.iscoroutinefunction(member):
                found[member.__code__] = f"{class_name}.{name}"
    return found


async def test_no_public_coroutine_is_left_out() -> None:
    public = public_coroutines()
    assert {"AsyncEngine.generate", "AsyncEngine.close", "Session.chat", "Generation.aclose"} <= {*public.values()}
    called: set[CodeType] = set()

    async def swept() -> None:
        await life(FakeEngine("ok"))
        async with new_engine(max_position=8192, num_blocks=2048, max_loras=1) as engine:
            for target in (*TARGETS, *CHANGES):
                await target(engine)

    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code) if event == "call" else None)
    try:
        await swept()
    finally:
        sys.setprofile(before)
    missing = sorted(name for code, name in public.items() if code not in called)
    assert not missing, f"write a target that calls {missing}"
