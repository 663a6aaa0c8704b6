"""The interface to llguidance: the tokenizer in its format, compiled grammars, and the progress of answers in them.

Calls take microseconds to seconds and run in threads.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncllm.config.structured_output.response_format import GrammarSpec
from asyncllm.errors import InvalidParameter
from asyncllm.text.grammars.lark import ESCAPES, WHITE_SPACE, Lark, as_lark, escaped
from asyncllm.text.grammars.tags import tag_rule
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tokenizers.token_table import LeadingSpace

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["AnswerGrammar", "CompiledGrammar", "GrammarCompiler", "GrammarProgress", "GrammarStart", "GrammarText"]

LIMITS: dict[str, Any] = {
    "max_items_in_row": 10_000,
    "max_grammar_size": 50_000,
    "initial_lexer_fuel": 200_000,
    "max_lexer_states": 25_000,
    "verbose_errors": False,
}

MAX_FIRST_MASK_S = 0.05
"""Maximum CPU time of a grammar's first masks in seconds. A slower grammar is refused, since it would delay other
rows."""

SLOW_MASK_S = 0.005
"""CPU time in seconds from which the mask of a running answer counts as slow. MAX_SLOW_MASKS of them end the answer."""
MAX_SLOW_MASKS = 10

EXCERPT = re.compile(r"\s+\d+ \| .*", re.DOTALL)


class _Vocabulary:
    """A tokenizer in llguidance's format."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        assert tokenizer.table is not None
        pieces = [piece or b"" for piece in tokenizer.table.pieces[:vocab_size]]
        self.tokens = [*pieces, *[b""] * (vocab_size - len(pieces))]
        self.special_token_ids = sorted(id_ for id_ in tokenizer.special_token_ids if id_ < vocab_size)
        self.eos_token_id = eos[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._by_bytes = {piece: id_ for id_, piece in enumerate(self.tokens) if piece}
        for id_ in self.special_token_ids:
            self._by_bytes.pop(self.tokens[id_], None)
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Return the tokens of some bytes: the tokenizer's own, or the longest matches if it adds a prefix."""
        try:
            ids = self._tokenizer.encode(data.decode(), add_bos=False, parse_special=False)
        except ValueError:
            ids = []
        if b"".join(self.tokens[id_] for id_ in ids if id_ < len(self.tokens)) == data:
            return ids
        ids, at = [], 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                found = self._by_bytes.get(data[at : at + size])
                if found is not None:
                    ids.append(found)
                    at += size
                    break
            else:
                at += 1
        return ids


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Usable from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        """`eos`: all ids that end an answer, at least one. `tokenizer` must have a byte table. Construction takes up to
        a second for a large vocabulary, with the interpreter lock held."""
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        assert tokenizer.table is not None
        self._vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos)), eos_token=list(eos))
        self._limits = LLParserLimits(**LIMITS)
        self._tokenizer = tokenizer
        self._words = -(-vocab_size // 32)
        self.ends = tuple(eos)
        """Tokens that end an answer."""
        self._spaced = tokenizer.table.leading is not LeadingSpace.KEEP

    def compile(self, spec: GrammarSpec, *, spaced: bool, tried: bool = False) -> CompiledGrammar:
        """Compile a grammar and try its first tokens, unless they were `tried` elsewhere. `spaced`: an answer may begin
        with white space.

        Raises InvalidParameter."""
        from llguidance import LLMatcher

        try:
            text = self._text(spec, spaced=spaced or self._spaced)
            matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
        except InvalidParameter:
            raise
        except ValueError:
            # The library's message repeats its input.
            raise InvalidParameter(
                f"No answer can be held to {spec.field}: it holds a half of a surrogate pair, or a number that no "
                f"computer has the room for. Leave it out.",
                spec.field,
            ) from None
        self._check(matcher, spec.field)
        if not tried:
            self._try_first_tokens(matcher.deep_copy(), spec.field)
        return CompiledGrammar(matcher, self._words, self.ends, GrammarText(next(_numbers), spec, spaced))

    def _text(self, spec: GrammarSpec, *, spaced: bool) -> str:
        from llguidance import LLMatcher

        front = r"/[ \n]{0,2}/ " if spaced else ""
        match spec.kind:
            case "json_schema":
                schema = json.loads(spec.source)
                white_space = WHITE_SPACE if spec.white_space is None else spec.white_space
                options: Any = {"whitespace_pattern": white_space, **ESCAPES}
                if spaced:
                    whole = json.dumps({**schema, "x-guidance": options})
                    return LLMatcher.grammar_from_lark(f"start: {front}answer\nanswer: %json {whole}")
                return LLMatcher.grammar_from_json_schema(spec.source, overrides=options)
            case "regex":
                return LLMatcher.grammar_from_regex(f"[ \\n]{{0,2}}({spec.source})" if spaced else spec.source)
            case "choice":
                # One expression, since that many alternatives in a grammar take seconds.
                words = "|".join(escaped(word) for word in json.loads(spec.source))
                return LLMatcher.grammar_from_regex(f"[ \\n]{{0,2}}({words})" if spaced else f"({words})")
            case "grammar":
                return LLMatcher.grammar_from_lark(as_lark(spec.source, spec.field))
            case "tags":
                rules = Lark(self._tokenizer)
                rules.rule(tag_rule(rules, spec.source, spec.field, self.ends), "answer")
                return LLMatcher.grammar_from_lark(f"start: {front}answer\n{rules.text}")
            case "calls":
                return LLMatcher.grammar_from_lark(f"start: {front}answer\n{spec.source}")

    def _check(self, matcher: LLMatcher, field: str) -> None:
        if matcher.is_error():
            # The sentence is followed by a piece of the grammar, which the client did not write itself.
            reason = " ".join(EXCERPT.sub("", matcher.get_error()).split())[:300]
            if "NoExtensionBias" in reason:
                reason = "no text ends in what it allows"
            if "coerce_one_of" in reason:
                reason = "the cases of a oneOf may overlap (anyOf may do, or a property that is another const in each)"
            raise InvalidParameter(
                f"No answer can be held to {field}: {reason}. Leave out what is not supported, and check the answer "
                f"for it yourself.",
                field,
            )

    def _try_first_tokens(self, matcher: LLMatcher, field: str) -> None:
        """Take the first steps in the grammar, since some compile and fail only when used."""
        words = np.zeros(self._words, np.int32)
        for _ in range(2):
            begun = time.thread_time()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if time.thread_time() - begun > MAX_FIRST_MASK_S:
                raise InvalidParameter(
                    f"The {field} is too complex: a single token takes longer than {MAX_FIRST_MASK_S * 1000:.0f} "
                    f"ms. Simplify it.",
                    field,
                )
            self._check(matcher, field)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not len(allowed):
                raise InvalidParameter(f"No text is allowed by this {field}. Loosen it.", field)
            if matcher.is_stopped():
                return
            matcher.consume_token(int(allowed[len(allowed) // 2]))
            self._check(matcher, field)


_numbers = count()


class GrammarText(NamedTuple):
    """The source from which another process compiles the same grammar."""

    number: int
    """Number given to the grammar by the process that compiled it first."""
    spec: GrammarSpec
    spaced: bool


class CompiledGrammar:
    """A compiled grammar in its initial state. Its copies share what they compute."""

    def __init__(self, matcher: LLMatcher, words: int, ends: tuple[int, ...], text: GrammarText) -> None:
        self._matcher = matcher
        self.text = text
        self.ends = ends
        """Tokens that end an answer."""
        self._lock = threading.Lock()
        self.words = words
        """Number of 32-bit words in a mask, which has one bit per token."""

    def copy(self) -> LLMatcher:
        with self._lock:  # a matcher may be used by one thread at a time
            return self._matcher.deep_copy()


class GrammarStart(NamedTuple):
    """The position in an answer at which its grammar begins."""

    inside: bool = False
    """Whether the answer begins inside the reasoning, which no grammar constrains."""
    opens: int | None = None
    """The token that may begin the reasoning."""
    closes: int | None = None
    """The token that ends it."""
    begins: int | None = None
    """The first token of a call, which also ends the reasoning."""
    budget: int | None = None
    """Maximum number of reasoning tokens, after which `closes` is forced."""
    ends: tuple[int, ...] = ()
    """Further tokens that end the answer, from an adapter's chat template."""


class AnswerGrammar:
    """The grammar of one request's answers, and the position at which it begins."""

    def __init__(self, compiled: CompiledGrammar | None, start: GrammarStart) -> None:
        """`compiled`: None if only the length of the reasoning is limited."""
        self._compiled = compiled
        self._start = start

    def reference(self) -> tuple[int | None, GrammarStart]:
        """Return the grammar's number and start, for a process that has compiled it too."""
        return None if self._compiled is None else self._compiled.text.number, self._start

    def start(self, answer: Sequence[int]) -> GrammarProgress:
        """Return the progress of an answer that already has some tokens."""
        progress = GrammarProgress(self._compiled, self._start)
        for token in answer:
            progress.consume(token)
        return progress


class GrammarProgress:
    """The progress of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, compiled: CompiledGrammar | None, start: GrammarStart) -> None:
        self._matcher = None if compiled is None else compiled.copy()
        self._end = -1 if compiled is None else compiled.ends[0]
        self._further_ends = () if compiled is None else start.ends
        ends = () if compiled is None else (*compiled.ends, *start.ends)
        self._ends = [token for token in ends if token != start.closes]
        self._free = start.inside
        """Whether the current text is reasoning, which no grammar constrains."""
        self._opens = None if start.inside else start.opens
        """The token that may still begin the reasoning."""
        self._closes = start.closes
        self._begins = start.begins
        self._left = start.budget
        """Number of reasoning tokens left."""
        self._run: list[int] = []
        """Forced tokens in reverse order. A run of them is computed once, and each of its masks allows one token."""
        self._slow = 0
        self.error: str | None = None
        """Why the answer cannot continue."""

    @property
    def ended(self) -> bool:
        """Whether the answer must end now."""
        return not self._free and self._matcher is not None and self._matcher.is_stopped()

    def consume(self, token: int) -> None:
        """Advance by the answer's next token."""
        if self._free:
            self._free = token not in (self._closes, self._begins)
            if self._left is not None:
                self._left -= 1
            if token == self._begins:
                self._match(token)
        elif token == self._opens:
            self._free, self._opens = True, None
        else:
            self._opens = None
            self._match(token)

    def _match(self, token: int) -> None:
        if token in self._further_ends:
            token = self._end
        if self._run and self._run.pop() != token:
            self._run.clear()
        if self._matcher is not None and not self.ended and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or "the token is not allowed"

    def forced(self) -> list[int]:
        """Return the tokens that must come next. A mask before them allows only the next one."""
        # Inside the reasoning, and while it may begin, there is a choice.
        if self._matcher is None or self._free or self._opens is not None or self.ended or self.error is not None:
            return []
        if not self._run:
            self._run = self._matcher.compute_ff_tokens()[::-1]
        return self._run[::-1]

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write the mask of the next token. If the answer cannot continue, no bit is set, and every rank learns that
        from the draw."""
        matcher = self.begin_fill(words)
        if matcher is not None:
            begun = time.thread_time()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._slow += time.thread_time() - begun > SLOW_MASK_S
            self.finish_fill(words)

    def begin_fill(self, words: NDArray[np.int32]) -> LLMatcher | None:
        """Do as `fill`, or return the matcher that has to write the mask before `finish_fill` is called."""
        if self.error is not None:
            words[:] = 0
        elif self._free and self._left is not None and self._left <= 0:
            assert self._closes is not None
            _allow_alone(words, self._closes)
        elif self._run:
            _allow_alone(words, self._run[-1])
        elif self._matcher is None:
            words[:] = -1
        elif self._free:
            words[:] = -1
            # The grammar has not begun yet.
            for token in self._ends:
                words.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        else:
            return self._matcher
        return None

    def finish_fill(self, words: NDArray[np.int32]) -> None:
        """Check the mask that the matcher of `begin_fill` has written."""
        assert self._matcher is not None
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
        elif self._slow >= MAX_SLOW_MASKS:
            self.error = "its masks take too long to compute"
        if self.error is not None:
            words[:] = 0
            return
        further = [] if self._opens is None else [self._opens]
        if self._further_ends and words.view(np.uint32)[self._end // 32] >> self._end % 32 & 1:
            further += self._further_ends
        for token in further:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def _allow_alone(words: NDArray[np.int32], token: int) -> None:
    words[:] = 0
    words.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)
