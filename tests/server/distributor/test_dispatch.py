"""Each request gets a node within its bound, in order; the count is right however a request ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor import pins
from asyncllm.server.distributor.dispatch import Dispatcher
from asyncllm.server.distributor.nodes import MAX_FAILURES, Node, Nodes
from asyncllm.server.distributor.pins import Pins
from asyncllm.server.distributor.routing_fields import RoutingFields
from asyncllm.server.distributor.strategies import min_expected_latency
from asyncllm.server.http.errors import ApiError

pytestmark = pytest.mark.anyio

ANY = RoutingFields()


class Setting:
    """A dispatcher with nodes that are ready."""

    def __init__(self, *models: str, ttl: float = 60.0, **config: Any) -> None:
        self.nodes = Nodes()
        self.pins = Pins(self.nodes, ttl)
        settings = DistributorConfig(**{"max_unfinished": 1, "wait_timeout": 5.0, **config})
        self.dispatcher = Dispatcher(self.nodes, self.pins, min_expected_latency, settings)
        self.all = [self.add(f"http://{number}", model) for number, model in enumerate(models)]

    def add(self, url: str, model: str) -> Node:
        node = Node(url)
        node.accepts, node.models = True, {model: {"id": model}}
        self.nodes.add(node)
        return node

    def later(self, fields: RoutingFields = ANY) -> asyncio.Task[Node]:
        return asyncio.create_task(self.dispatcher.take(fields))


async def test_requests_wait_in_order_for_a_node_with_room() -> None:
    setting = Setting("m", "m")
    taken = [await setting.dispatcher.take(ANY) for _ in range(2)]
    assert {node.url for node in taken} == {"http://0", "http://1"}
    waiting = [setting.later() for _ in range(3)]
    await asyncio.sleep(0)
    assert setting.dispatcher.num_waiting == 3
    for node, task in zip((taken[1], taken[0], taken[1]), waiting, strict=True):
        setting.dispatcher.give_back(node)
        assert await task is node
    assert setting.dispatcher.num_waiting == 0
    assert [node.unfinished for node in setting.all] == [1, 1]


async def test_a_request_does_not_wait_behind_one_for_another_model() -> None:
    setting = Setting("a", "b")
    a, b = RoutingFields(model="a"), RoutingFields(model="b")
    await setting.dispatcher.take(a)
    await setting.dispatcher.take(b)
    first, second = setting.later(a), setting.later(b)
    await asyncio.sleep(0)
    setting.dispatcher.give_back(setting.all[1])
    assert await second is setting.all[1]
    assert not first.done()
    setting.dispatcher.give_back(setting.all[0])
    assert await first is setting.all[0]


async def test_a_request_that_leaves_the_queue_takes_no_room() -> None:
    setting = Setting("m")
    await setting.dispatcher.take(ANY)
    leaving, also_leaving = setting.later(), setting.later()
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    # It gets the room and is cancelled in the same turn.
    setting.dispatcher.give_back(setting.all[0])
    also_leaving.cancel()
    await asyncio.wait([also_leaving])
    assert also_leaving.cancelled()
    assert setting.all[0].unfinished == setting.dispatcher.num_waiting == 0


@pytest.mark.parametrize("config", [{"max_waiting": 0}, {"wait_timeout": 0.01}])
async def test_what_finds_no_room_is_refused(config: dict[str, Any]) -> None:
    setting = Setting("m", **config)
    await setting.dispatcher.take(ANY)
    with pytest.raises(ApiError) as refused:
        await setting.dispatcher.take(ANY)
    assert (refused.value.status, refused.value.code, refused.value.headers["Retry-After"]) == (503, "nodes_full", "1")
    assert setting.dispatcher.num_waiting == 0


async def test_a_new_node_serves_those_that_wait_and_a_lost_one_refuses_them() -> None:
    setting = Setting("m", "m")
    for _ in range(2):
        await setting.dispatcher.take(ANY)
    waiting = setting.later()
    await asyncio.sleep(0)
    new = setting.add("http://new", "m")
    assert await waiting is new
    waiting = setting.later()
    await asyncio.sleep(0)
    for node in [*setting.all, new]:
        setting.nodes.remove(node)
    with pytest.raises(ApiError, match="no server yet"):
        await waiting


@pytest.mark.parametrize(
    ("change", "model", "status", "code"),
    [
        ({}, "m", 0, ""),
        ({}, None, 0, ""),
        ({}, "other", 404, "model_not_found"),
        ({"accepts": False}, "m", 503, "no_node"),
        ({"failures": MAX_FAILURES}, "m", 503, "no_node"),
        ({"accepts": False}, "other", 404, "model_not_found"),
        # A node that does not tell its models may have any.
        ({"models": {}}, "other", 0, ""),
        ({"models": {}, "accepts": False}, "other", 503, "no_node"),
    ],
)
async def test_who_may_answer(change: dict[str, Any], model: str | None, status: int, code: str) -> None:
    setting = Setting("m")
    for name, value in change.items():
        setattr(setting.all[0], name, value)
    if not status:
        assert await setting.dispatcher.take(RoutingFields(model=model)) is setting.all[0]
        return
    with pytest.raises(ApiError) as refused:
        await setting.dispatcher.take(RoutingFields(model=model))
    assert (refused.value.status, refused.value.code) == (status, code)
    assert ("Retry-After" in refused.value.headers) == (status == 503)


class TestConversations:
    TURN = RoutingFields(session=7)

    async def test_each_has_the_same_node_before_and_after_it_is_pinned(self) -> None:
        setting = Setting(*"mmmm", max_unfinished=9)
        first = await setting.dispatcher.take(self.TURN)
        # As after a restart of the distributor, which has lost its pins.
        assert await setting.dispatcher.take(self.TURN) is first
        setting.pins.put("session", -1, 7, first)
        for node in setting.all:
            if node is not first:
                setting.nodes.remove(node)
        for number in range(20):
            setting.add(f"http://new-{number}", "m")
        assert await setting.dispatcher.take(self.TURN) is first
        assert setting.dispatcher.take_another(self.TURN, [first]) is None

    async def test_one_waits_for_its_node_and_is_refused_without_it(self) -> None:
        setting = Setting("m", "m")
        setting.pins.put("session", -1, 7, setting.all[0])
        assert await setting.dispatcher.take(self.TURN) is setting.all[0]
        waiting = setting.later(self.TURN)
        await asyncio.sleep(0)
        assert not waiting.done()
        setting.all[0].accepts = False
        setting.dispatcher.give_back(setting.all[0])
        with pytest.raises(ApiError) as refused:
            await waiting
        assert refused.value.code == "conversation_unavailable"
        setting.nodes.remove(setting.all[0])
        assert await setting.dispatcher.take(self.TURN) is setting.all[1]

    async def test_tenants_do_not_share_them(self) -> None:
        setting = Setting("m", "m")
        setting.pins.put("response", 0, "resp_1", setting.all[0])
        assert setting.pins.get("response", 1, "resp_1") is None

    async def test_pins_are_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pins, "MAX_PINS", 3)
        setting = Setting("m", ttl=-1.0)
        setting.pins.put("session", -1, 7, setting.all[0])
        assert setting.pins.get("session", -1, 7) is None
        for number in range(5):
            setting.pins.put("session", -1, number, setting.all[0])
        assert len(setting.pins) == 3

    async def test_a_label_does_not_take_a_conversation_away(self) -> None:
        setting = Setting("m", "m")
        setting.pins.put("session", -1, 7, setting.all[0], holds=False)
        setting.pins.put("session", -1, 7, setting.all[1], holds=False)
        assert setting.pins.get("session", -1, 7) is setting.all[1]
        setting.pins.put("session", -1, 7, setting.all[0])
        setting.pins.put("session", -1, 7, setting.all[1], holds=False)
        assert setting.pins.get("session", -1, 7) is setting.all[0]
