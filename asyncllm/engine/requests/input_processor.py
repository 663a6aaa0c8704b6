"""InputProcessor turns a Call, the unchecked arguments of a caller, into a checked Request.

All errors in the user's input are raised here. Scheduler and model side can rely on a Request: its ids are in the
vocabulary, its parameters are in range, and the prompt and at least one new token fit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from asyncllm.config import GenerationConfig, RequestKeywords, RequestOptions, checked
from asyncllm.engine.adapters import AdapterTable
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.grammars import Grammars
from asyncllm.engine.requests.prompt_encoder import DEFAULT_OPTIONS, PromptEncoder
from asyncllm.engine.requests.split_answer import make_answers
from asyncllm.engine.requests.words import WordEncoder, Words
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.quality_of_service import QualityOfService
from asyncllm.engine.schedule.sequence import ORDINARY, Request, RequestPolicy
from asyncllm.engine.sessions.history import History, TurnInput
from asyncllm.engine.sessions.session_table import Conversation, SessionTable
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature, short
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import SamplingParams
from asyncllm.text.grammars.bridge import AnswerGrammar
from asyncllm.text.image_marks import holds_images, take_images
from asyncllm.text.messages import as_messages
from asyncllm.text.prompts import check_one_prompt
from asyncllm.types import Pooled

__all__ = ["Call", "InputProcessor", "Purpose"]

Purpose = Literal["answer", "scores", "logits", "embedding"]
"""What a prompt is computed for: an answer, log-probabilities of its own tokens, the logits after each token, or its
pooled hidden states."""

GREEDY_BELOW = 1e-3
"""Temperatures below this count as 0, because dividing float32 logits by them overflows."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One unchecked call of `generate`, `chat`, `get_ppl`, `get_logits`, `embed` or `classify`."""

    purpose: Purpose = "answer"
    prompt: Any = None
    """A text or messages; None if `input_ids` or `input_embeddings` are given."""
    input_ids: Sequence[int] | None = None
    input_embeddings: Any = None
    """See `placed_embeddings`, as for the next one."""
    input_embedding_ranges: Any = None
    config: GenerationConfig | None = None
    options: RequestKeywords = {}
    do_preprocess: bool = True
    """Whether the chat template writes the prompt."""
    streaming: bool = True
    adapter_name: str | None = None
    pooling: Pooled | None = None
    """How `embed` or `classify` pools the hidden states."""

    conversation: Conversation | None = None
    """The conversation of a call of `Session.chat`."""
    session_id: int | None = None
    """A label for `stop_session`; or, if one of the next two is False, the conversation that this is a turn of."""
    sequence_start: bool = True
    sequence_end: bool = True
    step: int = 0
    """Number of tokens of the conversation to keep before this turn; 0: all."""

    @property
    def is_turn(self) -> bool:
        """Whether this is a turn of a stored conversation."""
        return self.conversation is not None or not (self.sequence_start and self.sequence_end)

    @property
    def flags(self) -> dict[str, bool]:
        """The parameters of `generate` that are True or False."""
        return {
            "do_preprocess": self.do_preprocess,
            "stream_response": self.streaming,
            "sequence_start": self.sequence_start,
            "sequence_end": self.sequence_end,
        }

    @property
    def renders(self) -> bool:
        """Whether the chat template writes part of the prompt."""
        return self.do_preprocess and self.input_ids is None and self.input_embeddings is None


EMPTY_HISTORY = History([], [])
"""The history of a prompt that is not a turn of a session."""


class _CheckedCall(NamedTuple):
    """The checked parts of a call that do not depend on its prompt."""

    config: GenerationConfig
    options: RequestOptions
    policy: RequestPolicy
    adapter: Adapter | None
    encoder: PromptEncoder
    """The encoder with the chat template of the adapter or the model."""


class InputProcessor:
    """Checks calls and builds requests from them. Keeps no state of a request."""

    def __init__(
        self,
        encoder: PromptEncoder,
        sessions: SessionTable,
        grammars: Grammars | None = None,
        *,
        has_head: bool = True,
        quality: QualityOfService | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        """`grammars`: None if answers cannot be constrained. `has_head`: whether the model gives logits."""
        self._encoder = encoder
        self.grammars = grammars or Grammars(None)
        self._sessions = sessions
        self._has_head = has_head
        self._quality = quality
        self._adapters = adapters if adapters is not None else AdapterTable(0, {})
        self._words = WordEncoder(encoder)
        self._next_id = 0

    async def prepare(self, call: Call, delivery: Delivery) -> Request:
        """Return the request of a call; its chunks will go to `delivery`.

        A turn occupies its session. Raises InvalidRequest, SessionError, EngineError, and then leaves the conversation
        unchanged.
        """
        valid = self._check(call)
        conversation = None
        past = EMPTY_HISTORY
        if call.is_turn:
            conversation = self._conversation(call, valid)
            await conversation.begin_turn(delivery)
            past = conversation.cut(call.step) if call.step else conversation.past
        prompt_ids, images = await self._prompt_ids(call, valid, past)
        encoder = valid.encoder
        words = await self._words.of(valid.config, encoder.template)
        written = _marked(call.prompt) if call.renders else None
        grammar = await self.grammars.of(valid.config, written, valid.options, prompt_ids, encoder)
        label = call.session_id if conversation is None else conversation.id
        known = min(len(past.token_ids), len(prompt_ids))
        request = self._build(
            call,
            valid,
            prompt_ids,
            delivery,
            written,
            words,
            grammar,
            session_id=label,
            history_len=known,
            images=images,
        )
        if conversation is not None:
            closes = call.conversation is None and call.sequence_end
            conversation.run_turn(request, past, self._turn_input(call, past, prompt_ids, encoder), closes=closes)
        return request

    def _check(self, call: Call) -> _CheckedCall:
        """Check the parts of a call that do not depend on its prompt. Raises InvalidRequest."""
        for name, flag in call.flags.items():
            if not isinstance(flag, bool):
                raise InvalidParameter(f"{name} must be True or False, not {short(flag)}.", name)
        adapter = None if call.adapter_name is None else self._adapters.find(call.adapter_name)
        encoder = self.encoder_for(call.adapter_name)
        options = encoder.options(call.options, renders=call.renders)
        policy = self._policy(options)
        if call.purpose == "answer":
            check_one_prompt(call.prompt, call.input_ids)
        self._check_embeddings(call)
        config = checked(GenerationConfig, call.config, "gen_config")
        if call.step and not call.is_turn:
            raise InvalidParameter("step continues a session: it needs sequence_start=False.", "step")
        return _CheckedCall(config, options, policy, adapter, encoder)

    def _check_embeddings(self, call: Call) -> None:
        """Raise InvalidRequest for embeddings where there can be none."""
        if call.input_embeddings is None:
            if call.input_embedding_ranges is not None:
                raise InvalidParameter(
                    "input_embedding_ranges are the places of input_embeddings, and there are none. Pass them too.",
                    "input_embedding_ranges",
                )
            return
        if call.prompt is not None:
            raise InvalidParameter(
                "The prompt is given twice, as messages and as input_embeddings. Pass one, or input_ids with "
                "input_embedding_ranges.",
                "input_embeddings",
            )
        if call.is_turn:
            raise UnsupportedFeature(
                "input_embeddings are not for sessions, whose history is texts. Pass the whole conversation as "
                "input_ids with input_embedding_ranges.",
                "input_embeddings",
            )
        if call.config is not None and call.config.prompt_logprobs is not None:
            raise UnsupportedFeature(
                "prompt_logprobs are those of the prompt's tokens, and input_embeddings have none. Leave it out.",
                "prompt_logprobs",
            )

    def encoder_for(self, adapter_name: str | None) -> PromptEncoder:
        """Return the prompt encoder for an adapter, or for the model itself. Raises InvalidParameter."""
        found = None if adapter_name is None else self._adapters.encoder_of(adapter_name)
        return self._encoder if found is None else found

    def _policy(self, options: RequestOptions) -> RequestPolicy:
        """Return how the request ranks among others. Its timeout starts now. Raises InvalidParameter."""
        if options is DEFAULT_OPTIONS and self._quality is None:
            return ORDINARY
        if self._quality is None and options.user_id is not None:
            raise InvalidParameter(
                "user_id means something to quality of service, and the engine has none: EngineConfig.qos_config_path "
                "is None. Set it, or leave user_id out.",
                "user_id",
            )
        user = None if self._quality is None else self._quality.find(options.user_id)
        deadline = None if options.timeout is None else asyncio.get_running_loop().time() + options.timeout
        return RequestPolicy(options.priority, user, deadline, options.cache_salt)

    def _conversation(self, call: Call, valid: _CheckedCall) -> Conversation:
        """Return the conversation that the call is a turn of. Raises InvalidRequest, SessionNotFound."""
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(valid.options, name) is not None:
                raise UnsupportedFeature(
                    f"{name} is not for sessions, where each turn's answer is a message of its own. Leave it out.", name
                )
        if valid.config.n != 1:
            raise InvalidParameter(
                f"n={valid.config.n} in a session: a conversation goes on from one answer. Use n=1, or fork() the "
                f"session.",
                "n",
            )
        return call.conversation or self._sessions.find_or_start(
            call.session_id, sequence_start=call.sequence_start, step=call.step
        )

    async def _prompt_ids(
        self, call: Call, valid: _CheckedCall, past: History
    ) -> tuple[list[int], Sequence[PromptImage]]:
        """Return the token ids of history and prompt, and the images in them. Raises InvalidRequest, EngineError."""
        if call.input_embeddings is not None:
            return await self._encoder.given_embeddings(
                call.input_embeddings, call.input_embedding_ranges, call.input_ids
            )
        if call.prompt is None and (call.input_ids is not None or call.purpose != "answer"):
            name = "prompts" if call.purpose == "embedding" else "input_ids"
            return past.token_ids + await self._encoder.given_ids(call.input_ids, name), past.images
        return await valid.encoder.turn_ids(
            past,
            call.prompt,
            do_preprocess=call.do_preprocess,
            options=valid.options,
            owner=(valid.policy.user, valid.policy.cache_salt),
            whole=call.purpose == "embedding",
        )

    def _turn_input(self, call: Call, past: History, prompt_ids: list[int], encoder: PromptEncoder) -> TurnInput:
        """Return a turn's prompt as the conversation keeps it."""
        if call.input_ids is not None:
            new = prompt_ids[len(past.token_ids) :]
            return TurnInput(encoder.tokenizer.decode(new, skip_special_tokens=False))
        if not call.do_preprocess:
            return TurnInput(call.prompt)
        return TurnInput(call.prompt, as_messages(_marked(call.prompt)), encoder.template)

    def _build(
        self,
        call: Call,
        valid: _CheckedCall,
        prompt_ids: list[int],
        delivery: Delivery,
        written: Any,
        words: Words,
        grammar: AnswerGrammar | None,
        *,
        session_id: int | None,
        history_len: int,
        images: Sequence[PromptImage],
    ) -> Request:
        """Build the request of a checked call with this prompt. Raises InvalidRequest.

        `written`: the output of the chat template, with marks in place of images; None if there was none.
        """
        self._check_prompt(call, prompt_ids)
        encoder, config = self._encoder, valid.config
        has_images = any(not image.given for image in images)
        answered = call.purpose == "answer"
        room = encoder.room(len(prompt_ids), 1 if answered else 0)
        self._next_id += 1
        return Request(
            id=self._next_id,
            prompt_ids=prompt_ids,
            params=self._params(config, words, grammar),
            stop_ids=words.stop_ids,
            named_stop_ids=frozenset(config.stop_token_ids or ()),
            max_new_tokens=min(config.max_new_tokens or room, room) if answered else 0,
            delivery=delivery,
            answers=make_answers(
                valid.encoder.tokenizer,
                config,
                words.stop_words,
                words.stop_ids,
                valid.encoder.splitter.splitting(written, valid.options, prompt_ids),
            ),
            session_id=session_id,
            history_len=history_len,
            prompt_logprobs=0 if call.purpose == "scores" else config.prompt_logprobs,
            output_logits=call.purpose == "logits",
            policy=valid.policy,
            adapter=self._image_adapter() if valid.adapter is None and has_images else valid.adapter,
            pooling=call.pooling,
            images=images,
        )

    def _check_prompt(self, call: Call, prompt_ids: list[int]) -> None:
        """Raise UnsupportedFeature or InvalidMessage for a prompt that the model cannot compute."""
        if call.purpose != "embedding" and not self._has_head:
            raise UnsupportedFeature(
                "The model has no output embedding, so there are no logits and no answers: it is a checkpoint for "
                "embeddings. Call embed, or load a checkpoint with a head (a class ending in ForCausalLM)."
            )
        if not prompt_ids:
            raise InvalidMessage("The prompt has no tokens: there is nothing to read. Pass some text.")
        highest, encoder = max(prompt_ids), self._encoder
        if highest >= encoder.vocab_size:
            # A tokenizer may know more tokens than the model has embeddings; looking one up would fail the whole step.
            raise InvalidMessage(
                f"The prompt holds the token id {highest}, and the model's ids end at {encoder.vocab_size - 1}: its "
                f"tokenizer knows tokens that it was not given. Leave {encoder.tokenizer.token_text(highest)!r} out."
            )

    def _image_adapter(self) -> Adapter | None:
        """Return the adapter for prompts with images that name no adapter; None if the family needs none. Raises
        InvalidParameter."""
        name = self._encoder.image_adapter
        if name is None or name in self._adapters.paths:
            return None if name is None else self._adapters.find(name)
        raise InvalidParameter(
            f"The prompt has images, which this model reads with its adapter {name!r}, and no adapter of that name is "
            f"loaded. Download the folder {name}-lora into the model's, or start the engine with "
            f"adapters={{{name!r}: FOLDER}}.",
            "adapter_name",
        )

    def _params(self, config: GenerationConfig, words: Words, grammar: AnswerGrammar | None) -> list[SamplingParams]:
        """Return the sampling parameters of each of the `n` answers. Raises InvalidParameter."""
        bias = tuple(sorted((config.logit_bias or {}).items()))
        self._encoder.check_token_ids([token for token, _ in bias], "logit_bias")
        allowed = self._encoder.check_token_ids(config.allowed_token_ids or (), "allowed_token_ids")
        seed = secrets.randbits(64) if config.random_seed is None else config.random_seed
        return [
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
                stop_token_ids=tuple(sorted(words.stop_ids)) if config.min_new_tokens else (),
                bad_words=words.bad_words,
                allowed_token_ids=tuple(sorted(set(allowed))),
                grammar=grammar,
                logprobs=config.logprobs,
            )
            for index in range(config.n)
        ]


def _marked(prompt: Any) -> Any:
    """Return a prompt with marks in place of its images."""
    return take_images(prompt)[0] if holds_images(prompt) else prompt
