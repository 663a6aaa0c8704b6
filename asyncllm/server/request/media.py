"""Images and videos that clients send: as data: URLs, or as addresses of a few domains, which the server fetches.

A client may read neither the server's files nor addresses that only the server can reach. So only the owner's list of
domains is fetched from, a name is resolved once, to public addresses only, and redirects follow the same rules.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.fields import ImageUrls
from asyncllm.server.service import service_of
from asyncllm.text.image_marks import IMAGE_PARTS, MAX_IMAGES, VIDEO_PARTS, is_address, is_data_url, source_of

__all__ = ["MediaFetcher", "image_parts", "images_of", "is_public", "with_images"]

MAX_BYTES = 2**24
"""Maximum bytes of a fetched image."""
MAX_VIDEO_BYTES = 2**26
"""Maximum bytes of a fetched video."""
MAX_REDIRECTS = 3
SECONDS = 10.0
"""Seconds to fetch one image, redirects included."""
MAX_FETCHES = 4
"""Maximum number of images of a request that are fetched at a time."""
MAX_TOTAL = 2**28
"""Maximum number of bytes fetched for a request."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IPv6 has given out so far."""
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""The prefix under which an IPv6-only network reaches IPv4: the last 32 bits are the address."""
_RELAYED = ipaddress.IPv6Network("2002::/16")
"""6to4, whose addresses lead to one of IPv4 within them."""
_BASE64 = re.compile("[A-Za-z0-9+/]{64}")
_HEADERS = {"User-Agent": "asyncllm"}


def is_public(address: str) -> bool:
    """Return whether an address is a public one of the internet, and leads to no other one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if found.version == 6:
        if found in _TRANSLATED:
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        elif found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found not in _UNICAST or found in _RELAYED:
            return False
    return found.is_global and not found.is_multicast


async def with_images(request: web.Request, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the bytes of images and videos in place of their http(s) addresses; data: URLs stay.
    Raises ApiError."""
    media = list(_media(messages))
    for _, kind, url in media:
        if kind in VIDEO_PARTS and isinstance(url, list):
            if not all(is_data_url(frame) for frame in url):
                raise _refused("Each frame of a list is a URL of the form data:image/png;base64,... None is fetched.")
        elif url is None:
            raise _refused(f'A part of type {kind!r} names nothing. Give {{"type": "image_url", "image_url": "..."}}.')
        elif isinstance(url, str) and _BASE64.fullmatch(url[:64]):
            raise _refused("An image in base64 has no head. Put data:image/png;base64, in front of it.")
        elif not is_data_url(url) and not is_address(url):
            raise _refused(
                "An image or a video is sent as a URL of the form data:image/png;base64,... or, where the server "
                "allows domains, as http(s)://, and a video also as a list of frames. Files of the server are not read."
            )
    found = [(part, kind, url) for part, kind, url in media if is_address(url)]
    if not found:
        return messages
    if len(found) > MAX_IMAGES:
        raise _refused(f"The messages name {len(found)} images, and at most {MAX_IMAGES} are fetched. Send fewer.")
    fetcher = MediaFetcher(service_of(request).config.allowed_media_domains or ())
    gate = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(kind: str, url: str) -> bytes:
        async with gate:
            return await fetcher.fetch(url, MAX_VIDEO_BYTES if kind in VIDEO_PARTS else MAX_BYTES)

    tasks = [asyncio.ensure_future(fetch(kind, url)) for _, kind, url in found]
    try:
        fetched = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for (part, kind, _), image in zip(found, fetched, strict=True):
        part[kind] = {**part[kind], "url": image} if isinstance(part[kind], dict) else image
    return messages


def image_parts(urls: ImageUrls) -> list[dict[str, Any]]:
    """Return message parts for the images of a separate field."""
    every = urls if isinstance(urls, list) else [urls]
    return [{"type": "image_url", "image_url": url} for url in every if url]


async def images_of(request: web.Request, urls: ImageUrls) -> list[Any]:
    """Return the images of a separate field for the engine. Raises ApiError."""
    parts = image_parts(urls)
    await with_images(request, [{"content": parts}])
    return [part["image_url"] for part in parts]


class MediaFetcher:
    """Fetches from a list of domains for a request."""

    def __init__(
        self,
        domains: Sequence[str],
        *,
        accepts: Callable[[str], bool] = is_public,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`domains`: names of hosts, "*" for any. `accepts`: whether to connect to an address."""
        self._domains = frozenset(domain.lower() for domain in domains)
        self._accepts = accepts
        self._resolver = resolver
        self._room = MAX_TOTAL

    async def fetch(self, url: str, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the content of an address, up to a maximum number of bytes. Raises ApiError 400."""
        resolver = _CheckedResolver(self._resolver or aiohttp.ThreadedResolver(), self._accepts)
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True)
        session = aiohttp.ClientSession(connector=connector, headers=_HEADERS, trust_env=False)
        try:
            async with session, asyncio.timeout(SECONDS):
                return await self._follow(session, url, max_bytes)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _refused(f"An image could not be fetched ({type(error).__name__}). Send it as a data: URL.") from None

    async def _follow(self, session: aiohttp.ClientSession, url: str, max_bytes: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = self._checked(url)
            async with session.get(target, allow_redirects=False) as answer:
                if answer.status in (301, 302, 303, 307, 308):
                    url = str(target.join(URL(answer.headers.get("Location", ""))))
                    continue
                if answer.status != 200:
                    raise _refused(f"An image could not be fetched: status {answer.status}. Send it as a data: URL.")
                return await self._read(answer, max_bytes)
        raise _refused(f"An image's address redirects more than {MAX_REDIRECTS} times. Send its last address.")

    async def _read(self, answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        data = bytearray()
        async for piece in answer.content.iter_chunked(2**16):
            data += piece
            self._room -= len(piece)
            if len(data) > max_bytes:
                raise _refused(f"An image or a video has more than {max_bytes} bytes. Send a smaller one.")
            if self._room < 0:
                raise _refused(f"Images and videos of a request have more than {MAX_TOTAL} bytes. Send fewer.")
        return bytes(data)

    def _checked(self, url: str) -> URL:
        """Return an address that may be fetched from. Raises ApiError."""
        target = URL(url)
        host = (target.host or "").lower().rstrip(".")
        if target.scheme not in ("http", "https") or not host:
            raise _refused("An image's address is not of the form http(s)://host/path. Send it as a data: URL.")
        if target.user or target.password:
            raise _refused("An image's address holds a user or a password. Leave them out.")
        if host not in self._domains and "*" not in self._domains:
            allowed = f"it fetches from {', '.join(sorted(self._domains))}" if self._domains else "it fetches none"
            raise _refused(
                f"The server does not fetch images from {host[:128]!r}: {allowed}. Send the image as a data: URL; the "
                f"server's owner sets --allowed-media-domains."
            )
        if _is_literal(host) and not self._accepts(host):
            raise _refused("An image's address is within a private network. Send it as a data: URL.")
        return target


class _CheckedResolver(AbstractResolver):
    """Resolves names to allowed addresses, to which the connection then goes."""

    def __init__(self, inner: AbstractResolver, accepts: Callable[[str], bool]) -> None:
        self._inner, self._accepts = inner, accepts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        if not found or not all(self._accepts(each["host"]) for each in found):
            raise _refused("An image's host has an address within a private network. Send it as a data: URL.")
        return found

    async def close(self) -> None:
        await self._inner.close()


def _media(messages: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each part that is an image or a video: the part, its type, and its source."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in (*IMAGE_PARTS, *VIDEO_PARTS):
                yield part, kind, source_of(part, kind)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_image_url", param="messages")
