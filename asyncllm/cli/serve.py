"""`asyncllm serve`: a server or a distributor in the foreground, or a conversation with one. Dependencies are imported
when a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from asyncllm.cli import flags
from asyncllm.cli.flags import DEFAULT_MODEL, MODEL_HELP, add_model_settings, load_template
from asyncllm.cli.terminal import CHAT_HELP, converse
from asyncllm.config import DEFAULT_URL, SERVED_QUEUE, DistributorConfig, EngineConfig, ServerConfig
from asyncllm.config.lmdeploy_settings import DISTRIBUTORS
from asyncllm.errors import UnsupportedFeature

__all__ = ["add", "spelled_out"]

SERVER, CLIENT, DISTRIBUTOR = "api_server", "api_client", "proxy"
REFUSED = {"gradio": "There is no gradio here: `asyncllm serve MODEL` has a page to chat with the model at /."}
"""Other commands of LMDeploy -> what to do instead."""
WORDS = (SERVER, CLIENT, DISTRIBUTOR, *REFUSED, "-h", "--help")
"""Words that may follow `serve`; any other word belongs to its api_server."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `serve MODEL`, as in vLLM, and `serve` alone expanded to `serve api_server`, and
    without the options of a refused command."""
    if arguments[:1] == ["serve"] and (len(arguments) == 1 or arguments[1] not in WORDS):
        return ["serve", SERVER, *arguments[1:]]
    if arguments[:1] == ["serve"] and arguments[1] in REFUSED:
        return ["serve", arguments[1]]
    return list(arguments)


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Give the command line its `serve`."""
    serve = commands.add_parser(
        "serve",
        help="Serve a model over HTTP, or talk to a server.",
        description=f"Serve a model, or talk to a server. `asyncllm serve MODEL` is `asyncllm serve {SERVER} MODEL`.",
    )
    kinds = serve.add_subparsers(title="commands", metavar="COMMAND", required=True)

    about = "Serve a model over HTTP, with the OpenAI and LMDeploy APIs."
    server = kinds.add_parser(
        SERVER, help=about, description=about, usage=f"asyncllm serve [{SERVER}] [MODEL] [OPTIONS]"
    )
    server.set_defaults(run=_serve, parser=server)
    server.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = server.add_argument_group("server", "An option with a list takes all following words.")
    flags.add(group, ServerConfig, several=True)
    add_model_settings(server, SERVED_QUEUE, several=True)

    about = "Distribute requests over several servers, as LMDeploy's proxy does. It loads no model."
    usage = f"asyncllm serve {DISTRIBUTOR} [OPTIONS]"
    distributor = kinds.add_parser(DISTRIBUTOR, help=about, description=about, usage=usage)
    distributor.set_defaults(run=_distribute, parser=distributor)
    flags.add(distributor.add_argument_group("distributor"), DistributorConfig, several=True)
    flags.add_unsupported(distributor, DISTRIBUTORS, DISTRIBUTORS)

    for name, instead in REFUSED.items():
        refused = kinds.add_parser(name)
        refused.set_defaults(run=_refuse, parser=refused, instead=instead)

    about = f"Have a conversation with a server. {CHAT_HELP}"
    client = kinds.add_parser(CLIENT, help="Have a conversation with a server.", description=about)
    client.set_defaults(run=_talk, parser=client)
    client.add_argument(
        "api_server_url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"Default: {DEFAULT_URL}."
    )
    client.add_argument("--api-key", metavar="STR", help="One of the server's keys, if it has any.")
    client.add_argument(
        "--session-id",
        type=int,
        metavar="INT",
        help="Let the server keep the conversation under this number, to come back to it. Default: it is kept here.",
    )


def _serve(options: argparse.Namespace) -> int:
    """Serve a model until a signal ends the server."""
    flags.check_unsupported(options)
    config = flags.load(options, ServerConfig)
    engine_config = flags.load(options, EngineConfig)
    template = load_template(options)
    _refuse_lost_model(options)

    import asyncio

    from asyncllm.engine.async_engine import AsyncEngine
    from asyncllm.server.http.listening import fastest_loop
    from asyncllm.server.run import run

    make_engine = partial(AsyncEngine, options.model or DEFAULT_MODEL, engine_config, template)
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(run(make_engine, config))
    return 0


def _distribute(options: argparse.Namespace) -> int:
    """Distribute requests until a signal ends the distributor."""
    flags.check_unsupported(options, DISTRIBUTORS)
    config = flags.load(options, DistributorConfig)

    import asyncio

    from asyncllm.server.distributor.run import run
    from asyncllm.server.http.listening import fastest_loop

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(run(config))
    return 0


def _talk(options: argparse.Namespace) -> int:
    from asyncllm.cli.conversations import ClientConversation, SessionConversation
    from asyncllm.http_client.api_client import APIClient

    with APIClient(options.api_server_url, options.api_key) as client:
        model = client.available_models[0]
        kept_here = options.session_id is None
        converse(
            f"{model} at {client.api_server_url}",
            ClientConversation(client, model) if kept_here else SessionConversation(client, options.session_id),
        )
    return 0


def _refuse(options: argparse.Namespace) -> int:
    raise UnsupportedFeature(options.instead)


def _refuse_lost_model(options: argparse.Namespace) -> None:
    """Refuse a list that has swallowed the model's name after it: the default model would be served instead."""
    fields = (*ServerConfig.__struct_fields__, *EngineConfig.__struct_fields__)
    lists = [name for name in fields if isinstance(getattr(options, name, None), list)]
    longest = max(lists, key=lambda name: len(getattr(options, name)), default=None)
    if options.model is None and longest is not None and len(getattr(options, longest)) > 1:
        option = f"--{longest.replace('_', '-')}"
        options.parser.error(f"{option} takes all words that follow. Write the model's name before it.")
