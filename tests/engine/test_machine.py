"""A state machine over scheduler and device: any order of calls keeps every promise.

The default profile is for every run. `ASYNCLLM_MACHINE_EXAMPLES=2000` asks for that many examples.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from asyncllm.engine.prefix_cache import extend_hashes, root_hash
from asyncllm.engine.quality_of_service import QualityOfService
from asyncllm.engine.sequence import Request, Sequence, SequenceState, Terms
from asyncllm.engine.waiting_queue import MAX_PASSED, PATIENCE_S, WaitingQueue
from asyncllm.types import Pooling
from tests.engine.driver import Driver, expected_answer, expected_pooled
from tests.engine.policies import Clock, policy_of

EXAMPLES = int(os.environ.get("ASYNCLLM_MACHINE_EXAMPLES", "150"))
MAX_DEPTH = 6

GROUPS = {"Gold": {"boss": 100}, "Silver": {"ann": 70, "bob": 30, "idle": 0}}
USERS = ["boss", "ann", "bob", "idle"]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class SchedulerMachine(RuleBasedStateMachine):
    """Model: the oracle's answer to each request, from its prompt, seed, length and stop tokens alone; and who is next,
    from looking at everybody who waits."""

    requests = Bundle("requests")
    pins = Bundle("pins")

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        max_batch_size=st.integers(2, 6),
        spare_slots=st.integers(0, 2),
        budget=st.integers(1, 20),
        interval=st.integers(1, 3),
        caching=st.booleans(),
        depth=st.integers(1, MAX_DEPTH),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        min_copied_tokens=st.sampled_from([1, 4]),
        swapping=st.booleans(),
        with_quality=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_batch_size: int,
        spare_slots: int,
        budget: int,
        interval: int,
        caching: bool,
        depth: int,
        num_host_blocks: int,
        min_copied_tokens: int,
        swapping: bool,
        with_quality: bool,
    ) -> None:
        self.depth = depth
        self.clock = Clock()
        self.quality = QualityOfService(policy_of(GROUPS), self.clock) if with_quality else None
        self.queue = WaitingQueue(self.quality, self.clock)
        self.room = num_blocks * block_size
        self.driver = Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=max_batch_size + spare_slots,
            max_batch_size=max_batch_size,
            budget=budget,
            interval=interval,
            caching=caching,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            swapping=swapping,
            waiting=self.queue,
        )
        self.block_size = block_size
        self.asked: dict[Request, tuple[int, list[int | None], list[int]]] = {}
        self.cancelled: set[Request] = set()
        self.pinned: list[list[bytes]] = []

    @rule(
        target=requests,
        prompt=prompts,
        max_new=st.integers(1, 24),
        seeds=st.lists(st.sampled_from([None, 1, 2]), min_size=1, max_size=3),
        stop_ids=st.sampled_from([[], [], [], [3], [5, 6]]),
        scored=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        user=st.sampled_from(USERS),
        timeout=st.sampled_from([None, None, 1.0, 50.0]),
        salt=st.sampled_from([None, None, "a", "b"]),
    )
    def submit(
        self,
        prompt: list[int],
        max_new: int,
        seeds: list[int | None],
        stop_ids: list[int],
        scored: bool,
        priority: int,
        user: str,
        timeout: float | None,
        salt: str | None,
    ) -> Any:
        prompt = prompt[: self.room - 1]
        max_new = min(max_new, self.room - len(prompt))
        request = self.driver.submit(
            prompt,
            max_new,
            seeds=seeds,
            stop_ids=stop_ids,
            prompt_logprobs=1 if scored and max_new % 2 else None,
            terms=self.terms(user, priority, timeout, salt),
        )
        self.asked[request] = max_new, seeds, stop_ids
        return request

    def terms(self, user: str, priority: int = 0, timeout: float | None = None, salt: str | None = None) -> Terms:
        return Terms(
            priority=priority,
            user=self.quality.users[user] if self.quality is not None else None,
            deadline=None if timeout is None else self.clock.now + timeout,
            cache_salt=salt,
        )

    @rule(target=requests, prompt=prompts, pooling=st.sampled_from(["last", "mean"]), user=st.sampled_from(USERS))
    def embed(self, prompt: list[int], pooling: Pooling, user: str) -> Any:
        request = self.driver.submit(prompt[: self.room], 0, pooling=pooling, terms=self.terms(user))
        self.asked[request] = 0, [None], []
        return request

    @precondition(lambda self: len(self.driver.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        self.driver.schedule()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @rule(waits=st.booleans(), turns=st.integers(1, 8))
    def run(self, waits: bool, turns: int) -> None:
        for _ in range(turns):
            self.driver.turn(2 if waits else self.depth)
            self.driver.check()

    @rule(request=requests)
    def cancel(self, request: Request) -> None:
        if not request.finished:
            self.cancelled.add(request)
        self.driver.cancel(request)

    @rule(seconds=st.sampled_from([0.01, 1.0, PATIENCE_S, 70.0]))
    def time_passes(self, seconds: float) -> None:
        """Requests whose time is over end, as the engine loop ends them."""
        self.clock.now += seconds
        for request in self.asked:
            deadline = request.terms.deadline
            if deadline is not None and deadline <= self.clock.now and not request.finished:
                self.cancelled.add(request)
                self.driver.cancel(request)

    @precondition(lambda self: self.driver.scheduler.num_running)
    @rule()
    def preempt(self) -> None:
        """As if the pool had run dry just now."""
        scheduler = self.driver.scheduler
        scheduler._preempt(next(reversed(scheduler._running)))

    @precondition(lambda self: not self.driver.in_flight and not self.driver.scheduler.host.plan)
    @rule()
    def forget(self) -> None:
        """As when the model gets new weights, or sleeps."""
        self.driver.forget()
        scheduler = self.driver.scheduler
        assert scheduler.num_running == 0
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        assert scheduler.host.blocks.num_free == scheduler.host.blocks.num_blocks

    @rule(target=pins, prompt=prompts)
    def pin(self, prompt: list[int]) -> Any:
        cache = self.driver.scheduler.prefix_cache
        if cache is None:
            return multiple()
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(), prompt, self.block_size)
        cache.pin(hashes)
        return hashes

    @rule(hashes=consumes(pins))
    def unpin(self, hashes: list[bytes]) -> None:
        cache = self.driver.scheduler.prefix_cache
        assert cache is not None
        cache.unpin(hashes)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()
            self.check_answers()
            self.check_queue()

    def check_queue(self) -> None:
        waiting = list(self.queue)
        assert {row for row in waiting} == {
            row
            for request in self.asked
            for row in request.sequences
            if row.state in (SequenceState.WAITING, SequenceState.SWAPPED)
            and (row.index == 0 or request.siblings_queued)
        }
        assert self.queue.num_requests == sum(row.index == 0 for row in waiting)
        assert self.queue.num_tokens == sum(num_tokens for _, num_tokens in self.queue._waiting.values())
        if not waiting:
            assert self.queue.first() is None
            return
        since, _ = self.queue._waiting[waiting[0]]
        patient = self.queue._passed >= MAX_PASSED and self.clock.now - since >= PATIENCE_S
        assert self.queue.first() is (waiting[0] if patient else min(waiting, key=self.place))

    @staticmethod
    def place(row: Sequence) -> tuple[object, ...]:
        """Where a waiting sequence stands; the lowest is next."""
        user, place = row.request.terms.user, (row.request.terms.priority, row.request.id, row.index)
        return place if user is None else (user.group, user.load, user.number, *place)

    def check_answers(self) -> None:
        for request, (max_new, seeds, stop_ids) in self.asked.items():
            for row, answer, seed in zip(request.sequences, self.driver.answers(request), seeds, strict=True):
                expected = expected_answer(request.prompt_ids, max_new, seed=seed, stop_ids=stop_ids)
                whole = row.finish_reason in ("stop", "length")
                assert answer == (expected if whole else expected[: len(answer)])
                if whole:
                    assert (row.finish_reason == "stop") == any(token in stop_ids for token in answer[-1:])
                else:
                    assert row.finish_reason is None or request in self.cancelled
            if request.prompt_logprobs_asked is not None and request.finished and request not in self.cancelled:
                following = [next(iter(dict(entry))) for entry in request.prompt_logprobs]
                assert following == request.prompt_ids[1:]
            if request.pooling is not None and request.finished and request not in self.cancelled:
                expected_sum = expected_pooled(request.prompt_ids, request.pooling)
                assert request.pooled == pytest.approx(expected_sum, abs=1e-9)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check_drained()
            self.check_answers()


SchedulerMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    derandomize=EXAMPLES <= 150,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.timeout(max(60, EXAMPLES))
class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[misc]
    pass
