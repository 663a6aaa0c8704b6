"""Request bodies of OpenAI's routes, with vLLM's and LMDeploy's extensions.

`tests/server/request/test_fields.py` checks against the openai package's own types that every name is known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncllm.config import MAX_COUNT, MAX_LOGPROBS, Choices, FrequencyPenalty, LogitBias, PresencePenalty, Tools
from asyncllm.server.request.fields import (
    MAX_MESSAGES,
    ImageOptions,
    Label,
    NewTokens,
    PolicyFields,
    Prompt,
    SamplingFields,
    SessionName,
    Variables,
)
from asyncllm.server.request.structure import StructuredOutputs

__all__ = [
    "ChatRequest",
    "ClassifyRequest",
    "CompletionRequest",
    "Document",
    "EmbeddingRequest",
    "OpenAIFields",
    "PooledFields",
    "PooledInput",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
    "StreamOptions",
]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options`; only for streams."""

    include_usage: bool | None = None
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool | None = None
    """With include_usage: send it in every chunk (vLLM's)."""
    include_obfuscation: bool | None = None
    """Padding against traffic analysis, which loopback does not need. Ignored."""


class OpenAIFields(SamplingFields, kw_only=True):
    """The common fields of chat and plain completions."""

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
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be generated (vLLM's)."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    """The form of the answer: text, json_object, json_schema, regex_schema, regex, choice or grammar."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    """vLLM's: a JSON schema."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    """The whitespace allowed between JSON's tokens: a regular expression of spaces, tabs and line ends."""
    json_schema: dict[str, Any] | str | None = None
    """SGLang's and llama.cpp's: a JSON schema."""
    regex: str | None = None
    """SGLang's."""
    ebnf: str | None = None
    """SGLang's: a grammar."""
    grammar: str | None = None
    """llama.cpp's: GBNF, or Lark."""
    return_token_ids: bool | None = None
    """Also send the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens among log-probabilities as token_id:N (vLLM's)."""
    request_id: Label | None = None
    """The last part of the answer's id, by which /abort_request can end it."""
    rid: Label | None = None
    """SGLang's name for request_id."""
    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | SessionName | None = None
    """A label by which /abort_request and, if it is a number, /v1/chat/interactive can stop the answers that have it.
    -1: none, as in LMDeploy. A text is vLLM's."""


class ChatRequest(OpenAIFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | str
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    """LMDeploy's: an entry of chat_template_kwargs."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """auto: the model decides. none: the model sees the tools but calls none. required, or a function: the model must
    call."""
    parallel_tool_calls: bool | None = None
    """false: the answer ends after its first call."""
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    """none: the model does not think. Other values go to templates that read them."""
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """Maximum number of reasoning tokens."""
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    """vLLM's name of thinking_budget."""
    mm_processor_kwargs: ImageOptions | None = None
    """Image preparation: min_pixels, max_pixels, max_dynamic_patch, detail."""
    include_reasoning: bool | None = None
    """false: leave out the reasoning (vLLM's)."""
    separate_reasoning: bool | None = None
    """false: leave the reasoning in the content (SGLang's)."""
    do_preprocess: bool | None = None
    """false: `messages` is a text that is sent to the model without a chat template."""
    input_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    """LMDeploy's: the prompt as token ids, sent to the model without a chat template. `messages` is then empty."""
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    """Also send the log-probability of each token."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Also send those of this many most likely tokens. Needs `logprobs`."""


class CompletionRequest(OpenAIFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Prompt | None = None
    """Needed unless there are `prompt_embeds`, after which its choices come."""
    prompt_embeds: str | list[str] | None = None
    """Prompts of embeddings instead of tokens: tensors [tokens, hidden], saved by torch.save, in base64 (vLLM's)."""
    suffix: str | None = None
    """The text after the requested one, for models that were trained to fill in."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Choices | None = None
    """1, or as many as `n`: answers are not ranked."""
    max_completion_tokens: NewTokens | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """Keep as many tokens of each prompt at most; -1: as many as leave room for the answer (vLLM's)."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut off, by default the left one."""


class PooledFields(PolicyFields, kw_only=True):
    """The fields about the tokens of embeddings' and scores' inputs."""

    add_special_tokens: bool | None = None
    """false: leave out the tokens that the tokenizer adds (vLLM's)."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    """Keep as many tokens of each input at most, with those that the tokenizer adds; -1: as many as fit (vLLM's)."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut off, by default the left one."""


class PooledInput(PooledFields, kw_only=True):
    """The fields of inputs that are pooled one by one; `input` or `messages`."""

    input: Prompt | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    """A single input: a conversation as the chat template writes it (vLLM's)."""
    add_generation_prompt: bool | None = None
    """true: the conversation ends with the beginning of an answer."""
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None


class EmbeddingRequest(PooledInput, kw_only=True):
    """The body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    """Scale the vectors to length 1 (vLLM's)."""
    use_activation: bool | None = None
    """`normalize`."""


class ScoreRequest(PooledFields, kw_only=True):
    """The body of POST /v1/score, in either spelling of vLLM's."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """`text_1`."""
    documents: str | list[str] | None = None
    """`text_2`."""
    use_activation: bool | None = None
    """false: the head's raw score (vLLM's)."""


class Document(msgspec.Struct, kw_only=True):
    """A document of a rerank request or answer."""

    text: str


class RerankRequest(PooledFields, kw_only=True):
    """The body of POST /v1/rerank."""

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    return_documents: bool | None = None
    """false: leave the texts out of the answer."""
    use_activation: bool | None = None
    """false: the head's raw scores (vLLM's)."""


class ClassifyRequest(PooledInput, kw_only=True):
    """The body of POST /classify."""

    use_activation: bool | None = None
    """false: the head's raw scores in place of probabilities (vLLM's)."""


class PoolingRequest(PooledInput, kw_only=True):
    """The body of POST /pooling."""
