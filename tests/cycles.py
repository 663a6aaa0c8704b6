"""Finds what only the garbage collector can free: objects of asyncllm in reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, CoroutineType, FrameType, FunctionType

from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.generation import Generation
from asyncllm.engine.schedule.sequence import Request, Sequence

__all__ = ["PARTS", "alive", "no_cycles"]

PARTS = (Request, Sequence, Delivery, Answer, Generation)
"""What a request consists of."""


@contextmanager
def no_cycles() -> Iterator[None]:
    """Raise AssertionError if what is done inside leaves cycles that hold objects or frames of asyncllm."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = sorted({_name(thing) for thing in gc.garbage} - {""})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found, f"only the garbage collector frees these: {found}"


def alive() -> list[object]:
    """The parts of requests that are still there."""
    return [thing for thing in gc.get_objects() if isinstance(thing, PARTS)]


def _name(thing: object) -> str:
    """What is reported of a piece of garbage; nothing of what is not asyncllm's own."""
    match thing:
        case FrameType():
            return _code(thing.f_code, "frame")
        case CoroutineType():
            return _code(thing.cr_code, "coroutine")
        case FunctionType():
            return _code(thing.__code__, "function")
    kind = type(thing)
    return (
        f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith(("asyncllm", "aiohttp.web_re")) else ""
    )


def _code(code: CodeType, kind: str) -> str:
    return f"{kind} {code.co_qualname}" if "/asyncllm/" in code.co_filename else ""
