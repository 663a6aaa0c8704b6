"""`asyncllm batch`: answers a file of OpenAI batch requests. Dependencies are imported when it runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import ExitStack
from typing import Any, Literal, TextIO

from asyncllm.cli import flags
from asyncllm.cli.flags import DEFAULT_MODEL, MODEL_HELP, add_model_settings, load_template
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.printable import to_stderr

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Give the command line its `batch`."""
    about = "Answer a file of OpenAI batch requests, one line of JSON each."
    batch = commands.add_parser(
        "batch", help=about, description=about, usage="asyncllm batch [OPTIONS] [MODEL] INPUT OUTPUT"
    )
    batch.set_defaults(run=_batch, parser=batch)
    batch.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    batch.add_argument("input", metavar="INPUT", help="File of requests; '-': standard input.")
    batch.add_argument("output", metavar="OUTPUT", help="File of answers, written anew; '-': standard output.")
    add_model_settings(batch)


def _batch(options: argparse.Namespace) -> int:
    """Answer a file of batch requests. Return the exit status: 1 if any was refused."""
    flags.check_unsupported(options)
    engine_config, template = flags.load(options, EngineConfig), load_template(options)

    with ExitStack() as files:
        source = _opened(files, options.input, "r", "input")
        if options.input != "-" and os.path.exists(options.output) and os.path.samefile(options.input, options.output):
            raise InvalidParameter(f"{options.output} holds the requests. Give another file for the answers.", "output")
        target = _opened(files, options.output, "w", "output")

        import asyncio

        from asyncllm.engine.async_engine import AsyncEngine
        from asyncllm.server.batch import answer_file
        from asyncllm.server.http.listening import fastest_loop

        engine = AsyncEngine(options.model, engine_config, template)
        with asyncio.Runner(loop_factory=fastest_loop()) as runner:
            count = runner.run(answer_file(engine, source, target))
    to_stderr(f"{count.answered} answered, {count.refused} refused")
    return 0 if not count.refused else 1


def _opened(files: ExitStack, name: str, mode: Literal["r", "w"], param: str) -> TextIO:
    """Open a file, or the standard stream in its place, as lines of JSON: a line that is not UTF-8 is refused by
    itself, and what no file can hold is written as JSON spells it."""
    encoding, errors = ("utf-8-sig", "surrogateescape") if mode == "r" else ("utf-8", "backslashreplace")
    if name == "-":
        standard = sys.stdin if mode == "r" else sys.stdout
        if isinstance(standard, io.TextIOWrapper):
            standard.reconfigure(encoding=encoding, errors=errors)
        return standard
    try:
        file: TextIO = open(name, mode, encoding=encoding, errors=errors)  # noqa: SIM115 - the stack closes it
    except OSError as error:
        raise InvalidParameter(f"{name} cannot be opened: {error.strerror or error}.", param) from None
    return files.enter_context(file)
