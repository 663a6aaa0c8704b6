"""Grammars in a rank's process, compiled again from their texts. All ranks get the same grammars, and thus the same
masks.

The engine's process has compiled and tried a grammar before its text is sent. The text arrives before the request that
needs it, and is compiled in a thread, so that no step waits; the engine's process says when it is no longer needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from asyncllm.event_loop.in_thread import in_thread
from asyncllm.text.grammars.bridge import AnswerGrammar, CompiledGrammar, GrammarCompiler, GrammarStart, GrammarText
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["RankGrammars"]


class RankGrammars:
    """The grammars of one rank's rows. Written by its event loop's thread."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._kept: dict[int, CompiledGrammar | None] = {}
        """Number -> grammar, shared by requests with equal texts. None: it is being compiled."""

    def open(self, model_path: Path, vocab_size: int, ends: tuple[int, ...]) -> asyncio.Future[None]:
        """Read the tokenizer of the checkpoint, in a thread. `ends`: tokens that end an answer."""

        def read() -> GrammarCompiler:
            return GrammarCompiler(Tokenizer.from_folder(model_path), vocab_size, ends)

        async def opened() -> None:
            self._compiler = await in_thread(read)

        return asyncio.get_running_loop().create_task(opened(), name="asyncllm-vocabulary")

    def take(self, text: GrammarText) -> asyncio.Future[None]:
        """Compile a grammar, in a thread."""
        compiler = self._compiler
        assert compiler is not None, "no grammar is sent before TakeVocabulary"
        self._kept[text.number] = None

        async def taken() -> None:
            compiled = await in_thread(lambda: compiler.compile(text.spec, spaced=text.spaced, tried=True))
            if text.number in self._kept:
                self._kept[text.number] = compiled

        return asyncio.get_running_loop().create_task(taken(), name="asyncllm-grammar")

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop grammars that no later row uses."""
        for number in numbers:
            self._kept.pop(number, None)

    def make(self, number: int | None, start: GrammarStart) -> AnswerGrammar:
        """Return the constraint of an answer: a grammar that was taken, or none, and where it begins."""
        compiled = None if number is None else self._kept[number]
        assert number is None or compiled is not None, "no row comes before its grammar is taken"
        return AnswerGrammar(compiled, start)
