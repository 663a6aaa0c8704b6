"""The program of a rank's process: receives messages, and runs steps on the same executor as an engine without
ranks."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from asyncllm.agent.executor import open_executor
from asyncllm.protocol import Executor, StepOutput, TakeVocabulary, UpdateWeights
from asyncllm.ranks.channel import Channel
from asyncllm.ranks.grammars import RankGrammars
from asyncllm.ranks.messages import (
    AdapterTaken,
    CarriedOut,
    CarryOut,
    DropAdapter,
    Failure,
    ForgetGrammars,
    FromRank,
    GrammarTaken,
    Ping,
    Pong,
    Ready,
    RunStep,
    Start,
    StepDone,
    TakeAdapter,
    TakeGrammar,
    TakePixels,
    TakeWeights,
    decoder_to_rank,
    encode,
)
from asyncllm.ranks.shared_tensors import map_tensors
from asyncllm.ranks.step_images import LatestPixels, with_pixels

__all__ = ["Rank", "main"]


def main(descriptor: int, parent: int) -> None:
    """Serve the engine at the other end of the socket `descriptor` until it is closed. `parent`: the process that this
    one must not outlive."""
    # Printed text belongs in the log, not in the parent's output.
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="asyncllm-parent").start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Rank(socket.socket(fileno=descriptor)).run())


def _end_with(parent: int) -> None:
    """End this process at once when its parent, and with it the engine, is gone."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() == parent:
        select.select([watched], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """Written by the event loop's thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._channel: Channel | None = None
        self._executor: Executor | None = None
        self._started: asyncio.Future[Start | None] | None = None
        """The first message; None if there is none."""
        self._pixels: list[TakePixels] = []
        """New images for the next step."""
        self._latest = LatestPixels()
        self._over = asyncio.Event()
        self._grammars = RankGrammars()
        self._decode = decoder_to_rank(self._grammars.make)
        self._model_path = Path()
        self._vocab_size = 0

    async def run(self) -> None:
        """Load the model that the first message names, then handle messages until the channel ends."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        self._channel = Channel(self._end, self._take, self._end_of_channel)
        start = await self._started
        if start is None:
            return
        rendezvous = None
        if start.num_ranks > 1:
            from asyncllm.distributed.group import Rendezvous

            rendezvous = Rendezvous(start.rank, start.num_ranks, start.rendezvous_file)
        self._model_path = Path(start.model_path)
        executor = open_executor(start.config, self._model_path, rendezvous=rendezvous)
        try:
            limits = await executor.start()
        except Exception as error:
            self._send(Ready(None, Failure.of(error)))
        else:
            self._executor, self._vocab_size = executor, limits.vocab_size
            self._send(Ready(limits))
        await self._over.wait()
        await executor.close()

    def _end_of_channel(self) -> None:
        assert self._started is not None
        if not self._started.done():
            self._started.set_result(None)
        self._over.set()

    def _take(self, data: memoryview) -> None:
        """Handle one message of the engine's process. Answers follow when they are known."""
        match self._decode(data):
            case Start() as start:
                assert self._started is not None
                self._started.set_result(start)
            case TakePixels() as taken:
                self._pixels.append(taken)
            case RunStep(batch):
                taken_before, self._pixels = self._pixels, []
                batch = with_pixels(batch, taken_before, self._latest)
                self._answer(lambda: self._running().submit(batch), partial(_step_done, batch.step))
            case TakeGrammar(grammar):
                self._answer(lambda: self._grammars.take(grammar), partial(_grammar_taken, grammar.number))
            case TakeAdapter(adapter):
                self._answer(lambda: self._running().load_adapter(adapter), partial(_adapter_taken, adapter.number))
            case DropAdapter(number):
                self._running().drop_adapter(number)
            case Ping():
                self._send(Pong())
            case ForgetGrammars(numbers):
                self._grammars.forget(numbers)
            case CarryOut(TakeVocabulary(ends)):
                self._answer(lambda: self._grammars.open(self._model_path, self._vocab_size, ends), _carried_out)
            case CarryOut(command):
                self._answer(lambda: self._running().carry_out(command), _carried_out)
            case TakeWeights(tensors):
                assert self._channel is not None
                descriptor = self._channel.descriptors.popleft()
                try:
                    update = UpdateWeights(map_tensors(descriptor, tensors))
                finally:
                    os.close(descriptor)
                self._answer(lambda: self._running().carry_out(update), _carried_out)

    def _running(self) -> Executor:
        assert self._executor is not None, "nothing is asked of a rank before it is ready"
        return self._executor

    def _answer(
        self,
        work: Callable[[], asyncio.Future[Any]],
        answer: Callable[[Any, Failure | None], FromRank],
    ) -> None:
        """When the work is done, send the message that `answer` makes of its result or failure."""

        def send(future: asyncio.Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._send(answer(None, Failure.of(error)))
            else:
                self._send(answer(future.result(), None))

        work().add_done_callback(send)

    def _send(self, message: FromRank) -> None:
        assert self._channel is not None
        self._channel.send(encode(message))


def _step_done(step: int, output: StepOutput | None, failure: Failure | None) -> StepDone:
    return StepDone(step, output, failure)


def _grammar_taken(number: int, _: None, failure: Failure | None) -> GrammarTaken:
    return GrammarTaken(number, failure)


def _adapter_taken(number: int, digest: str | None, failure: Failure | None) -> AdapterTaken:
    return AdapterTaken(number, digest or "", failure)


def _carried_out(_: None, failure: Failure | None) -> CarriedOut:
    return CarriedOut(failure)
