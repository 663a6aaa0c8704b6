"""Which node a strategy chooses, also where LMDeploy's starve a node or fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, get_args

import pytest

from asyncllm.config import RoutingStrategy
from asyncllm.server.distributor.nodes import Node
from asyncllm.server.distributor.routing_fields import RoutingFields
from asyncllm.server.distributor.strategies import RECENT_S, rendezvous, strategy_named

ANY = RoutingFields()


def nodes_of(*fields: dict[str, Any]) -> list[Node]:
    made = []
    for number, each in enumerate(fields):
        node = Node(f"http://node-{number}")
        for name, value in each.items():
            setattr(node, name, value)
        made.append(node)
    return made


def chosen(name: RoutingStrategy, nodes: list[Node], times: int = 1, fields: RoutingFields = ANY) -> Counter[int]:
    """How often each node is chosen."""

    async def choose() -> Counter[int]:
        strategy = strategy_named(name)
        return Counter(nodes.index(strategy(nodes, fields)) for _ in range(times))

    return asyncio.run(choose())


@pytest.mark.parametrize("name", get_args(RoutingStrategy))
def test_one_node_is_chosen(name: RoutingStrategy) -> None:
    assert chosen(name, nodes_of({"speed": -1.0, "unfinished": 9})) == {0: 1}


def test_random_is_weighted_by_speed_and_the_unknown_count_as_the_mean() -> None:
    counts = chosen("random", nodes_of({"speed": 30.0}, {"speed": 10.0}, {}, {"speed": -1.0}), 8000)
    assert 2700 < counts[0] < 3300
    assert 800 < counts[1] < 1200
    assert 1700 < counts[2] < 2300
    assert 1700 < counts[3] < 2300


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        ([{"unfinished": 2}, {"unfinished": 1}], {1}),
        ([{"unfinished": 2, "speed": 30.0}, {"unfinished": 1, "speed": 10.0}], {0}),
        ([{"speed": 10.0}, {"speed": 30.0}], {1}),
        ([{"unfinished": 1}, {"unfinished": 1}, {"unfinished": 5}], {0, 1}),
        ([{"unfinished": 1, "speed": 0.0}, {"speed": -1.0}], {1}),
    ],
)
def test_min_expected_latency(nodes: list[dict[str, Any]], choices: set[int]) -> None:
    assert set(chosen("min_expected_latency", nodes_of(*nodes), 50)) == choices


@pytest.mark.parametrize(
    ("nodes", "choices"),
    [
        ([{"records": [2.0, 4.0]}, {"records": [2.5]}], {1}),
        # A node without a record is no infinitely slow one.
        ([{"records": [0.1]}, {}], {1}),
        # While its first answer runs, others get their share.
        ([{"records": [0.1]}, {"records": [0.2]}, {"unfinished": 1}], {0}),
        ([{"unfinished": 3}, {"unfinished": 1}], {1}),
        # An old record does not count, so a node that was slow is tried again.
        ([{"records": [0.1]}, {"old": [9.0]}], {1}),
    ],
)
def test_min_observed_latency(nodes: list[dict[str, Any]], choices: set[int]) -> None:
    async def choose() -> set[int]:
        now = asyncio.get_running_loop().time()
        made = []
        for each in nodes:
            [node] = nodes_of({"unfinished": each.get("unfinished", 0)})
            node.latencies.extend((now, seconds) for seconds in each.get("records", ()))
            node.latencies.extend((now - RECENT_S - 1, seconds) for seconds in each.get("old", ()))
            made.append(node)
        strategy = strategy_named("min_observed_latency")
        return {made.index(strategy(made, ANY)) for _ in range(50)}

    assert asyncio.run(choose()) == choices


def test_a_key_moves_only_if_its_node_is_gone() -> None:
    nodes = nodes_of({}, {}, {}, {})
    keys = [str(number).encode() for number in range(200)]
    before = [rendezvous(nodes, key) for key in keys]
    assert min(Counter(before).values()) > 20
    after = [rendezvous(nodes[1:], key) for key in keys]
    assert all(now is then for now, then in zip(after, before, strict=True) if then is not nodes[0])


class TestPrefix:
    def test_a_conversation_stays_with_its_node(self) -> None:
        nodes = nodes_of({}, {}, {}, {})
        strategy = strategy_named("prefix")
        turns = [RoutingFields(model="m", prompt=b"a" * 400 + b"b" * size) for size in (0, 700, 1500, 9000)]
        # Its first 512 bytes differ from turn 0, which is shorter, to turn 1; from then on they are the same.
        assert len({strategy(nodes, turn).url for turn in turns[1:]}) == 1

    def test_what_is_longest_counts(self) -> None:
        nodes = nodes_of({}, {})
        strategy = strategy_named("prefix")
        shared = b"s" * 600
        first = strategy(nodes, RoutingFields(prompt=shared + b"1" * 2000))
        first.unfinished = 9
        second = strategy(nodes, RoutingFields(prompt=shared + b"2" * 2000))
        assert second is not first
        first.unfinished = 0
        assert strategy(nodes, RoutingFields(prompt=shared + b"2" * 2400)) is second
        assert strategy(nodes, RoutingFields(prompt=shared + b"1" * 2400)) is first

    def test_tenants_and_models_are_apart(self) -> None:
        nodes = nodes_of(*({} for _ in range(16)))
        strategy = strategy_named("prefix")
        prompts = [RoutingFields(tenant=n % 4, model=str(n // 4), prompt=b"p" * 600) for n in range(16)]
        assert len({strategy(nodes, fields).url for fields in prompts}) > 4

    def test_an_overloaded_node_is_passed_over(self) -> None:
        nodes = nodes_of({}, {}, {})
        strategy = strategy_named("prefix")
        fields = RoutingFields(prompt=b"p" * 600)
        for _ in range(30):
            strategy(nodes, fields).unfinished += 1
        assert max(node.unfinished for node in nodes) <= 13

    def test_a_node_that_is_gone_is_forgotten(self) -> None:
        nodes = nodes_of({}, {}, {})
        strategy = strategy_named("prefix")
        fields = RoutingFields(prompt=b"p" * 5000)
        left = [node for node in nodes if node is not strategy(nodes, fields)]
        again = strategy(left, fields)
        assert again in left
        assert strategy(nodes, fields) is again
