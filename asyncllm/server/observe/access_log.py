"""The access log, one line per HTTP request at INFO, and the logging setup of a server that is the whole program."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from asyncllm.printable import in_one_line, in_terminal

__all__ = ["log_request", "logging_to_stderr"]

logger = logging.getLogger("asyncllm.server")

MAX_PATH = 128


def log_request(method: str, route: str, status: int, seconds: float, request_id: str, key: int) -> None:
    """Log a request. Bodies and queries are left out, since they hold prompts and perhaps keys. `key`: its index, or -1
    for none."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        "%s %s %d %.1f ms id=%s key=%s",
        in_one_line(method[:16]),
        in_one_line(route[:MAX_PATH]),
        status,
        seconds * 1e3,
        request_id,
        "-" if key < 0 else key,
    )


class _OneLine(logging.Formatter):
    """Escapes control characters in messages. A traceback keeps its lines but indents them, so that text in it cannot
    look like a line of the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = in_one_line(record.message)
        return super().formatMessage(record)

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return textwrap.indent(in_terminal(super().formatException(ei)), "  ")


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Write asyncllm's log to stderr during the block, from `level` up. A program that has configured logging itself,
    for example with `logging.basicConfig`, keeps its own handlers."""
    package = logging.getLogger("asyncllm")
    before = package.level
    package.setLevel(level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    own = not package.hasHandlers()
    if own:
        package.addHandler(handler)
    try:
        yield
    finally:
        if own:
            package.removeHandler(handler)
        package.setLevel(before)
