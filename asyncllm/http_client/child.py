"""A server in a child process that lives no longer than the process that started it.

The child reads its settings from the first line of its standard input, and treats the end of that input like SIGTERM:
killing the parent closes it too. It writes one line, a `Report`, to standard output; anything else that would be
printed there goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import partial

import msgspec

from asyncllm import errors
from asyncllm.config import ChatTemplateConfig, EngineConfig, ServerConfig
from asyncllm.errors import AsyncLLMError, EngineError, InvalidParameter, UnsupportedFeature
from asyncllm.http_client.api_client import APIClient

__all__ = ["Settings", "main", "start"]

PROGRAM = "import sys; sys.path[:] = {path!r}; from asyncllm.http_client.child import main; main()"
"""Run with the parent's import path, which may differ from an interpreter's default."""

LAST_SECONDS = 30.0
"""Seconds beyond its own deadlines that a server has to end before it is killed."""


class Settings(msgspec.Struct):
    """The settings that a server is started with."""

    model_path: str
    server: ServerConfig
    engine: EngineConfig
    template: ChatTemplateConfig


class Report(msgspec.Struct):
    """The server's address, or why it did not start."""

    url: str = ""
    error: str = ""
    """The class of an AsyncLLMError."""
    message: str = ""
    param: str | None = None

    def as_error(self) -> AsyncLLMError:
        """Return the error that the child's engine raised."""
        kind: type[AsyncLLMError] = getattr(errors, self.error)
        if issubclass(kind, (InvalidParameter, UnsupportedFeature)):
            return kind(self.message, self.param)
        return kind(self.message)


def start(settings: Settings) -> APIClient:
    """Run a server until its client is closed. Raises the engine's errors, and EngineError if the process dies."""
    from asyncllm.server.http.access import read_keys

    keys = read_keys(settings.server)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for the parent.
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # Then it writes no report either.
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise EngineError(
                f"The server's process ended with status {process.wait()} before it was ready. What it wrote to "
                f"standard error says why."
            )
        report = msgspec.json.decode(line, type=Report)
        if report.error:
            raise report.as_error()
        client = APIClient(report.url, keys[0] if keys else None, ssl_context=_trust(settings.server))
    except BaseException:
        _end(process, settings.server)
        raise
    finally:
        process.stdout.close()
    client.on_close = weakref.finalize(client, _end, process, settings.server)
    return client


def _end(process: subprocess.Popen[bytes], config: ServerConfig) -> None:
    """Let the server finish its work for others, and wait for its end."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # It has ended already.
        process.stdin.close()
    try:
        process.wait(config.drain_delay + config.drain_timeout + config.write_timeout + LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _trust(config: ServerConfig) -> ssl.SSLContext | None:
    """Return a context that trusts the server's own certificate, with any signature and any names."""
    if not config.ssl:
        return None
    context = ssl.create_default_context(cafile=config.ssl_certfile or os.environ["SSL_CERTFILE"])
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def main() -> None:
    """Run the child's side."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(report: Report) -> None:
        output.write(msgspec.json.encode(report) + b"\n")

    from asyncllm.engine.async_engine import AsyncEngine
    from asyncllm.server.http.listening import fastest_loop
    from asyncllm.server.run import run

    try:
        make_engine = partial(AsyncEngine, settings.model_path, settings.engine, settings.template)
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            runner.run(run(make_engine, settings.server, lambda url: report(Report(url=url))))
    except AsyncLLMError as error:
        with suppress(BrokenPipeError):  # The parent stops reading once the server has been announced.
            report(Report(error=type(error).__name__, message=str(error), param=getattr(error, "param", None)))
        sys.exit(1)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGTERM)
