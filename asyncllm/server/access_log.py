"""One line for each HTTP request, at INFO, and how a server's log is written when it is the whole program."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["log_request", "logging_to_stderr"]

logger = logging.getLogger("asyncllm.server")

MAX_PATH = 128

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def escaped(text: str) -> str:
    """The text in one line: a client must not write lines of its own, nor move a terminal's cursor."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def log_request(method: str, route: str, status: int, seconds: float, request_id: str, key: int) -> None:
    """Bodies and queries are not logged, as they hold prompts and perhaps keys. `key`: which one; -1: none."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        "%s %s %d %.1f ms id=%s key=%s",
        escaped(method[:16]),
        escaped(route[:MAX_PATH]),
        status,
        seconds * 1e3,
        request_id,
        "-" if key < 0 else key,
    )


class _OneLine(logging.Formatter):
    """Escapes what a message brings along; the traceback below it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Write what asyncllm logs to stderr while the block runs, from `level` up. A program that has set up logging
    itself, as `logging.basicConfig` does, keeps its own handlers."""
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
