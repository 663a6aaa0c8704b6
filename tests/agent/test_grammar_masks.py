"""Masks that several cores fill are those that one fills, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import asyncllm
from asyncllm.agent.sampling import grammar_masks
from asyncllm.agent.sampling.grammar_masks import FEW_ROWS, GrammarMasks
from asyncllm.config.structured_output.response_format import grammar_of
from asyncllm.text.grammars.bridge import AnswerGrammar, GrammarCompiler, GrammarProgress, GrammarStart
from asyncllm.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(asyncllm.__file__).parent / "assets" / "tiny-chat")
VOCAB = TOKENIZER.vocab_size + 3
EOS = list(TOKENIZER.eos_token_ids)
OPENS, CLOSES = 270, 271
"""Stand for the marks of reasoning."""
STARTS = (
    GrammarStart(),
    GrammarStart(opens=OPENS, closes=CLOSES),
    GrammarStart(inside=True, closes=CLOSES),
    GrammarStart(inside=True, closes=CLOSES, budget=0),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, EOS)


def answers(compiler: GrammarCompiler) -> dict[int, GrammarProgress]:
    """Answers by slot that stand at different places of different grammars, with every start."""
    made = {}
    for slot in range(0, 6 * FEW_ROWS, 2):
        words = {"type": "choice", "choice": [f"{number} apples" for number in range(slot + 1, slot + 40)]}
        spec = grammar_of(words)
        assert spec is not None
        grammar = AnswerGrammar(compiler.compile(spec, spaced=False), STARTS[slot // 2 % len(STARTS)])
        written = TOKENIZER.encode(str(slot + 1), add_bos=False) if slot % 8 == 0 else []
        made[slot] = grammar.start(written)
    return made


def filled(progress: GrammarProgress) -> NDArray[np.int32]:
    words = np.zeros(-(-VOCAB // 32), np.int32)
    progress.fill(words)
    return words


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_those_of_the_slots_in_the_order_asked_for(compiler: GrammarCompiler, num_threads: int) -> None:
    masks, progresses = GrammarMasks(VOCAB, num_threads), answers(compiler)
    for slots in (list(progresses), list(reversed(progresses))[: FEW_ROWS + 1], list(progresses)[:2]):
        expected = np.stack([filled(progresses[slot]) for slot in slots])
        assert np.array_equal(masks.compute(slots, dict(progresses)), expected)
    assert len({row.tobytes() for row in masks.compute(list(progresses), dict(progresses))}) > len(STARTS)


def test_rows_none_of_which_asks_its_grammar(compiler: GrammarCompiler) -> None:
    spec = grammar_of({"type": "choice", "choice": ["pears"]})
    assert spec is not None
    grammar = AnswerGrammar(compiler.compile(spec, spaced=False), GrammarStart(inside=True, closes=CLOSES, budget=0))
    progresses = {slot: grammar.start([]) for slot in range(FEW_ROWS + 2)}
    words = GrammarMasks(VOCAB, 2).compute(list(progresses), dict(progresses))
    assert all(np.array_equal(row, filled(progresses[0])) for row in words)


def test_an_answer_that_cannot_go_on_allows_nothing_and_harms_no_other(compiler: GrammarCompiler) -> None:
    masks, progresses = GrammarMasks(VOCAB, 2), answers(compiler)
    slots = list(progresses)
    expected = np.stack([filled(progresses[slot]) for slot in slots])
    lost = progresses[0]
    lost.consume(TOKENIZER.encode("pears", add_bos=False)[0])
    assert lost.error is not None
    words = masks.compute(slots, dict(progresses))
    assert not words[0].any()
    assert np.array_equal(words[1:], expected[1:])


def test_rows_behind_a_slow_fill_are_looked_at_one_by_one(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that those which hold others up are found, and end."""
    monkeypatch.setattr(grammar_masks, "SLOW_FILL_S", 0.0)
    masks, progresses = GrammarMasks(VOCAB, 2), answers(compiler)
    alone: list[Any] = []
    fill = GrammarProgress.fill
    monkeypatch.setattr(GrammarProgress, "fill", lambda self, words: (alone.append(self), fill(self, words))[1])
    for _ in range(4):
        masks.compute(list(progresses), dict(progresses))
    assert alone == 2 * list(progresses.values())
