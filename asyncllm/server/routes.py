"""The table of routes: path, access, handler, body types. The application, the documentation and tests read it."""

from __future__ import annotations

from dataclasses import replace

from asyncllm.server.administration import (
    LEVEL,
    PAUSE,
    RESET,
    TAGS,
    Paused,
    Pausing,
    Reset,
    Sleeping,
    Terminating,
    flush_cache,
    is_paused,
    is_sleeping,
    pause,
    reset_prefix_cache,
    resume,
    sleep,
    terminate,
    wakeup,
)
from asyncllm.server.anthropic.messages import MessageObject, TokenCount, count_tokens, create_message
from asyncllm.server.anthropic.models import ModelInfoList
from asyncllm.server.anthropic.requests import CountTokensRequest, MessagesRequest
from asyncllm.server.docs.openapi import openapi_json
from asyncllm.server.docs.page import docs
from asyncllm.server.http.access import Auth
from asyncllm.server.http.routing import Route
from asyncllm.server.invocations import Invocation, invocations
from asyncllm.server.lmdeploy.abort import AbortRequest, abort_request
from asyncllm.server.lmdeploy.generate import generate
from asyncllm.server.lmdeploy.interactive import chat_interactive
from asyncllm.server.lmdeploy.requests import (
    DetokenizeRequest,
    EncodeRequest,
    GenerateRequest,
    InteractiveRequest,
    PerplexityRequest,
    TokenizeRequest,
)
from asyncllm.server.lmdeploy.responses import (
    DetokenizeResponse,
    EncodeResponse,
    GenerateResponse,
    InteractiveResponse,
    PerplexityResponse,
    TokenizeResponse,
)
from asyncllm.server.lmdeploy.tokens import detokenize, encode_texts, get_ppl, tokenize
from asyncllm.server.observe.information import ModelInformation, ServerInformation, model_info, server_info
from asyncllm.server.observe.probes import Health, Load, health, live, load, metrics, ready
from asyncllm.server.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer
from asyncllm.server.ollama.generate import (
    OllamaEmbedding,
    OllamaEmbeddings,
    embed,
    embed_one,
    ollama_chat,
    ollama_generate,
)
from asyncllm.server.ollama.models import (
    OllamaModels,
    OllamaShown,
    OllamaVersion,
    RunningModels,
    ps,
    refuse_change,
    show,
    tags,
    version,
)
from asyncllm.server.ollama.requests import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from asyncllm.server.openai.chat import chat_completions
from asyncllm.server.openai.completions import completions
from asyncllm.server.openai.embeddings import embeddings
from asyncllm.server.openai.models import list_models, list_models_anthropic, show_model
from asyncllm.server.openai.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from asyncllm.server.openai.responses import (
    ChatResponse,
    ClassifyResponse,
    CompletionResponse,
    EmbeddingResponse,
    Model,
    ModelList,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from asyncllm.server.openai.scores import classify, pooling, rerank, score
from asyncllm.server.responses.create import InputTokens, ResponseObject, count_input_tokens, create_response
from asyncllm.server.responses.requests import InputTokensRequest, ResponsesRequest
from asyncllm.server.responses.stored import (
    LISTING,
    DeletedResponse,
    InputItems,
    cancel_response,
    delete_response,
    list_input_items,
    show_response,
)
from asyncllm.server.runtime_adapters import (
    LoadAdapterRequest,
    LoadedAdapters,
    LoadLoRAAdapterReqInput,
    UnloadAdapterRequest,
    UnloadLoRAAdapterReqInput,
    load_adapter,
    load_adapter_sglang,
    unload_adapter,
    unload_adapter_sglang,
)
from asyncllm.server.sse import NDJSON

__all__ = ["ROUTES"]

_GENERATING = (
    Route(
        "POST", "/v1/chat/completions", chat_completions, Auth.KEY, body=ChatRequest, answer=ChatResponse, streams=True
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        Auth.KEY,
        body=CompletionRequest,
        answer=CompletionResponse,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/chat/interactive",
        chat_interactive,
        Auth.KEY,
        body=InteractiveRequest,
        answer=InteractiveResponse,
        streams=True,
        stream_type=NDJSON.content_type,
    ),
)

_SCORE = Route("POST", "/v1/score", score, Auth.KEY, body=ScoreRequest, answer=ScoreResponse)
_RERANK = Route("POST", "/v1/rerank", rerank, Auth.KEY, body=RerankRequest, answer=RerankResponse)

_HEALTH = Route("GET", "/health", health, Auth.PUBLIC, answer=Health, also=(503,), work=False)

_WAKE_UP = Route("POST", "/wakeup", wakeup, Auth.ADMIN, query={"tags": TAGS}, answer=Sleeping, work=False)
_FLUSH = Route("POST", "/flush_cache", flush_cache, Auth.ADMIN, content_type="text/plain", work=False)
_SERVER_INFO = Route("GET", "/server_info", server_info, Auth.KEY, answer=ServerInformation, work=False)
_MODEL_INFO = Route("GET", "/model_info", model_info, Auth.KEY, answer=ModelInformation, work=False)

_OLLAMA_ANSWER = Route(
    "POST",
    "/api/chat",
    ollama_chat,
    Auth.KEY,
    body=OllamaChatRequest,
    answer=OllamaChatAnswer,
    streams=True,
    stream_type=NDJSON.content_type,
    errors="ollama",
)
_OLLAMA_CHANGE = Route("POST", "/api/pull", refuse_change, Auth.KEY, work=False, errors="ollama")
_OLLAMA_LIST = Route("GET", "/api/tags", tags, Auth.KEY, answer=OllamaModels, work=False, errors="ollama")

_OLLAMA = (
    _OLLAMA_ANSWER,
    replace(
        _OLLAMA_ANSWER,
        path="/api/generate",
        handler=ollama_generate,
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
    ),
    Route("POST", "/api/embed", embed, Auth.KEY, body=EmbedRequest, answer=OllamaEmbeddings, errors="ollama"),
    Route(
        "POST", "/api/embeddings", embed_one, Auth.KEY, body=EmbeddingsRequest, answer=OllamaEmbedding, errors="ollama"
    ),
    _OLLAMA_LIST,
    replace(_OLLAMA_LIST, path="/api/ps", handler=ps, answer=RunningModels),
    replace(_OLLAMA_LIST, path="/api/version", handler=version, answer=OllamaVersion),
    Route("POST", "/api/show", show, Auth.KEY, body=ShowRequest, answer=OllamaShown, work=False, errors="ollama"),
    _OLLAMA_CHANGE,
    *(replace(_OLLAMA_CHANGE, path=f"/api/{name}") for name in ("push", "create", "copy")),
    replace(_OLLAMA_CHANGE, method="DELETE", path="/api/delete"),
)

ROUTES: tuple[Route, ...] = (
    *_GENERATING,
    # LMDeploy's names for routes with per-user quotas; here every route has them.
    *(replace(route, path=f"{route.path}_qos") for route in _GENERATING),
    Route(
        "POST", "/v1/responses", create_response, Auth.KEY, body=ResponsesRequest, answer=ResponseObject, streams=True
    ),
    Route(
        "POST", "/v1/responses/input_tokens", count_input_tokens, Auth.KEY, body=InputTokensRequest, answer=InputTokens
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        show_response,
        Auth.KEY,
        work=False,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
        streams=True,
        answer=ResponseObject,
    ),
    Route("DELETE", "/v1/responses/{response_id}", delete_response, Auth.KEY, work=False, answer=DeletedResponse),
    Route("POST", "/v1/responses/{response_id}/cancel", cancel_response, Auth.KEY, work=False, answer=ResponseObject),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        list_input_items,
        Auth.KEY,
        work=False,
        query=LISTING,
        answer=InputItems,
    ),
    Route(
        "POST",
        "/v1/messages",
        create_message,
        Auth.KEY,
        body=MessagesRequest,
        answer=MessageObject,
        streams=True,
        errors="anthropic",
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        Auth.KEY,
        body=CountTokensRequest,
        answer=TokenCount,
        errors="anthropic",
    ),
    *_OLLAMA,
    Route("POST", "/v1/embeddings", embeddings, Auth.KEY, body=EmbeddingRequest, answer=EmbeddingResponse),
    Route("POST", "/generate", generate, Auth.KEY, body=GenerateRequest, answer=GenerateResponse, streams=True),
    Route(
        "POST", "/invocations", invocations, Auth.KEY, body=Invocation, content_type="application/json", streams=True
    ),
    Route("POST", "/abort_request", abort_request, Auth.KEY, body=AbortRequest, content_type="text/plain", work=False),
    Route("POST", "/tokenize", tokenize, Auth.KEY, body=TokenizeRequest, answer=TokenizeResponse),
    _SCORE,
    replace(_SCORE, path="/score"),
    _RERANK,
    # vLLM's other name for it, and Cohere's.
    replace(_RERANK, path="/rerank"),
    replace(_RERANK, path="/v2/rerank"),
    Route("POST", "/classify", classify, Auth.KEY, body=ClassifyRequest, answer=ClassifyResponse),
    Route("POST", "/pooling", pooling, Auth.KEY, body=PoolingRequest, answer=PoolingResponse),
    Route("POST", "/detokenize", detokenize, Auth.KEY, body=DetokenizeRequest, answer=DetokenizeResponse),
    Route("POST", "/v1/encode", encode_texts, Auth.KEY, body=EncodeRequest, answer=EncodeResponse),
    Route("POST", "/get_ppl", get_ppl, Auth.KEY, body=PerplexityRequest, answer=PerplexityResponse),
    Route("GET", "/v1/models", list_models, Auth.KEY, work=False, answer=ModelList),
    # LMDeploy's path, which needs no header.
    Route(
        "GET",
        "/anthropic/v1/models",
        list_models_anthropic,
        Auth.KEY,
        work=False,
        answer=ModelInfoList,
        errors="anthropic",
    ),
    # A hub id contains a slash.
    Route("GET", "/v1/models/{id:.+}", show_model, Auth.KEY, work=False, answer=Model),
    Route("POST", "/sleep", sleep, Auth.ADMIN, query={"level": LEVEL}, answer=Sleeping, work=False),
    _WAKE_UP,
    # vLLM's spelling.
    replace(_WAKE_UP, path="/wake_up"),
    Route("POST", "/pause", pause, Auth.ADMIN, query=PAUSE, answer=Pausing, work=False),
    Route("POST", "/resume", resume, Auth.ADMIN, answer=Pausing, work=False),
    Route("POST", "/reset_prefix_cache", reset_prefix_cache, Auth.ADMIN, query=RESET, answer=Reset, work=False),
    # SGLang's name, with both methods.
    _FLUSH,
    replace(_FLUSH, method="GET"),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        Auth.ADMIN,
        body=LoadAdapterRequest,
        content_type="text/plain",
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        Auth.ADMIN,
        body=UnloadAdapterRequest,
        content_type="text/plain",
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        "POST",
        "/load_lora_adapter",
        load_adapter_sglang,
        Auth.ADMIN,
        body=LoadLoRAAdapterReqInput,
        answer=LoadedAdapters,
        also=(400,),
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        "POST",
        "/unload_lora_adapter",
        unload_adapter_sglang,
        Auth.ADMIN,
        body=UnloadLoRAAdapterReqInput,
        answer=LoadedAdapters,
        also=(400,),
        work=False,
        only_with="adapters_folder",
    ),
    Route("GET", "/is_sleeping", is_sleeping, Auth.KEY, answer=Sleeping, work=False),
    Route("GET", "/is_paused", is_paused, Auth.KEY, answer=Paused, work=False),
    _SERVER_INFO,
    _MODEL_INFO,
    # SGLang's older names.
    replace(_SERVER_INFO, path="/get_server_info"),
    replace(_MODEL_INFO, path="/get_model_info"),
    Route(
        "GET", "/terminate", terminate, Auth.KEY, answer=Terminating, work=False, only_with="allow_terminate_by_client"
    ),
    # vLLM's route, next to Ollama's /api/version.
    Route("GET", "/version", version, Auth.KEY, answer=OllamaVersion, work=False),
    Route("GET", "/load", load, Auth.KEY, answer=Load, work=False),
    Route("GET", "/metrics", metrics, Auth.KEY, content_type="text/plain", work=False, switch="disable_metrics"),
    _HEALTH,
    # SGLang's name.
    replace(_HEALTH, path="/health_generate"),
    # SageMaker's name, with both methods, as in vLLM.
    replace(_HEALTH, path="/ping"),
    replace(_HEALTH, path="/ping", method="POST"),
    Route("GET", "/health/live", live, Auth.PUBLIC, answer=Health, also=(503,), work=False),
    Route("GET", "/health/ready", ready, Auth.PUBLIC, answer=Health, also=(503,), work=False),
    # The page shows the model and the server's limits.
    Route(
        "GET",
        "/openapi.json",
        openapi_json,
        Auth.KEY,
        content_type="application/json",
        work=False,
        switch="disable_docs",
    ),
    Route("GET", "/", docs, Auth.PUBLIC, content_type="text/html", work=False, switch="disable_docs"),
)
