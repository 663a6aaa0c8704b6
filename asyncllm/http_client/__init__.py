"""Access to servers from other programs: LMDeploy's `serve()`, which starts one, and `client()`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.config import DEFAULT_URL, SERVED_QUEUE, ChatTemplateConfig, EngineConfig, ServerConfig
from asyncllm.errors import InvalidParameter

if TYPE_CHECKING:
    from asyncllm.http_client.api_client import APIClient

__all__ = ["client", "serve"]


def serve(
    model_path: str | os.PathLike[str],
    model_name: str | None = None,
    backend: str | None = None,
    backend_config: EngineConfig | None = None,
    chat_template_config: ChatTemplateConfig | str | None = None,
    server_name: str = "127.0.0.1",
    server_port: int = 23333,
    log_level: str = "ERROR",
    api_keys: str | list[str] | None = None,
    ssl: bool = False,
    **options: Any,
) -> APIClient:
    """Start a server in a child process, and return its client once the model is loaded.

    The server ends with the client: when it is closed, garbage-collected, or its process ends for any reason. Answers
    to other clients may then still finish, for `drain_timeout` seconds.

    Args:
        model_path: folder, bundled model, or model id of the hub.
        model_name: name the model is served under.
        backend_config: the engine's settings; None: the defaults, with the queue bounds of `asyncllm serve`.
        backend: "pytorch" or "turbomind", as passed by older programs; both select this engine.
        server_port: 0 selects a free port; the client's `api_server_url` contains it.
        options: other fields of ServerConfig.

    Raises InvalidParameter, UnsupportedFeature and ModelError as the engine does, EngineError if the process dies.
    """
    from asyncllm.http_client.child import Settings, start

    if backend not in (None, "pytorch", "turbomind"):
        raise InvalidParameter(f"backend must be 'pytorch' or 'turbomind' (given: {backend!r}).", "backend")
    if isinstance(chat_template_config, str):
        chat_template_config = ChatTemplateConfig(model_name=chat_template_config)
    engine_config = backend_config or EngineConfig.from_dict(dict(SERVED_QUEUE))
    if model_name is not None:
        engine_config = msgspec.structs.replace(engine_config, model_name=model_name)
    fields = {
        "server_name": server_name,
        "server_port": server_port,
        "log_level": log_level,
        "api_keys": [api_keys] if isinstance(api_keys, str) else api_keys,
        "ssl": ssl,
        **options,
    }
    return start(
        Settings(
            os.fspath(model_path) if isinstance(model_path, os.PathLike) else model_path,
            ServerConfig.from_dict(fields).checked(),
            engine_config.checked(),
            (chat_template_config or ChatTemplateConfig()).checked(),
        )
    )


def client(api_server_url: str = DEFAULT_URL, api_key: str | None = None) -> APIClient:
    """Return the client of a running server. Raises InvalidParameter for an invalid address."""
    from asyncllm.http_client.api_client import APIClient

    return APIClient(api_server_url, api_key)
