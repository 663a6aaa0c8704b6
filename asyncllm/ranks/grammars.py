"""Grammars in a rank's process, made again from their texts. All ranks come to the same ones, and so to the same masks.

The engine's process has compiled and tried a grammar before its text is sent, so it fails in none of the ranks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path

from asyncllm.event_loop.in_thread import in_thread
from asyncllm.text.grammars.bridge import AnswerGrammar, CompiledGrammar, GrammarCompiler, GrammarStart, GrammarText
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["RankGrammars"]

MAX_KEPT = 256
"""Compiled grammars, as in the engine's process."""


class RankGrammars:
    """What the answers of one rank's rows are held to. Written by its event loop's thread."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[int, CompiledGrammar] = OrderedDict()
        """By number: who shares one there shares it here."""

    def open(self, model_path: Path, vocab_size: int, ends: tuple[int, ...]) -> asyncio.Future[None]:
        """Read the tokenizer of the checkpoint, in a thread. `ends`: tokens that end an answer."""

        def read() -> GrammarCompiler:
            return GrammarCompiler(Tokenizer.from_folder(model_path), vocab_size, ends)

        async def opened() -> None:
            self._compiler = await in_thread(read)

        return asyncio.get_running_loop().create_task(opened(), name="asyncllm-vocabulary")

    def make(self, text: GrammarText | None, start: GrammarStart) -> AnswerGrammar:
        """Return what an answer is held to. Compiling a new grammar takes as long as it took there."""
        return AnswerGrammar(None if text is None else self._compiled(text), start)

    def _compiled(self, text: GrammarText) -> CompiledGrammar:
        kept = self._kept.get(text.number)
        if kept is None:
            assert self._compiler is not None, "no grammar is sent before TakeVocabulary"
            kept = self._kept[text.number] = self._compiler.compile(text.spec, spaced=text.spaced, tried=True)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text.number)
        return kept
