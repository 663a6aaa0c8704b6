"""Error responses: `{"error": {"message", "type", "param", "code"}}` and a status; with
`error_format="lmdeploy"`, `{"object": "error", "message", "type", "param", "code"}`, whose code is the status.
Anthropic's routes have `{"type": "error", "error": {"type", "message"}}`, and Ollama's `{"error": message}`.

    400 invalid_request_error     the request cannot be served as it stands
    401 authentication_error      no key, or a wrong one
    403 permission_error          a Host or Origin that is not let in
    404 not_found_error           no such route, model or session
    405 408 413 415 417           method, slow, large or packed body, Expect: all invalid_request_error
    409 conflict_error            the session has a turn running
    429 rate_limit_error          the queue is full; Retry-After says when to come back
    410 session_expired_error     the session was forgotten; the next request begins a new one
    500 server_error              this request failed inside the engine
    503 unavailable_error         the server starts, drains, or its engine has died; Retry-After says when to come back
    504 timeout_error             the request's own timeout is over

Statuses and codes are OpenAI's where it has them. The class of an internal error is only in the log.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from aiohttp import web

from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidMessage,
    InvalidParameter,
    InvalidRequest,
    ModelError,
    QueueFull,
    RequestFailed,
    SessionBusy,
    SessionNotFound,
    UnsupportedFeature,
)

__all__ = ["FORM", "ApiError", "as_api_error", "event_of", "no_route"]

logger = logging.getLogger("asyncllm.server")

ErrorFormat = Literal["openai", "lmdeploy", "anthropic", "ollama"]

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "session_expired_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type of the error on Anthropic's routes."""

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
    "adapter_name": "model",
}
"""The engine's name of a parameter -> the API's, where they differ."""
PROMPT_NAMES = {"input_ids", "prompts", "prompt", "messages"}
"""The engine's names for the prompt."""


class ApiError(Exception):
    """An answer with status 4xx or 5xx and OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details`: what Anthropic's client reads from an error."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = details

    def response(self, error_format: ErrorFormat = "openai") -> web.Response:
        """Return the whole HTTP response."""
        body = msgspec.json.encode(fields_of(self, error_format))
        response = web.Response(status=self.status, body=body, headers=self.headers, content_type="application/json")
        if self.headers.get("Connection") == "close":
            response.force_close()
        return response


def fields_of(error: ApiError, error_format: ErrorFormat) -> dict[str, Any]:
    """Return the body of an answer of status 4xx or 5xx."""
    if error_format == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        details = {} if error.details is None else {"details": error.details}
        return {"type": "error", "error": {"type": kind, "message": error.message, **details}}
    if error_format == "ollama":
        return {"error": error.message}
    fields: dict[str, Any] = {"message": error.message, "type": error.type, "param": error.param}
    if error_format == "lmdeploy":
        return {"object": "error", **fields, "code": error.status}
    return {"error": {**fields, "code": error.code}}


def event_of(error: ApiError, error_format: ErrorFormat) -> bytes:
    """Return the error as an object in a stream, where LMDeploy's is under the key `error` too."""
    fields = fields_of(error, error_format)
    return msgspec.json.encode(fields if "error" in fields else {"error": fields})


def retry_after(seconds: float) -> dict[str, str]:
    """Return a Retry-After header of at most 120 seconds; beyond that OpenAI's client gives up."""
    return {"Retry-After": str(min(120, max(1, math.ceil(seconds))))}


FORM = "response_format"
"""The engine's name for the constraint on an answer."""


def as_api_error(error: Exception, prompt: str = "messages", form: str = FORM) -> ApiError:
    """Return the answer to an error raised by a handler. `prompt` and `form`: the client's names for the prompt and for
    the constraint on the answer."""
    match error:
        case ApiError():
            return error
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case ContextLengthExceeded():
            # litellm and others recognize it by the first words of OpenAI's sentence, not by the code.
            message = f"This model's maximum context length is exceeded. {error}"
            return ApiError(400, message, code="context_length_exceeded", param=prompt)
        case UnsupportedFeature():
            return ApiError(400, str(error), code="unsupported_parameter", param=_named(error.param, prompt))
        case InvalidParameter(param=param) if param == FORM:
            return ApiError(400, str(error).replace(FORM, form), code="invalid_value", param=form)
        case InvalidParameter():
            message = _in_names(str(error))
            if error.param in PROMPT_NAMES:
                message = re.sub(rf"^{error.param}\b", prompt, message)
            return ApiError(400, message, code="invalid_value", param=_named(error.param, prompt))
        case InvalidMessage():
            return ApiError(400, str(error), code="invalid_value", param=prompt)
        case InvalidRequest():
            return ApiError(400, str(error), code="invalid_value")
        case SessionBusy():
            # OpenAI's client retries a 409 by itself, while the session would still be busy.
            return ApiError(409, str(error), code="session_busy", headers={"x-should-retry": "false"})
        case SessionNotFound():
            return ApiError(404, str(error), code="session_not_found", param="session_id")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", headers=retry_after(error.retry_after))
        case DeadlineExceeded():
            # A client that retries by itself would wait as long again, for an answer that is no longer wanted.
            return ApiError(504, str(error), code="deadline_exceeded", headers={"x-should-retry": "false"})
        case RequestFailed():
            logger.error("a request failed: %s", error)
            return ApiError(
                500, "The request failed inside the engine; others are not affected.", code="request_failed"
            )
        case ModelError():
            # The message names folders of the server.
            logger.error("the model is not available: %s", error)
            message = "The model is not available; the server's log says why."
            return ApiError(503, message, code="model_unavailable", headers=retry_after(5))
        case EngineClosed():
            return ApiError(503, "The server is shutting down.", code="shutting_down", headers=retry_after(5))
        case EngineError():
            logger.error("the engine is not available: %s", error)
            return ApiError(503, "The engine is not available.", code="engine_unavailable", headers=retry_after(5))
        case AsyncLLMError():
            return ApiError(400, str(error), code="invalid_value")
    logger.error("an unexpected error", exc_info=error)
    return ApiError(500, "The server failed to handle the request; its log says why.", code="internal_error")


def _in_names(message: str) -> str:
    """Return the message with the API's parameter names."""
    return re.sub(r"\b(" + "|".join(NAMES) + r")\b", lambda found: NAMES[found[0]], message)


def _named(param: str | None, prompt: str) -> str | None:
    if param in PROMPT_NAMES:
        return prompt
    return NAMES.get(param, param) if param is not None else None


ELSEWHERE = {
    "v1/files": "No files are kept here. `asyncllm batch INPUT OUTPUT` answers a file of OpenAI's batch requests; "
    "images are sent in messages.",
    "v1/batches": "No batches are kept here. `asyncllm batch INPUT OUTPUT` answers a file of OpenAI's batch requests; "
    "or send them all at once: the server queues them.",
    "v1/audio": "Audio is not implemented. Send text or images.",
    "v1/images": "Images are not made here. Models that see take them in messages.",
    "v1/messages": "No batches of messages are kept here. Send them all at once to /v1/messages: the server queues "
    "them.",
    "v1/moderations": "Moderation is not implemented.",
    "v1/fine_tuning": "Nothing is trained here. Adapters that were trained elsewhere are served with --adapters.",
    "v1/assistants": "Assistants are not implemented. /v1/responses keeps conversations, and calls functions.",
    "v1/threads": "Threads are not implemented. /v1/responses keeps conversations.",
    "v1/conversations": "Conversations of this API are not implemented. Send previous_response_id to /v1/responses.",
    "v1/vector_stores": "Nothing is searched here. /v1/embeddings makes vectors for a store of your own.",
    "v1/responses/compact": "Responses are not made shorter. Send the input that shall be kept.",
    "v1/realtime": "The realtime API is not implemented. Send stream to /v1/chat/completions or /v1/responses.",
    "nodes": "This is one server. Nodes belong to a distributor (`asyncllm serve proxy`), with which servers register "
    "by --proxy-url.",
    "update_weights": "Weights are replaced by the program that owns the engine, with update_weights().",
    "distserve": "KV blocks are not handed to other servers.",
    "docs": "The page at / shows the routes and tries them.",
    "redoc": "The page at / shows the routes and tries them.",
}
"""Routes of OpenAI's and LMDeploy's that are not implemented -> what to do instead."""


def no_route(path: str, error: web.HTTPException) -> ApiError:
    """Return the error for a path without a route, or a method that the route lacks."""
    parts = path.strip("/").split("/")
    names = ["/".join(parts[:count]) for count in ((3, 2, 1) if error.status == 404 else (len(parts),))]
    instead = next((ELSEWHERE[each] for each in names if each in ELSEWHERE), None)
    if instead is not None:
        return ApiError(404, f"There is no such route. {instead}", code="unsupported_route")
    if error.status == 404:
        return ApiError(404, "There is no such route. GET / lists them.", code="unknown_route")
    allowed = error.headers.get("Allow", "another method")
    return ApiError(405, f"The route takes {allowed}.", code="method_not_allowed", headers={"Allow": allowed})
