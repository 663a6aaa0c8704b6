"""How the HTTP server listens, which clients it lets in, and how long it waits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from asyncllm.config.generation import MAX_CHOICES
from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.errors import InvalidParameter, short

__all__ = ["DEFAULT_URL", "ServerConfig"]


class ServerConfig(Settings, frozen=True, kw_only=True):
    """How the HTTP server listens, which clients it lets in, and how long it waits."""

    server_name: Annotated[str, Meta(min_length=1, description="Address or host name to listen on.")] = "127.0.0.1"
    server_port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one.")] = 23333
    api_keys: Annotated[
        list[str] | None,
        Meta(description="API keys, one of which a request must carry. Prefer a file: others can read command lines."),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one API key per line. ASYNCLLM_API_KEYS may list keys too, separated by commas."),
    ] = None
    admin_key_file: Annotated[
        str | None,
        Meta(
            description="File with one key per line for /sleep and /wakeup; without it the server lacks these routes."
        ),
    ] = None
    adapters_folder: Annotated[
        str | None,
        Meta(
            description="Folder from which LoRA adapters can be loaded at run time with the owner's key, by "
            "/v1/load_lora_adapter, /load_lora_adapter and the unload routes; None: the server lacks these routes."
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool,
        Meta(description="Listen beyond this machine without a key: anyone who reaches the port may use the server."),
    ] = False
    ssl: Annotated[bool, Meta(description="Serve https, with the files of ssl_keyfile and ssl_certfile.")] = False
    ssl_keyfile: Annotated[str | None, Meta(description="The private key; None: the variable SSL_KEYFILE.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="The certificate; None: the variable SSL_CERTFILE.")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        Meta(
            description="Additional names to accept in the Host header, or '*'. With a key any name is accepted; "
            "without one, beyond this machine, addresses and local network names (gpu-box, gpu.lan) are."
        ),
    ] = None
    allow_origins: Annotated[
        list[str] | None,
        Meta(description="Web origins that may call, each as https://host[:port], or '*' with a key; None: none."),
    ] = None
    allow_credentials: Annotated[bool, Meta(description="Let those origins send cookies.")] = False
    allow_methods: Annotated[list[str] | None, Meta(description="Methods for those origins; None: GET and POST.")] = (
        None
    )
    allow_headers: Annotated[list[str] | None, Meta(description="Headers for those origins; None or '*': any.")] = None
    max_concurrent_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_COUNT,
            description="Maximum number of concurrent requests; more are refused with 429. 0: no limit.",
        ),
    ] = 0
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Maximum number of open connections; no more than the process may open files.",
        ),
    ] = 8192
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=MAX_COUNT)] | None,
        Meta(description="Maximum size of a request body; None: 4 MiB, or 32 MiB if the model takes images."),
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
    ] = 256
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
    body_timeout: Annotated[float, Meta(gt=0, le=3600, description="Maximum seconds for a body to arrive.")] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum seconds that a client may leave an answer unread.")
    ] = 30.0
    keep_alive_timeout: Annotated[
        float,
        Meta(gt=0, le=3600, description="Maximum seconds that a connection may be idle, or take for request headers."),
    ] = 30.0
    ping_interval: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a silent stream sends a comment.")
    ] = 15.0
    drain_delay: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds to keep accepting after SIGTERM, while /health/ready fails.")
    ] = 0.0
    drain_timeout: Annotated[
        float, Meta(ge=0, le=86400, description="Maximum seconds for running answers to finish after SIGTERM.")
    ] = 60.0
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
    log_level: Annotated[
        Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"], Meta(description="What is logged.")
    ] = "WARNING"
    disable_docs: Annotated[bool, Meta(description="Leave out the page at / and /openapi.json.")] = False
    disable_metrics: Annotated[bool, Meta(description="Leave out /metrics.")] = False
    allow_terminate_by_client: Annotated[bool, Meta(description="Let clients stop the server by /terminate.")] = False

    def _check(self) -> None:
        for name in (
            "api_keys",
            "allow_origins",
            "allowed_hosts",
            "allow_methods",
            "allow_headers",
            "allowed_media_domains",
        ):
            if any(not text.strip() for text in getattr(self, name) or ()):
                raise InvalidParameter(f"{name} holds an empty text. Remove it.", name)
        for host in self.allowed_media_domains or ():
            if any(mark in host for mark in ",/ ") or host.count(":") == 1:
                raise InvalidParameter(
                    f"allowed_media_domains holds {short(host)}, which is not a host name. Give names such as "
                    f"example.com, one per entry, without scheme, port and path.",
                    "allowed_media_domains",
                )
        for name in ("ssl_keyfile", "ssl_certfile"):
            if getattr(self, name) is not None and not self.ssl:
                raise InvalidParameter(f"{name} is set, but ssl is not. Set ssl as well, to serve https.", name)
        if self.allow_credentials and "*" in (self.allow_origins or ()):
            raise InvalidParameter(
                "allow_credentials cannot be combined with allow_origins '*': browsers send cookies only for listed "
                "origins. Leave it out (keys are not cookies), or list the origins.",
                "allow_credentials",
            )
        for origin in self.allow_origins or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/*\s]+", origin):
                raise InvalidParameter(
                    f"allow_origins holds {origin!r}, which is not an origin. Write each as https://host or "
                    f"https://host:port, without a path, or '*' for every origin.",
                    "allow_origins",
                )


DEFAULT_URL = f"http://{ServerConfig().server_name}:{ServerConfig().server_port}"
"""The config of a server without settings."""
