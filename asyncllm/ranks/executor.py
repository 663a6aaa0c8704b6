"""RankExecutor: runs the steps of an engine in child processes, one per rank.

    engine's process                          a rank's process
    submit(batch) ── RunStep ──> every rank   StepExecutor, ModelAgent
           future <── StepDone ─ every rank   the first rank's message has the results

The engine's process needs no torch and no device context. A rank that dies is noticed at once through its pidfd; then
all ranks are killed and the executor is dead. A lost device is released with its process, so a new engine can start.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.agent.step_thread import dead, set_exception, set_result, set_seen_exception
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineError, InvalidCheckpoint, ModelError
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import (
    Batch,
    Command,
    Limits,
    LoadAdapter,
    Sleep,
    StepDropped,
    StepFailed,
    StepOutput,
    TakeVocabulary,
    UpdateWeights,
    Wake,
)
from asyncllm.ranks.calls import RankCall, RankStep
from asyncllm.ranks.channel import Channel
from asyncllm.ranks.heartbeat import Heartbeat, Work
from asyncllm.ranks.messages import (
    AdapterTaken,
    CarriedOut,
    CarryOut,
    DropAdapter,
    Failure,
    ForgetGrammars,
    GrammarTaken,
    Ping,
    Pong,
    Ready,
    RemoteError,
    RunStep,
    Start,
    StepDone,
    TakeAdapter,
    TakeGrammar,
    TakeWeights,
    decode_from_rank,
    encode,
    encode_pixels,
)
from asyncllm.ranks.process import RankProcess, above_streams
from asyncllm.ranks.shared_tensors import TensorHeader, share_tensors
from asyncllm.ranks.step_images import LatestPixels, without_pixels
from asyncllm.text.grammars.bridge import CompiledGrammar

__all__ = ["RankExecutor"]

_AGREEMENT_S = 5.0
"""How much later than one rank the others may notice that a step or a command has failed."""

_CAUSE_S = 0.2
"""After a rank has failed at the start, how long to wait for the death of another rank, which may be the cause."""

_CLOSE_PATIENCE_S = 10.0
"""How long ranks may take to release their resources before they are killed."""


class RankExecutor:
    """States: new, starting, running, possibly dead, then closed. Written by its event loop's thread."""

    isolated = True

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        """`model_path` is the checkpoint's folder."""
        self.num_ranks = config.tp
        self._config, self._model_path = msgspec.structs.replace(config, isolated=False, tp=1), str(model_path)
        self._rendezvous_file = ""
        """The file of several ranks' rendezvous: unnamed, given by the descriptor that they inherit."""
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._processes: list[RankProcess] = []
        self._channels: list[Channel] = []
        self._ready: list[asyncio.Future[Limits]] = []
        self._unanswered: list[deque[RankStep]] = []
        """By rank, the steps that it has not answered, oldest first."""
        self._command: RankCall[None] | None = None
        """The command under way."""
        self._adapters: dict[int, RankCall[str]] = {}
        """By number, the adapters that some rank is still reading."""
        self._heartbeat = Heartbeat(
            config.tp, work=self._work, ask=lambda: self._send_all(encode(Ping())), on_silence=self._end_hung
        )
        self._grammars: dict[int, RankCall[None]] = {}
        """By number, the grammars that some rank is still compiling."""
        self._forgotten: deque[int] = deque()
        """Numbers of grammars that nothing refers to any more. Written by the thread that drops the last reference."""
        self._error: BaseException | None = None
        """The error that killed the executor."""
        self._pixels = LatestPixels()
        """The images that all ranks have."""
        self._on_step: Callable[[], None] = lambda: None
        self._on_death: Callable[[Exception], None] | None = None

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """See `Executor`: `on_death` is called for a process that ends while no step or command is open."""
        self._on_step, self._on_death = on_step, on_death

    async def start(self) -> Limits:
        """Start the processes and load the model in each. Raises errors of loading, ModelError if a process ends before
        it is ready or is silent for minutes, and EngineError if the system refuses one; then no process is left."""
        if self._state != "new":
            raise EngineClosed("This executor was started or closed before. Make a new one.")
        self._state = "starting"
        self._loop = asyncio.get_running_loop()
        try:
            await self._start_processes()
            for process in self._processes:
                self._connect(process)
            self._heartbeat.begin()
            limits = await self._all_ready()
            if any(each.num_blocks != limits[0].num_blocks for each in limits):
                raise ModelError("The ranks do not agree on the blocks of the KV cache.")
            if any(each.adapter_digests != limits[0].adapter_digests for each in limits):
                raise _changed_meanwhile("The files of an adapter")
        except BaseException:
            self._kill()
            await self._wait_ended()
            self._state = "closed"
            self._heartbeat.stop()
            raise
        if self._state != "starting":
            raise EngineClosed("The executor was closed while it was starting.")
        self._state = "running"
        return limits[0]

    async def _all_ready(self) -> list[Limits]:
        """Return the limits reported by all ranks. Raises the error of the first rank that failed, or the death of the
        rank that caused it."""
        try:
            return await asyncio.gather(*self._ready)
        except AsyncLLMError as error:
            if isinstance(error.__cause__, RemoteError):
                await asyncio.sleep(_CAUSE_S)
                died = next((process for process in self._processes if process.ended.is_set()), None)
                if died is not None:
                    raise _died_at_start(died) from error
            raise

    async def _start_processes(self) -> None:
        """Start the ranks in a thread, because it takes milliseconds. Wait for it even if cancelled, so that no process
        is lost."""
        assert self._loop is not None

        def start_all() -> None:
            rendezvous = None
            if self.num_ranks > 1:
                rendezvous = above_streams(os.memfd_create("asyncllm-rendezvous", os.MFD_CLOEXEC))
            try:
                for rank in range(self.num_ranks):
                    self._processes.append(RankProcess(rank, num_ranks=self.num_ranks, rendezvous=rendezvous))
            finally:
                if rendezvous is not None:
                    self._rendezvous_file = f"/proc/self/fd/{rendezvous}"
                    os.close(rendezvous)

        starting = self._loop.create_task(in_thread(start_all), name="asyncllm-ranks")
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            raise
        except OSError as error:
            raise EngineError(
                f"The system refuses another process for the ranks ({error}). End others, lower tp, or raise the limit "
                f"of open files or processes (`ulimit -n`, `ulimit -u`)."
            ) from error

    def _connect(self, process: RankProcess) -> None:
        assert self._loop is not None
        rank = process.rank
        ready: asyncio.Future[Limits] = self._loop.create_future()
        # The failure of a rank that is not the first to fail is never awaited.
        ready.add_done_callback(retrieve)
        self._ready.append(ready)
        self._unanswered.append(deque())
        process.watch(self._process_ended)
        self._channels.append(Channel(process.end, partial(self._take, rank), lambda: None))
        start = Start(self._config, self._model_path, rank, self.num_ranks, self._rendezvous_file)
        self._channels[rank].send(encode(start))

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Send a step to all ranks; its future raises like a `StepExecutor`'s.

        Raises EngineClosed unless started and not closed.
        """
        future: asyncio.Future[StepOutput] = self._new_future()
        if future.done():
            return future
        if self._forgotten:
            numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self._send_all(encode(ForgetGrammars(numbers)))
        self._heartbeat.begin()
        step = RankStep(future, self.num_ranks)
        stripped, pixels = without_pixels(batch, self._pixels)
        message, images = encode(RunStep(stripped)), [encode_pixels(each) for each in pixels]
        for channel, unanswered in zip(self._channels, self._unanswered, strict=True):
            unanswered.append(step)
            for head, values in images:
                channel.send(head, tail=values)
            channel.send(message)
        return future

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        """Have all ranks carry out a command. No step is in flight, and none is submitted before the end of the
        command.

        Raises EngineClosed unless started and not closed.
        """
        future: asyncio.Future[None] = self._new_future()
        if future.done():
            return future
        self._command = RankCall(future, self.num_ranks)
        self._heartbeat.begin()
        match command:
            case Sleep() | Wake() | TakeVocabulary():
                self._send_all(encode(CarryOut(command)))
            case UpdateWeights(weights):
                self._send_weights(weights)
        return future

    def take_grammar(self, grammar: CompiledGrammar) -> asyncio.Future[None]:
        """Have all ranks compile the grammar's text while steps run. They keep it as long as `grammar` exists here.

        Raises EngineClosed unless started and not closed.
        """
        future: asyncio.Future[None] = self._new_future()
        if future.done():
            return future
        text = grammar.text
        weakref.finalize(grammar, self._forgotten.append, text.number).atexit = False
        self._grammars[text.number] = RankCall(future, self.num_ranks)
        self._heartbeat.begin()
        self._send_all(encode(TakeGrammar(text)))
        return future

    def load_adapter(self, adapter: LoadAdapter) -> asyncio.Future[str]:
        """Have all ranks read an adapter while steps run. If one cannot, none keeps it.

        Raises EngineClosed unless started and not closed.
        """
        future: asyncio.Future[str] = self._new_future()
        if future.done():
            return future
        self._adapters[adapter.number] = RankCall(future, self.num_ranks)
        self._heartbeat.begin()
        self._send_all(encode(TakeAdapter(adapter)))
        return future

    def drop_adapter(self, number: int) -> None:
        """Have all ranks forget an adapter. Ranks that no longer run have none."""
        if self._state == "running" and self._error is None:
            self._send_all(encode(DropAdapter(number)))

    def _adapter_taken(self, number: int, digest: str, failure: Failure | None) -> None:
        """Count a rank that has read an adapter or failed to. The last one settles the future of the call."""
        taken = self._adapters[number]
        taken.results.add(digest)
        if not taken.answered(failure):
            return
        del self._adapters[number]
        if len(taken.results) > 1 and not taken.failures:
            taken.failures.append(_changed_meanwhile("The adapter's files"))
        if taken.failures:
            self.drop_adapter(number)
        taken.settle(digest)

    def _work(self) -> Work | None:
        """Return the kind of work that the ranks have, if any."""
        if self._state == "starting":
            return "start"
        if self._state != "running" or self._error is not None:
            return None
        return "steps" if any(self._unanswered) or self._command or self._adapters or self._grammars else None

    def _end_hung(self, rank: int, seconds: float) -> None:
        """End all ranks, because one has been silent for this long."""
        starting = self._state == "starting"
        hung = (
            f"rank {rank} (process {self._processes[rank].pid}) {'is to load the model' if starting else 'has work'} "
            f"and has said nothing for {seconds:g} s: it is stopped, or hangs. All ranks were ended."
        )
        if starting:
            set_exception(self._ready[rank], ModelError(hung))
        else:
            self._die(RemoteError(hung))

    def _grammar_taken(self, number: int, failure: Failure | None) -> None:
        """Count a rank that has compiled a grammar or failed to. The last one settles the future of the call."""
        taken = self._grammars[number]
        if not taken.answered(failure):
            return
        del self._grammars[number]
        taken.settle(None)

    def _send_weights(self, weights: Mapping[str, Any]) -> None:
        """Copy new weights to shared memory in a thread, then send them."""
        sharing = in_thread(partial(share_tensors, weights))
        shared = self._running().create_task(sharing, name="asyncllm-ranks")

        def send(shared: asyncio.Future[tuple[int, list[TensorHeader]]]) -> None:
            if shared.cancelled():
                return
            error = shared.exception()
            if error is not None:
                if self._command is not None:
                    command, self._command = self._command, None
                    refused = ModelError(f"The new weights could not be handed to the ranks: {error}")
                    refused.__cause__ = error
                    set_exception(command.future, refused)
                return
            descriptor, tensors = shared.result()
            try:
                self._send_all(encode(TakeWeights(tensors)), (descriptor,))
            finally:
                os.close(descriptor)

        shared.add_done_callback(send)

    def _send_all(self, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
        for channel in self._channels:
            channel.send(message, descriptors)

    def _new_future(self) -> asyncio.Future[Any]:
        """Return the future of a call. If the ranks are dead, it already has EngineDead. Raises EngineClosed."""
        future: asyncio.Future[Any] = self._running().create_future()
        if self._error is not None:
            set_seen_exception(future, dead(self._error))
        return future

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._state != "running":
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        return self._loop

    def _take(self, rank: int, data: memoryview) -> None:
        """Handle a message from a rank."""
        if self._error is not None:
            return
        self._heartbeat.heard(rank)
        match decode_from_rank(data):
            case Pong():
                pass
            case Ready(limits, failure):
                if failure is not None:
                    set_exception(self._ready[rank], self._start_error(rank, failure.error()))
                else:
                    set_result(self._ready[rank], limits)
            case StepDone(_, output, failure):
                self._step_done(rank, self._unanswered[rank].popleft(), output, failure)
            case AdapterTaken(number, digest, failure):
                self._adapter_taken(number, digest, failure)
            case GrammarTaken(number, failure):
                self._grammar_taken(number, failure)
            case CarriedOut(failure):
                self._carried_out(failure)

    def _step_done(self, rank: int, step: RankStep, output: StepOutput | None, failure: Failure | None) -> None:
        """Record how a step ended for a rank: in the same way as for all others, or the ranks disagree."""
        step.waits_for -= 1
        error = None if failure is None else failure.error()
        if error is not None and not isinstance(error, (StepFailed, StepDropped)):
            self._die(error)
            return
        if step.answered and type(error) is not type(step.error):
            disagreed = RemoteError(f"The ranks disagree on how a step ended; rank {rank} says: {error!r}.")
            disagreed.__cause__ = error
            self._die(disagreed)
            return
        step.answered, step.error = True, error
        if rank == 0 and error is None:
            set_result(step.future, output)
        elif error is not None and not step.waits_for:
            set_exception(step.future, error)
        elif error is not None and step.waits_for == self.num_ranks - 1:
            self._running().call_later(_AGREEMENT_S, self._check_agreement, step, error)
        if step.future.done():
            self._on_step()

    def _check_agreement(self, step: RankStep, error: Exception) -> None:
        """End all ranks if one has failed in a step that others do not finish, because they wait for it."""
        if step.waits_for and self._error is None and self._state == "running":
            alone = RemoteError(f"A rank failed in a step that others do not come out of: {error.__cause__!r}.")
            alone.__cause__ = error
            self._die(alone)

    def _carried_out(self, failure: Failure | None) -> None:
        command = self._command
        assert command is not None
        if not command.answered(failure):
            if command.failures:
                self._running().call_later(_AGREEMENT_S, self._check_command, command)
            return
        self._command = None
        if not command.failures:
            set_result(command.future, None)
            return
        error = command.cause()
        if len(command.failures) == self.num_ranks and isinstance(error, AsyncLLMError):
            set_exception(command.future, error)
        else:
            set_exception(command.future, error if not isinstance(error, AsyncLLMError) else dead(error))
            self._die(error)

    def _check_command(self, command: RankCall[None]) -> None:
        """End all ranks if one has refused a command that others do not finish, because they wait for it."""
        if self._command is command and self._error is None and self._state == "running":
            error = command.cause()
            self._die(error if not isinstance(error, AsyncLLMError) else dead(error))

    def _start_error(self, rank: int, error: Exception) -> AsyncLLMError:
        """Return why a rank could not load the model. Name the rank for memory errors, not for checkpoint errors."""
        if isinstance(error, AsyncLLMError):
            if self.num_ranks == 1 or type(error) is not ModelError:
                return error
            failure = ModelError(f"Rank {rank} (process {self._processes[rank].pid}): {error}")
            failure.__cause__ = error.__cause__
        else:
            failure = ModelError(f"Loading the model failed: {error}")
            failure.__cause__ = error
        return failure

    def _process_ended(self, process: RankProcess) -> None:
        """End the start, or all ranks, because a rank's process is gone; do nothing if they are being closed."""
        if self._state == "closed" or self._error is not None:
            return
        if self._state == "starting":
            set_exception(self._ready[process.rank], _died_at_start(process))
            return
        self._die(RemoteError(f"{process.describe_end()}. Its standard error may say why."))

    def _die(self, error: Exception) -> None:
        """End all ranks: the first unread step raises this error, and every later one EngineDead."""
        self._error = error
        self._kill()
        waiting = self._open_futures()
        if not waiting and self._on_death is not None:
            self._on_death(error)
        self._fail_calls(dead(error))
        for index, future in enumerate(waiting):
            if index == 0:
                set_exception(future, error)
            else:
                set_seen_exception(future, dead(error))
        self._on_step()

    def _open_futures(self) -> list[asyncio.Future[StepOutput] | asyncio.Future[None]]:
        """Return the futures that wait, oldest first."""
        futures: dict[asyncio.Future[StepOutput] | asyncio.Future[None], None] = {}
        # Ranks answer in order, so the one that has answered the fewest steps has all open ones.
        for step in max(self._unanswered, key=len, default=()):
            if not step.future.done():
                futures[step.future] = None
        for unanswered in self._unanswered:
            unanswered.clear()
        if self._command is not None:
            futures[self._command.future] = None
            self._command = None
        return list(futures)

    def _fail_calls(self, error: Exception) -> None:
        """Raise `error` in the calls that wait for grammars and adapters."""
        for grammar in self._grammars.values():
            set_seen_exception(grammar.future, error)
        for adapter in self._adapters.values():
            set_seen_exception(adapter.future, error)
        self._grammars.clear()
        self._adapters.clear()

    def _kill(self) -> None:
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            if not process.ended.is_set():
                process.kill()

    async def _wait_ended(self) -> None:
        """Wait until every process is gone and reaped."""
        for process in self._processes:
            if len(self._channels) > process.rank:
                await process.ended.wait()
            else:
                process.end.close()
                process.kill_and_wait()

    async def close(self) -> None:
        """End the ranks' processes. Idempotent; may be called from another event loop once this one is closed."""
        if self._state in ("new", "closed"):
            self._state = "closed"
            return
        self._state = "closed"
        self._heartbeat.stop()
        if self._loop is not asyncio.get_running_loop():
            self._leave_behind()
            return
        waiting = self._open_futures()
        closed = EngineClosed("The executor was closed before this step ran.")
        self._fail_calls(closed)
        for future in waiting:
            set_seen_exception(future, closed)
        if waiting:
            self._kill()
        for channel in self._channels:
            channel.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wait_ended(), _CLOSE_PATIENCE_S)
        finally:
            self._kill()
            await asyncio.shield(self._wait_ended())

    def _leave_behind(self) -> None:
        """End the processes of an event loop that no longer runs."""
        for process in self._processes:
            process.end.close()
            process.kill_and_wait()


def _changed_meanwhile(files: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"{files} changed while the ranks read them, so that not all have the same. Load it again when they are whole."
    )


def _died_at_start(process: RankProcess) -> ModelError:
    return ModelError(f"{process.describe_end()} while it was loading the model. Its standard error says why.")
