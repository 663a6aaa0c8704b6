"""How a program listens for HTTP, whom it lets in, and how long it waits: the settings of server and distributor."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from asyncllm.config.settings import MAX_COUNT, Settings
from asyncllm.errors import InvalidParameter

__all__ = ["ListenConfig"]


class ListenConfig(Settings, frozen=True, kw_only=True):
    """How a program listens for HTTP, whom it lets in, and how long it waits."""

    server_name: Annotated[str, Meta(min_length=1, description="Address or host name to listen on.")] = "127.0.0.1"
    server_port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: a free one.")] = 0
    api_keys: Annotated[
        list[str] | None,
        Meta(description="API keys, one of which a request must carry. Prefer a file: others can read command lines."),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(description="File with one API key per line. ASYNCLLM_API_KEYS may list keys too, separated by commas."),
    ] = None
    admin_key_file: Annotated[
        str | None, Meta(description="File with one key per line for routes that affect all clients.")
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
    allow_methods: Annotated[
        list[str] | None, Meta(description="Methods for those origins; None: GET, POST and DELETE.")
    ] = None
    allow_headers: Annotated[list[str] | None, Meta(description="Headers for those origins; None or '*': any.")] = None
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_COUNT,
            description="Maximum number of open connections; no more than the process may open files.",
        ),
    ] = 8192
    body_timeout: Annotated[float, Meta(gt=0, le=3600, description="Maximum seconds for a body to arrive.")] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum seconds that a client may leave an answer unread.")
    ] = 30.0
    keep_alive_timeout: Annotated[
        float,
        Meta(gt=0, le=3600, description="Maximum seconds that a connection may be idle, or take for request headers."),
    ] = 30.0
    drain_timeout: Annotated[
        float, Meta(ge=0, le=86400, description="Maximum seconds for running answers to finish after SIGTERM.")
    ] = 60.0
    log_level: Annotated[
        Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"], Meta(description="What is logged.")
    ] = "WARNING"
    disable_metrics: Annotated[bool, Meta(description="Leave out /metrics.")] = False

    def _check(self) -> None:
        self._check_filled("api_keys", "allow_origins", "allowed_hosts", "allow_methods", "allow_headers")
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

    def _check_filled(self, *names: str) -> None:
        """Raise InvalidParameter if one of these lists holds an empty text."""
        for name in names:
            if any(not text.strip() for text in getattr(self, name) or ()):
                raise InvalidParameter(f"{name} holds an empty text. Remove it.", name)
