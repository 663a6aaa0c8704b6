"""Groups, quotas and shares: the file, whose turn it is by a fake clock, and what comes out of continuous batching."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.schedule.quality_of_service import BUCKET_S, WINDOW_S, QualityOfService, User
from asyncllm.engine.schedule.sequence import Request, RequestPolicy, SequenceState
from asyncllm.engine.schedule.waiting_queue import MAX_PASSED, PATIENCE_S, WaitingQueue
from asyncllm.errors import InvalidParameter, QueueFull
from asyncllm.testing import FakeEngine, hash_oracle
from tests.engine.driver import Driver
from tests.engine.policies import GROUPS, Clock, policy
from tests.engine.waits import settle, until

LMDEPLOY = {
    "Platinum": {"user_id0": 100, "default": 0},
    "Gold": {"user_id1": 50, "user_id2": 50},
    "Silver": {"user_id3": 5, "default": 95},
    "Bronze": {"user_id4": 30, "user_id5": 30, "user_id6": 40, "default": 0},
}
"""The sample of LMDeploy's documentation."""


def write(folder: Path, content: object) -> str:
    path = folder / "qos.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quality(tmp_path: Path, clock: Clock) -> QualityOfService:
    return QualityOfService.open(write(tmp_path, policy(GROUPS)), clock)


class TestFile:
    def test_the_sample_of_lmdeploy(self, tmp_path: Path) -> None:
        quality = QualityOfService.open(write(tmp_path, policy(LMDEPLOY)))
        places = {user.id: (user.group, user.quota) for user in quality.users.values()}
        assert places["user_id0"] == (0, 100)
        assert places["user_id6"] == (3, 40)
        assert places["default"] == (2, 95), "of several, the one with the highest quota"
        assert len({user.number for user in quality.users.values()}) == len(quality.users)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("", "not a QoS configuration"),
            ("[]", "Expected `object`"),
            ({}, "enable_user_qos"),
            (policy(GROUPS, enable_user_qos="yes"), r"Expected `bool`"),
            (policy(GROUPS, user_groups=[]), "length >= 1"),
            (policy(GROUPS, quotas=1), "unknown field"),
            (policy(GROUPS, user_groups=["Gold", "Silver"]), "user_group_map has the group 'Bronze'"),
            (policy(GROUPS, user_groups=["Gold", "Silver", "Bronze", "Tin"]), "user_groups has the group 'Tin'"),
            (policy(GROUPS, user_groups=["Gold", "Gold", "Silver", "Bronze"]), "names a group twice"),
            (policy({"Gold": {"ann": 60, "bob": 30}}), "add up to 90"),
            (policy({"Gold": {"ann": 60, "bob": 60}}), "add up to 120"),
            (policy({"Gold": {}}), "add up to 0"),
            (policy({"Gold": {"ann": -1, "bob": 101}}), "quota_pct"),
            (policy({"Gold": {"": 100}}), "length >= 1"),
            (policy({"Gold": {"ann": 100}, "Silver": {"ann": 100}}), "'ann' is listed twice"),
            (policy({"Gold": {}}, user_group_map={"Gold": [{"id": "a", "quota_pct": 50}] * 2}), "'a' is listed twice"),
            (policy({"Gold": {}}, user_group_map={"Gold": [{"id": "a"}]}), "quota_pct"),
            (policy({"Gold": {}}, user_group_map={"Gold": [{"id": 5, "quota_pct": 100}]}), "Expected `str`"),
        ],
    )
    def test_what_does_not_hold(self, content: object, complaint: str, tmp_path: Path) -> None:
        with pytest.raises(InvalidParameter, match=complaint) as caught:
            QualityOfService.open(write(tmp_path, content))
        assert caught.value.param == "qos_config_path"

    def test_no_such_file(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing.json", tmp_path):
            with pytest.raises(InvalidParameter, match="Cannot read"):
                QualityOfService.open(str(path))
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        with pytest.raises(InvalidParameter, match="not a QoS"):
            QualityOfService.open(str(tmp_path / "binary"))

    def test_thirds(self, tmp_path: Path) -> None:
        QualityOfService.open(write(tmp_path, policy({"Gold": {"a": 33.33, "b": 33.33, "c": 33.33}})))


class TestUsers:
    def test_an_unlisted_user_is_the_default_user(self, quality: QualityOfService) -> None:
        default = quality.users["default"]
        for user_id in ("default", "nobody", None, ""):
            assert quality.find(user_id) is default
        assert quality.find("bob") is quality.users["bob"]

    @pytest.mark.parametrize("user_id", ["nobody", None, "default"])
    def test_without_a_default_user_they_are_refused(self, user_id: str | None, tmp_path: Path) -> None:
        quality = QualityOfService.open(write(tmp_path, policy({"Gold": {"ann": 100}})))
        with pytest.raises(InvalidParameter, match="no user 'default'") as caught:
            quality.find(user_id)
        assert caught.value.param == "user_id"

    def test_switched_off_it_makes_no_difference(self, tmp_path: Path) -> None:
        quality = QualityOfService.open(write(tmp_path, policy({"Gold": {"ann": 100}}, enable_user_qos=False)))
        assert quality.find("nobody") is None
        assert WaitingQueue(quality).quality is None


class TestTurns:
    def serve(self, quality: QualityOfService, tokens: int = 1) -> str:
        user = quality.next_user()
        user.current += tokens
        return user.id

    def wait(self, quality: QualityOfService, *ids: str) -> None:
        for user_id in ids:
            quality.sequence_waits(quality.users[user_id])

    def test_groups_come_in_order(self, quality: QualityOfService) -> None:
        self.wait(quality, "zoe", "bob", "boss")
        assert self.serve(quality, 10**6) == "boss"
        assert self.serve(quality) == "boss"
        quality.sequence_left(quality.users["boss"])
        assert self.serve(quality, 10**6) == "bob"
        quality.sequence_left(quality.users["bob"])
        assert self.serve(quality) == "zoe"
        self.wait(quality, "boss")
        assert self.serve(quality) == "boss"

    def test_users_share_by_quota(self, quality: QualityOfService) -> None:
        self.wait(quality, "ann", "bob", "default")
        served = [self.serve(quality) for _ in range(1000)]
        assert [served.count(user_id) for user_id in ("ann", "bob", "default")] == [600, 300, 100]

    def test_shares_are_of_tokens_and_not_of_requests(self, quality: QualityOfService) -> None:
        self.wait(quality, "ann", "bob")
        for _ in range(3000):
            user = quality.next_user()
            user.current += 50 if user.id == "ann" else 1
        used = quality.used()
        assert used["ann"] == pytest.approx(2 * used["bob"], rel=0.01)

    def test_an_absent_user_leaves_its_share_to_the_others(self, quality: QualityOfService) -> None:
        self.wait(quality, "bob", "default")
        served = [self.serve(quality) for _ in range(400)]
        assert [served.count(user_id) for user_id in ("bob", "default")] == [300, 100]

    def test_quota_zero_is_served_if_no_user_with_a_quota_waits(self, quality: QualityOfService) -> None:
        self.wait(quality, "zoe", "idle")
        assert {self.serve(quality, 1000) for _ in range(20)} == {"zoe"}
        quality.sequence_left(quality.users["zoe"])
        assert self.serve(quality) == "idle"

    def test_the_window_slides(self, quality: QualityOfService, clock: Clock) -> None:
        self.wait(quality, "ann", "bob")
        quality.users["ann"].current += 10_000
        clock.now += WINDOW_S - BUCKET_S
        assert self.serve(quality, 0) == "bob"
        assert quality.used()["ann"] == 10_000
        clock.now += 2 * BUCKET_S
        assert quality.used()["ann"] == 0
        assert self.serve(quality, 0) == "ann", "both have used nothing, and ann is listed first"

    def test_a_window_forgets_bucket_by_bucket(self, quality: QualityOfService, clock: Clock) -> None:
        ann = quality.users["ann"]
        for _ in range(100):
            ann.current += 10
            clock.now += BUCKET_S
            quality.expire_use()
        assert ann.used == 10 * (WINDOW_S / BUCKET_S - 1)
        assert len(ann._buckets) <= WINDOW_S / BUCKET_S

    def test_any_order_of_calls_agrees_with_looking_at_everybody(self, quality: QualityOfService, clock: Clock) -> None:
        generator = random.Random(5)
        users = list(quality.users.values())
        for _ in range(5000):
            user = generator.choice(users)
            action = generator.random()
            if action < 0.3 and user.num_waiting < 3:
                quality.sequence_waits(user)
            elif action < 0.55 and user.num_waiting:
                quality.sequence_left(user)
            elif action < 0.9:
                user.current += generator.randrange(100)
            else:
                clock.now += generator.random() * 2 * BUCKET_S
            waiting = [user for user in users if user.num_waiting]
            if waiting:
                found = quality.next_user()
                assert found is min(waiting, key=lambda user: (user.group, user.load, user.number))


class Overload:
    """Users who always have requests waiting, rows that are always taken, and a clock that moves 50 ms a step."""

    def __init__(self, quality: QualityOfService, clock: Clock, lengths: dict[str, tuple[int, int]]) -> None:
        """`lengths`: user -> tokens of a prompt, tokens of an answer at most."""
        self.quality, self.clock, self.lengths = quality, clock, lengths
        self.driver = Driver(
            num_blocks=4000, num_slots=8, max_batch_size=8, waiting=WaitingQueue(quality, clock), caching=False
        )
        self.random = random.Random(3)
        self.arrived: dict[Request, float] = {}
        self.queue_times: dict[str, list[float]] = {user_id: [] for user_id in quality.users}

    def submit(self, user_id: str, prompt: int, answer: int) -> Request:
        policy = RequestPolicy(user=self.quality.users[user_id])
        request = self.driver.submit([self.random.randrange(8) for _ in range(prompt)], answer, policy=policy)
        self.arrived[request] = self.clock.now
        return request

    def step(self) -> None:
        for user_id, (prompt, answer) in self.lengths.items():
            while self.quality.users[user_id].num_waiting < 10:
                self.submit(user_id, self.random.randint(1, prompt), self.random.randint(1, answer))
        self.clock.now += 0.05
        self.driver.turn()
        for request in list(self.arrived):
            if request.sequences[0].state is not SequenceState.WAITING:
                user = request.policy.user
                assert user is not None
                self.queue_times[user.id].append(self.clock.now - self.arrived.pop(request))

    def shares(self, seconds: float) -> dict[str, float]:
        """Each user's part of the tokens used in the window after so many seconds."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.step()
        used = self.quality.used()
        return {user_id: 100 * used[user_id] / sum(used[each] for each in self.lengths) for user_id in self.lengths}


class TestContinuousBatching:
    @pytest.mark.parametrize(
        "lengths",
        [
            {"ann": (9, 30), "bob": (9, 30), "default": (9, 30)},
            {"ann": (4, 60), "bob": (60, 4), "default": (20, 20)},
            {"ann": (60, 4), "bob": (4, 60), "default": (4, 60)},
        ],
    )
    def test_shares_of_tokens_follow_quotas(
        self, quality: QualityOfService, clock: Clock, lengths: dict[str, tuple[int, int]]
    ) -> None:
        shares = Overload(quality, clock, lengths).shares(2 * WINDOW_S)
        for user_id, share in shares.items():
            assert share == pytest.approx(quality.users[user_id].quota, abs=5), shares

    def test_the_first_group_takes_a_row_from_the_others(self, quality: QualityOfService, clock: Clock) -> None:
        overload = Overload(quality, clock, {"ann": (9, 30), "bob": (9, 30), "zoe": (9, 30)})
        for _ in range(60):
            overload.submit("boss", 5, 5)
            overload.shares(1.0)
        waits = overload.queue_times["boss"]
        assert len(waits) == 60
        assert max(waits) <= 3 * 0.05, "two steps in flight, which hold the row"
        assert max(overload.queue_times["ann"]) > 1.0
        assert overload.driver.scheduler.waiting.num_requests >= 20

    def test_no_user_starves(self, quality: QualityOfService, clock: Clock) -> None:
        overload = Overload(quality, clock, {"ann": (9, 30), "zoe": (9, 30)})
        shares = overload.shares(90.0)
        waits = overload.queue_times["zoe"]
        assert waits, "the last group has starved"
        assert min(waits) >= PATIENCE_S
        assert 0 < shares["zoe"] < 100 / (MAX_PASSED + 1) + 5

    def test_priority_orders_within_a_user_only(self, quality: QualityOfService, clock: Clock) -> None:
        queue = WaitingQueue(quality, clock)
        driver = Driver(waiting=queue)
        asked = [("bob", -9), ("ann", 5), ("ann", 0), ("boss", 99), ("ann", 0)]
        requests = [
            driver.submit([1], policy=RequestPolicy(priority, quality.users[user_id])) for user_id, priority in asked
        ]
        order = []
        while (row := queue.first()) is not None:
            queue.admit(row, 1)
            order.append(requests.index(row.request))
        # ann and bob alternate by their shares: 1 of 60 is less than 1 of 30.
        assert order == [3, 2, 0, 4, 1]

    def test_tokens_that_were_cached_cost_nothing(self, quality: QualityOfService, clock: Clock) -> None:
        driver = Driver(waiting=WaitingQueue(quality, clock))
        ann, bob = quality.users["ann"], quality.users["bob"]
        for user in (ann, bob):
            driver.submit([1, 2, 3, 4, 5, 6], 2, policy=RequestPolicy(user=user))
            driver.drain()
        assert (ann.used, bob.used) == (6 + 2, 2 + 2)

    def test_what_a_preemption_makes_the_engine_compute_again_costs_nothing(
        self, quality: QualityOfService, clock: Clock
    ) -> None:
        driver = Driver(caching=False, waiting=WaitingQueue(quality, clock))
        ann = quality.users["ann"]
        request = driver.submit([1, 2, 3, 4, 5, 6], 4, policy=RequestPolicy(user=ann))
        driver.turn(1)
        driver.scheduler._preempt(request.sequences[0])
        driver.drain()
        assert driver.scheduler.counts.prefill_tokens > 6
        assert ann.used == 6 + 4

    def test_ten_thousand_users_cost_a_turn_no_more_than_ten(self, tmp_path: Path) -> None:
        def looked_at(num_users: int) -> int:
            groups = {"Gold": {f"user{number}": 100 / num_users for number in range(num_users)}}
            quality = QualityOfService.open(write(tmp_path, policy(groups)), Clock())
            for user in quality.users.values():
                quality.sequence_waits(user)
            looks = 0

            class CountingUser(User):
                __slots__ = ()

                @property
                def load(self) -> tuple[bool, float]:
                    nonlocal looks
                    looks += 1
                    return super().load

            for user in quality.users.values():
                user.__class__ = CountingUser
            for _ in range(50):
                quality.next_user().current += 1
            return looks

        assert looked_at(10_000) <= looked_at(10) + 150


@pytest.mark.anyio
class TestEngine:
    def engine(self, folder: Path, groups: dict[str, dict[str, float]] = GROUPS, **fields: Any) -> FakeEngine:
        config = EngineConfig(max_batch_size=4, qos_config_path=write(folder, policy(groups, **fields)))
        return FakeEngine(None, config, oracle=hash_oracle(256))

    async def test_ten_times_too_much_is_shared_by_quota(self, tmp_path: Path) -> None:
        async with self.engine(tmp_path) as engine:

            async def client(user_id: str) -> None:
                settings = GenerationConfig(max_new_tokens=24, ignore_eos=True)
                while True:
                    await engine.generate(f"I am {user_id}", settings, user_id=user_id)

            tasks = [asyncio.create_task(client(user_id)) for user_id in ("ann", "bob", "anybody") for _ in range(14)]
            await until(lambda: sum(engine.stats().user_tokens.values()) > 12_000)
            waits = []
            for _ in range(5):
                steps = engine.stats().steps
                await engine.generate("Me!", GenerationConfig(max_new_tokens=1), user_id="boss")
                waits.append(engine.stats().steps - steps)
            stats = engine.stats()
            assert stats.queued_requests > 30
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await settle(engine)
        used = {user_id: stats.user_tokens[user_id] for user_id in ("ann", "bob", "default")}
        for user_id, tokens in used.items():
            quota = GROUPS["Silver"][user_id]
            assert 100 * tokens / sum(used.values()) == pytest.approx(quota, abs=5), used
        assert max(waits) <= 24 + 8, "the first group waits for more than a row"

    @pytest.mark.parametrize("bounds", [{"max_queued_requests": 10}, {"max_queued_tokens": 50}])
    async def test_a_full_queue_has_a_place_for_everybodys_part(self, tmp_path: Path, bounds: dict[str, int]) -> None:
        config = EngineConfig(max_batch_size=4, qos_config_path=write(tmp_path, policy(GROUPS)), **bounds)
        endless = GenerationConfig(max_new_tokens=1000, ignore_eos=True)
        async with FakeEngine(None, config, oracle=hash_oracle(256)) as engine:
            engine.executor.pause()
            taken: list[Any] = []

            async def ask(user_id: str) -> bool:
                generation = engine.generate(input_ids=[1] * 5, gen_config=endless, user_id=user_id)
                try:
                    await generation.start()
                except QueueFull:
                    return False
                taken.append(generation)
                return True

            def asked(user_id: str) -> int:
                return sum(generation._request.policy.user.id == user_id for generation in taken)

            for _ in range(30):
                await ask("zoe")
            assert asked("zoe") == 4 + 10, "rows, and the whole queue"
            await until(lambda: engine.stats().running == 4)
            for _ in range(30):
                for user_id in ("ann", "bob", "boss"):
                    await ask(user_id)
                if len(taken) % 3 == 0:
                    await asyncio.sleep(0)  # so that some wait in the queue, and some have just arrived
            found = {user_id: asked(user_id) for user_id in ("ann", "bob", "boss")}
            again, queued = await ask("zoe"), engine.stats().queued_requests
            engine.executor.resume()
            for generation in taken:
                await generation.aclose()
            assert found == {"ann": 6, "bob": 3, "boss": 10}
            assert not again
            assert queued == 10 + 6 + 3 + 10
            await settle(engine)
            users = {generation._request.policy.user for generation in taken}
            assert all((user.queued_requests, user.queued_tokens) == (0, 0) for user in users)

    async def test_unknown_users_are_refused_and_the_engine_goes_on(self, tmp_path: Path) -> None:
        async with self.engine(tmp_path, {"Gold": {"ann": 100}}) as engine:
            settings = GenerationConfig(max_new_tokens=2)
            for options in ({"user_id": "bob"}, {}):
                with pytest.raises(InvalidParameter, match="no user 'default'"):
                    await engine.generate("Hi", settings, **options)
                with pytest.raises(InvalidParameter, match="no user 'default'"):
                    await engine.session().chat("Hi", settings, **options)
                with pytest.raises(InvalidParameter, match="no user 'default'"):
                    await engine.get_ppl([1, 2, 3], **options)
                with pytest.raises(InvalidParameter, match="no user 'default'"):
                    await engine.embed("Hi", **options)
            assert (await engine.generate("Hi", settings, user_id="ann")).finish_reason == "length"
            assert await engine.get_ppl([1, 2, 3], user_id="ann") > 0
            assert await engine.embed("Hi", user_id="ann")
            await settle(engine)

    async def test_switched_off_any_user_will_do(self, tmp_path: Path) -> None:
        async with self.engine(tmp_path, enable_user_qos=False) as engine:
            await engine.generate("Hi", GenerationConfig(max_new_tokens=2), user_id="anybody")
            assert engine.stats().user_tokens == {}

    async def test_without_it_a_user_id_is_refused(self) -> None:
        async with FakeEngine() as engine:
            with pytest.raises(InvalidParameter, match="qos_config_path"):
                await engine.generate("Hi", user_id="ann")

    async def test_a_bad_file_ends_the_start(self, tmp_path: Path) -> None:
        for path in (write(tmp_path, "{}"), str(tmp_path / "nothing.json")):
            with pytest.raises(InvalidParameter, match="qos_config_path"):
                await FakeEngine(None, EngineConfig(qos_config_path=path)).start()
