"""AsyncEngine: the public face. It opens a model, admits requests and keeps sessions; `EngineLoop` does the work.

generate() ── Admission ──> EngineLoop.open ──> Scheduler ──> Executor
async for chunk <── Generation <── Delivery <── EngineLoop
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from asyncllm.batch import Executor, Limits
from asyncllm.config import ChatTemplateConfig, EngineConfig, GenerationConfig, RequestKeywords, checked
from asyncllm.engine.admission import Admission, check_adapter
from asyncllm.engine.batches import generations_of, responses_of
from asyncllm.engine.commands import Weights, sleep_of, update_of, wake_of
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.embeddings import EmbeddingForm, EmbeddingInput, embed
from asyncllm.engine.generation import Generation, interleave
from asyncllm.engine.in_thread import in_thread
from asyncllm.engine.loop import Death, EngineLoop
from asyncllm.engine.parts import Parts
from asyncllm.engine.prompts import Prompts, is_single, longest_first, pair_with_configs
from asyncllm.engine.quality_of_service import QualityOfService
from asyncllm.engine.queue_bounds import QueueBounds
from asyncllm.engine.record import RequestRecord
from asyncllm.engine.scheduler import Scheduler
from asyncllm.engine.scoring import mean_cross_entropy, score
from asyncllm.engine.sequence import Request
from asyncllm.engine.session import Session
from asyncllm.engine.sessions import SessionTable
from asyncllm.engine.stats import EngineStats
from asyncllm.engine.waiting_queue import WaitingQueue
from asyncllm.errors import EngineClosed, EngineError, InvalidParameter
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Embedding, Message, Pooling, Response

__all__ = ["AsyncEngine"]

_live: weakref.WeakSet[AsyncEngine] = weakref.WeakSet()
"""Engines that have started and not closed, for tests that look for leaks."""


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
        scheduler: Callable[..., Scheduler] | None = None,
    ) -> None:
        """Check the settings; nothing is loaded before `start`. Raises InvalidParameter, UnsupportedFeature.

        `model_path` is a folder, the name of a bundled model, or a model id of the hub. `executor`, `tokenizer` and
        `chat_template` replace what would be opened from there, and `scheduler` what makes the engine's scheduler.
        """
        if not isinstance(model_path, str) or not model_path:
            raise InvalidParameter(f"model_path must be a non-empty str, not {model_path!r}.", "model_path")
        self.model_path = model_path
        self.config = checked(EngineConfig, backend_config, "backend_config")
        if isinstance(chat_template_config, str):
            chat_template_config = ChatTemplateConfig(model_name=chat_template_config)
        self.chat_template_config = checked(ChatTemplateConfig, chat_template_config, "chat_template_config")
        self.model_name = self.config.model_name or model_path.rstrip("/").rpartition("/")[2]
        self._parts = Parts(executor, tokenizer, chat_template)
        self._make_scheduler = scheduler
        self._state = "new"
        self._loop: EngineLoop | None = None
        self._executor: Executor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._sessions: SessionTable | None = None
        self.observers: list[Callable[[RequestRecord], None]] = []
        """Called, in the engine's task, with every request that ends. Written by those who want to know."""

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
            path = self.config.qos_config_path
            quality = None if path is None else await in_thread(lambda: QualityOfService.open(path))
            parts = self._parts
            executor = await parts.find(self.model_path, self.config, self.chat_template_config)
            self.limits = await parts.load()
            self.tokenizer, self.chat_template = parts.texts()
            if self.config.eviction_type == "copy" and not self.limits.num_host_blocks:
                raise InvalidParameter(
                    "eviction_type='copy' needs blocks in host memory, and the executor has none. Give it some, or use "
                    "eviction_type='recompute'.",
                    "eviction_type",
                )
            self.admission = Admission(
                self.tokenizer, self.chat_template, self.limits, self.config.session_len, quality
            )
            scheduler = (self._make_scheduler or Scheduler)(
                self.limits,
                max_batch_size=self.config.max_batch_size,
                prefill_budget=self.config.prefill_budget,
                prefill_interval=self.config.prefill_interval,
                prefix_caching=self.config.enable_prefix_caching,
                swapping=self.config.eviction_type == "copy",
                waiting=WaitingQueue(quality),
            )
        except BaseException:
            self._state = "closed"
            if executor is not None:
                await asyncio.shield(asyncio.get_running_loop().create_task(executor.close()))
            raise
        self._executor = executor
        bounds = QueueBounds(self.config.max_queued_requests, self.config.max_queued_tokens)
        name = f"asyncllm-engine-{self.model_name}"
        self._loop = EngineLoop(scheduler, executor, bounds, stall_timeout=self.config.stall_timeout, name=name)
        self._loop.observers = self.observers
        self._sessions = SessionTable(
            self._loop, self.admission, self.tokenizer, self.chat_template, self.chat, self.limits.block_size
        )
        self._state = "running"
        _live.add(self)

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
        if self._loop is None:
            raise EngineClosed(f"The engine is {self._state}. Use it inside `async with AsyncEngine(...) as engine:`.")
        self._loop.check_running()
        return self._loop

    async def wait_ended(self) -> Death | None:
        """Wait until a started engine has died, and say of what; None once it is closed."""
        assert self._loop is not None, "the engine was never started"
        return await self._loop.wait_ended()

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
        **options: Unpack[RequestKeywords],
    ) -> Generation:
        """Answer a prompt (str), a conversation (messages) or token ids.

        `session_id` with `sequence_end=False` keeps the conversation for a next call with `sequence_start=False`,
        which goes on after its first `step` tokens, or after all of them if `step` is 0. With
        `stream_response=False` the reader gets one chunk, at the end. `options` are the fields of RequestOptions:
        priority, timeout, user_id, cache_salt, and for the chat template add_generation_prompt, continue_final_message
        and chat_template_kwargs. Errors are raised by the first await.
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
                options=options,
            )

        async def prepare(delivery: Delivery) -> Request:
            asked = self.admission.options(options, renders=do_preprocess and input_ids is None)
            terms = self.admission.terms(asked)
            check_adapter(adapter_name)
            config = checked(GenerationConfig, gen_config, "gen_config")
            if step:
                raise InvalidParameter("step continues a session: it needs sequence_start=False.", "step")
            if input_ids is not None:
                prompt_ids = self.admission.check_token_ids(input_ids)
            else:
                text = self.admission.render(messages, do_preprocess=do_preprocess, options=asked)
                prompt_ids = await self.admission.encode(text)
            return self.admission.build(prompt_ids, config, delivery, session_id=session_id, terms=terms)

        return Generation(self.running, prepare, Delivery(streaming=stream_response))

    def chat(
        self,
        prompt: str | Sequence[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
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
            options=options,
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
        options: RequestKeywords,
    ) -> Generation:
        session: Session | None = None

        def ended() -> None:
            if session is not None and session.record() and close_after:
                session.close()

        async def prepare(delivery: Delivery) -> Request:
            nonlocal session
            asked = self.admission.options(options, renders=do_preprocess and input_ids is None)
            terms = self.admission.terms(asked)
            check_adapter(adapter_name)
            config = checked(GenerationConfig, gen_config, "gen_config")
            found = find()
            request = await found.prepare(
                delivery,
                prompt,
                config,
                step=step,
                do_preprocess=do_preprocess,
                input_ids=input_ids,
                options=asked,
                terms=terms,
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
        **options: Unpack[RequestKeywords],
    ) -> Response | list[Response]:
        """Answer one prompt, or a list of them; responses come in the prompts' order.

        As all are awaited together, those with the largest `max_new_tokens` are admitted first, unless there is a
        `timeout`. `on_response` is called for each in order, as soon as it and those before it are complete. Bad input
        raises before anything runs to its end. A request that fails inside a step, or at its deadline, gives a Response
        with finish_reason 'error', and the others go on.
        """
        pairs = pair_with_configs(prompts, gen_config)
        generations = generations_of(
            self.generate,
            pairs,
            do_preprocess=do_preprocess,
            adapter_name=adapter_name,
            stream_response=False,
            **options,
        )
        # Under a timeout a long answer in front would be the end of those behind it.
        order = range(len(pairs)) if options.get("timeout") else longest_first([config for _, config in pairs])
        responses = await responses_of(generations, order, on_response)
        return responses[0] if is_single(prompts) else responses

    def stream_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncIterator[Chunk]:
        """The chunks of all answers as they come; `chunk.index` says to which prompt one belongs."""
        pairs = pair_with_configs(prompts, gen_config)
        return interleave(
            generations_of(self.generate, pairs, do_preprocess=do_preprocess, adapter_name=adapter_name, **options)
        )

    async def embed(
        self,
        prompts: EmbeddingInput,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Embedding | list[Embedding]:
        """The embedding of one prompt (a text or token ids), or of a list of them in order.

        It is the hidden state after the final norm of the prompt's `last` token, or the `mean` of all its tokens,
        cut to the first `dimensions` entries and then scaled to length 1 (`normalize`). A text is encoded as it is: no
        chat template is applied, and a model that was trained to embed at an end token needs it in the text.
        The first error, of whichever prompt, ends the call. Raises InvalidRequest, RequestFailed, EngineError.
        """
        self.running()
        form = EmbeddingForm(pooling, normalize, dimensions, self.limits.hidden_size)
        return await embed(self.running, self.admission, prompts, form, options)

    async def encode(
        self,
        prompts: Prompts,
        *,
        do_preprocess: bool = True,
        add_bos: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> list[int] | list[list[int]]:
        """The token ids that `generate` would make of a prompt, or of each of a list of prompts.

        `add_bos=False` leaves out what the checkpoint's tokenizer puts in front. Long texts are encoded in a thread.
        Raises InvalidRequest, EngineClosed.
        """
        self.running()
        asked = self.admission.options(options, renders=do_preprocess)
        pairs = pair_with_configs(prompts, None)
        encoded = await self.admission.encode_all(
            [prompt for prompt, _ in pairs], asked, do_preprocess=do_preprocess, add_bos=add_bos
        )
        return encoded[0] if is_single(prompts) else encoded

    async def get_logits(self, input_ids: Sequence[int], **options: Unpack[RequestKeywords]) -> Any:
        """The logits after each token: a float32 CPU tensor [tokens, vocab]. Nothing is generated."""
        from asyncllm.agent.scoring import concatenate

        self.running()
        chunk = await score(self.running, self.admission, input_ids, options, output_logits=True)
        return concatenate(chunk.logits)

    async def get_ppl(self, input_ids: Sequence[int], **options: Unpack[RequestKeywords]) -> float:
        """Mean cross-entropy of the tokens after the first, in nats: the logarithm of the perplexity."""
        self.running()
        return await mean_cross_entropy(self.running, self.admission, input_ids, options)

    async def update_weights(self, weights: Weights) -> None:
        """Replace weights in place, by their names in the checkpoint's safetensors files: all, or only some.

        Tensors may lie on any device and have any float type. All are checked before the first is copied: with
        InvalidParameter nothing has changed. It happens between two steps. What was computed with the old weights is
        used no more: running answers keep their tokens and go on from them, computed again; the prefix cache, on the
        device, in host memory and for sessions, begins anew. If this is cancelled, either nothing changes or all does;
        leave the tensors alone until a next call of these methods has returned. Raises EngineError.
        """
        await self.running().change(update_of(weights))

    async def sleep(self, level: int = 1) -> None:
        """Give the device's memory back between two steps, until `wake`. Asleep already: nothing, or the deeper level.

        The weights wait in host memory (level 1), or are dropped (2), and come back by `update_weights` with all of
        them or from the checkpoint. Requests are not lost: running ones are computed again after `wake`, and what
        arrives waits as well, within the queue's bounds and its `timeout`. Raises InvalidParameter, ModelError,
        EngineError.
        """
        await self.running().change(sleep_of(level))

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; awake already: nothing. `tags`: "weights" first and "kv_cache" later, say, to update
        weights in between. With ModelError, when something has no room, the engine sleeps on, and may be asked again.
        Raises InvalidParameter, EngineError.
        """
        await self.running().change(wake_of(tags))

    async def wakeup(self, tags: Sequence[str] | None = None) -> None:
        """LMDeploy's name of `wake`."""
        await self.wake(tags)

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        return self.running().stats(len(self._table()))

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or a row or block is held by anything but steps that still run;
        for tests, right after the last answer too."""
        if self._loop is not None:
            self._loop.check_idle()
