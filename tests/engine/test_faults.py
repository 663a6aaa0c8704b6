"""A fault at each point of the engine: a row's ends that row, a step's that step's rows, the loop's own reaches all.

Whatever it is, each request has exactly one terminal event, and nothing is held at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.errors import AsyncLLMError, EngineDead, InvalidRequest, RequestFailed
from asyncllm.testing import FakeEngine, Fault, FaultPlan, InjectedFault
from asyncllm.testing.faults import Point
from asyncllm.types import Chunk
from tests.engine.waits import settle, until

pytestmark = pytest.mark.anyio

POISON = "poison"
PROMPTS = ["first question", POISON, "another one", "and the last of them"]
ROW_POINTS: tuple[Point, ...] = ("tokenize", "template", "detokenize", "emit")
STEP_POINTS: tuple[Point, ...] = ("prefill", "decode", "sample", "swap")
LOOP_POINTS: tuple[Point, ...] = ("admit", "alloc", "free")
SMALL: dict[str, Any] = {"num_blocks": 40, "num_slots": 16, "num_host_blocks": 40, "block_size": 4}
CONFIG = EngineConfig(max_batch_size=4, eviction_type="copy")


def answer_to(prompt: str) -> str:
    return (prompt[::-1] + " ") * 3


def engine_with(plan: FaultPlan, **more: Any) -> FakeEngine:
    return FakeEngine(answer_to, CONFIG, faults=plan, **{**SMALL, **more})


class Asked:
    """A request that is read chunk by chunk, and how it ended."""

    def __init__(self, engine: FakeEngine, prompt: str, **options: Any) -> None:
        self.prompt = prompt
        self.chunks: list[Chunk] = []
        self.ends: list[BaseException | None] = []
        self.task = asyncio.create_task(self._read(engine.generate(prompt, **options)))

    async def _read(self, generation: Any) -> None:
        try:
            async for chunk in generation:
                self.chunks.append(chunk)
            self.ends.append(None)
        except Exception as error:
            self.ends.append(error)

    @property
    def error(self) -> BaseException | None:
        (end,) = self.ends
        return end

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


async def ask(engine: FakeEngine, prompts: list[str] = PROMPTS) -> list[Asked]:
    asked = [Asked(engine, prompt) for prompt in prompts]
    async with asyncio.timeout(10):
        await asyncio.gather(*(each.task for each in asked))
    return asked


async def undisturbed(prompts: list[str] = PROMPTS) -> dict[str, list[int]]:
    """The tokens of each prompt's answer where nothing goes wrong."""
    async with engine_with(FaultPlan()) as engine:
        asked = await ask(engine, prompts)
        await settle(engine)
    assert not any(each.error for each in asked)
    return {each.prompt: each.tokens for each in asked}


async def check_still_right(engine: FakeEngine, expected: dict[str, list[int]]) -> None:
    """Nothing is held, and all later answers are what they should be, from the prefix cache too."""
    await settle(engine)
    for _ in range(2):
        for each in await ask(engine, list(expected)):
            assert each.error is None
            assert each.tokens == expected[each.prompt]
            assert each.text == answer_to(each.prompt)
    await settle(engine)


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("point", ROW_POINTS)
async def test_a_row_that_raises_ends_alone(point: Point, at: int) -> None:
    expected = await undisturbed()
    # A prompt is rendered once, and encoded once.
    fault = Fault(point, request=POISON, at=at if point in ("detokenize", "emit") else 0)
    async with engine_with(FaultPlan(fault)) as engine:
        asked = await ask(engine)
        for each in asked:
            if each.prompt == POISON:
                assert isinstance(each.error, RequestFailed)
                assert isinstance(each.error.__cause__, InjectedFault)
                assert each.tokens == expected[POISON][: len(each.tokens)]
            else:
                assert each.error is None
                assert each.tokens == expected[each.prompt]
        assert fault.num_fired == 1
        await check_still_right(engine, expected)


@pytest.mark.parametrize(("point", "at"), [("prefill", 0), ("decode", 0), ("decode", 7), ("sample", 0), ("sample", 9)])
async def test_a_row_that_is_corrupted_ends_alone(point: Point, at: int) -> None:
    expected = await undisturbed()
    async with engine_with(FaultPlan(Fault(point, "corrupt", request=POISON, at=at))) as engine:
        failed = [each for each in await ask(engine) if each.error is not None]
        if point == "sample":
            # The first row of a step that has the poison.
            assert len(failed) <= 1
        else:
            assert [each.prompt for each in failed] == [POISON]
        assert all(isinstance(each.error, RequestFailed) for each in failed)
        await check_still_right(engine, expected)


async def test_ids_that_the_model_does_not_have_are_refused() -> None:
    expected = await undisturbed()
    async with engine_with(FaultPlan(Fault("tokenize", "corrupt", request=POISON))) as engine:
        for each in await ask(engine):
            assert isinstance(each.error, InvalidRequest) == (each.prompt == POISON)
            assert each.tokens == ([] if each.prompt == POISON else expected[each.prompt])
        await check_still_right(engine, expected)


@pytest.mark.parametrize(
    ("point", "at"),
    [
        ("prefill", 0),
        ("decode", 0),
        ("decode", 1),
        ("decode", 9),
        ("sample", 0),
        ("sample", 7),
        ("swap", 0),
        ("swap", 2),
    ],
)
async def test_a_step_that_raises_ends_its_rows_and_the_engine_goes_on(point: Point, at: int) -> None:
    expected = await undisturbed()
    fault = Fault(point, at=at)
    async with engine_with(FaultPlan(fault), num_blocks=32) as engine:
        asked = await ask(engine)
        assert fault.num_fired == 1
        for each in asked:
            if each.error is not None:
                assert isinstance(each.error, RequestFailed)
                assert isinstance(each.error.__cause__, InjectedFault)
                assert each.tokens == expected[each.prompt][: len(each.tokens)]
            else:
                assert each.tokens == expected[each.prompt]
        await settle(engine)
        stats = engine.stats()
        assert stats.steps_failed == 1
        if point != "swap":
            assert any(each.error for each in asked)
        await check_still_right(engine, expected)


async def test_a_step_with_the_poison_ends_its_neighbours_too_and_no_later_request() -> None:
    expected = await undisturbed()
    async with engine_with(FaultPlan(Fault("decode", request=POISON, at=3))) as engine:
        first = [Asked(engine, prompt) for prompt in PROMPTS[:2]]
        await asyncio.gather(*(each.task for each in first))
        assert all(isinstance(each.error, RequestFailed) for each in first)
        await check_still_right(engine, expected)


async def test_steps_launched_ahead_are_dropped_and_their_new_rows_computed_again() -> None:
    """Who was admitted by a step behind the one that fails has lost nothing but time."""
    expected = await undisturbed()
    plan = FaultPlan()
    async with engine_with(plan) as engine:
        engine.executor.pause()
        first = Asked(engine, POISON)
        await until(lambda: engine.stats().running == 1)
        plan.add(Fault("prefill", request=POISON))
        # Admitted by the second step, which is in flight when the first one fails.
        second = Asked(engine, PROMPTS[0])
        await until(lambda: engine.stats().steps_in_flight == 2)
        engine.executor.resume()
        await asyncio.gather(first.task, second.task)
        assert isinstance(first.error, RequestFailed)
        assert second.error is None
        assert second.tokens == expected[PROMPTS[0]]
        await check_still_right(engine, expected)


async def test_nothing_of_a_failed_step_is_found_in_the_prefix_cache() -> None:
    """The prompt's blocks are written by the step that fails: the next request computes all of it."""
    async with engine_with(FaultPlan(Fault("sample"))) as engine:
        (failed,) = await ask(engine, ["a prompt of several blocks"])
        assert isinstance(failed.error, RequestFailed)
        await settle(engine)
        assert engine.stats().blocks_cached == 0
        (again,) = await ask(engine, ["a prompt of several blocks"])
        assert again.error is None
        assert again.chunks[-1].cached_token_len == 0
        await settle(engine)
        assert engine.stats().blocks_cached > 0


@pytest.mark.parametrize("at", [0, 1, 3, 5])
async def test_a_step_whose_copies_are_lost_lets_the_waiting_be_computed_again(at: int) -> None:
    """More than fits: rows go to the host and back. A copy that was never made is no prefix of a request."""
    prompts = [f"question {number} of many that do not fit" for number in range(6)]
    expected = await undisturbed(prompts)
    fault = Fault("swap", at=at)
    async with engine_with(FaultPlan(fault), num_blocks=44) as engine:
        asked = await ask(engine, prompts)
        assert fault.num_fired == 1, "the pool is small enough"
        for each in asked:
            assert each.error is None or isinstance(each.error, RequestFailed)
            assert each.error is not None or each.tokens == expected[each.prompt]
        assert any(each.error is None for each in asked)
        await check_still_right(engine, expected)


@pytest.mark.parametrize("seed", range(5))
async def test_faults_of_steps_at_any_time(seed: int) -> None:
    """Again and again, with more than fits: those who are not hit get the right answer."""
    prompts = [f"question {number} of many" for number in range(12)]
    expected = await undisturbed(prompts)
    faults = [Fault(point, probability=0.05, times=None) for point in STEP_POINTS]
    faults.append(Fault("decode", "corrupt", probability=0.02, times=None))
    plan = FaultPlan(*faults, seed=seed)
    async with engine_with(plan, num_blocks=44) as engine:
        for each in await ask(engine, prompts):
            assert each.error is None or isinstance(each.error, RequestFailed)
            assert each.tokens == expected[each.prompt][: len(each.tokens)]
            assert each.error is not None or len(each.tokens) == len(expected[each.prompt])
        await settle(engine)
        plan.clear()
        await check_still_right(engine, expected)
    assert sum(fault.num_fired for fault in faults) > 0


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("point", LOOP_POINTS)
async def test_the_loops_own_fault_reaches_all(point: Point, at: int) -> None:
    fault = Fault(point, at=at)
    async with engine_with(FaultPlan(fault)) as engine:
        asked = await ask(engine, [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS])
        assert fault.num_fired == 1
        errors = [each.error for each in asked if each.error is not None]
        assert errors
        assert all(isinstance(error, EngineDead) and isinstance(error.__cause__, InjectedFault) for error in errors)
        with pytest.raises(EngineDead) as caught:
            await engine.generate("later")
        assert isinstance(caught.value.__cause__, InjectedFault)


@pytest.mark.parametrize("point", [*ROW_POINTS, *STEP_POINTS, *LOOP_POINTS])
async def test_what_takes_long_changes_nothing(point: Point) -> None:
    expected = await undisturbed()
    fault = Fault(point, "sleep", seconds=0.005, at=1, times=3)
    async with engine_with(FaultPlan(fault)) as engine:
        for each in await ask(engine):
            assert each.error is None
            assert each.tokens == expected[each.prompt]
        assert fault.num_fired > 0
        await check_still_right(engine, expected)


@pytest.mark.parametrize("point", [*ROW_POINTS, *STEP_POINTS])
async def test_n_answers_to_one_prompt_end_together(point: Point) -> None:
    config = GenerationConfig(n=3, max_new_tokens=12)
    async with engine_with(FaultPlan(Fault(point, at=0))) as engine:
        failed = Asked(engine, PROMPTS[0], gen_config=config)
        await failed.task
        if point != "swap":
            assert isinstance(failed.error, AsyncLLMError)
        await settle(engine)
        again = Asked(engine, PROMPTS[0], gen_config=config)
        await again.task
        assert again.error is None
        assert [chunk.finish_reason for chunk in again.chunks if chunk.finish_reason] == ["length"] * 3
        await settle(engine)


@pytest.mark.parametrize("point", ["decode", "emit", "tokenize"])
async def test_a_session_goes_on_after_a_turn_that_failed(point: Point) -> None:
    async with engine_with(FaultPlan(Fault(point, request=POISON))) as engine:
        session = engine.session()
        first = await session.chat("one")
        with pytest.raises(RequestFailed):
            await session.chat(POISON)
        again = await session.chat("two")
        assert (first.text, again.text) == (answer_to("one"), answer_to("two"))
        session.close()
        await settle(engine)


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Fault("nowhere")  # type: ignore[arg-type]
    for action in ("explode", "corrupt"):
        with pytest.raises(ValueError, match="emit"):
            Fault("emit", action)  # type: ignore[arg-type]


def test_a_plan_is_the_same_from_run_to_run() -> None:
    def fired(seed: int) -> list[bool]:
        fault = Fault("emit", probability=0.5, times=None, error=KeyError())
        plan = FaultPlan(fault, seed=seed)
        found = []
        for _ in range(20):
            before = fault.num_fired
            with contextlib.suppress(KeyError):
                plan.reach("emit", ["x"])
            found.append(fault.num_fired > before)
        return found

    assert fired(1) == fired(1)
    assert any(fired(1))
    assert not all(fired(1))
