"""A state machine over scheduler, sessions and device: any order of calls keeps every promise.

`Driver.check` and the device look for what no step may do; here is the model of what requests and sessions must give.
Every run takes the same few examples; `ASYNCLLM_MACHINE_EXAMPLES=2000` asks for that many others.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
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

from asyncllm.config import GenerationConfig
from asyncllm.engine.cache.block_groups import pool_tokens
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.input_processor import Call
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.quality_of_service import QualityOfService
from asyncllm.engine.schedule.sequence import Request, RequestPolicy, Sequence, SequenceState
from asyncllm.engine.schedule.waiting_queue import MAX_PASSED, PATIENCE_S, WaitingQueue
from asyncllm.engine.sessions.session_table import Conversation, SessionTable
from asyncllm.errors import QueueFull, SessionBusy
from asyncllm.types import Pooling
from tests.engine.driver import TOKENIZER, Driver, Inputs, expected_answer, expected_pooled
from tests.engine.policies import Clock, policy_of

EXAMPLES = int(os.environ.get("ASYNCLLM_MACHINE_EXAMPLES", "150"))
MAX_DEPTH = 6

ADAPTERS = [Adapter(number, f"adapter {number}", "") for number in (1, 2, 3)]

GROUPS = {"Gold": {"boss": 100}, "Silver": {"ann": 70, "bob": 30, "idle": 0}}
USERS = ["boss", "ann", "bob", "idle"]

# One choice each: with lists and their elements as choices of their own, choosing takes longer than all that is tested.
prompts = st.integers(2, 2**10 - 1).map(lambda number: [int(bit) for bit in f"{number:b}"[1:]])
adapters = st.sampled_from([None, None, None, *ADAPTERS])
several_seeds = st.sampled_from([[None], [None], [1], [2], [None, 1], [1, 1], [None, 1, 2], [2, None, None]])


def row_failure(history: list[int]) -> str | None:
    """Some rows fail, and always after the same tokens; never where a prompt ends that is no turn of a session."""
    return "not finite" if history[-1] > 1 and zlib.crc32(bytes(history)) % 17 == 0 else None


def forces(history: list[int]) -> int:
    """How many tokens are forced behind these: mostly none, sometimes more than there is room for."""
    return (0, 0, 0, 0, 1, 2, 3, 5, 9, 30)[zlib.crc32(bytes(history)) % 10]


class Asked:
    """A request, and what must come of it."""

    def __init__(
        self, request: Request, max_new: int, seeds: list[int | None], stop_ids: list[int], *, failing: bool
    ) -> None:
        self.request = request
        self.stop_ids = stop_ids
        prompt, adapter = request.prompt_ids, request.adapter
        self.answers = [
            expected_answer(prompt, max_new, seed=seed, stop_ids=stop_ids, adapter=adapter) for seed in seeds
        ]
        self.ends_early = False
        """Whether it was cancelled, or its time was over."""
        self.fails_after: list[int | None] = [None] * len(seeds)
        """For each answer, how many tokens it has when its row fails."""
        if failing:
            for index, answer in enumerate(self.answers):
                lengths = range(len(answer) + (not answer))
                self.fails_after[index] = next((n for n in lengths if row_failure(prompt + answer[:n])), None)
        self.may_fail = failing and any(row_failure(prompt[:n]) for n in range(1, len(prompt) + 1))
        """Whether a chunk of the prompt may end where its row fails."""


class SchedulerMachine(RuleBasedStateMachine):
    """Model: the oracle's answer to each request, from its prompt, seed, length and stop tokens alone; the history of
    each session; and who is next, from looking at everybody who waits."""

    requests = Bundle("requests")
    sessions = Bundle("sessions")

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        max_batch_size=st.integers(2, 6),
        spare_slots=st.integers(0, 2),
        budgets=st.tuples(st.integers(1, 20), st.sampled_from([None, None, 3, 9]), st.sampled_from([1, 1, 2, 4])),
        interval=st.integers(1, 3),
        caching=st.booleans(),
        depth=st.integers(1, MAX_DEPTH),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        min_copied_tokens=st.sampled_from([1, 4]),
        swapping=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (2,), (5,), (9,), (None, 3), (6, None), (None, None, 4), (2, 7)]),
        keeps_state=st.booleans(),
        with_quality=st.booleans(),
        failing=st.booleans(),
        forcing=st.booleans(),
        max_queued=st.sampled_from([(0, 0), (0, 0), (2, 0), (0, 12), (3, 20)]),
        num_adapter_slots=st.integers(1, 3),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        max_batch_size: int,
        spare_slots: int,
        budgets: tuple[int, int | None, int],
        interval: int,
        caching: bool,
        depth: int,
        num_host_blocks: int,
        min_copied_tokens: int,
        swapping: bool,
        windows: tuple[int | None, ...],
        keeps_state: bool,
        with_quality: bool,
        failing: bool,
        forcing: bool,
        max_queued: tuple[int, int],
        num_adapter_slots: int,
    ) -> None:
        self.depth, self.failing = depth, failing
        self.clock = Clock()
        self.quality = QualityOfService(policy_of(GROUPS), self.clock) if with_quality else None
        self.queue = WaitingQueue(self.quality, self.clock)
        self.driver = Driver(
            num_blocks=num_blocks * len(windows),
            block_size=block_size,
            num_slots=max_batch_size + spare_slots,
            max_batch_size=max_batch_size,
            budget=budgets[0],
            tokens_beside_decode=budgets[1],
            token_tile=budgets[2],
            interval=interval,
            caching=caching,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            swapping=swapping,
            windows=windows,
            keeps_state=keeps_state,
            waiting=self.queue,
            row_failure=row_failure if failing else None,
            forces=forces if forcing else None,
            num_adapter_slots=num_adapter_slots,
            adapters=[adapter.number for adapter in ADAPTERS],
        )
        self.room = min(pool_tokens(self.driver.device.limits), 60)
        self.asked: dict[Request, Asked] = {}
        self.unfinished: dict[Request, None] = {}
        """Those of `asked` whose answers have not been looked at since they ended."""
        self.max_queued = max_queued
        self.bounds = Backpressure(*max_queued)
        loop: Any = SimpleNamespace(scheduler=self.driver.scheduler, abandon=self.abandon)
        self.table = SessionTable(loop, TOKENIZER)
        self.inputs = Inputs(self.table, self.driver, self.room)
        self.histories: dict[Conversation, list[int]] = {}
        """What each open session must remember, its running turn apart."""
        self.turns: dict[Conversation, Request] = {}
        """The last turn of each, which may still run."""

    @rule(
        target=requests,
        prompt=prompts,
        max_new=st.integers(1, 24),
        seeds=several_seeds,
        stop_ids=st.sampled_from([[], [], [], [3], [5, 6]]),
        scored=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        user=st.sampled_from(USERS),
        timeout=st.sampled_from([None, None, 1.0, 50.0]),
        salt=st.sampled_from([None, None, "a", "b"]),
        streaming=st.booleans(),
        adapter=adapters,
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
        streaming: bool,
        adapter: Adapter | None,
    ) -> Any:
        prompt = prompt[: self.room - 1]
        max_new = min(max_new, self.room - len(prompt))
        if not self.has_room(prompt):
            return multiple()
        request = self.driver.submit(
            prompt,
            max_new,
            seeds=seeds,
            stop_ids=stop_ids,
            prompt_logprobs=1 if scored and max_new % 2 else None,
            policy=self.policy(user, priority, timeout, salt),
            delivery=Delivery(streaming=streaming),
            adapter=adapter,
        )
        self.expect(request, max_new, seeds, stop_ids)
        return request

    def expect(self, request: Request, max_new: int, seeds: list[int | None], stop_ids: list[int]) -> None:
        self.asked[request] = Asked(request, max_new, seeds, stop_ids, failing=self.failing)
        self.unfinished[request] = None

    def has_room(self, prompt: list[int]) -> bool:
        """Whether the queue takes the prompt, as the engine asks it; compared with counting who waits."""
        leaders = [row for row in self.queue if row.index == 0]
        queued = len(leaders), sum(self.queue._waiting[row][1] for row in self.queue)
        most_requests, most_tokens = self.max_queued
        full = bool(leaders) and (0 < most_requests < queued[0] + 1 or 0 < most_tokens < queued[1] + len(prompt))
        try:
            self.bounds.check(self.queue.num_requests, self.queue.num_tokens, len(prompt), self.clock.now)
        except QueueFull:
            assert full
            return False
        assert not full
        return True

    def policy(self, user: str, rank: int = 0, timeout: float | None = None, salt: str | None = None) -> RequestPolicy:
        owner = self.quality.users[user] if self.quality is not None else None
        return RequestPolicy(rank, owner, None if timeout is None else self.clock.now + timeout, salt)

    @rule(target=requests, prompt=prompts, pooling=st.sampled_from(["last", "mean"]), user=st.sampled_from(USERS))
    def embed(self, prompt: list[int], pooling: Pooling, user: str) -> Any:
        prompt = prompt[: self.room]
        if not self.has_room(prompt):
            return multiple()
        request = self.driver.submit(prompt, 0, pooling=pooling, policy=self.policy(user))
        self.expect(request, 0, [None], [])
        return request

    @rule(target=sessions)
    def begin_session(self) -> Conversation:
        session = self.table.new()
        self.histories[session] = []
        return session

    @rule(
        target=requests,
        session=sessions,
        prompt=prompts,
        max_new=st.integers(1, 8),
        user=st.sampled_from(USERS),
        salt=st.sampled_from([None, None, "a"]),
        adapter=adapters,
    )
    def turn(
        self,
        session: Conversation,
        prompt: list[int],
        max_new: int,
        user: str,
        salt: str | None,
        adapter: Adapter | None,
    ) -> Any:
        """The next turn, after a rewind if the conversation has become too long."""
        if session.closed:
            return multiple()
        delivery = Delivery(streaming=True)
        self.inputs.adapter = adapter
        if session.busy:
            with pytest.raises(SessionBusy):
                self.prepare(session, delivery, prompt, 0, max_new, self.policy(user))
            return multiple()
        history, prompt = self.histories[session], prompt[: self.room - 1]
        step = min(len(history), self.room - 1 - len(prompt))
        if (history and not step) or not self.has_room(history[:step] + prompt):
            return multiple()
        request = self.prepare(session, delivery, prompt, step, max_new, self.policy(user, salt=salt))
        assert request.prompt_ids == history[:step] + prompt
        assert request.history_len == step
        self.driver.add(request)
        self.expect(request, request.sequences[0].remaining, [None], [])
        self.turns[session] = request
        return request

    def prepare(
        self,
        session: Conversation,
        delivery: Delivery,
        prompt: list[int],
        step: int,
        max_new: int,
        policy: RequestPolicy,
    ) -> Request:
        """Return the request of a turn, which has nothing to wait for: who left the turn before has ended it."""
        self.inputs.policy = policy
        config = GenerationConfig(max_new_tokens=max_new)
        call = Call(conversation=session, input_ids=prompt, step=step, config=config)
        preparation = self.inputs.prepare(call, delivery)
        with pytest.raises(StopIteration) as done:
            preparation.send(None)
        return done.value.value  # type: ignore[no-any-return]

    @rule(session=sessions)
    def stop(self, session: Conversation) -> None:
        session.stop()

    @rule(target=sessions, session=sessions)
    def fork(self, session: Conversation) -> Any:
        if session.closed or session.busy:
            return multiple()
        copy = session.fork()
        self.histories[copy] = list(self.histories[session])
        return copy

    @rule(session=consumes(sessions))
    def end_session(self, session: Conversation) -> None:
        session.close()
        session.close()
        self.histories.pop(session, None)
        assert not session.busy
        assert not session._pinned

    @precondition(lambda self: len(self.driver.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        self.driver.schedule()
        self.check_groups()

    def check_groups(self) -> None:
        """After a step has been scheduled, no sequence waits for one of a later group, except for steps in flight."""
        scheduler = self.driver.scheduler
        row = self.queue.first_of_groups()
        if row is None or all(self.queue.rank(other) <= self.queue.rank(row) for other in scheduler._running):
            return
        assert scheduler.slots._fenced or scheduler.blocks.num_fenced

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
        self.abandon(request)

    def abandon(self, request: Request) -> None:
        """The reader has left, for the first time or again."""
        if not request.finished:
            self.asked[request].ends_early = True
        self.driver.cancel(request)

    @rule(seconds=st.sampled_from([0.01, 1.0, PATIENCE_S, 70.0]))
    def time_passes(self, seconds: float) -> None:
        """Requests whose time is over end, as the engine loop ends them."""
        self.clock.now += seconds
        for request in list(self.unfinished):
            deadline = request.policy.deadline
            if deadline is not None and deadline <= self.clock.now:
                self.abandon(request)

    @precondition(lambda self: self.driver.scheduler.num_running)
    @rule()
    def preempt(self) -> None:
        """As if the pool had run dry just now."""
        scheduler = self.driver.scheduler
        scheduler._preempt(next(reversed(scheduler._running)))

    @precondition(lambda self: not self.driver.in_flight and not self.driver.scheduler.host.plan)
    # What `evict` has pushed to the host outside of a step is fenced until the next one has been read.
    @precondition(lambda self: not self.host_blocks_in_transit())
    @rule()
    def forget(self) -> None:
        """As when the model gets new weights, or sleeps."""
        self.driver.forget()
        scheduler = self.driver.scheduler
        assert scheduler.num_running == 0
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
        assert scheduler.host.blocks.num_free == scheduler.host.blocks.num_blocks

    def host_blocks_in_transit(self) -> int:
        host = self.driver.scheduler.host
        return host.blocks.num_held - sum(len(sequence.host_blocks) for sequence in host.swapped)

    @rule(share=st.sampled_from([0.3, 1.0]))
    def evict(self, share: float) -> None:
        """As if the room had been needed for a moment: free blocks are taken first, then cached ones."""
        scheduler = self.driver.scheduler
        taken = scheduler.blocks.allocate(math.ceil(scheduler.blocks.num_available * share))
        scheduler.blocks.retire(taken, -1, -1)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()
            self.check_answers(self.unfinished)
            self.check_sessions()
            self.check_queue()

    def check_queue(self) -> None:
        waiting = list(self.queue)
        assert {row for row in waiting} == {
            row
            for request in self.unfinished
            for row in request.sequences
            if row.state in (SequenceState.WAITING, SequenceState.SWAPPED)
            and (row.index == 0 or request.siblings_queued)
        }
        assert self.queue.num_requests == sum(row.index == 0 for row in waiting)
        assert self.queue.num_tokens == sum(num_tokens for _, num_tokens, _ in self.queue._waiting.values())
        if not waiting:
            assert self.queue.first() is None
            return
        since, _, _ = self.queue._waiting[waiting[0]]
        patient = self.queue._passed >= MAX_PASSED and self.clock.now - since >= PATIENCE_S
        assert self.queue.first() is (waiting[0] if patient else min(waiting, key=self.place))

    @staticmethod
    def place(row: Sequence) -> tuple[object, ...]:
        """Where a waiting sequence stands; the lowest is next."""
        user, place = row.request.policy.user, (row.request.policy.priority, row.request.id, row.index)
        return place if user is None else (user.group, user.load, user.number, *place)

    def check_sessions(self) -> None:
        for session, history in self.histories.items():
            request = self.turns.get(session)
            if request is not None and not session.busy:
                del self.turns[session]
                history[:] = request.sequences[0].token_ids
            assert self.turns.get(session) is not None or session.past.token_ids == history
        cache = self.driver.scheduler.prefix_cache
        if cache is not None:
            pinned = [key for session in self.histories for key in session._pinned]
            assert cache._pins.total() == len(pinned)

    def check_answers(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            asked = self.asked[request]
            rows = zip(request.sequences, self.driver.answers(request), asked.answers, asked.fails_after, strict=True)
            failed = False
            for row, answer, expected, fails_after in rows:
                whole = row.finish_reason in ("stop", "length")
                assert answer == (expected if whole else expected[: len(answer)])
                assert fails_after is None or len(answer) <= fails_after
                if row.error is not None:
                    failed = True
                    assert asked.may_fail or len(answer) == fails_after
                if whole:
                    assert fails_after is None
                    assert (row.finish_reason == "stop") == any(token in asked.stop_ids for token in answer[-1:])
            if request.finished:
                self.unfinished.pop(request, None)
                whole = all(row.finish_reason in ("stop", "length") for row in request.sequences)
                self.check_end(asked, whole=whole)
                assert whole or failed or asked.ends_early

    def check_end(self, asked: Asked, *, whole: bool) -> None:
        """What comes beside the tokens of a request that ran to its end."""
        request = asked.request
        if request.prompt_logprobs_asked is not None and whole:
            following = [next(iter(dict(entry))) for entry in request.prompt_logprobs]
            assert following == request.prompt_ids[1:]
        if request.pooling is not None and whole:
            assert request.pooled is not None
            expected = expected_pooled(request.prompt_ids, request.pooling, self.driver.device.limits.hidden_size)
            assert all(map(partial(math.isclose, abs_tol=1e-9), request.pooled, expected))

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            # What `evict` pushed to the host is held until the next step, which in the engine is under way.
            self.driver.submit([0], 1, policy=self.policy("bob"))
            self.driver.drain()
            self.driver.check_drained()
            self.check_answers(self.asked)
            self.check_sessions()
            self.table.close()
            cache = self.driver.scheduler.prefix_cache
            assert cache is None or not cache._pins


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
