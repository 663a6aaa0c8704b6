"""How the HTTP server listens, which clients it lets in, and how long it waits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncllm.config.generation import MAX_CHOICES
from asyncllm.config.listen import ListenConfig
from asyncllm.config.settings import MAX_COUNT, check_address
from asyncllm.errors import InvalidParameter, short

__all__ = ["DEFAULT_URL", "ServerConfig"]


class ServerConfig(ListenConfig, frozen=True, kw_only=True):
    """How the HTTP server listens, which clients it lets in, and how long it waits."""

    server_port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one.")] = 23333
    admin_key_file: Annotated[
        str | None,
        Meta(
            description="File with one key per line for routes that affect all clients, such as /sleep; without it the "
            "server lacks these routes."
        ),
    ] = None
    adapters_folder: Annotated[
        str | None,
        Meta(
            description="Folder from which LoRA adapters can be loaded at run time with the owner's key, by "
            "/v1/load_lora_adapter, /load_lora_adapter and the unload routes; None: the server lacks these routes."
        ),
    ] = None
    proxy_url: Annotated[
        str | None,
        Meta(description="Address of a distributor (`asyncllm serve proxy`) with which to register; None: none."),
    ] = None
    proxy_key_file: Annotated[
        str | None, Meta(description="File with the key for the distributor's node routes, if they need one.")
    ] = None
    node_url: Annotated[
        str | None,
        Meta(
            description="Address under which the distributor reaches this server; None: server_name and server_port, "
            "or, if it listens on all interfaces, the address of the one that leads to the distributor."
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Maximum number of concurrent requests; more are refused with 429. 0: no limit.",
        ),
    ] = 0
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=MAX_COUNT)] | None,
        Meta(description="Maximum size of a request body; None: 4 MiB, or 32 MiB with images or embeddings."),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        Meta(
            description="Hosts from which images are fetched, or '*' for any public host; None: none, images have to "
            "be data: URLs."
        ),
    ] = None
    max_prompts: Annotated[
        int, Meta(ge=1, le=65536, description="Maximum number of prompts or inputs per request.")
    ] = 1024
    max_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Maximum number of answers per prompt.")] = 16
    max_sessions: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="Maximum number of conversations that /v1/chat/interactive stores.")
    ] = 1024
    max_session_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="A new conversation is stored while all of them hold fewer tokens than this.",
        ),
    ] = 2**22
    session_ttl: Annotated[
        float, Meta(gt=0, le=MAX_COUNT, description="Idle seconds after which a conversation is evicted.")
    ] = 3600.0
    ping_interval: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a silent stream sends a comment.")
    ] = 15.0
    drain_delay: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds to keep accepting after SIGTERM, while /health/ready fails.")
    ] = 0.0
    progress_timeout: Annotated[
        float, Meta(gt=0, le=86400, description="Seconds without a finished step, while work waits, until unhealthy.")
    ] = 90.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="How many dead engines to replace within restart_window; one more ends the server.",
        ),
    ] = 3
    restart_window: Annotated[
        float, Meta(gt=0, le=MAX_COUNT, description="Seconds for which a dead engine counts.")
    ] = 600.0
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="Sampling defaults; auto: the checkpoint's generation_config.json; none: OpenAI's."),
    ] = "auto"
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        Meta(description="Unknown names in a body; refuse: 400; ignore: the header X-Ignored-Fields lists them."),
    ] = "refuse"
    error_format: Annotated[
        Literal["openai", "lmdeploy"],
        Meta(description="Error bodies; openai: under the key error; lmdeploy: flat, with the status as code."),
    ] = "openai"
    disable_docs: Annotated[bool, Meta(description="Leave out the page at / and /openapi.json.")] = False
    allow_terminate_by_client: Annotated[bool, Meta(description="Let clients stop the server by /terminate.")] = False

    def _check(self) -> None:
        super()._check()
        self._check_filled("allowed_media_domains")
        check_address(self.proxy_url, "proxy_url")
        check_address(self.node_url, "node_url")
        for name in ("proxy_key_file", "node_url"):
            if getattr(self, name) is not None and self.proxy_url is None:
                raise InvalidParameter(
                    f"{name} is set, but proxy_url is not. Set proxy_url as well, to register with a distributor.", name
                )
        for host in self.allowed_media_domains or ():
            if any(mark in host for mark in ",/ ") or host.count(":") == 1:
                raise InvalidParameter(
                    f"allowed_media_domains holds {short(host)}, which is not a host name. Give names such as "
                    f"example.com, one per entry, without scheme, port and path.",
                    "allowed_media_domains",
                )


DEFAULT_URL = f"http://{ServerConfig().server_name}:{ServerConfig().server_port}"
"""The address of a server with default settings."""
