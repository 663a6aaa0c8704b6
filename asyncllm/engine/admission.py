"""Admission: from what the user wrote to a Request. Everything that the user's input can break breaks here.

The scheduler and the model side may rely on a Request: ids are in the vocabulary, parameters in range, and the
prompt and at least one new token fit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from asyncllm.batch import Limits, SamplingParams
from asyncllm.config import GenerationConfig, RequestOptions
from asyncllm.engine.delivery import Answer, Delivery
from asyncllm.engine.prompts import is_token_ids
from asyncllm.engine.quality_of_service import QualityOfService
from asyncllm.engine.sequence import ORDINARY, Request, Terms
from asyncllm.errors import ContextLengthExceeded, EngineClosed, InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.literals import Literals
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message, Pooling

__all__ = ["Admission", "Rendered", "check_adapter"]

Result = TypeVar("Result")

INLINE_SIZE = 4096
"""Texts up to so many characters are encoded on the loop: about 1 ms. Longer ones go to a thread."""

GREEDY_BELOW = 1e-3
"""Temperatures under this count as 0: dividing float32 logits by them overflows."""


DEFAULT_OPTIONS = RequestOptions()


class Rendered(NamedTuple):
    """A prompt's text, and where in it a special token's spelling is just what the user wrote."""

    text: str
    literal_spans: Sequence[tuple[int, int]] = ()


class Admission:
    """Renders, encodes and validates. Holds no per-request state."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        limits: Limits,
        session_len: int | None,
        quality: QualityOfService | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._quality = quality
        self._template = template
        self._vocab_size = limits.vocab_size
        self._pool_tokens = limits.num_blocks * limits.block_size
        self.session_len = min(limits.max_position, session_len or limits.max_position)
        """Most tokens of prompt, history and answer together."""
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._next_id = 0

    def close(self) -> None:
        """Let the encoding threads end when they are through with what they have."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    def options(self, keywords: Mapping[str, Any], *, renders: bool) -> RequestOptions:
        """The keywords of a call, checked; `renders`: the chat template writes its prompt. Raises InvalidRequest."""
        if not keywords:
            return DEFAULT_OPTIONS
        asked = RequestOptions.from_dict(dict(keywords)).checked()
        field = asked.template_field()
        if field is not None and not renders:
            raise InvalidParameter(
                f"{field} is about the chat template, which has no part in this prompt. Leave it out, or pass messages "
                f"with do_preprocess=True.",
                field,
            )
        if field is not None and self._template.capability != "chat":
            raise UnsupportedFeature(
                f"{field} is for conversations, and the template's capability is {self._template.capability!r}. Leave "
                f"it out.",
                field,
            )
        return asked

    def terms(self, asked: RequestOptions) -> Terms:
        """How the request stands among the others; its time begins now. Raises InvalidParameter."""
        if asked is DEFAULT_OPTIONS and self._quality is None:
            return ORDINARY
        if self._quality is None and asked.user_id is not None:
            raise InvalidParameter(
                "user_id means something to quality of service, and the engine has none: EngineConfig.qos_config_path "
                "is None. Set it, or leave user_id out.",
                "user_id",
            )
        user = None if self._quality is None else self._quality.find(asked.user_id)
        deadline = None if asked.timeout is None else asyncio.get_running_loop().time() + asked.timeout
        return Terms(asked.priority, user, deadline, asked.cache_salt)

    def render(
        self,
        messages: str | Sequence[Message] | None,
        *,
        do_preprocess: bool,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Rendered:
        """The prompt's text. Raises InvalidRequest."""
        if not isinstance(messages, Sequence):
            raise InvalidMessage(
                f"A prompt is a str or a list of messages, not {type(messages).__name__}. "
                f"A message looks like {{'role': 'user', 'content': 'Hi'}}."
            )
        if isinstance(messages, str):
            if not messages:
                raise InvalidMessage("The prompt is empty: there is nothing to read. Pass at least one character.")
            if not do_preprocess:
                return Rendered(messages)
            messages = [{"role": "user", "content": messages}]
        elif not do_preprocess:
            raise InvalidMessage("do_preprocess=False takes the prompt as it is: it must be a str, not messages.")
        literals = Literals(self._tokenizer)
        text = self._template.render(
            literals.mark(messages),
            add_generation_prompt=options.add_generation_prompt is not False,
            continue_final_message=options.continues,
            variables=literals.mark_values(options.chat_template_kwargs),
        )
        return self.restored(literals, text)

    def restored(self, literals: Literals, text: str) -> Rendered:
        """A text rendered from marked messages, with its marks resolved."""
        text, spans = literals.restore(text)
        # A prompt that no template frames is the user's own framing, special tokens and all.
        return Rendered(text, spans if self._template.capability == "chat" else ())

    async def encode(self, prompt: Rendered, *, add_bos: bool = True) -> list[int]:
        """Token ids of a rendered prompt; long texts are encoded in a thread that does not hold the GIL."""

        def encode() -> list[int]:
            return self._tokenizer.encode(prompt.text, add_bos=add_bos, literal_spans=prompt.literal_spans)

        return await self.off_loop(encode, len(prompt.text))

    async def off_loop(self, call: Callable[[], Result], size: int) -> Result:
        """What `call` returns, which takes as long as encoding a text of `size` characters, or decoding as many
        tokens; a long one runs in a thread. Raises EngineClosed."""
        if size <= INLINE_SIZE:
            return call()
        if self._closed:
            raise EngineClosed("The engine was closed while the prompt was being prepared.")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="asyncllm-encode")
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def encode_all(
        self, prompts: Sequence[Any], options: RequestOptions, *, do_preprocess: bool, add_bos: bool
    ) -> list[list[int]]:
        """Token ids of each prompt: a text, messages or ids. Raises InvalidRequest."""
        encoded: list[list[int]] = []
        for prompt in prompts:
            if is_token_ids(prompt):
                encoded.append(self.check_token_ids(prompt))
                continue
            text = self.render(prompt, do_preprocess=do_preprocess, options=options)
            encoded.append(await self.encode(text, add_bos=add_bos))
            await asyncio.sleep(0)  # many prompts do not hold up the loop
        return encoded

    def check_token_ids(self, token_ids: Sequence[int], name: str = "input_ids") -> list[int]:
        """A copy of the ids as a list. Raises InvalidParameter unless all are in the vocabulary."""
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidParameter(f"{name} must be a list of token ids, not {type(token_ids).__name__}.", name)
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise InvalidParameter(
                    f"{name} holds {token!r}; token ids are integers in [0, {self._vocab_size - 1}].", name
                )
        return list(token_ids)

    def build(
        self,
        prompt_ids: list[int],
        config: GenerationConfig,
        delivery: Delivery,
        *,
        session_id: int | None = None,
        history_len: int = 0,
        score_only: bool = False,
        output_logits: bool = False,
        terms: Terms = ORDINARY,
        pooling: Pooling | None = None,
    ) -> Request:
        """A request ready for the scheduler. `config` has been checked. Raises InvalidRequest."""
        if not prompt_ids:
            raise InvalidMessage("The prompt has no tokens: there is nothing to read. Pass some text.")
        highest = max(prompt_ids)
        if highest >= self._vocab_size:
            # A tokenizer may know more tokens than the model has embeddings; looking one up would fail the whole step.
            raise InvalidMessage(
                f"The prompt holds the token id {highest}, and the model's ids end at {self._vocab_size - 1}: its "
                f"tokenizer knows tokens that it was not given. Leave {self._tokenizer.token_text(highest)!r} out."
            )
        room = self._room(len(prompt_ids), 0 if score_only else 1)
        max_new_tokens = 0 if score_only else min(config.max_new_tokens or room, room)
        stop_words = list(dict.fromkeys([*(config.stop_words or ()), *self._template.stop_words]))
        stop_ids, text_stops = self._stops(config, stop_words)
        bad_words = self._bad_words(config)
        bias = tuple(sorted((config.logit_bias or {}).items()))
        self.check_token_ids([token for token, _ in bias], "logit_bias")
        seed = secrets.randbits(64) if config.random_seed is None else config.random_seed
        params = [
            SamplingParams(
                temperature=config.temperature if config.temperature >= GREEDY_BELOW else 0.0,
                top_k=config.top_k,
                top_p=config.top_p,
                min_p=config.min_p,
                repetition_penalty=config.repetition_penalty,
                presence_penalty=config.presence_penalty,
                frequency_penalty=config.frequency_penalty,
                logit_bias=bias,
                # Choice 0 keeps the seed, so that raising n does not change the first answer.
                seed=(seed + index) % 2**64,
                min_new_tokens=config.min_new_tokens or 0,
                stop_token_ids=tuple(sorted(stop_ids)) if config.min_new_tokens else (),
                bad_words=bad_words,
                logprobs=config.logprobs,
            )
            for index in range(config.n)
        ]
        answers = [
            Answer(
                Detokenizer(self._tokenizer, skip_special_tokens=config.skip_special_tokens),
                stop_words=text_stops,
                hidden_ids=frozenset() if config.include_stop_str_in_output else stop_ids,
                include_stop=config.include_stop_str_in_output,
            )
            for _ in range(config.n)
        ]
        self._next_id += 1
        return Request(
            id=self._next_id,
            prompt_ids=prompt_ids,
            params=params,
            stop_ids=stop_ids,
            named_stop_ids=frozenset(config.stop_token_ids or ()),
            max_new_tokens=max_new_tokens,
            delivery=delivery,
            answers=answers,
            session_id=session_id,
            history_len=history_len,
            prompt_logprobs=config.prompt_logprobs,
            output_logits=output_logits,
            terms=terms,
            pooling=pooling,
        )

    def _room(self, prompt_len: int, needed: int) -> int:
        """New tokens that fit after the prompt. Raises ContextLengthExceeded when that is fewer than `needed`."""
        for limit, why in (
            (self.session_len, f"the session length of {self.session_len} tokens"),
            (self._pool_tokens, f"the KV cache of {self._pool_tokens} tokens"),
        ):
            if limit - prompt_len < needed:
                raise ContextLengthExceeded(prompt_len, limit - needed, why, scored=needed == 0)
        return min(self.session_len, self._pool_tokens) - prompt_len

    def _stops(self, config: GenerationConfig, stop_words: list[str]) -> tuple[frozenset[int], list[str]]:
        """Token ids that end the answer, and stop words to look for in its text."""
        stop_ids = set(self.check_token_ids(config.stop_token_ids or (), "stop_token_ids"))
        if not config.ignore_eos:
            stop_ids.update(self._tokenizer.eos_token_ids)
        own_words = set(config.stop_words or ())
        text_stops = []
        for word in stop_words:
            special = self._special(word)
            if special is not None:
                # A special token never shows in the text, so its id is what there is to look for.
                if word in own_words or not config.ignore_eos:
                    stop_ids.add(special)
            elif word in own_words or not config.ignore_eos:
                text_stops.append(word)
        return frozenset(stop_ids), text_stops

    def _special(self, word: str) -> int | None:
        """The id of a word that is a special token, and so never shows in a text."""
        token = self._tokenizer.token_id(word)
        return token if token in self._tokenizer.special_token_ids else None

    def _bad_words(self, config: GenerationConfig) -> tuple[tuple[int, ...], ...]:
        """Each bad word as token sequences: at the start of a text and after a space."""
        bad_ids = self.check_token_ids(config.bad_token_ids or (), "bad_token_ids")
        banned: set[tuple[int, ...]] = {(token,) for token in bad_ids}
        for word in config.bad_words or ():
            special = self._special(word)
            if special is not None:
                banned.add((special,))
                continue
            for spelling in (word, " " + word):
                ids = tuple(self._tokenizer.encode(spelling, add_bos=False, parse_special=False))
                if ids:
                    banned.add(ids)
        return tuple(sorted(banned))


def check_adapter(adapter_name: str | None) -> None:
    """Raise UnsupportedFeature if an adapter is asked for."""
    if adapter_name is not None:
        raise UnsupportedFeature(
            f"adapter_name={adapter_name!r}: LoRA adapters are not implemented yet. Leave adapter_name out.",
            "adapter_name",
        )
