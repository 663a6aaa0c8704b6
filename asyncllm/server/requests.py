"""The bodies that OpenAI's routes take, with vLLM's and LMDeploy's extensions.

Every field has one of three policies, and `tests/server/test_fields.py` reads the openai package's own types to see
that none lacks one:

    implemented     a field of the Struct that a handler reads
    ignored         in `Ignored`: it asks for nothing that an answer could show
    refused         in `REFUSED`: anything but the listed values is a 400 `unsupported_parameter`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncllm.config import (
    MAX_COUNT,
    MAX_LOGPROBS,
    Choices,
    FrequencyPenalty,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopP,
)
from asyncllm.server.errors import ApiError

__all__ = [
    "Asking",
    "Body",
    "ChatRequest",
    "CompletionRequest",
    "Drawn",
    "EmbeddingRequest",
    "Prompt",
    "Sampled",
    "StreamOptions",
    "Variables",
    "refuse_unsupported",
]

Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
Stop = Annotated[str, Meta(max_length=256)] | Words | bool | None
"""false, as in LMDeploy's early examples, stands for none."""
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_COUNT)]], Meta(max_length=512)]
NewTokens = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}(?!\n)$")]

MAX_MESSAGES = 4096

Variables = dict[str, str | int | float | bool | None]
"""Of a chat template."""

Prompt = str | list[str | int | list[int]]
"""A text, texts, token ids, or several lists of them; a list is of one kind."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON object. A name that is not a field is refused."""

    model: str | None = None


class Asking(Body, kw_only=True):
    """How a request stands among the others; the engine's RequestOptions check them."""

    priority: int | None = None
    """Lower values are served earlier."""
    timeout: float | None = None
    """Seconds from admission to the last token; then 504, or an error event."""
    user_id: str | None = None
    """Whom it counts for, with `qos_config_path`; refused without."""
    cache_salt: str | None = None
    """Requests share cached prefixes only if their salt, and with several keys their key, is the same."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`; only for streams."""

    include_usage: bool | None = None
    """A last chunk without choices carries the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries it (vLLM's)."""
    include_obfuscation: bool | None = None
    """Padding against traffic analysis, which loopback does not need; ignored."""


class Drawn(Asking, kw_only=True):
    """How tokens are drawn and where an answer ends, on every route that generates."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Stop = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1: all.")] | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class Ignored(Drawn, kw_only=True):
    """Fields that are accepted and have no effect: labels for the provider's own records and wishes about its caches,
    service levels and detokenizers."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    moderation: Any = None
    verbosity: Any = None
    parallel_tool_calls: Any = None


class Sampled(Ignored, kw_only=True):
    """What chat and plain completions have in common."""

    stream: bool | None = None
    """Send the answer piece by piece, as server-sent events."""
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: int | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT, description="LMDeploy's name of min_tokens.")] | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    """Send the token ids of prompt and answer along."""
    request_id: Label | None = None
    """The end of the answer's id."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """A label under which /v1/chat/interactive can stop the answer; -1 stands for none, as in LMDeploy."""
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    length_penalty: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class ChatRequest(Sampled, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | str
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    """LMDeploy's: an entry of chat_template_kwargs."""
    do_preprocess: bool | None = None
    """false: `messages` is a text, which no template frames."""
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    """Send the log-probability of each token along."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """And those of as many of the most likely tokens; needs `logprobs`."""
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampled, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: NewTokens | None = None
    add_special_tokens: bool | None = None
    best_of: Any = None
    suffix: Any = None


class EmbeddingRequest(Asking, kw_only=True):
    """The body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    pooling: Literal["mean", "last"] | None = None
    user: Any = None


class _Refusal(msgspec.Struct, frozen=True):
    allowed: tuple[Any, ...]
    why: str

    def allows(self, value: Any) -> bool:
        """Whether it is one of the allowed values, of the same type: to Python, 0 is False and 1 is true."""
        return any(type(value) is type(each) and value == each for each in self.allowed)


_GRAMMAR = "Answers cannot be held to a grammar yet. Leave it out and check the answer."
_LOOPS = "Use repetition_penalty or frequency_penalty against loops, or leave it out."
_DISAGGREGATION = "KV blocks are not handed to other servers. Leave it out."
_MEDIA = "Prompts are text. Leave it out."
_TOOLS = "Tools are not implemented yet. Leave them out."

REFUSED: Mapping[str, _Refusal] = {
    "response_format": _Refusal((None, {"type": "text"}), _GRAMMAR),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        _Refusal((None,), _GRAMMAR),
    ),
    "tools": _Refusal((None, []), _TOOLS),
    "tool_choice": _Refusal((None, "none", "auto"), _TOOLS),
    "functions": _Refusal((None, []), _TOOLS),
    "function_call": _Refusal((None, "none", "auto"), _TOOLS),
    "audio": _Refusal((None,), "Answers are text. Leave it out."),
    "modalities": _Refusal((None, ["text"]), "Answers are text. Leave it out."),
    "chat_template": _Refusal((None,), "The server's owner chooses the template. Leave it out."),
    "documents": _Refusal((None, []), "Put the documents into a message."),
    "mm_processor_kwargs": _Refusal((None, {}), _MEDIA),
    "media_io_kwargs": _Refusal((None, {}), _MEDIA),
    "image_data": _Refusal((None, []), _MEDIA),
    "image_url": _Refusal((None, "", []), _MEDIA),
    "adapter_name": _Refusal((None,), "LoRA adapters are not implemented. Leave it out."),
    "return_routed_experts": _Refusal((None, False), "Which experts ran is not recorded. Leave it out."),
    "repetition_ngram_size": _Refusal((None, 0), _LOOPS),
    "repetition_ngram_threshold": _Refusal((None, 0), _LOOPS),
    "with_cache": _Refusal((None, False), _DISAGGREGATION),
    "preserve_cache": _Refusal((None, False), _DISAGGREGATION),
    "web_search_options": _Refusal((None,), "The server does not search the web. Leave it out."),
    "reasoning_effort": _Refusal((None,), "Reasoning effort is not implemented. Leave it out."),
    "suffix": _Refusal((None, ""), "Text cannot be inserted before a suffix. Leave it out."),
    "best_of": _Refusal((None, 1), "Answers are not ranked. Ask for n answers instead."),
    "allowed_token_ids": _Refusal((None,), "Use logit_bias to favour tokens, or leave it out."),
    "truncate_prompt_tokens": _Refusal((None,), "Prompts are not cut silently. Shorten the prompt yourself."),
    "length_penalty": _Refusal((None, 1, 1.0), "It belongs to beam search, which is not implemented. Leave it out."),
    "spaces_between_special_tokens": _Refusal((None, True), "The tokenizer's own rule holds. Leave it out."),
}


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raise ApiError 400 for a field whose value asks for what is not implemented."""
    for name in body.__struct_fields__:
        refusal = REFUSED.get(name)
        if refusal is not None and not refusal.allows(getattr(body, name)):
            raise ApiError(
                400, f"{name} is not supported with this value. {refusal.why}", code="unsupported_parameter", param=name
            )
