"""Every error that asyncllm raises on purpose.

    AsyncLLMError
    ├── InvalidRequest (ValueError)          the caller's input cannot be served as it stands
    │   ├── InvalidParameter                 a parameter is of the wrong type, unknown or out of range
    │   ├── InvalidMessage                   a prompt or a chat message is malformed
    │   ├── ContextLengthExceeded            the prompt can never fit, with the numbers
    │   └── UnsupportedFeature               well-formed, but not implemented
    ├── ModelError (RuntimeError)            the checkpoint cannot be loaded
    │   ├── ModelNotFound                    no such folder, bundled model or hub id
    │   ├── InvalidCheckpoint                a file is missing, truncated, overlapping or inconsistent
    │   └── UnsupportedModel                 the architecture or one of its settings is not implemented
    ├── SessionError (RuntimeError)
    │   ├── SessionBusy                      one turn at a time, and one is running
    │   └── SessionNotFound                  unknown or ended session id
    ├── EngineError (RuntimeError)
    │   ├── EngineClosed                     the engine was closed, or never started
    │   ├── EngineDead                       the engine loop died; the cause is chained
    │   ├── QueueFull                        too much waits already; `retry_after` says when to come back
    │   └── RequestFailed                    one request failed, or the step that it was in; the others go on
    │       └── DeadlineExceeded (TimeoutError)  its `timeout` is over
    └── ServerError (RuntimeError)           a client was told so by its server, with status and code
        └── ServerUnreachable (ConnectionError)  it was told nothing

Messages say what is wrong, why, and what to do, in that order.
"""

from __future__ import annotations

import traceback
import typing

__all__ = [
    "AsyncLLMError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EngineClosed",
    "EngineDead",
    "EngineError",
    "InvalidCheckpoint",
    "InvalidMessage",
    "InvalidParameter",
    "InvalidRequest",
    "ModelError",
    "ModelNotFound",
    "QueueFull",
    "RequestFailed",
    "ServerError",
    "ServerUnreachable",
    "SessionBusy",
    "SessionError",
    "SessionNotFound",
    "UnsupportedFeature",
    "UnsupportedModel",
    "detached",
    "short",
    "unraised",
]

Kept = typing.TypeVar("Kept", bound=BaseException)


class AsyncLLMError(Exception):
    """Base of every error raised on purpose by asyncllm."""


class InvalidRequest(AsyncLLMError, ValueError):
    """The caller's input cannot be served as it stands."""


class InvalidParameter(InvalidRequest):
    """A parameter is unknown, of the wrong type or out of range.

    `param` is the name of the offending parameter, as the caller wrote it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidMessage(InvalidRequest):
    """A prompt or a chat message is malformed."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt can never fit; `prompt_len` and `limit` are in tokens."""

    def __init__(self, prompt_len: int, limit: int, why: str, *, scored: bool = False, at_least: bool = False) -> None:
        """`scored`: the prompt is only scored or embedded, and needs no room for a new token. `at_least`: it was not
        counted to its end."""
        room = f"{limit} prompt tokens" if scored else f"{limit} prompt tokens and one new token"
        tokens = f"at least {prompt_len}" if at_least else prompt_len
        super().__init__(
            f"The prompt has {tokens} tokens, but {why} leaves room for {room}. Shorten the prompt, or raise "
            f"session_len (or cache_max_entry_count) if the model and the memory allow it."
        )
        self.prompt_len = prompt_len
        self.limit = limit


class UnsupportedFeature(InvalidRequest):
    """The request is well-formed but asks for something that is not implemented."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(AsyncLLMError, RuntimeError):
    """A checkpoint cannot be loaded."""


class ModelNotFound(ModelError):
    """No folder, bundled model or hub id goes by this name."""


class InvalidCheckpoint(ModelError):
    """A file of the checkpoint is missing, truncated or inconsistent."""


class UnsupportedModel(ModelError):
    """The architecture, or a setting in its config.json, is not implemented."""


class SessionError(AsyncLLMError, RuntimeError):
    """A session cannot take this call."""


class SessionBusy(SessionError):
    """A session takes one turn at a time, and one is running."""


class SessionNotFound(SessionError):
    """The session id is unknown, or the session has ended."""


class EngineError(AsyncLLMError, RuntimeError):
    """The engine cannot serve this call."""


class EngineClosed(EngineError):
    """The engine was closed, or was never started."""


class EngineDead(EngineError):
    """The engine loop died; `__cause__` is the error that killed it."""


class QueueFull(EngineError):
    """Too many requests or tokens wait already. `retry_after`: seconds after which there should be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(EngineError):
    """One request failed, or a whole step that it had a row in; `__cause__` is what was raised, if anything was. The
    others go on."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """The request's `timeout` was over before its answer was complete."""


class ServerError(AsyncLLMError, RuntimeError):
    """What a server answered to its client. The fields are those of the answer, None where it has none."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """`status`: that of HTTP; None for an answer that failed while it was streamed. `retry_after`: seconds."""
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after


class ServerUnreachable(ServerError, ConnectionError):
    """No server answers at the address, or the connection ended before the answer did."""


def short(name: object) -> str:
    """Return `name` quoted for a message: unprintable characters escaped, and cut to a length that fits a line."""
    try:
        text = repr(name)
    except ValueError:
        # Python writes no integer of more than 4,300 digits.
        text = f"<{type(name).__name__} too long to write>"
    return text if len(text) <= 160 else f"{text[:150]}...{text[-1]}"


# By its traceback an error refers to the frames that it passed, and these to the prompt, the request and whatever keeps
# the error itself: a cycle, which only the garbage collector frees. The next two are for errors that are kept.


def unraised(error: Kept, *, cause: bool) -> Kept:
    """Return a copy that has not been raised, with the cause of the original or with none: the message names it."""
    # The arguments of a class's own __init__ are not known here, and what it has set is copied. The built-in class that
    # it is laid out as makes it.
    kind: type[BaseException] = type(error)
    while "__new__" not in vars(kind):
        assert kind.__base__ is not None
        kind = kind.__base__
    copy: Kept = kind.__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    if cause:
        copy.__cause__ = error.__cause__
    return copy


def detached(error: Kept) -> Kept:
    """Return the error, for the function that has caught it to keep: the tracebacks of it and its causes become a note,
    as even a cleared frame refers to those that called it."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
