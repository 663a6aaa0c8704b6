"""Access control: keys, the Host header, and web pages of other origins."""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping

from aiohttp import web

from asyncllm.config import ListenConfig
from asyncllm.errors import InvalidParameter
from asyncllm.server.http.errors import ApiError

__all__ = ["KEY", "Access", "Auth", "is_loopback", "read_admin_keys", "read_key", "read_keys"]

KEY = web.RequestKey("KEY", int)
"""Index of the server's key that the request carries; -1 if it needs none. Set by the entry point."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
"""Hosts by which clients call a server on their own machine. No name server can redirect these."""
KEYS_VARIABLE = "ASYNCLLM_API_KEYS"

HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
"""A valid Host header."""
PRIVATE_ENDINGS = (".local", ".internal", ".lan", ".home.arpa")
"""Endings of names that no public name server resolves, so that no web page can have them."""
ORIGIN = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,260}")
"""An Origin that may be quoted in an error."""
ANY = "*"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Should-Retry, X-Ignored-Fields"
"""Headers of answers that a page's client reads, as those of OpenAI and Anthropic do."""
HEADER_NAMES = re.compile(r"[A-Za-z0-9_,\s-]{0,2000}")


class Auth(enum.Enum):
    """The rights required by a route."""

    PUBLIC = "public"
    """No rights: the server's health is not secret."""
    KEY = "key"
    """One of the server's keys, if it has any."""
    ADMIN = "admin"
    """One of the administrator keys. Without any such key, the route is not served."""


def is_loopback(name: str) -> bool:
    """Return whether the address or host name can only be reached from this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_address(name: str) -> bool:
    """Return whether the name is an IP address, which no name server can redirect."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_private_name(name: str) -> bool:
    """Return whether the name belongs to a local network: without a dot, or with a private ending."""
    return "." not in name or name.endswith(PRIVATE_ENDINGS)


def read_keys(config: ListenConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return all keys, from the config, its file and the environment. Raises InvalidParameter for a file without
    keys."""
    keys = [key.strip() for key in config.api_keys or ()]
    if config.api_key_file is not None:
        keys += _keys_in(config.api_key_file, "api_key_file")
    keys += [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    return list(dict.fromkeys(keys))


def read_admin_keys(config: ListenConfig) -> list[str]:
    """Return the administrator keys. Raises InvalidParameter for a file without keys."""
    return [] if config.admin_key_file is None else _keys_in(config.admin_key_file, "admin_key_file")


def read_key(path: str | None, field: str) -> str | None:
    """Return the only key of a file; None without a file. Raises InvalidParameter."""
    if path is None:
        return None
    keys = _keys_in(path, field)
    if len(keys) > 1:
        raise InvalidParameter(f"The key file {path!r} holds {len(keys)} keys. Leave the one to send.", field)
    return keys[0]


def _keys_in(path: str, field: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            found = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(
            f"The key file {path!r} cannot be read ({type(error).__name__}). Give a text file with one key a line.",
            field,
        ) from None
    if not found:
        raise InvalidParameter(f"The key file {path!r} holds no key. Add one.", field)
    return found


def _digest(key: str) -> bytes:
    """Return the digest of a key's bytes as in the header or the environment, which need not be UTF-8."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name_in(host: str) -> str | None:
    """Return the name or address in a Host header, without port and brackets; None if the header is invalid."""
    found = HOST.fullmatch(host)
    return (found["ipv6"] or found["name"]).lower() if found is not None else None


class Access:
    """The access rules, applied once per request. Immutable."""

    def __init__(self, config: ListenConfig, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        """Raise InvalidParameter if other machines, or any web page, could call without a key."""
        self._digests = [_digest(key) for key in keys]
        self._admin_digests = [_digest(key) for key in admin_keys]
        loopback = is_loopback(config.server_name)
        if not loopback and not self._digests and not config.insecure_no_auth:
            raise InvalidParameter(
                f"server_name {config.server_name!r} can be reached from other machines, and no key is set. Set one "
                f"(api_key_file, or the variable {KEYS_VARIABLE}), listen on 127.0.0.1, or accept the risk with "
                f"insecure_no_auth.",
                "server_name",
            )
        self._hosts = LOOPBACK_NAMES | {
            _name_in(host) or host.lower() for host in (config.server_name, *(config.allowed_hosts or ()))
        }
        """Names of this server in a Host header."""
        self._any_host = bool(self._digests) or ANY in self._hosts
        """With a key any name is fine: a page that reaches this server under its own name does not know the key."""
        self._is_open = not loopback
        self._origins = frozenset(config.allow_origins or ())
        self._any_origin = ANY in self._origins
        if self._any_origin and not self._digests and not config.insecure_no_auth:
            raise InvalidParameter(
                "allow_origins '*' lets every page on the web call a server without a key. Set a key (api_key_file, or "
                f"the variable {KEYS_VARIABLE}), list the pages that may, or accept the risk with insecure_no_auth.",
                "allow_origins",
            )
        self._methods = ", ".join(config.allow_methods or ("GET", "POST", "DELETE"))
        self._headers = ", ".join(config.allow_headers or (ANY,))
        self._credentials = config.allow_credentials

    @property
    def num_keys(self) -> int:
        return len(self._digests)

    @property
    def has_admin(self) -> bool:
        """Whether there are administrator keys."""
        return bool(self._admin_digests)

    def check_origin(self, request: web.Request) -> None:
        """Raise ApiError 403 for a Host or an Origin that is not allowed.

        A name of an attacker's page that resolves to 127.0.0.1 shows in the Host header (DNS rebinding); a page of
        another origin shows in the Origin header.
        """
        host = request.headers.get("Host", "")
        if not self._any_host and not self._is_own(host):
            name = _name_in(host)
            raise ApiError(
                403,
                "The Host header names no machine."
                if name is None or len(name) > 253
                else f"This server does not know that {name!r} is its own name. Start it with --allowed-hosts {name}, "
                f"or with a key, or call it by its address.",
                code="host_not_allowed",
            )
        origin = request.headers.get("Origin")
        if origin is not None and not self._is_listed(origin) and origin != f"{request.scheme}://{host}":
            quoted = origin if ORIGIN.fullmatch(origin) else "ORIGIN"
            raise ApiError(
                403,
                f"Pages of this origin are not let in. Start the server with --allow-origins {quoted}.",
                code="origin_not_allowed",
            )

    def _is_listed(self, origin: str | None) -> bool:
        return origin is not None and (self._any_origin or origin in self._origins)

    def _is_own(self, host: str) -> bool:
        name = _name_in(host)
        if name is None:
            return False
        return name in self._hosts or (self._is_open and (is_address(name) or is_private_name(name)))

    def key_of(self, request: web.Request) -> int:
        """Return the index of the request's key; -1 if none is needed. Raises ApiError 401."""
        return self._find(request, self._digests) if self._digests else -1

    def check_admin(self, request: web.Request) -> None:
        """Raise ApiError 401 unless the request carries an administrator key."""
        self._find(request, self._admin_digests)

    @staticmethod
    def _find(request: web.Request, digests: list[bytes]) -> int:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = _digest(key)
        found = -1
        # Compare all keys, so that timing does not reveal which one matches.
        for index, known in enumerate(digests):
            if hmac.compare_digest(known, digest):
                found = index
        if found < 0:
            raise ApiError(
                401,
                "The key is missing or wrong. Send the header Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def grant(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add the headers with which a browser lets an allowed page read the response."""
        origin = request.headers.get("Origin")
        if self._any_origin:
            response.headers["Access-Control-Allow-Origin"] = ANY
        elif self._is_listed(origin):
            response.headers["Access-Control-Allow-Origin"] = str(origin)
            response.headers["Vary"] = "Origin"
            if self._credentials:
                response.headers["Access-Control-Allow-Credentials"] = "true"
        if "Access-Control-Allow-Origin" in response.headers:
            response.headers["Access-Control-Expose-Headers"] = EXPOSED

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a browser's preflight request; None for any other request."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or not self._is_listed(request.headers.get("Origin")):
            return None
        # Browsers do not accept '*' for the key's header, so the requested headers are granted by name.
        wanted = {name: request.headers.get(f"Access-Control-Request-{name}", "") for name in ("Method", "Headers")}
        granted = {
            name: asked if ANY in allowed and HEADER_NAMES.fullmatch(asked) else allowed
            for (name, asked), allowed in zip(wanted.items(), (self._methods, self._headers), strict=True)
        }
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": granted["Method"],
                "Access-Control-Allow-Headers": granted["Headers"],
                "Access-Control-Max-Age": "600",
            },
        )
