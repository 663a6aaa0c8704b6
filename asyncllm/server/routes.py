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
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        auth=Auth.KEY,
        body=ChatRequest,
        answer=ChatResponse,
        streams=True,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        auth=Auth.KEY,
        body=CompletionRequest,
        answer=CompletionResponse,
        streams=True,
    ),
    Route(
        method="POST",
        path="/v1/chat/interactive",
        handler=chat_interactive,
        auth=Auth.KEY,
        body=InteractiveRequest,
        answer=InteractiveResponse,
        streams=True,
        stream_type=NDJSON.content_type,
    ),
)

_SCORE = Route(method="POST", path="/v1/score", handler=score, auth=Auth.KEY, body=ScoreRequest, answer=ScoreResponse)
_RERANK = Route(
    method="POST", path="/v1/rerank", handler=rerank, auth=Auth.KEY, body=RerankRequest, answer=RerankResponse
)

_HEALTH = Route(method="GET", path="/health", handler=health, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False)

_WAKE_UP = Route(
    method="POST",
    path="/wakeup",
    handler=wakeup,
    auth=Auth.ADMIN,
    query={"tags": TAGS},
    answer=Sleeping,
    work=False,
)
_FLUSH = Route(
    method="POST", path="/flush_cache", handler=flush_cache, auth=Auth.ADMIN, content_type="text/plain", work=False
)
_SERVER_INFO = Route(
    method="GET", path="/server_info", handler=server_info, auth=Auth.KEY, answer=ServerInformation, work=False
)
_MODEL_INFO = Route(
    method="GET", path="/model_info", handler=model_info, auth=Auth.KEY, answer=ModelInformation, work=False
)

_OLLAMA_ANSWER = Route(
    method="POST",
    path="/api/chat",
    handler=ollama_chat,
    auth=Auth.KEY,
    body=OllamaChatRequest,
    answer=OllamaChatAnswer,
    streams=True,
    stream_type=NDJSON.content_type,
    errors="ollama",
)
_OLLAMA_CHANGE = Route(
    method="POST", path="/api/pull", handler=refuse_change, auth=Auth.KEY, work=False, errors="ollama"
)
_OLLAMA_LIST = Route(
    method="GET", path="/api/tags", handler=tags, auth=Auth.KEY, answer=OllamaModels, work=False, errors="ollama"
)

_OLLAMA = (
    _OLLAMA_ANSWER,
    replace(
        _OLLAMA_ANSWER,
        path="/api/generate",
        handler=ollama_generate,
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
    ),
    Route(
        method="POST",
        path="/api/embed",
        handler=embed,
        auth=Auth.KEY,
        body=EmbedRequest,
        answer=OllamaEmbeddings,
        errors="ollama",
    ),
    Route(
        method="POST",
        path="/api/embeddings",
        handler=embed_one,
        auth=Auth.KEY,
        body=EmbeddingsRequest,
        answer=OllamaEmbedding,
        errors="ollama",
    ),
    _OLLAMA_LIST,
    replace(_OLLAMA_LIST, path="/api/ps", handler=ps, answer=RunningModels),
    replace(_OLLAMA_LIST, path="/api/version", handler=version, answer=OllamaVersion),
    Route(
        method="POST",
        path="/api/show",
        handler=show,
        auth=Auth.KEY,
        body=ShowRequest,
        answer=OllamaShown,
        work=False,
        errors="ollama",
    ),
    _OLLAMA_CHANGE,
    *(replace(_OLLAMA_CHANGE, path=f"/api/{name}") for name in ("push", "create", "copy")),
    replace(_OLLAMA_CHANGE, method="DELETE", path="/api/delete"),
)

ROUTES: tuple[Route, ...] = (
    *_GENERATING,
    # LMDeploy's names for routes with per-user quotas; here every route has them.
    *(replace(route, path=f"{route.path}_qos") for route in _GENERATING),
    Route(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        auth=Auth.KEY,
        body=ResponsesRequest,
        answer=ResponseObject,
        streams=True,
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        auth=Auth.KEY,
        body=InputTokensRequest,
        answer=InputTokens,
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=show_response,
        auth=Auth.KEY,
        work=False,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
        streams=True,
        answer=ResponseObject,
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=delete_response,
        auth=Auth.KEY,
        work=False,
        answer=DeletedResponse,
    ),
    Route(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=cancel_response,
        auth=Auth.KEY,
        work=False,
        answer=ResponseObject,
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=list_input_items,
        auth=Auth.KEY,
        work=False,
        query=LISTING,
        answer=InputItems,
    ),
    Route(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        auth=Auth.KEY,
        body=MessagesRequest,
        answer=MessageObject,
        streams=True,
        errors="anthropic",
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        auth=Auth.KEY,
        body=CountTokensRequest,
        answer=TokenCount,
        errors="anthropic",
    ),
    *_OLLAMA,
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings,
        auth=Auth.KEY,
        body=EmbeddingRequest,
        answer=EmbeddingResponse,
    ),
    Route(
        method="POST",
        path="/generate",
        handler=generate,
        auth=Auth.KEY,
        body=GenerateRequest,
        answer=GenerateResponse,
        streams=True,
    ),
    Route(
        method="POST",
        path="/invocations",
        handler=invocations,
        auth=Auth.KEY,
        body=Invocation,
        content_type="application/json",
        streams=True,
    ),
    Route(
        method="POST",
        path="/abort_request",
        handler=abort_request,
        auth=Auth.KEY,
        body=AbortRequest,
        content_type="text/plain",
        work=False,
    ),
    Route(
        method="POST", path="/tokenize", handler=tokenize, auth=Auth.KEY, body=TokenizeRequest, answer=TokenizeResponse
    ),
    _SCORE,
    replace(_SCORE, path="/score"),
    _RERANK,
    # vLLM's other name for it, and Cohere's.
    replace(_RERANK, path="/rerank"),
    replace(_RERANK, path="/v2/rerank"),
    Route(
        method="POST",
        path="/classify",
        handler=classify,
        auth=Auth.KEY,
        body=ClassifyRequest,
        answer=ClassifyResponse,
    ),
    Route(method="POST", path="/pooling", handler=pooling, auth=Auth.KEY, body=PoolingRequest, answer=PoolingResponse),
    Route(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        auth=Auth.KEY,
        body=DetokenizeRequest,
        answer=DetokenizeResponse,
    ),
    Route(
        method="POST", path="/v1/encode", handler=encode_texts, auth=Auth.KEY, body=EncodeRequest, answer=EncodeResponse
    ),
    Route(
        method="POST",
        path="/get_ppl",
        handler=get_ppl,
        auth=Auth.KEY,
        body=PerplexityRequest,
        answer=PerplexityResponse,
    ),
    Route(method="GET", path="/v1/models", handler=list_models, auth=Auth.KEY, work=False, answer=ModelList),
    # LMDeploy's path, which needs no header.
    Route(
        method="GET",
        path="/anthropic/v1/models",
        handler=list_models_anthropic,
        auth=Auth.KEY,
        work=False,
        answer=ModelInfoList,
        errors="anthropic",
    ),
    # A hub id contains a slash.
    Route(
        method="GET",
        path="/v1/models/{id:.+}",
        handler=show_model,
        auth=Auth.KEY,
        work=False,
        answer=Model,
    ),
    Route(
        method="POST",
        path="/sleep",
        handler=sleep,
        auth=Auth.ADMIN,
        query={"level": LEVEL},
        answer=Sleeping,
        work=False,
    ),
    _WAKE_UP,
    # vLLM's spelling.
    replace(_WAKE_UP, path="/wake_up"),
    Route(method="POST", path="/pause", handler=pause, auth=Auth.ADMIN, query=PAUSE, answer=Pausing, work=False),
    Route(method="POST", path="/resume", handler=resume, auth=Auth.ADMIN, answer=Pausing, work=False),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        handler=reset_prefix_cache,
        auth=Auth.ADMIN,
        query=RESET,
        answer=Reset,
        work=False,
    ),
    # SGLang's name, with both methods.
    _FLUSH,
    replace(_FLUSH, method="GET"),
    Route(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load_adapter,
        auth=Auth.ADMIN,
        body=LoadAdapterRequest,
        content_type="text/plain",
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload_adapter,
        auth=Auth.ADMIN,
        body=UnloadAdapterRequest,
        content_type="text/plain",
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        method="POST",
        path="/load_lora_adapter",
        handler=load_adapter_sglang,
        auth=Auth.ADMIN,
        body=LoadLoRAAdapterReqInput,
        answer=LoadedAdapters,
        also=(400,),
        work=False,
        only_with="adapters_folder",
    ),
    Route(
        method="POST",
        path="/unload_lora_adapter",
        handler=unload_adapter_sglang,
        auth=Auth.ADMIN,
        body=UnloadLoRAAdapterReqInput,
        answer=LoadedAdapters,
        also=(400,),
        work=False,
        only_with="adapters_folder",
    ),
    Route(method="GET", path="/is_sleeping", handler=is_sleeping, auth=Auth.KEY, answer=Sleeping, work=False),
    Route(method="GET", path="/is_paused", handler=is_paused, auth=Auth.KEY, answer=Paused, work=False),
    _SERVER_INFO,
    _MODEL_INFO,
    # SGLang's older names.
    replace(_SERVER_INFO, path="/get_server_info"),
    replace(_MODEL_INFO, path="/get_model_info"),
    Route(
        method="GET",
        path="/terminate",
        handler=terminate,
        auth=Auth.KEY,
        answer=Terminating,
        work=False,
        only_with="allow_terminate_by_client",
    ),
    # vLLM's route, next to Ollama's /api/version.
    Route(method="GET", path="/version", handler=version, auth=Auth.KEY, answer=OllamaVersion, work=False),
    Route(method="GET", path="/load", handler=load, auth=Auth.KEY, answer=Load, work=False),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        auth=Auth.KEY,
        content_type="text/plain",
        work=False,
        switch="disable_metrics",
    ),
    _HEALTH,
    # SGLang's name.
    replace(_HEALTH, path="/health_generate"),
    # SageMaker's name, with both methods, as in vLLM.
    replace(_HEALTH, path="/ping"),
    replace(_HEALTH, path="/ping", method="POST"),
    Route(method="GET", path="/health/live", handler=live, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False),
    Route(method="GET", path="/health/ready", handler=ready, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False),
    # The page shows the model and the server's limits.
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi_json,
        auth=Auth.KEY,
        content_type="application/json",
        work=False,
        switch="disable_docs",
    ),
    Route(
        method="GET",
        path="/",
        handler=docs,
        auth=Auth.PUBLIC,
        content_type="text/html",
        work=False,
        switch="disable_docs",
    ),
)
