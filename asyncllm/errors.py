"""The errors that asyncllm raises.

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
    │   ├── QueueFull                        too much waits already; `retry_after` says when to try again
    │   └── RequestFailed                    the request failed, or a step that it was in; the others go on
    │       └── DeadlineExceeded (TimeoutError)  the request's `timeout` is over
    └── ServerError (RuntimeError)           a server answered its client with an error, with status and code
        └── ServerUnreachable (ConnectionError)  no server answered

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
    """Base class of asyncllm's errors. They can be pickled, as pools of processes do."""

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


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
    """The prompt can never fit. `prompt_len`: its tokens. `limit`: most tokens that a prompt may have."""

    def __init__(self, prompt_len: int, limit: int, why: str, *, scored: bool = False, at_least: bool = False) -> None:
        """`scored`: the prompt is only scored or embedded, so it needs no room for a new token. `at_least`: the
        prompt has `prompt_len` tokens or more."""
        room = f"{limit} prompt tokens" if scored else f"{limit} prompt tokens and one new token"
        tokens = f"at least {prompt_len}" if at_least else prompt_len
        super().__init__(
            f"The prompt has {tokens} tokens, but {why} leaves room for {room}. Shorten the prompt, or raise "
            f"session_len (or cache_max_entry_count) if the model and the memory allow it."
        )
        self.prompt_len = prompt_len
        self.limit = limit


class UnsupportedFeature(InvalidRequest):
    """The request is well-formed, but asks for something that is not implemented. `param` names the parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelError(AsyncLLMError, RuntimeError):
    """A checkpoint cannot be loaded."""


class ModelNotFound(ModelError):
    """There is no folder, bundled model or hub id of this name."""


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
    """The engine loop died. `__cause__` is the error that ended it."""


class QueueFull(EngineError):
    """Too many requests or tokens are waiting. `retry_after`: seconds until there should be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(EngineError):
    """One request failed, or a step that it was part of; other requests continue. `__cause__` is the underlying error,
    if any."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """The request's `timeout` passed before its answer was complete."""


class ServerError(AsyncLLMError, RuntimeError):
    """A server answered its client with an error. Fields that the answer lacks are None."""

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
        """`status`: the HTTP status; None if the answer failed while it was streamed. `retry_after`: seconds."""
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after


class ServerUnreachable(ServerError, ConnectionError):
    """No server answers at the address, or the connection ended before the answer did."""


def short(name: object) -> str:
    """Return `name` quoted for a message, with unprintable characters escaped, cut to about 150 characters."""
    try:
        text = repr(name)
    except ValueError:
        # Python refuses to format an integer of more than 4,300 digits.
        text = f"<{type(name).__name__} too long to write>"
    return text if len(text) <= 160 else f"{text[:150]}...{text[-1]}"


# An error refers through its traceback to the frames it passed, and these refer to the prompt, the request and the
# error itself. Keeping such an error makes a cycle that only the garbage collector frees; these two functions avoid it.


def unraised(error: Kept, *, cause: bool) -> Kept:
    """Return a copy of `error` without its traceback, and without its cause unless `cause`."""
    copy = _remade(type(error), error.args, error.__dict__)
    if cause:
        copy.__cause__ = error.__cause__
    return copy


def _remade(kind: type[Kept], args: tuple[typing.Any, ...], attributes: dict[str, typing.Any]) -> Kept:
    """Return an error with these arguments and attributes."""
    # A class's own __init__ may take other arguments than `args`, so the built-in base class creates the error.
    base: type[BaseException] = kind
    while "__new__" not in vars(base):
        assert base.__base__ is not None
        base = base.__base__
    error: Kept = base.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def detached(error: Kept) -> Kept:
    """Return `error` with its own traceback as a note, and remove the tracebacks of it and its causes, since even a
    cleared frame refers to its callers."""
    error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
