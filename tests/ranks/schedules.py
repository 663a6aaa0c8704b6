"""Random schedules of calls of one engine, for comparing engines: their answers depend on the seed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.engine.requests.generation import Generation, Session

__all__ = ["Schedule"]

LENGTHS = (1, 5, 24)
CALLS = ("ask", "ask", "burst", "leave", "turn", "turn", "fork", "rewind", "load", "unload", "doze", "sleep", "update")


class Schedule:
    """Calls one after the other, beside answers that run on. What changes weights waits for these first."""

    def __init__(
        self, engine: AsyncEngine, seed: int, adapters: Mapping[str, Path], weights: list[dict[str, Tensor]]
    ) -> None:
        """`adapters`: folders. `weights`: of several models of this shape."""
        self.engine = engine
        self.dice = Random(seed)
        self.adapters = adapters
        self.weights = weights
        self.answers: list[Any] = []
        """In the order of the calls."""
        self.running: dict[int, asyncio.Task[Any]] = {}
        """By place in `answers`."""
        self.sessions: list[Session] = []

    async def run(self, num_calls: int) -> list[Any]:
        """Make all kinds of calls once, then others, in any order. Return what they gave."""
        self.sessions.append(self.engine.session())
        calls = [*dict.fromkeys(CALLS), *self.dice.choices(CALLS, k=num_calls)]
        self.dice.shuffle(calls)
        for call in calls:
            await getattr(self, call)()
        await self.settle()
        for session in self.sessions:
            session.close()
        self.engine.check_idle()
        return self.answers

    def config(self) -> GenerationConfig:
        drawn = {"top_k": 30, "random_seed": self.dice.randrange(9), "n": self.dice.choice((1, 2))}
        most = self.dice.choice(LENGTHS)
        return GenerationConfig(max_new_tokens=most, ignore_eos=True, **self.dice.choice(({"temperature": 0.0}, drawn)))

    def name(self) -> str | None:
        return self.dice.choice([None, *sorted(self.engine.adapters)])

    def generation(self, config: GenerationConfig) -> Generation:
        """A prompt that begins like others."""
        prompt = [7, 8, 9, 200, 31] * self.dice.randrange(1, 6) + [self.dice.randrange(256)]
        return self.engine.generate(input_ids=prompt, gen_config=config, adapter_name=self.name())

    async def ask(self) -> None:
        await self.start(self.generation(self.config()))

    async def burst(self) -> None:
        """So many that their blocks do not suffice."""
        for _ in range(8):
            await self.start(self.generation(GenerationConfig(max_new_tokens=24, ignore_eos=True, temperature=0.0)))

    async def start(self, generation: Generation) -> None:
        """Have it answered beside the calls that follow. It is for the adapter and the weights of now."""
        await generation.start()
        self.running[len(self.answers)] = asyncio.create_task(generation.response())
        self.answers.append(None)

    async def leave(self) -> None:
        """Without an answer."""
        generation = self.generation(GenerationConfig(max_new_tokens=24, ignore_eos=True))
        if self.dice.random() < 0.5:
            async for _ in generation:
                break
        else:
            await generation.start()
        generation.cancel()

    async def turn(self) -> None:
        session = self.dice.choice(self.sessions)
        if session.step > 60:
            session.rewind(0)
        config = GenerationConfig(max_new_tokens=4, ignore_eos=True, temperature=0.0)
        turn = session.chat(self.dice.choice(("Hi", "And then?")), config, adapter_name=self.name())
        self.answers.append((await turn).token_ids)

    async def fork(self) -> None:
        self.sessions.append(self.dice.choice(self.sessions).fork())
        if len(self.sessions) > 3:
            self.sessions.pop(0).close()

    async def rewind(self) -> None:
        session = self.dice.choice(self.sessions)
        session.rewind(self.dice.randrange(session.step + 1))

    async def load(self) -> None:
        name, folder = self.dice.choice("ab"), self.adapters[self.dice.choice("abc")]
        await self.engine.load_adapter(name, str(folder), replace=name in self.engine.adapters)

    async def unload(self) -> None:
        if self.engine.adapters:
            await self.engine.unload_adapter(self.dice.choice(sorted(self.engine.adapters)))

    async def doze(self) -> None:
        """With weights kept, and answers that have begun."""
        await self.engine.sleep(1)
        await self.engine.wake()

    async def sleep(self) -> None:
        """With the weights of the checkpoint afterwards."""
        await self.settle()
        await self.engine.sleep(2)
        await self.engine.wake()

    async def update(self) -> None:
        await self.settle()
        await self.engine.update_weights(self.dice.choice(self.weights))

    async def settle(self) -> None:
        """Wait for all answers."""
        for place, task in self.running.items():
            response = await task
            self.answers[place] = [choice.token_ids for choice in response.choices or (response,)]
        self.running.clear()
