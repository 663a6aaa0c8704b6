"""Grammars compiles the grammars of requests in threads, a few at a time, and keeps them for later requests."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from asyncllm.config import GenerationConfig, RequestOptions
from asyncllm.config.structured_output.response_format import GrammarSpec, grammar_of
from asyncllm.engine.requests.prompt_encoder import PromptEncoder
from asyncllm.errors import AsyncLLMError, EngineError, InvalidParameter, QueueFull, UnsupportedFeature
from asyncllm.event_loop.in_thread import starting_thread
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import Limits, TakesGrammars
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.grammars.bridge import AnswerGrammar, CompiledGrammar, GrammarCompiler
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["Grammars", "ends_of"]

MAX_KEPT = 256
"""Maximum number of cached grammars; each takes up to 0.6 MB."""
MAX_KEPT_CHARACTERS = 4 * 2**20
"""Maximum number of characters of their sources."""
MAX_COMPILING = 2
"""Maximum number of compiling threads. A thread cannot be stopped, so one that takes too long counts until it ends."""
PATIENCE = 2.0
"""Maximum seconds to compile a grammar, or to wait for it."""


def ends_of(tokenizer: Tokenizer, template: ChatTemplate, limits: Limits) -> tuple[int, ...]:
    """Return the tokens that end an answer; empty if the model does not support grammars."""
    found = dict.fromkeys([*tokenizer.eos_token_ids, *template.end_tokens(tokenizer)])
    # A tokenizer may know more tokens than the model has embeddings.
    ends = [token for token in found if token < limits.vocab_size]
    return tuple(ends) if limits.takes_grammars and tokenizer.table is not None else ()


class Grammars:
    """One model's compiled grammars. Belongs to one event loop."""

    def __init__(self, compiler: GrammarCompiler | None, remote: TakesGrammars | None = None) -> None:
        """`compiler`: None if the model does not support grammars. `remote`: an executor in other processes, which
        compiles them as well."""
        self._compiler = compiler
        self._remote = remote
        self._kept: OrderedDict[Hashable, tuple[CompiledGrammar, int]] = OrderedDict()
        self._characters = 0
        self._compiling: dict[Hashable, asyncio.Future[CompiledGrammar]] = {}
        """Key -> future of a grammar being compiled, shared by all requests that wait for it."""
        self._num_threads = 0

    async def of(
        self,
        config: GenerationConfig,
        prompt: Any,
        options: RequestOptions,
        prompt_ids: list[int],
        encoder: PromptEncoder,
    ) -> AnswerGrammar | None:
        """Return the grammar of the answers to a prompt, or None. `prompt`: before rendering; None for a prompt without
        a template. Raises InvalidRequest, QueueFull."""
        splitter = encoder.splitter
        spec = grammar_of(config.response_format) if config.is_constrained else None
        if prompt is not None and splitter.constrains_reply(options, spec):
            content, size = spec, sum(len(str(tool)) for tool in options.tools or ())
            spec = await encoder.offload(lambda: splitter.reply_grammar(options, content), size)
        budget = options.thinking_budget
        if spec is None and budget is None:
            return None
        field = "thinking_budget" if spec is None else spec.field
        known = self._checked_compiler(field).ends
        start = splitter.grammar_start(prompt, options, prompt_ids, field)
        if budget is not None:
            if start.closes is None:
                raise UnsupportedFeature(
                    "The model's reasoning cannot be bounded: it has none, or its end is not a single token. Leave "
                    "thinking_budget out.",
                    "thinking_budget",
                )
            start = start._replace(budget=budget)
        if spec is None:
            return AnswerGrammar(None, start)
        ends = encoder.template.end_tokens(encoder.tokenizer)
        start = start._replace(ends=tuple(end for end in ends if end not in known and end < encoder.vocab_size))
        spaced = start.inside or start.opens is not None
        return AnswerGrammar(await self.find(spec, spaced=spaced, owner=options.cache_salt), start)

    async def find(self, spec: GrammarSpec, *, spaced: bool, owner: Hashable) -> CompiledGrammar:
        """Return the compiled grammar, which requests of the same `owner` share. Raises InvalidParameter, QueueFull."""
        compiler = self._checked_compiler(spec.field)
        key = (spec, spaced, owner)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept[0]
        future = self._compiling.get(key)
        if future is None:
            if self._num_threads >= MAX_COMPILING:
                await self._wait_for_room()
                return await self.find(spec, spaced=spaced, owner=owner)
            future = self._begin(key, lambda: compiler.compile(spec, spaced=spaced), len(spec.source))
        try:
            return await asyncio.wait_for(asyncio.shield(future), PATIENCE)
        except TimeoutError:
            raise InvalidParameter(
                f"The {spec.field} asked for is too complex: it takes more than {PATIENCE:.0f} s to compile. Simplify "
                f"it.",
                spec.field,
            ) from None

    def _checked_compiler(self, field: str) -> GrammarCompiler:
        """Return the compiler. Raises UnsupportedFeature for the parameter `field` if there is none."""
        if self._compiler is None:
            raise UnsupportedFeature(
                f"This engine cannot hold answers to a response_format, nor to tools that are strict or have to be "
                f"called, nor bound their reasoning: its model is a fake, or runs in another process, which has "
                f"another tokenizer than the one that was given, or its tokenizer has no bytes for its tokens or no "
                f"end-of-sequence token. Leave {field} out, or strict and "
                f"tool_choice.",
                field,
            )
        return self._compiler

    async def _wait_for_room(self) -> None:
        pending = list(self._compiling.values())
        done, _ = await asyncio.wait(pending, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise QueueFull(
                "No grammar can be compiled now: those of other requests take long. Ask again later, or with one "
                "that was used before.",
                retry_after=PATIENCE,
            )

    def _begin(
        self, key: Hashable, compile_: Callable[[], CompiledGrammar], size: int
    ) -> asyncio.Future[CompiledGrammar]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CompiledGrammar] = loop.create_future()
        # All requests that wait for the grammar may have left.
        future.add_done_callback(retrieve)
        self._compiling[key] = future
        self._num_threads += 1

        def finish(compiled: CompiledGrammar | None, error: BaseException | None) -> None:
            if compiled is None or self._remote is None:
                end(compiled, error)
                return
            try:
                taken = self._remote.take_grammar(compiled)
            except AsyncLLMError as closed:
                end(None, closed)
            else:
                taken.add_done_callback(lambda taken: end(compiled, taken.exception()))

        def end(compiled: CompiledGrammar | None, error: BaseException | None) -> None:
            self._num_threads -= 1
            del self._compiling[key]
            if error is not None:
                future.set_exception(error)
            elif compiled is not None:
                self._keep(key, compiled, size)
                future.set_result(compiled)

        def run() -> None:
            compiled, error = None, None
            try:
                compiled = compile_()
            except Exception as failure:
                error = failure
            try:
                loop.call_soon_threadsafe(finish, compiled, error)
            except RuntimeError:
                return  # The event loop was closed meanwhile.

        try:
            with starting_thread():
                threading.Thread(target=run, name="asyncllm-grammar", daemon=True).start()
        except EngineError as error:
            end(None, error)
        return future

    def _keep(self, key: Hashable, compiled: CompiledGrammar, size: int) -> None:
        self._kept[key] = compiled, size
        self._characters += size
        while len(self._kept) > MAX_KEPT or self._characters > MAX_KEPT_CHARACTERS:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._characters -= dropped
