"""AsyncEngine: the public face. It opens a model, admits requests and keeps sessions; `EngineLoop` does the work.

generate() ── Admission ──> EngineLoop.open ──> Scheduler ──> Executor
async for chunk <── Generation <── Delivery <── EngineLoop
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from asyncllm.batch import Executor, Limits
from asyncllm.config import ChatTemplateConfig, EngineConfig, GenerationConfig
from asyncllm.engine.admission import Admission, check_adapter
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.generation import Generation, interleave
from asyncllm.engine.loop import EngineLoop
from asyncllm.engine.prompts import Prompts, is_single, pair_with_configs
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.sequence import Request
from asyncllm.engine.session import Session
from asyncllm.engine.sessions import SessionTable
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import (
    EngineClosed,
    EngineError,
    InvalidParameter,
    RequestFailed,
)
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Message, Response

__all__ = ["AsyncEngine"]

Config = TypeVar("Config", EngineConfig, GenerationConfig, ChatTemplateConfig)
Result = TypeVar("Result")

_live: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()
"""Engines that have started and not closed, for tests that look for leaks."""


async def _in_thread(call: Callable[[], Result]) -> Result:
    """What `call` returns, run in a thread of its own.

    Reading and importing take seconds. Such a thread leaves none behind in the loop's pool, and the loop does not wait
    for it when this task is cancelled.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="asyncllm-open")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call)
    finally:
        thread.shutdown(wait=False)


class AsyncEngine:
    """LLM inference in the caller's own event loop.

        async with AsyncEngine("tiny-chat") as engine:
            async for chunk in engine.generate("What is 17 + 25?"):
                print(chunk.text, end="")

    States: new, starting, running, closing, closed. After `start`, `tokenizer`, `chat_template` and `limits` say what
    was opened.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    admission: Admission
    limits: Limits

    def __init__(
        self,
        model_path: str,
        backend_config: EngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | str | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Check the settings; nothing is loaded before `start`. Raises InvalidParameter, UnsupportedFeature.

        `model_path` is a folder, the name of a bundled model, or a model id of the hub. `executor`, `tokenizer` and
        `chat_template` replace what would be opened from there.
        """
        if not isinstance(model_path, str) or not model_path:
            raise InvalidParameter(f"model_path must be a non-empty str, not {model_path!r}.", "model_path")
        self.model_path = model_path
        self.config = checked(EngineConfig, backend_config, "backend_config")
        if isinstance(chat_template_config, str):
            chat_template_config = ChatTemplateConfig(model_name=chat_template_config)
        self.chat_template_config = checked(ChatTemplateConfig, chat_template_config, "chat_template_config")
        self.model_name = self.config.model_name or model_path.rstrip("/").rpartition("/")[2]
        self._given = (executor, tokenizer, chat_template)
        self._state = "new"
        self._loop: EngineLoop | None = None
        self._executor: Executor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._sessions: SessionTable | None = None

    async def start(self) -> None:
        """Load the model and start the engine's task. Raises ModelError; leaves nothing behind when it raises."""
        if self._state != "new":
            raise EngineError(f"The engine was started before and is {self._state}. Make a new AsyncEngine.")
        self._state = "starting"
        self._starting = asyncio.get_running_loop().create_task(self._start_up(), name="asyncllm-start")
        try:
            await self._starting
        except asyncio.CancelledError:
            # The start may have come to its end in the same turn of the loop as the cancellation.
            if self._starting.done() and not self._starting.cancelled():
                self._starting.exception()
            await self.close()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise EngineClosed("The engine was closed while it was starting.") from None
            raise

    async def _start_up(self) -> None:
        executor: Executor | None = None
        try:
            executor, open_text = await self._find_model()
            self.limits = await self._load(executor, open_text)
            if self.config.eviction_type == "copy" and not self.limits.num_host_blocks:
                raise InvalidParameter(
                    "eviction_type='copy' needs blocks in host memory, and the executor has none. Give it some, or use "
                    "eviction_type='recompute'.",
                    "eviction_type",
                )
            self.admission = Admission(self.tokenizer, self.chat_template, self.limits, self.config.session_len)
            scheduler = Scheduler(
                self.limits,
                max_batch_size=self.config.max_batch_size,
                prefill_budget=self.config.prefill_budget,
                prefill_interval=self.config.prefill_interval,
                prefix_caching=self.config.enable_prefix_caching,
                swapping=self.config.eviction_type == "copy",
            )
        except BaseException:
            self._state = "closed"
            if executor is not None:
                await asyncio.shield(asyncio.get_running_loop().create_task(executor.close()))
            raise
        self._executor = executor
        self._loop = EngineLoop(scheduler, executor, name=f"asyncllm-engine-{self.model_name}")
        self._sessions = SessionTable(
            self._loop, self.admission, self.tokenizer, self.chat_template, self.chat, self.limits.block_size
        )
        self._state = "running"
        _live.add(self)

    async def _find_model(self) -> tuple[Executor, Callable[[], None] | None]:
        """Find the model. -> the executor that will run it, and what is to be called to open tokenizer and template."""
        executor, tokenizer, chat_template = self._given
        if executor is not None and tokenizer is not None and chat_template is not None:
            self.tokenizer, self.chat_template = tokenizer, chat_template
            return executor, None

        def find() -> tuple[Executor, Callable[[], None]]:
            from asyncllm.agent.executor import open_executor
            from asyncllm.locate import locate

            config = self.config
            folder = locate(self.model_path, revision=config.revision, download_dir=config.download_dir)

            def open_text() -> None:
                self.tokenizer = tokenizer or Tokenizer.from_folder(folder)
                self.chat_template = chat_template or ChatTemplate.open(folder, self.chat_template_config)

            return executor or open_executor(config, folder), open_text

        return await _in_thread(find)

    async def _load(self, executor: Executor, open_text: Callable[[], None] | None) -> Limits:
        """Start the executor, and read the tokenizer meanwhile: weights wait for disk and device, not for Python."""
        starting = asyncio.get_running_loop().create_task(executor.start(), name="asyncllm-load")
        try:
            if open_text is not None:
                await _in_thread(open_text)
            return await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()
            raise

    async def close(self) -> None:
        """End open requests with EngineClosed, wait for steps in flight, release the model. Idempotent.

        A start that is under way is cancelled, and raises EngineClosed.
        """
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
            if self._sessions is not None:
                self._sessions.close()
            self.admission.close()
        finally:
            self._state = "closed"
            _live.discard(self)
            await self._executor.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def running(self) -> EngineLoop:
        """The engine's loop. Raises EngineClosed, EngineDead, or EngineError in another event loop."""
        if self._loop is None or self._state != "running":
            raise EngineClosed(f"The engine is {self._state}. Use it inside `async with AsyncEngine(...) as engine:`.")
        self._loop.check_running()
        return self._loop

    def generate(
        self,
        messages: str | Sequence[Message] | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        session_id: int | None = None,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        input_ids: Sequence[int] | None = None,
        stream_response: bool = True,
    ) -> Generation:
        """Answer a prompt (str), a conversation (messages) or token ids.

        `session_id` with `sequence_end=False` keeps the conversation for a next call with `sequence_start=False`,
        which goes on after its first `step` tokens, or after all of them if `step` is 0. With
        `stream_response=False` the reader gets one chunk, at the end. Errors are raised by the first await.
        """

        if not (sequence_start and sequence_end):
            return self._turn(
                lambda: self._table().find_or_start(session_id, sequence_start=sequence_start, step=step),
                messages,
                gen_config,
                step=step,
                do_preprocess=do_preprocess,
                adapter_name=adapter_name,
                input_ids=input_ids,
                streaming=stream_response,
                close_after=sequence_end,
            )

        async def prepare(delivery: Delivery) -> Request:
            check_adapter(adapter_name)
            config = checked(GenerationConfig, gen_config, "gen_config")
            if step:
                raise InvalidParameter("step continues a session: it needs sequence_start=False.", "step")
            if input_ids is not None:
                prompt_ids = self.admission.check_token_ids(input_ids)
            else:
                text = self.admission.render(messages, do_preprocess=do_preprocess)
                prompt_ids = await self.admission.encode(text)
            return self.admission.build(prompt_ids, config, delivery, session_id=session_id)

        return Generation(self.running, prepare, Delivery(streaming=stream_response))

    def chat(
        self,
        prompt: str | Sequence[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
    ) -> Generation:
        """The next turn of a session, or the first of a new one, which the Generation then carries as `session`."""
        found = session or self.session()
        generation = self._turn(
            lambda: found,
            prompt,
            gen_config,
            do_preprocess=do_preprocess,
            adapter_name=adapter_name,
            input_ids=None,
            streaming=True,
            close_after=False,
        )
        generation.session = found
        return generation

    def _turn(
        self,
        find: Callable[[], Session],
        prompt: str | Sequence[Message] | None,
        gen_config: GenerationConfig | None,
        *,
        step: int = 0,
        do_preprocess: bool,
        adapter_name: str | None,
        input_ids: Sequence[int] | None,
        streaming: bool,
        close_after: bool,
    ) -> Generation:
        session: Session | None = None

        def ended() -> None:
            if session is not None:
                session.record()
                if close_after:
                    session.close()

        async def prepare(delivery: Delivery) -> Request:
            nonlocal session
            check_adapter(adapter_name)
            config = checked(GenerationConfig, gen_config, "gen_config")
            found = find()
            request = await found.prepare(
                delivery, prompt, config, step=step, do_preprocess=do_preprocess, input_ids=input_ids
            )
            session = found
            return request

        return Generation(self.running, prepare, Delivery(streaming=streaming, on_end=ended))

    def session(self) -> Session:
        """A new, empty conversation."""
        return self._table().new()

    def _table(self) -> SessionTable:
        self.running()
        assert self._sessions is not None
        return self._sessions

    async def stop_session(self, session_id: int) -> None:
        """End the answers that run under this id, with finish_reason 'abort'. The session keeps what there is."""
        loop = self.running()
        session = self._table().get(session_id)
        if session is not None:
            session.stop()
        running = [request for request in loop.requests if request.session_id == session_id]
        for request in running:
            loop.abandon(request)
        for request in running:
            await request.delivery.wait_end()

    async def end_session(self, session_id: int) -> None:
        """Stop what runs under this id and forget the conversation. Raises SessionNotFound."""
        await self.stop_session(session_id)
        self._table().find(session_id).close()

    async def batch_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        on_response: Callable[[Response], None] | None = None,
    ) -> Response | list[Response]:
        """Answer one prompt, or a list of them in order. `on_response` is called as each is complete.

        Bad input raises before anything runs to its end. A request that fails inside a step gives a Response with
        finish_reason 'error', and the others go on.
        """
        generations = self._batch(prompts, gen_config, do_preprocess, adapter_name, streaming=False)
        responses = []
        try:
            for generation in generations:
                await generation.start()
                await asyncio.sleep(0)  # many prompts do not hold up the loop
            for index, generation in enumerate(generations):
                try:
                    response = await generation.response()
                except RequestFailed as error:
                    response = Response(finish_reason="error", error_message=str(error), index=index)
                responses.append(response)
                if on_response is not None:
                    on_response(response)
        finally:
            for generation in generations:
                generation.cancel()
        return responses[0] if is_single(prompts) else responses

    def stream_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
    ) -> AsyncIterator[Chunk]:
        """The chunks of all answers as they come; `chunk.index` says to which prompt one belongs."""
        return interleave(self._batch(prompts, gen_config, do_preprocess, adapter_name, streaming=True))

    def _batch(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None,
        do_preprocess: bool,
        adapter_name: str | None,
        *,
        streaming: bool,
    ) -> list[Generation]:
        generations = []
        for index, (prompt, config) in enumerate(pair_with_configs(prompts, gen_config)):
            generation = self.generate(
                prompt,
                config,
                do_preprocess=do_preprocess,
                adapter_name=adapter_name,
                stream_response=streaming,
            )
            generation.index = index
            generations.append(generation)
        return generations

    async def get_logits(self, input_ids: Sequence[int]) -> Any:
        """The logits after each token: a float32 CPU tensor [tokens, vocab]. Nothing is generated."""
        from asyncllm.agent.scoring import concatenate

        chunk = await self._score(input_ids, GenerationConfig(), output_logits=True)
        return concatenate(chunk.logits)

    async def get_ppl(self, input_ids: Sequence[int]) -> float:
        """Mean cross-entropy of the tokens after the first, in nats: the logarithm of the perplexity."""
        if isinstance(input_ids, Sequence) and len(input_ids) < 2:
            raise InvalidParameter("Perplexity needs at least 2 tokens: the first has nothing before it.", "input_ids")
        chunk = await self._score(input_ids, GenerationConfig(prompt_logprobs=0))
        entries = [entry for entry in chunk.prompt_logprobs or [] if entry is not None]
        return -sum(next(iter(entry.values())) for entry in entries) / len(entries)

    async def _score(self, input_ids: Sequence[int], config: GenerationConfig, *, output_logits: bool = False) -> Chunk:
        async def prepare(delivery: Delivery) -> Request:
            prompt_ids = self.admission.check_token_ids(input_ids)
            return self.admission.build(prompt_ids, config, delivery, score_only=True, output_logits=output_logits)

        async with Generation(self.running, prepare, Delivery(streaming=False)) as generation:
            return await anext(generation)

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        return self.running().stats(len(self._table()))

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or a row or block is held by anything but steps that still run;
        for tests, right after the last answer too."""
        if self._loop is not None:
            self._loop.check_idle()


def checked(cls: type[Config], value: Config | None, name: str) -> Config:
    """The config itself if it holds; the default for None. Raises InvalidParameter."""
    if value is None:
        return cls()
    if not isinstance(value, cls):
        raise InvalidParameter(f"{name} must be a {cls.__name__}, not {type(value).__name__}.", name)
    return value.checked()
