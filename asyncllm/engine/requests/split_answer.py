"""SplitAnswer separates reasoning, content and tool calls in an answer while it is generated."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from asyncllm.config import EngineConfig, GenerationConfig, RequestOptions
from asyncllm.config.structured_output.response_format import GrammarSpec
from asyncllm.config.tools import ToolChoice, is_constrained, schemas_of
from asyncllm.engine.requests.answer import Answer
from asyncllm.errors import UnsupportedFeature
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer, StopWords
from asyncllm.text.grammars.bridge import GrammarStart
from asyncllm.text.replies.events import CallPiece, CallStart, Event, Text, Thought
from asyncllm.text.replies.formats import NONE as NO_PARSER
from asyncllm.text.replies.formats import TOOL_PARSERS, reply_format
from asyncllm.text.replies.reply import Reply, ReplyFormat
from asyncllm.text.replies.reply_grammar import call_grammar, reply_grammar
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Response, ToolCall, ToolCallPiece

__all__ = ["SplitAnswer", "Splitter", "Splitting", "make_answers"]

PROMPT_END = 64
"""Tokens at the end of a prompt that are searched for the beginning of an answer written by the template."""


class Splitting:
    """How the answers to one request are split."""

    def __init__(
        self,
        form: ReplyFormat,
        tools: Mapping[str, Any] | None,
        *,
        inside: bool,
        max_calls: int = 0,
        has_to_call: bool = False,
    ) -> None:
        """See `Reply`. `has_to_call`: the beginning of a call that is cut off is not content."""
        self.form = form
        self.tools = tools
        self.inside = inside
        self.max_calls = max_calls
        self.has_to_call = has_to_call

    def reply(self) -> Reply:
        """Return a new reply."""
        return Reply(self.form, self.tools, inside=self.inside, max_calls=self.max_calls)


class Splitter:
    """The format of a model's answers, according to its template and the engine's settings. Immutable."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, config: EngineConfig) -> None:
        """Raise InvalidParameter for unknown parser names."""
        source = template.source if template.capability == "chat" else None
        parser = config.tool_call_parser
        self._tokenizer = tokenizer
        self._reads_tools = template.reads_tools
        self.form = reply_format(source, tokenizer, tool_parser=parser, reasoning=config.reasoning_parser)
        """Format of replies, as far as it is known."""
        self._unsplit = reply_format(source, tokenizer, tool_parser=parser, reasoning=NO_PARSER)
        """Format for requests whose reasoning stays in the text."""

    def check_tools(self, options: RequestOptions) -> None:
        """Raise UnsupportedFeature if the template takes no tools, or if the format of calls is unknown."""
        if not self._reads_tools:
            raise UnsupportedFeature(
                "The model's chat template has no place for tools. Use a checkpoint that was trained to call tools, "
                "or give its template for tools by ChatTemplateConfig(chat_template=...).",
                "tools",
            )
        if self.form.tools is None and options.choice is not None:
            raise UnsupportedFeature(
                f"It is not known how the model writes calls of tools. Set tool_call_parser to one of: "
                f"{', '.join(sorted(TOOL_PARSERS))}.",
                "tools",
            )

    def splitting(self, messages: Any, options: RequestOptions, prompt_ids: list[int]) -> Splitting | None:
        """Return how answers to a rendered prompt are split; None if they are plain text.

        `messages`: the prompt before rendering; None for a prompt without a template.
        """
        if messages is None:
            return None
        form = self.form if options.separate_reasoning else self._unsplit
        tools = schemas_of(options.tools) if options.tools and options.choice is not None else None
        if tools is None and not (form.splits and options.separate_reasoning):
            return None
        inside = form.thinking is not None and self._beginning(messages, options, prompt_ids)[1]
        return Splitting(
            form,
            tools,
            inside=inside,
            max_calls=options.parallel_tool_calls is False,
            has_to_call=options.choice is not None and options.choice.required,
        )

    def constrains_reply(self, options: RequestOptions, content: GrammarSpec | None) -> bool:
        """Return whether a grammar applies to the whole reply rather than to its content alone."""
        if content is None and not options.tools:
            return False
        choice = options.choice
        if choice is None:
            return content is not None and self.form.tools is not None and self.form.tools.whole is not None
        return content is not None or is_constrained(choice, options.tools or ())

    def reply_grammar(self, options: RequestOptions, content: GrammarSpec | None) -> GrammarSpec:
        """Return the grammar of a whole reply, calls included. Raises InvalidParameter, UnsupportedFeature."""
        form, choice = self.form.tools, options.choice
        assert form is not None
        tools = () if choice is None else options.tools or ()
        many = options.parallel_tool_calls is not False
        return reply_grammar(form, self._tokenizer, tools, choice or ToolChoice(), content, many=many)

    def grammar_start(self, messages: Any, options: RequestOptions, prompt_ids: list[int], field: str) -> GrammarStart:
        """Return where an answer's grammar begins. Raises UnsupportedFeature for `field` if that is unknown.

        `messages`: the prompt before rendering; None for a prompt without a template.
        """
        thinking = self.form.thinking
        if messages is None or thinking is None:
            return GrammarStart()
        opens, closes = (self._tokenizer.token_id(mark.strip()) for mark in thinking[:2])
        end, inside = self._beginning(messages, options, prompt_ids)
        if inside and closes is None:
            raise UnsupportedFeature(
                f"The model begins with reasoning whose end is not a single token, so it is not known where its "
                f"answer begins. Switch the reasoning off, or leave {field} out.",
                field,
            )
        begins = None
        if options.choice is not None and self.form.tools is not None:
            grammar = call_grammar(self.form.tools, self._tokenizer)
            begins = None if grammar is None else self._first_token(grammar.opener)
        if inside:
            return GrammarStart(True, None, closes, begins)
        is_over = end.rstrip().endswith(thinking.close.strip())
        return GrammarStart(False, None if is_over or closes is None else opens, closes, begins)

    def _first_token(self, opener: str) -> int | None:
        """Return the id of the special token that a marker begins with, or None."""
        found = self._tokenizer.spellings.pattern.match(opener)
        return self._tokenizer.token_id(found[0] if found else opener)

    def _beginning(self, messages: Any, options: RequestOptions, prompt_ids: list[int]) -> tuple[str, bool]:
        """Return the end of the prompt's text, and whether the answer begins inside the reasoning."""
        continued = None
        if options.continues is not False and not isinstance(messages, str) and messages[-1]["role"] == "assistant":
            content = messages[-1].get("content")
            continued = content if isinstance(content, str) else ""
        tail = prompt_ids[-PROMPT_END - len(continued or "") :]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return text, self.form.begins_inside(text, continued)


class SplitAnswer(Answer):
    """An answer whose text is only its content. Stop words apply to the content only."""

    __slots__ = (
        "_calls",
        "_codes",
        "_has_to_call",
        "_includes_stop",
        "_max_calls",
        "_num_thought",
        "_num_thoughts_sent",
        "_raw",
        "_reply",
        "_thoughts",
        "_unsent_calls",
        "reasoning_tokens",
    )
    splits = True

    def __init__(
        self,
        splitting: Splitting,
        detokenizer: Detokenizer,
        *,
        stop_words: StopWords | None,
        hidden_ids: frozenset[int],
        include_stop: bool,
    ) -> None:
        super().__init__(detokenizer, stop_words=stop_words, hidden_ids=hidden_ids, include_stop=include_stop)
        self._reply = splitting.reply()
        self._codes = splitting.form.tokens
        self._has_to_call = splitting.has_to_call
        self._max_calls = splitting.max_calls
        self._includes_stop = include_stop
        self._raw: list[str] = []
        self._thoughts: list[str] = []
        self._num_thoughts_sent = 0
        self._calls: list[tuple[ToolCallPiece, list[str]]] = []
        """The first piece of each call, and the pieces of its arguments."""
        self._unsent_calls: list[ToolCallPiece] = []
        self.reasoning_tokens = 0
        """Number of reasoning tokens, including the marks."""
        self._num_thought = 0
        """Those up to the last that is known to be one: the newest may begin a call, which ends the reasoning."""

    @property
    def text(self) -> str:
        """All text so far, with reasoning and calls as the model wrote them. A conversation continues this text."""
        return "".join(self._raw)

    @property
    def watches_text(self) -> bool:
        return super().watches_text or self._max_calls > 0

    @property
    def over(self) -> bool:
        return super().over or self._reply.over

    @property
    def called(self) -> bool:
        return self._reply.num_complete > 0

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        shown = tokens[:-1] if last and tokens and tokens[-1] in self._hidden_ids else tokens
        for token in shown:
            if self.over:
                return
            self.num_read += 1
            text = self._detokenizer.push([token])
            self._raw.append(text)
            was_thinking = self._reply.thinking
            events = self._reply.push(self._codes.get(token, text))
            self._handle(events)
            self._count(was_thinking, {type(event) for event in events})
        if self.over:
            return
        self.num_read += len(tokens) - len(shown)
        if last:
            rest = self._detokenizer.flush()
            self._raw.append(rest)
            self._handle(self._reply.push(rest))
            self._handle([each for each in self._reply.end() if not self._has_to_call or type(each) is not Text])
            if self._matcher is not None and self.stop_reason is None:
                self._add(self._matcher.flush())

    def _count(self, was_thinking: bool, kinds: set[type]) -> None:
        """Count a token that was read, with events of these kinds, as reasoning if it is."""
        thinking = self._reply.thinking
        self.reasoning_tokens += was_thinking or thinking
        if thinking and not was_thinking and not (self._parts or self._calls or self._thoughts):
            # The mark may consist of several tokens, and is recognized at the last one.
            self.reasoning_tokens = self.num_read
        if was_thinking and CallStart in kinds:
            self.reasoning_tokens = self._num_thought
        elif was_thinking != thinking or Thought in kinds:
            self._num_thought = self.reasoning_tokens

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.stop_reason is not None:
                return
            match event:
                case Text(text):
                    if self._matcher is not None:
                        text, self.stop_reason = self._matcher.push(text)
                    self._add(text)
                    if isinstance(self.stop_reason, str):
                        self._cut_raw(self.stop_reason)
                case Thought(text):
                    self._thoughts.append(text)
                case CallStart(index, name, own_id):
                    if self._matcher is not None:
                        # A stop word cannot continue across a call.
                        self._add(self._matcher.flush())
                    call_id = own_id or f"call_{uuid.uuid4().hex[:24]}"
                    position = sum(map(len, self._parts))
                    first = ToolCallPiece(index=index, id=call_id, name=name, text_position=position)
                    self._calls.append((first, []))
                    self._unsent_calls.append(first)
                case CallPiece(index, arguments):
                    self._calls[index][1].append(arguments)
                    self._unsent_calls.append(ToolCallPiece(index=index, arguments=arguments))

    def _cut_raw(self, stop_word: str) -> None:
        """Remove the stop word from the text that a conversation continues, as from the content."""
        before, word, _ = self.text.rpartition(stop_word)
        self._raw = [before + word if self._includes_stop else before]

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._unsent += text

    def complete(self, chunk: Chunk) -> None:
        super().complete(chunk)
        chunk.reasoning = "".join(self._thoughts[self._num_thoughts_sent :])
        self._num_thoughts_sent = len(self._thoughts)
        chunk.tool_calls, self._unsent_calls = self._unsent_calls, []
        chunk.reasoning_token_len = self.reasoning_tokens

    def fill(self, response: Response) -> None:
        response.text = "".join(self._parts)
        response.reasoning = "".join(self._thoughts)
        response.tool_calls = [
            ToolCall(
                id=first.id or "",
                name=first.name or "",
                arguments="".join(arguments),
                text_position=first.text_position,
            )
            for first, arguments in self._calls
        ]
        response.reasoning_token_len = self.reasoning_tokens


def make_answers(
    tokenizer: Tokenizer,
    config: GenerationConfig,
    stop_words: StopWords,
    stop_ids: frozenset[int],
    splitting: Splitting | None,
) -> list[Answer]:
    """Return the `n` answers to a prompt. `splitting`: how to separate reasoning and calls; None: plain text."""
    make = Answer if splitting is None else partial(SplitAnswer, splitting)
    return [
        make(
            Detokenizer(tokenizer, skip_special_tokens=config.skip_special_tokens),
            stop_words=stop_words,
            hidden_ids=frozenset() if config.include_stop_str_in_output else stop_ids,
            include_stop=config.include_stop_str_in_output,
        )
        for _ in range(config.n)
    ]
