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
    server_port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: one that is free.")] = 23333
    api_keys: Annotated[
        list[str] | None,
        Meta(description="Keys, of which a request must bring one. Better in a file: others see a command line."),
    ] = None
    api_key_file: Annotated[
        str | None, Meta(description="File with one key a line. ASYNCLLM_API_KEYS may hold keys too, with commas.")
    ] = None
    admin_key_file: Annotated[
        str | None,
        Meta(description="File with one key a line for /sleep and /wakeup, which a server without it does not have."),
    ] = None
    adapters_folder: Annotated[
        str | None,
        Meta(
            description="Folder below which the owner's key may load LoRA adapters while the server runs, by "
            "/v1/load_lora_adapter, /load_lora_adapter and their opposites; None: a server without these routes."
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool,
        Meta(description="Listen beyond this machine without a key: every client that reaches the port may use it."),
    ] = False
    ssl: Annotated[bool, Meta(description="Serve https, with the files of ssl_keyfile and ssl_certfile.")] = False
    ssl_keyfile: Annotated[str | None, Meta(description="The private key; None: the variable SSL_KEYFILE.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="The certificate; None: the variable SSL_CERTFILE.")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        Meta(
            description="Further names in the Host header to answer to, or '*'. With a key it is any; without one, "
            "beyond this machine, addresses and names of a local network (gpu-box, gpu.lan)."
        ),
    ] = None
    allow_origins: Annotated[
        list[str] | None,
        Meta(description="Web pages that may call, each as https://host[:port], or '*' with a key; None: no page."),
    ] = None
    allow_credentials: Annotated[bool, Meta(description="Let those pages send cookies along.")] = False
    allow_methods: Annotated[list[str] | None, Meta(description="Methods for those pages; None: GET and POST.")] = None
    allow_headers: Annotated[list[str] | None, Meta(description="Headers for those pages; None or '*': any.")] = None
    max_concurrent_requests: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="Requests in work at once; more are refused with 429. 0: no limit.")
    ] = 0
    max_connections: Annotated[
        int,
        Meta(ge=1, le=MAX_COUNT, description="Open connections at once; no more than the process may open files."),
    ] = 8192
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=MAX_COUNT)] | None,
        Meta(description="Largest body of a request; None: 4 MiB, or 32 MiB where the model takes images."),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        Meta(
            description="Hosts from which images of prompts are fetched, or '*' for any public one; None: from none, "
            "and images come as data: URLs."
        ),
    ] = None
    max_prompts: Annotated[int, Meta(ge=1, le=65536, description="Most prompts or inputs in one request.")] = 256
    max_choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Most answers per prompt.")] = 16
    max_sessions: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="Most conversations that /v1/chat/interactive keeps.")
    ] = 1024
    max_session_tokens: Annotated[
        int, Meta(ge=1, le=MAX_COUNT, description="A new one is kept while all hold fewer tokens than this.")
    ] = 2**22
    session_ttl: Annotated[
        float, Meta(gt=0, le=MAX_COUNT, description="Idle seconds after which one is forgotten.")
    ] = 3600.0
    body_timeout: Annotated[float, Meta(gt=0, le=3600, description="Seconds for a body to arrive.")] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds that a client may leave an answer unread.")
    ] = 30.0
    keep_alive_timeout: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds that a connection may be idle, or take for the headers of a request."),
    ] = 30.0
    ping_interval: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a silent stream sends a comment.")
    ] = 15.0
    drain_delay: Annotated[
        float, Meta(ge=0, le=3600, description="Seconds to go on accepting after SIGTERM, while /health/ready says no.")
    ] = 0.0
    drain_timeout: Annotated[
        float, Meta(ge=0, le=86400, description="Seconds that running answers may take to finish after SIGTERM.")
    ] = 60.0
    progress_timeout: Annotated[
        float, Meta(gt=0, le=86400, description="Seconds without a finished step, while work waits, until unhealthy.")
    ] = 90.0
    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000, description="Dead engines to replace within restart_window; at one more the server ends."),
    ] = 3
    restart_window: Annotated[float, Meta(gt=0, le=MAX_COUNT, description="Seconds that a death counts for.")] = 600.0
    generation_config: Annotated[
        Literal["auto", "none"],
        Meta(description="Defaults of sampling: auto: the checkpoint's generation_config.json; none: OpenAI's."),
    ] = "auto"
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        Meta(description="Unknown names in a body: refuse: 400; ignore: the header X-Ignored-Fields names them."),
    ] = "refuse"
    error_format: Annotated[
        Literal["openai", "lmdeploy"],
        Meta(description="Bodies of errors: openai: below the key error; lmdeploy: flat, the code being the status."),
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
                    f"allowed_media_domains holds {short(host)}, which is no host's name. Give names such as "
                    f"example.com, each for itself, without scheme, port and path.",
                    "allowed_media_domains",
                )
        for name in ("ssl_keyfile", "ssl_certfile"):
            if getattr(self, name) is not None and not self.ssl:
                raise InvalidParameter(f"{name} is set, but ssl is not. Set ssl as well, to serve https.", name)
        if self.allow_credentials and "*" in (self.allow_origins or ()):
            raise InvalidParameter(
                "allow_credentials does not go with allow_origins '*': browsers send cookies to listed pages' servers "
                "alone. Leave it out, as keys are no cookies, or list the pages.",
                "allow_credentials",
            )
        for origin in self.allow_origins or ():
            if origin != "*" and not re.fullmatch(r"https?://[^/*\s]+", origin):
                raise InvalidParameter(
                    f"allow_origins holds {origin!r}, which is no origin. Write each as https://host or "
                    f"https://host:port, without a path, or '*' for every page on the web.",
                    "allow_origins",
                )


DEFAULT_URL = f"http://{ServerConfig().server_name}:{ServerConfig().server_port}"
"""The config of a server without settings."""
