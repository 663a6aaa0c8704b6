"""The protocol of `linear_hopper` as a small model: blocks of a producer and consumers, copies that arrive late and in
any order, flags. Agents are generators that yield True when they got on and False when they wait; a schedule runs them
in random order. What must never happen is an assertion, a wait that never ends a `Deadlock`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncllm.kernels.triton.linear.hopper import share_of, tile_place

Agent = Iterator[bool]
Part = tuple[int, int, int]
"""Tile of tokens, tile of columns, step."""


class Deadlock(Exception):
    """All agents have waited for a long time."""


@dataclass(frozen=True)
class Launch:
    token_tiles: int
    column_tiles: int
    steps: int
    blocks: int
    """Blocks that run at once; with `shares` also how many shares there are, times `token_tiles`."""
    shares: bool
    consumers: int = 2
    stages: int = 3
    group: int = 4
    broken: str = ""
    """What to do wrong, to see that it is found: "phase", "early", "order" or "flag"."""


class Barrier:
    """An mbarrier: completes when `count` have arrived and no bytes are outstanding, and flips its phase."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending -= 1
        self.add(expected)

    def add(self, number: int) -> None:
        self.bytes += number
        if self.pending == self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def passed(self, phase: int) -> bool:
        return self.phase != phase


class Block:
    def __init__(self, device: Device, number: int) -> None:
        launch = device.launch
        self.full = [Barrier(1) for _ in range(launch.stages)]
        self.empty = [Barrier(launch.consumers) for _ in range(launch.stages)]
        self.held: list[dict[str, Part]] = [{} for _ in range(launch.stages)]
        self.readers = [0] * launch.stages
        consumers = (_consume(device, self, number, consumer) for consumer in range(launch.consumers))
        self.agents: list[Agent] = [_produce(device, self, number), *consumers]


@dataclass
class Device:
    launch: Launch
    copies: list[tuple[Block, int, str, Part]] = field(default_factory=list)
    partial: dict[int, list[int]] = field(default_factory=dict)
    flags: dict[int, int] = field(default_factory=dict)
    results: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """(tile of tokens, tile of columns, consumer) -> the steps that were summed, in order."""


def segments(launch: Launch, block: int) -> list[tuple[int, int, int, int]]:
    """What a block goes through: (tile of tokens, tile of columns, first step, the one after the last)."""
    found = []
    if launch.shares:
        count = launch.blocks // launch.token_tiles
        tile, _, at, stop = share_of.fn(block, launch.token_tiles, launch.column_tiles, count, launch.steps)
        while at < stop:
            begin = at % launch.steps
            end = min(launch.steps, begin + stop - at)
            found.append((tile, at // launch.steps, begin, end))
            at += end - begin
    else:
        for number in range(block, launch.token_tiles * launch.column_tiles, launch.blocks):
            place = tile_place.fn(number, launch.token_tiles, launch.column_tiles, launch.group)
            found.append((*place, 0, launch.steps))
    return found


def _produce(device: Device, block: Block, number: int) -> Agent:
    launch = device.launch
    parts = [
        (tile, column, step)
        for tile, column, begin, end in segments(launch, number)
        for step in range(begin, end)
    ]  # fmt: skip
    stage = phase = 0
    for part in parts:
        while not block.empty[stage].passed(phase ^ 1):
            yield False
        block.full[stage].arrive(2)
        device.copies += [(block, stage, "tokens", part), (block, stage, "weights", part)]
        yield True
        stage += 1
        if stage == launch.stages:
            stage, phase = 0, phase ^ (launch.broken != "phase")


def _consume(device: Device, block: Block, number: int, consumer: int) -> Agent:
    launch = device.launch
    stage = phase = 0
    for tile, column, begin, end in segments(launch, number):
        total: list[int] = []
        before = -1
        for step in range(begin, end):
            while not block.full[stage].passed(phase):
                yield False
            part = (tile, column, step)
            assert block.held[stage] == {"tokens": part, "weights": part}, "a product of other numbers"
            block.readers[stage] += 1
            total.append(step)
            if launch.broken == "early":
                block.empty[stage].arrive()
            yield True
            # This product runs, so the one before it is done.
            if before >= 0:
                _release(launch, block, before)
            before = stage
            stage += 1
            if stage == launch.stages:
                stage, phase = 0, phase ^ 1
        _release(launch, block, before)
        if begin > 0:
            mine = number * launch.consumers + consumer
            assert mine not in device.partial, "a sum over another that has not been read"
            if launch.broken != "flag":
                yield True
                device.partial[mine] = total
            yield True
            device.flags[mine] = 1
        else:
            if launch.shares:
                yield from _add_others(device, number, tile, column, consumer, total)
            assert (tile, column, consumer) not in device.results, "stored twice"
            device.results[tile, column, consumer] = total
        yield True


def _release(launch: Launch, block: Block, stage: int) -> None:
    block.readers[stage] -= 1
    if launch.broken != "early":
        block.empty[stage].arrive()


def _add_others(device: Device, number: int, tile: int, column: int, consumer: int, total: list[int]) -> Agent:
    launch = device.launch
    count, all_steps = launch.blocks // launch.token_tiles, launch.column_tiles * launch.steps
    other = share_of.fn(number, launch.token_tiles, launch.column_tiles, count, launch.steps)[1]
    found = []
    while (other + 1) * all_steps // count < (column + 1) * launch.steps:
        other += 1
        theirs = (count - 1 - other) * launch.token_tiles + tile
        assert theirs < number, "waits for a block that may not have been started"
        found.append(theirs * launch.consumers + consumer)
    for theirs in reversed(found) if launch.broken == "order" else found:
        while not device.flags.get(theirs):
            yield False
        assert theirs in device.partial, "a flag before its sum"
        total += device.partial.pop(theirs)
        yield True
        device.flags[theirs] = 0


def run(launch: Launch, seed: int, resident: int) -> Device:
    """Run a launch of which `resident` blocks are on the device at a time. Raises Deadlock, or AssertionError."""
    chance = random.Random(seed)
    device = Device(launch)
    waiting, live, idle = list(range(launch.blocks)), [], 0
    while waiting or live:
        while waiting and len(live) < resident:
            live.append(Block(device, waiting.pop(0)))
        agents = [(block, agent) for block in live for agent in block.agents]
        chance.shuffle(agents)
        moved = False
        for block, agent in agents[: chance.randint(1, len(agents))]:
            try:
                moved |= next(agent)
            except StopIteration:
                block.agents.remove(agent)
                moved = True
        chance.shuffle(device.copies)
        for _ in range(chance.randint(0, len(device.copies))):
            block, stage, kind, part = device.copies.pop()
            assert not block.readers[stage], "overwritten while a product reads it"
            block.held[stage][kind] = part
            block.full[stage].add(-1)
            moved = True
        live = [block for block in live if block.agents]
        idle = 0 if moved else idle + 1
        if idle > 300:
            raise Deadlock(f"{launch} with {resident} blocks at once")
    return device
