"""Lifecycle starts and closes an engine, and holds its parts: loop, sessions, input processor.

new -> starting -> running -> closing -> closed
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import NoReturn

from asyncllm.config import EngineConfig
from asyncllm.engine.adapters import AdapterTable
from asyncllm.engine.loop.engine_loop import Death, EngineLoop
from asyncllm.engine.model_files import ModelFiles
from asyncllm.engine.requests.grammars import Grammars, ends_of
from asyncllm.engine.requests.input_processor import InputProcessor
from asyncllm.engine.requests.prompt_encoder import PromptEncoder
from asyncllm.engine.schedule.backpressure import Backpressure
from asyncllm.engine.schedule.quality_of_service import QualityOfService
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.waiting_queue import WaitingQueue
from asyncllm.engine.sessions.session_table import SessionTable
from asyncllm.errors import AsyncLLMError, EngineClosed, EngineError, InvalidParameter, ModelError
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.protocol import Executor, Limits, TakesGrammars, TakeVocabulary
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.grammars.bridge import GrammarCompiler
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import RequestRecord

__all__ = ["Lifecycle"]

RANKS_STALL_S = 120.0
"""Default stall timeout of ranks: several times the longest GPU step and the time to compile a kernel."""

_live: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
"""Engines that have started and not closed, for tests that look for leaks."""


class Lifecycle:
    """The state of one engine, and the parts that `start` opens."""

    limits: Limits
    encoder: PromptEncoder
    sessions: SessionTable
    inputs: InputProcessor

    def __init__(self, files: ModelFiles, make_scheduler: Callable[..., Scheduler] | None, name: str) -> None:
        """`name`: the model's name, used in the names of tasks."""
        self.files = files
        self._make_scheduler = make_scheduler
        self._name = name
        self._state = "new"
        self.adapters = AdapterTable(0, {})
        """The loaded adapters, while the engine runs."""
        self._loop: EngineLoop | None = None
        self._executor: Executor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Functions that the engine's loop calls with the record of each request that ends."""

    async def start(self) -> None:
        """Load the model and start the engine's loop. On ModelError or EngineError, leave nothing behind."""
        if self._state != "new":
            raise EngineError(f"The engine was started before and is {self._state}. Make a new AsyncEngine.")
        loop = _asyncio_loop()
        self._state = "starting"
        self._starting = loop.create_task(self._start_up(), name="asyncllm-start")
        try:
            await self._starting
        except asyncio.CancelledError:
            # The start may have finished in the same event-loop iteration in which it was cancelled.
            if self._starting.done() and not self._starting.cancelled():
                self._starting.exception()
            await self.close()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise EngineClosed("The engine was closed while it was starting.") from None
            raise

    async def _start_up(self) -> None:
        executor: Executor | None = None
        config = self.files.config
        try:
            path = config.qos_config_path
            quality = None if path is None else await in_thread(lambda: QualityOfService.open(path))
            executor = await self.files.find()
            self.limits = await self.files.load()
            tokenizer, template = self.files.texts()
            self._check_limits(config)
            self.encoder = PromptEncoder(tokenizer, template, self.limits, config, self.files.images)
            self.adapters = await self._configured_adapters()
            compiler = await self._open_grammars(executor, tokenizer, template)
            scheduler = self._new_scheduler(WaitingQueue(quality))
        except BaseException:
            self._state = "closed"
            if executor is not None:
                await asyncio.shield(asyncio.get_running_loop().create_task(executor.close()))
            raise
        self._executor = executor
        self._loop = EngineLoop(
            scheduler,
            executor,
            Backpressure(config.max_queued_requests, config.max_queued_tokens),
            adapters=self.adapters,
            num_host_adapters=self.limits.num_host_adapters,
            gate=self.encoder.gate,
            observers=self.observers,
            stall_timeout=_stall_timeout(config, isolated=executor.isolated, device=self.limits.device),
            name=f"asyncllm-engine-{self._name}",
        )
        self.sessions = SessionTable(self._loop, tokenizer)
        self.inputs = InputProcessor(
            self.encoder,
            self.sessions,
            Grammars(compiler, executor if isinstance(executor, TakesGrammars) else None),
            has_head=self.limits.has_head,
            quality=quality,
            adapters=self.adapters,
        )
        self._state = "running"
        _live.add(self)

    async def _configured_adapters(self) -> AdapterTable:
        """Return the table of the adapters that the engine starts with. Raises ModelError, InvalidParameter."""
        # Use the config with the folders that `files.find` has found.
        paths = self.files.config.adapters or {}
        found = await in_thread(lambda: {name: self.adapter_encoder(name, path) for name, path in paths.items()})
        encoders = {name: encoder for name, encoder in found.items() if encoder is not None}
        return AdapterTable(self.limits.num_adapter_slots, paths, self.limits.adapter_digests, encoders)

    def _new_scheduler(self, waiting: WaitingQueue) -> Scheduler:
        config = self.files.config
        return (self._make_scheduler or Scheduler)(
            self.limits,
            max_batch_size=config.max_batch_size,
            prefill_budget=config.prefill_budget,
            prefill_interval=config.prefill_interval,
            prefix_caching=config.enable_prefix_caching,
            swapping=config.eviction_type == "copy",
            waiting=waiting,
        )

    def adapter_encoder(self, name: str, path: str) -> PromptEncoder | None:
        """Return the prompt encoder of an adapter, or None if it uses the model's chat template. Reads files. Raises
        ModelError, InvalidParameter."""
        template = self.files.adapter_template(name, path)
        return None if template is None else self.encoder.with_template(template)

    def _check_limits(self, config: EngineConfig) -> None:
        """Raise InvalidParameter for settings that a given executor does not support."""
        if config.eviction_type == "copy" and not self.limits.num_host_blocks:
            raise InvalidParameter(
                "eviction_type='copy' needs blocks in host memory, and the executor has none. Give it some, or use "
                "eviction_type='recompute'.",
                "eviction_type",
            )
        if config.num_adapter_slots > self.limits.num_adapter_slots:
            raise InvalidParameter(
                f"adapters need {config.num_adapter_slots} slots on the device, and the executor has "
                f"{self.limits.num_adapter_slots}. Give it as many, or leave adapters and max_loras out.",
                "adapters",
            )

    async def _open_grammars(
        self, executor: Executor, tokenizer: Tokenizer, template: ChatTemplate
    ) -> GrammarCompiler | None:
        """Return the grammar compiler, or None if the model's answers cannot be constrained. Raises ModelError if the
        executor has lost the model meanwhile."""
        ends = ends_of(tokenizer, template, self.limits)
        if not ends:
            return None
        if isinstance(executor, TakesGrammars):
            try:
                await executor.carry_out(TakeVocabulary(ends))
            except AsyncLLMError:
                raise
            except Exception as error:
                raise ModelError(f"The model was lost while the engine started: {error}") from error
        vocab_size = self.limits.vocab_size
        # Reading a large vocabulary takes up to a second.
        return await in_thread(lambda: GrammarCompiler(tokenizer, vocab_size, ends))

    def running(self) -> EngineLoop:
        """Return the engine's loop. Raises EngineClosed, EngineDead, or EngineError in another event loop."""
        if self._loop is None:
            self._refuse()
        self._loop.check_running()
        return self._loop

    async def wait_ended(self) -> Death | None:
        """Wait until a started engine has ended. Return why it died, or None if it was closed. Raises EngineClosed if
        it was never started."""
        if self._loop is None:
            self._refuse()
        return await self._loop.wait_ended()

    async def close(self) -> None:
        """See `AsyncEngine.close`."""
        if self._closing is None and self._state in ("starting", "running"):
            if self._loop is not None:
                self._loop.check_event_loop()
            self._closing = asyncio.get_running_loop().create_task(self._shut_down(), name="asyncllm-close")
        if self._closing is not None:
            await asyncio.shield(self._closing)
        self._state = "closed"

    async def _shut_down(self) -> None:
        if self._state == "starting":
            assert self._starting is not None
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._loop is None or self._executor is None:
            return
        self._state = "closing"
        try:
            await self._loop.stop()
            self.sessions.close()
            await self.encoder.close()
        finally:
            self._state = "closed"
            _live.discard(self)
            await self._executor.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("limits", "encoder", "sessions", "inputs"):
            self._refuse()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self) -> NoReturn:
        raise EngineClosed(f"The engine is {self._state}. Use it inside `async with AsyncEngine(...) as engine:`.")

    def __reduce__(self) -> NoReturn:
        raise EngineError(
            "An engine can be neither pickled nor copied: it holds a model, and runs in one event loop. Start one in "
            "each process, or share one through `asyncllm serve`."
        )

    def check_idle(self) -> None:
        """See `EngineLoop.check_idle`."""
        if self._loop is not None:
            self._loop.check_idle()


def _stall_timeout(config: EngineConfig, *, isolated: bool, device: str) -> float:
    """Return the seconds without a completed step after which an engine is dead; 0 for never. Ranks could wait for each
    other forever, and no GPU step takes minutes."""
    if config.stall_timeout is not None:
        return config.stall_timeout
    return RANKS_STALL_S if isolated and device != "cpu" else 0.0


def _asyncio_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop. Raises EngineError if there is none, or if it belongs to another library."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise EngineError(
            "An engine runs in asyncio's event loop, and none is running here. Start it inside asyncio.run(...); "
            "under trio, in a thread with a loop of its own, or use asyncllm.pipeline."
        ) from None
