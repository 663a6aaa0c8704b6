"""PromptEncoder turns a user's prompt (a text, messages or token ids) into checked token ids."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar

from asyncllm.config import EngineConfig, RequestOptions
from asyncllm.engine.cache.block_groups import pool_tokens
from asyncllm.engine.requests.embedded_prompt import num_values, placed_embeddings
from asyncllm.engine.requests.image_input import ImageInput
from asyncllm.engine.requests.split_answer import Splitter
from asyncllm.engine.requests.text_threads import TextThreads
from asyncllm.engine.sessions.history import History
from asyncllm.errors import ContextLengthExceeded, InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.event_loop.request_gate import RequestGate
from asyncllm.prompt_image import AdaptedProcessor, ImagePreparation, PromptImage
from asyncllm.protocol import Limits
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.literals import Literals
from asyncllm.text.messages import as_messages
from asyncllm.text.prompts import is_token_ids, no_prompt
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message

__all__ = ["DEFAULT_OPTIONS", "PromptEncoder", "Rendered"]

Result = TypeVar("Result")

INLINE_SIZE = 4096
"""Maximum number of characters encoded on the event loop, about 1 ms. Longer texts go to a thread."""

IDS_PER_CHARACTER = 16
"""Token ids that take as long to check as a character takes to encode."""

VALUES_PER_CHARACTER = 16
"""Numbers of embeddings that take as long to copy, check and hash as a character takes to encode."""

PART_SIZE = 64
"""Characters that take as long to encode as a message, part or field takes to render."""

PROBED = 8
"""Characters per available token: this much of a far longer text is encoded, to see whether it can fit at all."""

CHARACTERS_PER_TOKEN = 8
"""Maximum characters per token of texts waiting to be encoded, if the engine bounds the waiting tokens."""

DEFAULT_OPTIONS = RequestOptions()


class Rendered(NamedTuple):
    """A prompt's text, and the spans in which a special token's spelling is plain text of the user."""

    text: str
    literal_spans: Sequence[tuple[int, int]] = ()


class PromptEncoder:
    """Renders, encodes and measures prompts, long ones in threads. Holds no state of a request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        limits: Limits,
        config: EngineConfig,
        images: ImagePreparation | None = None,
    ) -> None:
        """`images`: the image preparation; None for a text-only model."""
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = limits.vocab_size
        adapted = None if images is None else images.processor
        self._embedding_size = limits.hidden_size if limits.takes_embeddings else 0
        self.image_adapter = adapted.adapter_name if isinstance(adapted, AdaptedProcessor) else None
        """Name of the adapter for prompts with images, in a family that has one."""
        self.session_len = min(limits.max_position, config.session_len or limits.max_position)
        """Maximum number of tokens of history, prompt and answer together."""
        self._pool_tokens = pool_tokens(limits, 0 if images is None else images.processor.joint)
        pieces = [] if tokenizer.table is None else tokenizer.table.pieces
        self._longest_piece = max((len(piece) for piece in pieces if piece), default=0)
        """Bytes of the longest token; 0 if unknown."""
        self._config = config
        self.splitter = Splitter(template, tokenizer, config)
        """The format of answers, according to the template."""
        self.gate = RequestGate()
        """Lets new requests start a few at a time."""
        self._threads = TextThreads(CHARACTERS_PER_TOKEN * config.max_queued_tokens)
        self.images = ImageInput(images, self.offload)

    def with_template(self, template: ChatTemplate) -> Self:
        """Return an encoder with another chat template that shares everything else, including the threads."""
        other = copy.copy(self)
        other.template, other.splitter = template, Splitter(template, self.tokenizer, self._config)
        return other

    async def close(self) -> None:
        """End the encoding threads, which finish their current work."""
        await self._threads.close()

    def options(self, keywords: Mapping[str, Any], *, renders: bool) -> RequestOptions:
        """Return the checked keywords of a call. `renders`: the chat template writes its prompt.

        Raises InvalidRequest."""
        if not keywords:
            return DEFAULT_OPTIONS
        options = RequestOptions.from_dict(dict(keywords)).checked()
        field = options.template_field()
        if field is not None and not renders:
            raise InvalidParameter(
                f"{field} is about the chat template, which has no part in this prompt. Leave it out, or pass messages "
                f"with do_preprocess=True.",
                field,
            )
        if field is not None and self.template.capability != "chat":
            raise UnsupportedFeature(
                f"{field} is for conversations, and the template's capability is {self.template.capability!r}. Leave "
                f"it out.",
                field,
            )
        if options.tools:
            self.splitter.check_tools(options)
        return options

    def render(
        self,
        messages: str | Sequence[Message] | None,
        *,
        do_preprocess: bool,
        options: RequestOptions = DEFAULT_OPTIONS,
        images: Sequence[PromptImage] = (),
    ) -> Rendered:
        """Return the prompt's text, with the placeholders of its images. Raises InvalidRequest."""
        if not isinstance(messages, Sequence):
            raise no_prompt(messages)
        if isinstance(messages, str):
            if not messages:
                raise InvalidMessage("The prompt is empty: there is nothing to read. Pass at least one character.")
            if not do_preprocess:
                return Rendered(self.images.written(messages, images))
            messages = as_messages(messages)
        elif not do_preprocess:
            raise InvalidMessage("do_preprocess=False takes the prompt as it is: it must be a str, not messages.")
        literals = Literals(self.tokenizer)
        text = self.template.render(
            literals.mark(messages),
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=options.continues,
            variables=literals.mark_values(options.variables()),
        )
        return self._restored(literals, text, images)

    def _restored(self, literals: Literals, text: str, images: Sequence[PromptImage]) -> Rendered:
        """Return a text that was rendered from marked messages, with its marks resolved."""
        text, spans = literals.restore(self.images.written(text, images))
        # Without a template the user wrote the whole prompt, including its special tokens.
        return Rendered(text, spans if self.template.capability == "chat" else ())

    def encode(self, prompt: Rendered, *, add_bos: bool = True, whole: bool = False, bounded: bool = True) -> list[int]:
        """Return the token ids of a rendered prompt, as `prompt_ids`."""
        if bounded:
            self._check_size(prompt.text)
        ids = self.tokenizer.encode(prompt.text, add_bos=add_bos, literal_spans=prompt.literal_spans)
        return self.tokenizer.with_suffix(ids) if whole else ids

    async def prompt_ids(
        self,
        prompt: Any,
        *,
        do_preprocess: bool,
        options: RequestOptions = DEFAULT_OPTIONS,
        owner: Hashable = None,
        add_bos: bool = True,
        whole: bool = False,
        bounded: bool = True,
        images: Sequence[PromptImage] = (),
    ) -> list[int]:
        """Return the token ids of a text or of messages, rendered and encoded in a thread if they are long.

        Owners of long texts take turns. `whole`: nothing follows the text, which gets the final tokens of the
        checkpoint's tokenizer. `bounded`: refuse a text that cannot fit before encoding all of it. Raises
        InvalidRequest, EngineError.
        """

        def encode() -> list[int]:
            rendered = self.render(prompt, do_preprocess=do_preprocess, options=options, images=images)
            return self.encode(rendered, add_bos=add_bos, whole=whole, bounded=bounded)

        await self.gate.enter()
        size = _size_of(prompt) if not options.tools else _size_of([prompt, options.tools])
        return await self.offload(encode, size, owner)

    async def given_ids(self, token_ids: Sequence[int] | None, name: str = "input_ids") -> list[int]:
        """Return `check_token_ids`, run in a thread for a long list."""
        await self.gate.enter()
        size = len(token_ids) if isinstance(token_ids, Sequence) else 0
        return await self.offload(lambda: self.check_token_ids(token_ids, name), size // IDS_PER_CHARACTER)

    async def given_embeddings(
        self, embeddings: Any, ranges: Any, token_ids: Sequence[int] | None
    ) -> tuple[list[int], Sequence[PromptImage]]:
        """Return `placed_embeddings`, run in a thread for many. Raises InvalidParameter, UnsupportedFeature."""
        if not self._embedding_size:
            raise UnsupportedFeature(
                "input_embeddings: the engine takes no embeddings instead of tokens. Start it with "
                "enable_prompt_embeds=True.",
                "input_embeddings",
            )
        ids = None if token_ids is None else await self.given_ids(token_ids)
        await self.gate.enter()
        size = num_values(embeddings) // VALUES_PER_CHARACTER
        return await self.offload(lambda: placed_embeddings(embeddings, ranges, ids, self._embedding_size), size)

    async def turn_ids(
        self,
        past: History,
        prompt: Any,
        *,
        do_preprocess: bool,
        options: RequestOptions,
        owner: Hashable,
        whole: bool = False,
    ) -> tuple[list[int], Sequence[PromptImage]]:
        """Return the token ids of the history and the new prompt, as `prompt_ids`, and the images among them."""
        prompt, images = await self.images.take(prompt, options, owner, len(past.images))
        if not past.turns or not do_preprocess:
            rendering: Any = {"do_preprocess": do_preprocess, "options": options, "owner": owner, "whole": whole}
            added = await self.prompt_ids(prompt, add_bos=not past.token_ids, images=images, **rendering)
            ids, placed = self.images.placed(past.token_ids, added, images)
            return ids, [*past.images, *placed]
        await self.gate.enter()
        size = _size_of([prompt, past.messages()])
        return await self.offload(lambda: self._with_history(past, prompt, images, options), size, owner)

    def _with_history(
        self, past: History, prompt: Any, images: Sequence[PromptImage], options: RequestOptions
    ) -> tuple[list[int], Sequence[PromptImage]]:
        """Return the token ids of messages that follow others, and the images of both."""
        self.render(prompt, do_preprocess=True, options=options)  # Raises for errors in the new messages.
        literals = Literals(self.tokenizer)
        before, new = literals.mark(past.messages()), literals.mark(as_messages(prompt))
        answer = literals.mark_text(past.turns[-1].answer)
        variables = literals.mark_values(options.variables())
        known = past.template
        tail = None
        if known is None or known is self.template:
            tail = self.template.continuation(before, answer, new, variables)
        if tail is None:
            conversation = [*before, {"role": "assistant", "content": answer}, *new]
            text = self.template.render(conversation, variables=variables)
            everything = [*past.images, *images]
            return self.images.placed([], self.encode(self._restored(literals, text, everything)), everything)
        added = self.encode(self._restored(literals, tail, images), add_bos=False)
        ids = past.token_ids
        if ids and ids[-1] in self.tokenizer.eos_token_ids:
            # The template writes the end of a turn, usually as the same token.
            ids = ids[:-1]
        ids, placed = self.images.placed(ids, added, images)
        return ids, [*past.images, *placed]

    async def encode_all(
        self, prompts: Sequence[Any], options: RequestOptions, *, do_preprocess: bool, add_bos: bool, bounded: bool
    ) -> list[list[int]]:
        """Return the token ids of each prompt: a text, messages or ids. Raises InvalidRequest, EngineError."""
        encoded: list[list[int]] = []
        for prompt in prompts:
            if is_token_ids(prompt):
                encoded.append(await self.given_ids(prompt))
            else:
                marked, images = await self.images.take(prompt, options)
                ids = await self.prompt_ids(
                    marked,
                    do_preprocess=do_preprocess,
                    options=options,
                    add_bos=add_bos,
                    bounded=bounded,
                    images=images,
                )
                encoded.append(self.images.placed([], ids, images)[0])
            await asyncio.sleep(0)  # Many prompts must not block the event loop.
        return encoded

    def check_token_ids(self, token_ids: Sequence[int] | None, name: str = "input_ids") -> list[int]:
        """Return a copy of the ids as a list. Raises InvalidParameter unless all are in the vocabulary."""
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidParameter(
                f"{name} must be a list of token ids, not {type(token_ids).__name__}. Encode a text first, and pass "
                f"{name}.tolist() of a tensor or array.",
                name,
            )
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return list(token_ids)
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidParameter(
                    f"{name} holds {token!r}; token ids are integers in [0, {self.vocab_size - 1}].", name
                )
        return list(token_ids)

    def room(self, prompt_len: int, needed: int, *, at_least: bool = False) -> int:
        """Return how many new tokens fit after the prompt. Raises ContextLengthExceeded if fewer than `needed` do."""
        for limit, why in (
            (self.session_len, f"the session length of {self.session_len} tokens"),
            (self._pool_tokens, f"the KV cache of {self._pool_tokens} tokens"),
        ):
            if limit - prompt_len < needed:
                raise ContextLengthExceeded(prompt_len, limit - needed, why, scored=needed == 0, at_least=at_least)
        return min(self.session_len, self._pool_tokens) - prompt_len

    def _check_size(self, text: str) -> None:
        """Raise ContextLengthExceeded, without encoding all of it, for a text that certainly has too many tokens."""
        limit = min(self.session_len, self._pool_tokens)
        if len(text) <= limit:
            return
        if self._longest_piece and len(text) > limit * self._longest_piece:
            # A tokenizer may drop white space.
            min_tokens = -(-(len(text) - sum(map(text.count, " \t\r\n"))) // self._longest_piece)
            if min_tokens > limit:
                self.room(min_tokens, 1, at_least=True)
        beginning = PROBED * limit
        if len(text) > 2 * beginning:
            min_tokens = len(self.tokenizer.encode(text[:beginning], add_bos=False))
            # Near the cut, a few tokens may differ from those of the whole text.
            if min_tokens > limit + limit // 16 + 64:
                self.room(min_tokens, 1, at_least=True)

    async def offload(self, call: Callable[[], Result], size: int, owner: Hashable = None) -> Result:
        """Return the result of `call`, which takes as long as encoding a text of `size` characters, or decoding as many
        tokens. A long call runs in a thread, at its owner's turn. Raises EngineClosed, QueueFull."""
        return call() if size <= INLINE_SIZE else await self._threads.run(call, size, owner)


def _size_of(prompt: Any) -> int:
    """Return the number of characters of a text or of messages. Counting messages stops beyond INLINE_SIZE."""
    if isinstance(prompt, str):
        return len(prompt)
    size, left = 0, [prompt]
    while left and size <= INLINE_SIZE:
        value = left.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list | tuple | dict):
            size += PART_SIZE
            left.extend(islice(value.values() if isinstance(value, dict) else value, INLINE_SIZE))
    return size
