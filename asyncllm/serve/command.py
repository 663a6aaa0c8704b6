"""`asyncllm serve`: a server in the foreground. Nothing of it is imported before the command runs."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from asyncllm import flags
from asyncllm.config import EngineConfig, ServerConfig
from asyncllm.model_options import DEFAULT_MODEL, MODEL_HELP, add_model_settings, load_template

__all__ = ["add", "spelled_out"]

SERVER = "api_server"
WORDS = (SERVER, "-h", "--help")
"""What may follow `serve`; anything else belongs to its api_server."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """`serve MODEL`, as vLLM has it, is `serve api_server MODEL`; so is `serve` alone."""
    if arguments[:1] == ["serve"] and (len(arguments) == 1 or arguments[1] not in WORDS):
        return ["serve", SERVER, *arguments[1:]]
    return list(arguments)


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Give the command line its `serve`."""
    serve = commands.add_parser(
        "serve",
        help="Serve a model over HTTP.",
        description=f"Serve a model over HTTP. `asyncllm serve MODEL` is `asyncllm serve {SERVER} MODEL`.",
    )
    kinds = serve.add_subparsers(title="commands", metavar="COMMAND", required=True)

    about = "Serve a model over HTTP, with OpenAI's routes and LMDeploy's."
    server = kinds.add_parser(
        SERVER, help=about, description=about, usage=f"asyncllm serve [{SERVER}] [MODEL] [OPTIONS]"
    )
    server.set_defaults(run=_serve, parser=server)
    server.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = server.add_argument_group("server", "An option with a list takes all words that follow.")
    flags.add(group, ServerConfig, several=True)
    group.add_argument(
        "--disable-fastapi-docs",
        dest="disable_docs",
        action="store_true",
        default=argparse.SUPPRESS,
        help="LMDeploy's name of --disable-docs.",
    )
    group.add_argument(
        "--backend", choices=("pytorch", "turbomind"), help="LMDeploy's back ends; both are this engine."
    )
    add_model_settings(server)


def _serve(options: argparse.Namespace) -> int:
    config = flags.load(options, ServerConfig)
    engine_config = flags.load(options, EngineConfig)
    template = load_template(options)
    _refuse_lost_model(options)

    from asyncllm.engine.async_engine import AsyncEngine
    from asyncllm.server.run import run

    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    engine = AsyncEngine(options.model or DEFAULT_MODEL, engine_config, template)
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(run(engine, config))
    return 0


def _refuse_lost_model(options: argparse.Namespace) -> None:
    """A list takes the model's name too when that comes after it, and the default model would be served instead."""
    lists = [name for name in ServerConfig.__struct_fields__ if isinstance(getattr(options, name, None), list)]
    longest = max(lists, key=lambda name: len(getattr(options, name)), default=None)
    if options.model is None and longest is not None and len(getattr(options, longest)) > 1:
        option = f"--{longest.replace('_', '-')}"
        options.parser.error(f"{option} takes all words that follow. Write the model's name before it.")


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's where it is installed. Libraries take the loop that they are run in; a program chooses."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
