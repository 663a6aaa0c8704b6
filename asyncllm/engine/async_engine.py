"""AsyncEngine, the public face of the engine: its methods delegate to the parts that `Lifecycle` holds.

generate() ── Call ──> InputProcessor.prepare ── Request ──> EngineLoop.open ──> Scheduler ──> Executor
async for chunk <── Generation <── Delivery <── EngineLoop
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, Unpack, get_args

from asyncllm.config import ChatTemplateConfig, EngineConfig, GenerationConfig, RequestKeywords, checked
from asyncllm.engine.lifecycle import Lifecycle
from asyncllm.engine.loop.control import Pause, ResetCache, Resume, sleep_of, update_of, wake_of
from asyncllm.engine.loop.engine_loop import Death, EngineLoop
from asyncllm.engine.model_files import ModelFiles
from asyncllm.engine.requests.batches import interleave, responses_of
from asyncllm.engine.requests.generation import Generation, Session
from asyncllm.engine.requests.input_processor import Call, Purpose
from asyncllm.engine.requests.pooling import EmbeddingForm, ScoreForm, pool
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import InvalidParameter, UnsupportedFeature, short
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.protocol import Executor, Limits
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.prompts import Prompts, is_single, is_token_ids, longest_first, pair_with_configs
from asyncllm.text.replies.reply import ReplyFormat
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import (
    Chunk,
    Embedding,
    EmbeddingInput,
    ImagePrompt,
    Message,
    Pooling,
    RequestRecord,
    Response,
    SequenceScores,
    Weights,
)

__all__ = ["AsyncEngine"]

Result = TypeVar("Result")
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]


class AsyncEngine:
    """LLM inference in the caller's own event loop.

        async with AsyncEngine("tiny-chat") as engine:
            async for chunk in engine.generate("What is 17 + 25?"):
                print(chunk.text, end="")

    States: new, starting, running, closing, closed. `tokenizer`, `chat_template` and `limits` exist once `start` has
    returned.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        backend_config: EngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | str | None = None,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        chat_template: ChatTemplate | None = None,
        scheduler: Callable[..., Scheduler] | None = None,
    ) -> None:
        """Check the settings; `start` loads the model. Raises InvalidParameter, UnsupportedFeature.

        `model_path` is a folder, the name of a bundled model, or a model id on the Hugging Face hub. `executor`,
        `tokenizer` and `chat_template` replace the ones that `start` would load from the model's folder; `scheduler`
        replaces the Scheduler class.
        """
        if isinstance(model_path, os.PathLike):
            model_path = os.fspath(model_path)
        if not isinstance(model_path, str) or not model_path:
            raise InvalidParameter(f"model_path must be a non-empty str, not {model_path!r}.", "model_path")
        self.model_path = model_path
        self.config = checked(EngineConfig, backend_config, "backend_config")
        if isinstance(chat_template_config, str):
            chat_template_config = ChatTemplateConfig(model_name=chat_template_config)
        self.chat_template_config = checked(ChatTemplateConfig, chat_template_config, "chat_template_config")
        self.model_name = self.config.model_name or model_path.rstrip("/").rpartition("/")[2]
        if self.model_name in (self.config.adapters or {}):
            raise InvalidParameter(
                f"adapters name one {self.model_name!r}, which is the model's own name. Choose another.", "adapters"
            )
        for name, part, kind in (("tokenizer", tokenizer, Tokenizer), ("chat_template", chat_template, ChatTemplate)):
            if part is not None and not isinstance(part, kind):
                raise InvalidParameter(
                    f"{name} must be a {kind.__name__}, not {short(part)}. Names and files of chat templates go into "
                    f"chat_template_config; leave {name} out to use the model's.",
                    name,
                )
        files = ModelFiles(model_path, self.config, self.chat_template_config, executor, tokenizer, chat_template)
        self._lifecycle = Lifecycle(files, scheduler, self.model_name)

    async def start(self) -> None:
        """Load the model and start the engine. On ModelError or EngineError, leave nothing behind."""
        await self._lifecycle.start()

    async def close(self) -> None:
        """End open requests with EngineClosed, wait for steps in flight and for texts and images that are being
        encoded, release the model. Idempotent.

        A start that is under way is cancelled, and raises EngineClosed.
        """
        await self._lifecycle.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._lifecycle.encoder.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        return self._lifecycle.encoder.template

    @property
    def reply_format(self) -> ReplyFormat:
        """The model's format for reasoning and tool calls, as far as it is known."""
        return self._lifecycle.encoder.splitter.form

    def chat_template_of(self, adapter_name: str | None) -> ChatTemplate:
        """Return the chat template for an adapter, which may be the model's own. Raises InvalidParameter."""
        return self._lifecycle.inputs.encoder_for(adapter_name).template

    def reply_format_of(self, adapter_name: str | None) -> ReplyFormat:
        """Return `reply_format` for an adapter. Raises InvalidParameter."""
        return self._lifecycle.inputs.encoder_for(adapter_name).splitter.form

    @property
    def limits(self) -> Limits:
        """Sizes and capabilities of the loaded model, such as `max_position` and `vocab_size`."""
        return self._lifecycle.limits

    @property
    def session_len(self) -> int:
        """Maximum number of tokens of history, prompt and answer together."""
        return self._lifecycle.encoder.session_len

    @property
    def sleep_level(self) -> int:
        """The level of `sleep` (1 or 2) until everything is awake again, then 0. Raises EngineError unless running."""
        return self.running().sleep_level

    @property
    def observers(self) -> list[Callable[[RequestRecord], None]]:
        """Functions to call with the record of each request that ends. Append your own."""
        return self._lifecycle.observers

    @observers.setter
    def observers(self, observers: list[Callable[[RequestRecord], None]]) -> None:
        self._lifecycle.observers = observers

    def check_running(self) -> None:
        """Raise EngineClosed or EngineDead unless the engine takes requests, and EngineError in another event loop."""
        self.running()

    def running(self) -> EngineLoop:
        """Return the engine's loop, for tests. Raises what `check_running` raises."""
        return self._lifecycle.running()

    async def wait_ended(self) -> Death | None:
        """Wait until the engine has ended. Return why it died, or None if it was closed. Raises EngineClosed if it was
        never started."""
        return await self._lifecycle.wait_ended()

    def generate(
        self,
        messages: str | ImagePrompt | Sequence[Message] | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        session_id: int | None = None,
        sequence_start: bool = True,
        sequence_end: bool = True,
        step: int = 0,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        input_ids: Sequence[int] | None = None,
        input_embeddings: Any = None,
        input_embedding_ranges: Any = None,
        stream_response: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> Generation:
        """Answer a prompt (str), a conversation (messages) or token ids. Iterate the result for chunks, or await it.

        With `EngineConfig.enable_prompt_embeds`, `input_embeddings` may be the prompt: an array [tokens, hidden] of
        numpy or torch, as transformers' `inputs_embeds`. Or a list of such arrays for the places in `input_ids` that
        `input_embedding_ranges` lists as (start, end); the ids there only count for penalties.

        `session_id` with `sequence_end=False` keeps the conversation. A later call with the same `session_id` and
        `sequence_start=False` continues it after its first `step` tokens, or after all of them if `step` is 0.
        With `stream_response=False` the only chunk comes at the end. `options` are the fields of
        `asyncllm.config.RequestOptions`: priority, timeout, user_id, cache_salt, tools and so on. The first await
        raises InvalidRequest, SessionError and EngineError; a later one raises RequestFailed and EngineError.
        """
        call = Call(
            prompt=messages,
            input_ids=input_ids,
            input_embeddings=input_embeddings,
            input_embedding_ranges=input_embedding_ranges,
            config=gen_config,
            session_id=session_id,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
            step=step,
            do_preprocess=do_preprocess,
            adapter_name=adapter_name,
            streaming=stream_response,
            options=options,
        )
        return Generation(self._lifecycle, call)

    def chat(
        self,
        prompt: str | ImagePrompt | Sequence[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Generation:
        """Answer the next turn of `session`, or the first turn of a new one, which is `Generation.session`."""
        found = self.session() if session is None else self._own(session)
        return found.chat(prompt, gen_config, do_preprocess=do_preprocess, adapter_name=adapter_name, **options)

    def session(self) -> Session:
        """Return a new, empty conversation. Raises EngineError."""
        self.check_running()
        return Session(self._lifecycle, self._lifecycle.sessions.new())

    def _own(self, session: object, name: str = "session") -> Session:
        """Return a session of this engine. Raises InvalidParameter for anything else."""
        if not isinstance(session, Session) or not session.belongs_to(self._lifecycle):
            raise InvalidParameter(
                f"{name}: {short(session)} is no session of this engine. Take one from session().", name
            )
        return session

    def _own_sessions(self, sessions: object) -> list[Session]:
        several = sessions if isinstance(sessions, list | tuple) else [sessions]
        return [self._own(session, "sessions") for session in several]

    async def stop_session(self, session_id: int) -> None:
        """End the running answers of this id with finish_reason 'abort'. The session keeps the text so far.

        An answer that waits for its tokens, grammar or adapter ends once it has them. Raises EngineError.
        """
        loop = self.running()
        self._lifecycle.sessions.stop(session_id)
        for request in loop.stop_session(session_id):
            await request.delivery.wait_end()

    async def end_session(self, session_id: int) -> None:
        """Stop the running answers of this id and forget the conversation. Raises SessionNotFound."""
        await self.stop_session(session_id)
        self.check_running()
        self._lifecycle.sessions.find(session_id).close()

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
        """Return the answer to one prompt, or the answers to a list of prompts in order.

        Prompts with the largest `max_new_tokens` start first, unless there is a `timeout`. `on_response` is called
        with each response in order, as soon as it and those before it are complete. Raises InvalidRequest and
        EngineError, which end all the answers. A prompt of a list that is malformed or too long, and a request that
        fails in a step or at its deadline, produces a Response with finish_reason 'error', and the others continue.
        """
        pairs = pair_with_configs(prompts, gen_config)
        generations = self._answers(
            pairs, do_preprocess=do_preprocess, adapter_name=adapter_name, streaming=False, options=options
        )
        # With a timeout, a long answer started first would use up the time of those queued after it.
        order = range(len(pairs)) if options.get("timeout") else longest_first([config for _, config in pairs])
        single = is_single(prompts)
        responses = await responses_of(generations, order, on_response, single=single)
        return responses[0] if single else responses

    def stream_infer(
        self,
        prompts: Prompts,
        gen_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        sessions: Session | Sequence[Session] | None = None,
        stream_response: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks of all answers as they arrive. `chunk.index` is the number of the prompt. `sessions` has one
        session per prompt, and each prompt is the next turn of its session. Raises the errors of `batch_infer`, with a
        chunk in place of the Response, and those of `Session.chat`."""
        pairs = pair_with_configs(prompts, gen_config)
        answers = self._answers(
            pairs,
            None if sessions is None else self._own_sessions(sessions),
            do_preprocess=do_preprocess,
            adapter_name=adapter_name,
            streaming=stream_response,
            options=options,
        )
        return interleave(answers, single=is_single(prompts))

    def _answers(
        self,
        pairs: Sequence[tuple[Any, GenerationConfig | None]],
        sessions: Sequence[Session] | None = None,
        **same: Any,
    ) -> list[Generation]:
        """Return an unstarted Generation for each (prompt, config). `same`: fields that all their calls share."""
        if sessions is not None and len(sessions) != len(pairs):
            raise InvalidParameter(
                f"There are {len(pairs)} prompts and {len(sessions)} sessions. Pass one for each.", "sessions"
            )
        answers = []
        for index, (prompt, config) in enumerate(pairs):
            given = {"input_ids": prompt} if is_token_ids(prompt) else {"prompt": prompt}
            fields = {"config": config, **given, **same}
            if sessions is None:
                answers.append(Generation(self._lifecycle, Call(**fields), index=index))
            else:
                answers.append(sessions[index].turn(index, **fields))
        return answers

    async def embed(
        self,
        prompts: EmbeddingInput,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Embedding | list[Embedding]:
        """Return the embedding of one prompt (a text or token ids), or of a list of them in order.

        An embedding is the hidden state after the final norm of the `last` token, or the `mean` over all tokens, cut
        to `dimensions` entries, then scaled to length 1 if `normalize`. None takes the checkpoint's own setting, or
        without one the last token and length 1. A text is encoded without a chat template, with the final token that
        the checkpoint's tokenizer adds. The first error of any prompt ends the call. Raises InvalidRequest,
        RequestFailed, EngineError.
        """
        self.check_running()
        defaults = self._lifecycle.files.embedding
        form = EmbeddingForm(pooling, normalize, dimensions, self.limits.hidden_size, defaults)
        return await pool(self._lifecycle, prompts, form, options, adapter_name)

    async def classify(
        self, prompts: EmbeddingInput, *, adapter_name: str | None = None, **options: Unpack[RequestKeywords]
    ) -> SequenceScores | list[SequenceScores]:
        """Return the scores of the model's head for one prompt (a text or token ids), or for a list of prompts in
        order.

        The model's class must end in ForSequenceClassification or ForRewardModel; its head reads the last token's
        hidden state after the final norm. A text is encoded as in `embed`. The first error of any prompt ends the call.
        Raises InvalidRequest, RequestFailed, EngineError.
        """
        self.check_running()
        return await pool(self._lifecycle, prompts, ScoreForm(self.limits), options, adapter_name)

    async def get_reward_score(self, input_ids: Sequence[int], **options: Unpack[RequestKeywords]) -> float:
        """Return the reward of a sequence: the only score of the model's head at its last token.

        Raises UnsupportedFeature for a model with several scores, InvalidRequest, RequestFailed, EngineError.
        """
        self.check_running()
        if len(self.limits.labels) > 1:
            raise UnsupportedFeature(f"The model gives {len(self.limits.labels)} scores, not a reward. Call classify.")
        scores = await pool(self._lifecycle, [input_ids], ScoreForm(self.limits), options)
        assert isinstance(scores, list)
        return scores[0].values[0]

    async def encode(
        self,
        prompts: Prompts,
        *,
        do_preprocess: bool = True,
        add_bos: bool = True,
        bounded: bool = False,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[int] | list[list[int]]:
        """Return the token ids that `generate` would make of a prompt, or of each prompt of a list.

        `add_bos=False` leaves out the tokens that the tokenizer prepends. `bounded` refuses, before encoding all of it,
        a text that can never fit. `adapter_name` selects the chat template. Long texts are encoded in a thread. Raises
        InvalidRequest, EngineClosed.
        """
        self.check_running()
        encoder = self._lifecycle.inputs.encoder_for(adapter_name)
        request_options = encoder.options(options, renders=do_preprocess)
        items = [prompt for prompt, _ in pair_with_configs(prompts, None)]
        encoded = await encoder.encode_all(
            items, request_options, do_preprocess=do_preprocess, add_bos=add_bos, bounded=bounded
        )
        return encoded[0] if is_single(prompts) else encoded

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Decodes long lists in a thread. Raises InvalidParameter, EngineClosed."""
        encoder = self._lifecycle.encoder

        def decode() -> str:
            ids = encoder.check_token_ids(tokens, "tokens")
            return encoder.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await encoder.offload(decode, len(tokens) if isinstance(tokens, Sequence) else 0)

    async def offload(self, call: Callable[[], Result], size: int) -> Result:
        """Return the result of `call`. If `size`, in tokens or characters of the text it handles, is large, run it in
        one of the threads that encode long prompts, so that the event loop stays free. Raises EngineClosed."""
        return await self._lifecycle.encoder.offload(call, size)

    async def get_logits(
        self,
        input_ids: Sequence[int] | None,
        *,
        input_embeddings: Any = None,
        input_embedding_ranges: Any = None,
        adapter_name: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Any:
        """Return the logits after each token: a float32 CPU tensor [tokens, vocab]. Nothing is generated. Embeddings
        are those of `generate`. Raises InvalidRequest, RequestFailed, EngineError."""
        from asyncllm.agent.prompt_outputs import concatenate

        given = (input_embeddings, input_embedding_ranges)
        return concatenate((await self._scored("logits", input_ids, adapter_name, options, given)).logits)

    async def get_ppl(
        self, input_ids: Sequence[int], *, adapter_name: str | None = None, **options: Unpack[RequestKeywords]
    ) -> float:
        """Return the mean cross-entropy of the tokens after the first, in nats: the logarithm of the perplexity. Raises
        InvalidRequest, RequestFailed, EngineError."""
        self.check_running()
        if isinstance(input_ids, Sequence) and len(input_ids) < 2:
            raise InvalidParameter("Perplexity needs at least 2 tokens: the first has nothing before it.", "input_ids")
        chunk = await self._scored("scores", input_ids, adapter_name, options)
        entries = [entry for entry in chunk.prompt_logprobs or [] if entry is not None]
        return -sum(next(iter(entry.values())) for entry in entries) / len(entries)

    async def _scored(
        self,
        purpose: Purpose,
        input_ids: Sequence[int] | None,
        adapter_name: str | None,
        options: RequestKeywords,
        given: tuple[Any, Any] = (None, None),
    ) -> Chunk:
        """Return the only chunk of a call that generates no tokens. `given`: embeddings, and their ranges. Raises
        InvalidRequest, EngineError."""
        call = Call(
            purpose=purpose,
            input_ids=input_ids,
            input_embeddings=given[0],
            input_embedding_ranges=given[1],
            do_preprocess=False,
            streaming=False,
            adapter_name=adapter_name,
            options=options,
        )
        async with Generation(self._lifecycle, call) as generation:
            return await generation.only_chunk()

    async def update_weights(self, weights: Weights) -> None:
        """Replace some or all weights in place, between two steps, by their names in the checkpoint's safetensors.

        Tensors may be on any device and of any float type. All are checked before the first is copied. Running answers
        keep their tokens, whose keys and values are recomputed; every cached prefix is dropped. After a cancellation
        either all weights are replaced or none, and the tensors must stay unchanged until the next command (such as
        `sleep`) has returned. Raises EngineError, and InvalidParameter, after which nothing has changed.
        """
        await self.running().change(update_of(weights))

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the LoRA adapters that requests may name."""
        return self._lifecycle.adapters.paths

    async def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Load a LoRA adapter in PEFT's format, from a folder or the hub, for requests with `adapter_name=name`.

        Reading the adapter does not delay running steps. The name must be free, unless `replace` is True: then the old
        adapter answers its open requests to their end, and the new one all later requests. The two share no cached
        prefix. The chat template is the one registered under the name, else the folder's, else the model's. The engine
        must have been started with adapter slots (`EngineConfig.adapters` or `max_loras`). Raises ModelError,
        InvalidParameter, UnsupportedFeature, EngineError, after which nothing has changed.
        """
        loop = self.running()
        if name == self.model_name:
            raise InvalidParameter(f"{name!r} is the model's own name. Choose another.", "name")
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str):
            raise InvalidParameter(f"path must be a folder or a hub id, not {type(path).__name__}.", "path")
        adapter = loop.adapters.begin(name, path, replace=replace)
        try:
            folder = adapter.path = await self._lifecycle.files.find_adapter(path)
            encoder = await in_thread(lambda: self._lifecycle.adapter_encoder(name, folder))
            await loop.host_adapters.load(adapter)
            former = loop.adapters.add(adapter, encoder)
        finally:
            loop.adapters.end(adapter)
        if former is not None:
            loop.drop(former)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Open requests keep using it; its memory is freed when the last of them has ended.

        Raises InvalidParameter, EngineError.
        """
        loop = self.running()
        loop.drop(loop.adapters.remove(name))

    async def sleep(self, level: int = 1) -> None:
        """Free the device's memory between two steps, until `wake`. A sleeping engine can go from level 1 to 2.

        Level 1 keeps the weights in host memory. Level 2 drops them; `wake` reads them from the checkpoint, unless
        `update_weights` has brought all of them back. No request is lost: running requests are recomputed after `wake`,
        and new ones wait, within the queue's bounds and their `timeout`. Raises InvalidParameter, ModelError,
        EngineError.
        """
        await self.running().change(sleep_of(level))

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device's memory again. Does nothing if the engine is awake.

        `tags` wakes "weights" and "kv_cache" separately, so that weights can be updated in between; None wakes both.
        Raises ModelError if memory is short (the engine then stays asleep), InvalidParameter, EngineError.
        """
        await self.running().change(wake_of(tags))

    async def wakeup(self, tags: Sequence[str] | None = None) -> None:
        """LMDeploy's name for `wake`."""
        await self.wake(tags)

    @property
    def paused(self) -> bool:
        """Whether `pause` has stopped the engine. Raises EngineError unless running."""
        return self.running().paused

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Launch no step until `resume`. New requests wait, within the queue's bounds and their `timeout`.

        `keep`: open requests stay as they are, with their blocks, and go on afterwards. `wait`: they are answered
        first. `abort`: they end with finish_reason 'abort' and the text so far. Raises InvalidParameter, EngineError.
        """
        if mode not in get_args(PauseMode):
            raise InvalidParameter(f"mode must be 'keep', 'wait' or 'abort' (given: {short(mode)}).", "mode")
        loop = self.running()
        ended = loop.requests if mode == "abort" else []
        await loop.change(Pause(drains=mode == "wait"))
        for request in ended:
            loop.abandon(request)
        for request in ended:
            await request.delivery.wait_end()

    async def resume(self) -> None:
        """End a pause. Does nothing if the engine is not paused. Raises EngineError."""
        await self.running().change(Resume())

    async def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values, on the device and in host memory. Running answers are recomputed from their
        tokens. Raises EngineError."""
        await self.running().change(ResetCache())

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and contents."""
        return self.running().stats(len(self._lifecycle.sessions))

    def check_idle(self) -> None:
        """Raise AssertionError if a request is open, or a row or block is held other than by unread steps.

        For tests. It holds as soon as the last answer has ended.
        """
        self._lifecycle.check_idle()
