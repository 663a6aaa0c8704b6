"""Response bodies of OpenAI's routes. Fields whose value is UNSET are left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from asyncllm.server.openai.requests import Document

__all__ = [
    "CalledCustomTool",
    "CalledFunction",
    "ChatChoice",
    "ChatResponse",
    "ChoiceLogprobs",
    "ClassifyResponse",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "CompletionTokensDetails",
    "Embedding",
    "EmbeddingResponse",
    "EmbeddingUsage",
    "LabelProbabilities",
    "MessageCustomToolCall",
    "MessageToolCall",
    "Model",
    "ModelList",
    "ModelPermission",
    "PoolingResponse",
    "PromptLogprob",
    "PromptTokensDetails",
    "RankedDocument",
    "RerankResponse",
    "ResponseMessage",
    "Reward",
    "Score",
    "ScoreResponse",
    "TokenLogprob",
    "TopLogprob",
    "Usage",
]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    image_tokens: int | UnsetType = UNSET
    """Prompt tokens that stand for images, if there are any."""
    images: int | UnsetType = UNSET
    """The number of these images."""


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int
    """Tokens of the model's reasoning, including the marks around it."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Set if the model has reasoned."""


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token of the prompt, or a likely alternative to it (vLLM's format)."""

    logprob: float
    rank: int | None
    """1: the most likely token. null: not among the requested ones."""
    decoded_token: str


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class MessageToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct, kw_only=True):
    name: str
    input: str


class MessageCustomToolCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustomTool


class ResponseMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """null if the message has only reasoning or calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The reasoning before the answer, under the name that DeepSeek, SGLang and LMDeploy use."""
    reasoning: str | UnsetType = UNSET
    """The same under vLLM's name."""
    tool_calls: list[MessageToolCall | MessageCustomToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    output_ids: list[int] | UnsetType = UNSET
    """The same under LMDeploy's name."""


class ChatResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token. The prompt's first token has None, since nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str
    """Numbers, or little-endian float32 in base64."""


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float
    """From 0 to 1."""


class ScoreResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Score]
    model: str
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    """From 0 to 1."""
    document: Document | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    results: list[RankedDocument]
    """Best first."""
    model: str
    usage: EmbeddingUsage


class LabelProbabilities(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """The most likely label."""
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[LabelProbabilities]
    model: str
    usage: EmbeddingUsage


class Reward(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float]


class PoolingResponse(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Reward]
    model: str
    usage: EmbeddingUsage


class ModelPermission(msgspec.Struct, kw_only=True):
    """A caller's permissions on the model, in OpenAI's early format, which LMDeploy and vLLM kept."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = True
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "asyncllm"
    root: str
    """The model that this one was made from: itself."""
    parent: str | None = None
    """For an adapter: its base model."""
    permission: list[ModelPermission]
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
