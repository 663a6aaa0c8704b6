"""pipeline(): the synchronous interface, with LMDeploy's names, as an adapter of AsyncEngine."""

from __future__ import annotations

import logging
import queue
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from asyncllm.config import (
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    RequestKeywords,
    VisionConfig,
    checked,
)
from asyncllm.config.direct_options import GenConfigs, replaced, split_options
from asyncllm.config.lmdeploy_settings import PIPELINES, without_unsupported
from asyncllm.errors import InvalidParameter, UnsupportedFeature, short
from asyncllm.text.image_marks import holds_images
from asyncllm.text.prompts import Prompts, is_single
from asyncllm.types import (
    Chunk,
    Embedding,
    EmbeddingInput,
    ImagePrompt,
    Message,
    Pooling,
    Response,
    SequenceScores,
    Weights,
)

if TYPE_CHECKING:
    from concurrent.futures import Future
    from os import PathLike

    from torch import Tensor

    from asyncllm.engine.async_engine import AsyncEngine
    from asyncllm.engine.requests.generation import Session
    from asyncllm.engine.stats import EngineStats
    from asyncllm.text.tokenizer import Tokenizer

__all__ = ["ChatSession", "Pipeline", "pipeline"]

T = TypeVar("T")

LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")


def pipeline(
    model_path: str | PathLike[str],
    model_name: str | None = None,
    backend_config: EngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    log_level: str = "WARNING",
    *,
    backend: str | None = None,
    tp: int | None = None,
    instance_num: int | None = None,
    vision_config: VisionConfig | None = None,
    **unknown: Any,
) -> Pipeline:
    """Load a model and return a Pipeline, which answers prompts: `pipeline("tiny-chat")("Hello").text`.

    Args:
        model_path: a folder, the name of a bundled model, or a model id of the hub.
        model_name: name of a chat template, as in LMDeploy; `chat_template_config` has more options.
        backend_config: settings of the engine.
        log_level: level of the logger "asyncllm".
        backend: "pytorch" or "turbomind", as passed by older LMDeploy programs; both select this engine.
        tp: replaces `backend_config.tp`.
        instance_num: replaces `backend_config.max_batch_size`.
        vision_config: how images are encoded.
        unknown: other LMDeploy arguments, if they ask for nothing (config/lmdeploy_settings.py).

    Raises InvalidParameter, UnsupportedFeature, ModelError.
    """
    unknown = without_unsupported(PIPELINES, unknown)
    if unknown:
        name = next(iter(unknown))
        raise UnsupportedFeature(
            f"pipeline() got {name}={unknown[name]!r}, which is not implemented. Settings of the engine go into "
            f"backend_config, those of the template into chat_template_config.",
            name,
        )
    if log_level not in LOG_LEVELS:
        raise InvalidParameter(f"log_level must be one of {', '.join(LOG_LEVELS)} (given: {log_level!r}).", "log_level")
    if backend not in (None, "pytorch", "turbomind"):
        raise InvalidParameter(f"backend must be 'pytorch' or 'turbomind' (given: {backend!r}).", "backend")
    if isinstance(model_name, EngineConfig):
        raise InvalidParameter("Pass the EngineConfig as backend_config=...: the second is model_name.", "model_name")
    if model_name is not None:
        if chat_template_config is not None:
            raise InvalidParameter(
                "model_name and chat_template_config both choose the chat template. Pass only the latter.", "model_name"
            )
        chat_template_config = ChatTemplateConfig(model_name=model_name)
    vision = None if vision_config is None else checked(VisionConfig, vision_config, "vision_config")
    asked = {"tp": tp, "max_batch_size": instance_num, "vision_max_batch_size": vision and vision.max_batch_size}
    given = {name: value for name, value in asked.items() if value is not None}
    if given:
        backend_config = replaced(backend_config or EngineConfig(), given)
    logging.getLogger("asyncllm").setLevel(log_level)
    return Pipeline(model_path, backend_config, chat_template_config)


class Pipeline:
    """A model for synchronous code, usable from several threads at once, and inside a running event loop.

    A Pipeline owns a thread with an event loop and an AsyncEngine. `close()` or the end of a `with` block ends them. A
    pipeline that is never closed causes a ResourceWarning and does not keep the interpreter from exiting.
    """

    def __init__(
        self,
        model_path: str | PathLike[str],
        backend_config: EngineConfig | None = None,
        chat_template_config: ChatTemplateConfig | str | None = None,
        **parts: Any,
    ) -> None:
        """Load the model. `parts`: other arguments of AsyncEngine. Raises InvalidParameter, UnsupportedFeature,
        ModelError."""
        from asyncllm.engine.async_engine import AsyncEngine
        from asyncllm.event_loop.loop_thread import LoopThread

        self._closed = True  # Until there is something to close.
        self._engine: AsyncEngine = AsyncEngine(model_path, backend_config, chat_template_config, **parts)
        self._loop = LoopThread(f"asyncllm-pipeline-{self._engine.model_name}", self._engine.start, self._engine.close)
        self._closed = False

    def __call__(
        self,
        prompts: Prompts,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        **options: Any,
    ) -> Response | list[Response]:
        """Return the Response to one prompt (str or messages), or a list of them for a list of prompts, in order.

        `gen_config` is one config for all prompts, or a list with one per prompt. `options` are the fields of
        `asyncllm.config.RequestOptions` (priority, timeout and so on), `enable_thinking`, or fields of `gen_config`, as
        in older versions of LMDeploy. `use_tqdm` shows a progress bar. Raises InvalidRequest and EngineError. In a
        list, a prompt that is malformed or too long, or that fails in a step or at its timeout, produces a Response
        with finish_reason 'error', and the others continue.
        """
        config, keywords = split_options(gen_config, options)
        total = 1 if is_single(prompts) else len(prompts)
        done: queue.SimpleQueue[Response | None] = queue.SimpleQueue()
        future = self._loop.submit(
            self._engine.batch_infer(
                prompts,
                config,
                do_preprocess=do_preprocess,
                adapter_name=adapter_name,
                on_response=done.put if use_tqdm else None,
                **keywords,
            )
        )
        if use_tqdm:
            _show_progress(future, done, total)
        return self._loop.wait(future)

    infer = batch_infer = __call__
    """LMDeploy's names for calling the pipeline."""

    def stream_infer(
        self,
        prompts: Prompts,
        gen_config: GenConfigs = None,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        sessions: ChatSession | Sequence[ChatSession] | None = None,
        stream_response: bool = True,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Yield the chunks of all answers as they arrive. `chunk.index` is the number of the prompt.

        `sessions` has one session per prompt, and each prompt is the next turn of its session. Without
        `stream_response` an answer is one chunk. Leaving the loop early ends the answers. The first chunk raises
        InvalidRequest and EngineError.
        """
        config, keywords = split_options(gen_config, options)
        asked = sessions if sessions is None or isinstance(sessions, list | tuple) else [sessions]
        return self._stream(
            lambda: self._engine.stream_infer(
                prompts,
                config,
                do_preprocess=do_preprocess,
                adapter_name=adapter_name,
                sessions=None if asked is None else [_inner(session, "sessions") for session in asked],
                stream_response=stream_response,
                **keywords,
            )
        )

    def session(self) -> ChatSession:
        """Return a new, empty conversation."""
        return ChatSession(self, self._call(self._engine.session))

    @overload
    def chat(
        self,
        prompt: str | ImagePrompt | Sequence[Message],
        session: ChatSession | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: Literal[False] = False,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Any,
    ) -> ChatSession: ...

    @overload
    def chat(
        self,
        prompt: str | ImagePrompt | Sequence[Message],
        session: ChatSession | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        stream_response: Literal[True],
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Any,
    ) -> Iterator[Chunk]: ...

    def chat(
        self,
        prompt: str | ImagePrompt | Sequence[Message],
        session: ChatSession | None = None,
        gen_config: GenerationConfig | None = None,
        stream_response: bool = False,
        do_preprocess: bool = True,
        adapter_name: str | None = None,
        **options: Any,
    ) -> ChatSession | Iterator[Chunk]:
        """Take the next turn of `session`, or the first turn of a new one.

        Return the ChatSession, whose `response` is the answer, or with `stream_response` an iterator of Chunks.
        """
        found = session if session is not None else self.session()
        inner = _inner(found, "session")
        merged, keywords = split_options(gen_config, options)
        config: Any = merged
        chunks = self._stream(
            lambda: self._engine.chat(
                prompt, inner, config, do_preprocess=do_preprocess, adapter_name=adapter_name, **keywords
            )
        )
        if stream_response:
            return chunks
        for _ in chunks:
            pass
        return found

    def prepare_inputs(
        self, prompts: Prompts, do_preprocess: bool = True, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Return {"input_ids": token ids of the prompt, or a list of these for a list of prompts}. `adapter_name`
        selects the chat template. Raises UnsupportedFeature for images, whose tokens mean nothing without them."""
        if any(holds_images(prompt) for prompt in ([prompts] if is_single(prompts) else prompts)):
            raise UnsupportedFeature(
                "The prompt has images, and token ids alone would lose them. AsyncEngine.encode counts its tokens.",
                "prompts",
            )
        encoding = self._engine.encode(prompts, do_preprocess=do_preprocess, adapter_name=adapter_name)
        return {"input_ids": self._loop.call(encoding)}

    def embed(
        self,
        prompts: EmbeddingInput,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Embedding | list[Embedding]:
        """Return the embedding of one prompt (a text or token ids), or of a list of them; see `AsyncEngine.embed`."""
        form: Any = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        return self._loop.call(self._engine.embed(prompts, **form, **options))

    def classify(
        self, prompts: EmbeddingInput, **options: Unpack[RequestKeywords]
    ) -> SequenceScores | list[SequenceScores]:
        """Return the scores of one prompt (a text or token ids), or of a list of them; see `AsyncEngine.classify`."""
        return self._loop.call(self._engine.classify(prompts, **options))

    def get_reward_score(
        self, input_ids: Sequence[int] | Sequence[Sequence[int]], **options: Unpack[RequestKeywords]
    ) -> list[float]:
        """Return the reward of each sequence; see `AsyncEngine.get_reward_score`."""
        return self._loop.call(_gather(partial(self._engine.get_reward_score, **options), _sequences(input_ids)))

    def get_ppl(
        self, input_ids: Sequence[int] | Sequence[Sequence[int]], **options: Unpack[RequestKeywords]
    ) -> list[float]:
        """Return, per sequence, the mean cross-entropy of its tokens after the first, in nats."""
        return self._loop.call(_gather(partial(self._engine.get_ppl, **options), _sequences(input_ids)))

    def get_logits(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        input_embeddings: Sequence[Any] | None = None,
        input_embedding_ranges: Sequence[Any] | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Tensor:
        """Return the logits after each token: float32 [sequences, tokens, vocab], with shorter sequences padded with
        zeros. Embeddings are those of `AsyncEngine.generate`, in one list for each sequence if there are several."""
        from torch.nn.utils.rnn import pad_sequence

        sequences = _sequences(input_ids)
        single = sequences == [input_ids]

        def each(given: Sequence[Any] | None, name: str) -> Sequence[Any]:
            several = [given] * len(sequences) if single or given is None else given
            if len(several) != len(sequences):
                raise InvalidParameter(
                    f"{name} has {len(several)} entries for {len(sequences)} sequences. Pass one for each.", name
                )
            return several

        embeddings = each(input_embeddings, "input_embeddings")
        ranges = each(input_embedding_ranges, "input_embedding_ranges")

        def one(index: int) -> Coroutine[Any, Any, Tensor]:
            return self._engine.get_logits(
                sequences[index],
                input_embeddings=embeddings[index],
                input_embedding_ranges=ranges[index],
                **options,
            )

        return pad_sequence(self._loop.call(_gather(one, list(range(len(sequences))))), batch_first=True)

    def update_weights(self, weights: Weights) -> None:
        """Replace weights in place, by their names in the checkpoint; see `AsyncEngine.update_weights`."""
        self._loop.call(self._engine.update_weights(weights))

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the LoRA adapters that prompts may name."""
        return self._engine.adapters

    def load_adapter(self, name: str, path: str | PathLike[str], *, replace: bool = False) -> None:
        """Load a LoRA adapter; see `AsyncEngine.load_adapter`."""
        self._loop.call(self._engine.load_adapter(name, path, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; see `AsyncEngine.unload_adapter`."""
        self._loop.call(self._engine.unload_adapter(name))

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory until `wake`; see `AsyncEngine.sleep`."""
        self._loop.call(self._engine.sleep(level))

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; see `AsyncEngine.wake`."""
        self._loop.call(self._engine.wake(tags))

    wakeup = wake
    """LMDeploy's name."""

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters and contents."""
        return self._call(self._engine.stats)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    def close(self) -> None:
        """End open requests with EngineClosed, release the model, and wait until that is done. Idempotent."""
        self._closed = True
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._loop.end()  # Must not wait: the garbage collector may run in any thread, even this loop's own.
            message = f"A pipeline for {self.model_name!r} was not closed. Use `with`, or call close()."
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def _call(self, function: Callable[[], T]) -> T:
        """Run a plain function in the event loop."""
        return self._loop.call(_async(function))

    def _stream(self, chunks: Callable[[], AsyncIterator[Chunk]]) -> Iterator[Chunk]:
        arrived: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()

        async def pump() -> None:
            async for chunk in chunks():
                arrived.put(chunk)

        future = self._loop.submit(pump())
        future.add_done_callback(lambda _: arrived.put(None))
        try:
            while (chunk := arrived.get()) is not None:
                yield chunk
            self._loop.wait(future)
        finally:
            future.cancel()


class ChatSession:
    """A conversation with a Pipeline. Its history grows by one turn with each `chat`."""

    def __init__(self, pipe: Pipeline, inner: Session) -> None:
        self._pipe = pipe
        self.inner = inner
        """The engine's session, which is changed only in the pipeline's event loop."""

    @property
    def id(self) -> int:
        return self.inner.id

    @property
    def session_id(self) -> int:
        """LMDeploy's name for `id`."""
        return self.inner.id

    @property
    def history(self) -> list[tuple[object, str]]:
        """(prompt, answer) of each turn."""
        return self.inner.history

    @property
    def response(self) -> Response | None:
        """The last turn's answer."""
        return self.inner.response

    def chat(
        self, prompt: str | ImagePrompt | Sequence[Message], gen_config: GenerationConfig | None = None, **options: Any
    ) -> Any:
        """Take the next turn; see `Pipeline.chat`."""
        return self._pipe.chat(prompt, self, gen_config, **options)

    def fork(self) -> ChatSession:
        """Return a second conversation with the same history."""
        return ChatSession(self._pipe, self._pipe._call(self.inner.fork))

    def abort(self) -> None:
        """Stop the running turn, if any. The text generated so far stays in the history."""
        self._pipe._call(self.inner.stop)

    def close(self) -> None:
        """Stop the running turn and forget the conversation. Idempotent."""
        if not self.inner.closed:
            self._pipe._call(self.inner.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _inner(session: object, name: str) -> Session:
    """Return the engine's session. Raises InvalidParameter for anything but a ChatSession."""
    if not isinstance(session, ChatSession):
        raise InvalidParameter(f"{name}: {short(session)} is no session. Take one from session() or chat().", name)
    return session.inner


def _sequences(input_ids: Any) -> list[Any]:
    """Return a list of sequences, of length one if `input_ids` is a single sequence."""
    several = isinstance(input_ids, list | tuple) and len(input_ids) > 0 and not isinstance(input_ids[0], int)
    return list(input_ids) if several else [input_ids]


async def _async(function: Callable[[], T]) -> T:
    return function()


async def _gather(function: Callable[[Any], Coroutine[Any, Any, T]], items: list[Any]) -> list[T]:
    """Return all results in order; the first error ends the rest."""
    from asyncio import TaskGroup

    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(function(item)) for item in items]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _show_progress(future: Future[Any], done: queue.SimpleQueue[Response | None], total: int) -> None:
    from tqdm import tqdm

    # A class of its own, because tqdm's monitor is a thread that outlives the bar.
    progress = type("Progress", (tqdm,), {"monitor_interval": 0})
    future.add_done_callback(lambda _: done.put(None))
    try:
        with progress(total=total, unit="prompt") as bar:
            while done.get() is not None:
                bar.update()
    except BaseException:
        future.cancel()
        raise
