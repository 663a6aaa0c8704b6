"""How an answer is generated. The parameters' types have names, because the bodies of HTTP requests share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from asyncllm.config.lmdeploy_settings import ANSWERS
from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.config.structured_output.response_format import as_response_format, grammar_of
from asyncllm.config.unsupported import Unsupported
from asyncllm.errors import InvalidParameter, short

__all__ = ["GenerationConfig"]

MAX_LOGPROBS = 20
MAX_STOP_WORDS = 64
MAX_LOGIT_BIAS = 512
MAX_CHOICES = 128
MAX_ALLOWED = 16384
LMDEPLOY_TOP_K = 50
"""LMDeploy's default with do_sample=True."""


Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Answers per prompt; they share the prompt's blocks.")]
TopP = Annotated[float, Meta(ge=0, le=1, description="Keep the smallest set of tokens with this probability.")]
TopK = Annotated[int, Meta(ge=0, le=MAX_COUNT, description="Keep the k most likely tokens; 0: all; 1: greedy.")]
MinP = Annotated[
    float, Meta(ge=0, le=1, description="Drop tokens below this fraction of the most likely one's probability.")
]
Temperature = Annotated[float, Meta(ge=0, le=2, description="Divides the logits; 0: greedy.")]
RepetitionPenalty = Annotated[
    float,
    # A logit divided by the lowest one stays far below the largest float32.
    Meta(ge=0.01, le=10, description="Above 1: tokens of prompt and answer become less likely; below 1: more likely."),
]
PresencePenalty = Annotated[float, Meta(ge=-2, le=2, description="Subtracted from the logits of tokens in the answer.")]
FrequencyPenalty = Annotated[float, Meta(ge=-2, le=2, description="Subtracted per occurrence in the answer.")]
LogitBias = Annotated[
    dict[int, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(description="Token id -> value in [-100, 100] added to its logit."),
]


class GenerationConfig(Settings, frozen=True, kw_only=True):
    """How an answer is generated. The default is greedy, as top_k is 1.

    LMDeploy's `do_sample` is accepted too: False means top_k=1, and True means its top_k=50 if top_k is left out.
    """

    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = ANSWERS

    n: Choices = 1
    max_new_tokens: Annotated[
        int | None, Meta(description="Maximum number of tokens to generate; None: up to the session length.")
    ] = 512
    min_new_tokens: Annotated[
        int | None, Meta(description="Number of tokens before which no stop token can be sampled.")
    ] = None
    top_p: TopP = 1.0
    top_k: TopK = 1
    min_p: MinP = 0.0
    temperature: Temperature = 0.8
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias | None = None
    ignore_eos: Annotated[bool, Meta(description="Continue after the end-of-sequence token.")] = False
    random_seed: Annotated[
        int | None,
        Meta(description="The same seed and prompt give the same answer. None: a new seed for each request."),
    ] = None
    stop_words: Annotated[
        list[str] | None, Meta(description="Texts that end the answer and are cut from it; of any length.")
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the answer.")] = None
    bad_words: Annotated[
        list[str] | None,
        Meta(
            description="Words that are not generated, also after a space; of any length. Longer words may contain one."
        ),
    ] = None
    bad_token_ids: Annotated[list[int] | None, Meta(description="Token ids that are not generated.")] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        Meta(description="The only token ids that may be generated; must include the end of sequence."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Keep the stop word that ended the answer in its text.")
    ] = False
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    logprobs: Annotated[
        int | None,
        Meta(description=f"Log-probabilities of the chosen and the N most likely tokens, 0 to {MAX_LOGPROBS}."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Meta(description=f"The same for the prompt's tokens, 0 to {MAX_LOGPROBS}.")
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description="Constraint on the answer: a JSON schema, a regular expression, a choice or a grammar."),
    ] = None

    @classmethod
    def own_fields(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        sampled = fields.get("do_sample")
        if sampled not in (None, False, True):
            raise InvalidParameter(f"do_sample must be None, False or True, not {short(sampled)}.", "do_sample")
        own = super().own_fields({name: value for name, value in fields.items() if name != "do_sample"})
        if sampled is not None:
            own["top_k"] = own.get("top_k", LMDEPLOY_TOP_K) if sampled else 1
        return own

    def __post_init__(self) -> None:
        if self.response_format is not None and not isinstance(self.response_format, dict):
            msgspec.structs.force_setattr(self, "response_format", as_response_format(self.response_format))

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar applies to the answer."""
        return self.response_format is not None and self.response_format.get("type") != "text"

    def _check(self) -> None:
        if self.is_constrained:
            grammar_of(self.response_format)
        self._bound("max_new_tokens", self.max_new_tokens, 1, MAX_COUNT)
        self._bound("min_new_tokens", self.min_new_tokens, 0, MAX_COUNT)
        self._bound("random_seed", self.random_seed, -(2**63), 2**64 - 1)
        self._bound("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._bound("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise InvalidParameter(
                f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens}).",
                "min_new_tokens",
            )
        if self.allowed_token_ids is not None and not 1 <= len(self.allowed_token_ids) <= MAX_ALLOWED:
            raise InvalidParameter(
                f"allowed_token_ids takes 1 to {MAX_ALLOWED} ids, {len(self.allowed_token_ids)} were given.",
                "allowed_token_ids",
            )
        self._check_texts("stop_words", "bad_words")
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name) or []
            if len(words) > MAX_STOP_WORDS:
                raise InvalidParameter(f"{name} takes at most {MAX_STOP_WORDS} words, {len(words)} were given.", name)
            if any(not word for word in words):
                raise InvalidParameter(f"{name} holds an empty text, which every answer contains. Remove it.", name)
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens.", "logit_bias")

    @staticmethod
    def _bound(name: str, value: int | None, low: int, high: int) -> None:
        if value is not None and not low <= value <= high:
            raise InvalidParameter(f"{name} must be None or in [{low}, {high}] (given: {value}).", name)
