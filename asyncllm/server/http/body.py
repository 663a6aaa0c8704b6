"""The body of a request, which is neither read nor decompressed before its route asks for it."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from asyncllm.server.http.errors import ApiError

__all__ = ["defer_continue", "read_body"]

WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}
"""Window bits of the supported encodings, by their names in Content-Encoding."""
RAW_DEFLATE = -zlib.MAX_WBITS
"""Deflate without the standard header, as some clients send it."""

INLINE_BYTES = 2**14
"""Size from which a compressed body is decompressed in a thread: 4 MiB may take a second."""

CLOSING = {"Connection": "close"}


async def read_body(request: web.Request, patience: float, max_bytes: int, *, undeclared: bool = False) -> bytes:
    """Return the whole body, decompressed; all of it must arrive within `patience` seconds. `undeclared`: programs need
    not declare that it is JSON.

    Raises ApiError 400, 408, 413, 415, 417."""
    # A browser sends other types across origins without asking, and declares itself as a browser.
    browser = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    if request.content_type != "application/json" and (browser or not undeclared):
        # 400 as in LMDeploy and vLLM, whose clients' tests look for it.
        raise ApiError(
            400,
            "The body must be JSON: send the header Content-Type: application/json.",
            code="unsupported_media_type",
            headers=CLOSING,
        )
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    if encoding != "identity" and encoding not in WINDOW_BITS:
        raise ApiError(
            415,
            "The body's Content-Encoding is not known here. Send gzip, deflate, or the body as it is.",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, deflate", **CLOSING},
        )
    if (request.content_length or 0) > max_bytes:
        raise _too_large()
    try:
        async with asyncio.timeout(patience):
            await _say_continue(request)
            body = await _received(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {patience:g} seconds.",
            code="body_timeout",
            headers={"x-should-retry": "false", **CLOSING},
        ) from None
    except (web.RequestPayloadError, ValueError) as error:
        raise _broken() from error
    if encoding == "identity":
        return body
    if len(body) <= INLINE_BYTES:
        return _unpacked(body, encoding, max_bytes)
    return await asyncio.to_thread(_unpacked, body, encoding, max_bytes)


async def defer_continue(request: web.Request) -> None:
    """Leave `Expect: 100-continue` to `read_body`, so that a refused request need not send its body."""


async def _say_continue(request: web.Request) -> None:
    """Ask a client that sent `Expect: 100-continue` for the body. Raises ApiError 417."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < (1, 1):
        return
    if expected.strip().lower() != "100-continue":
        raise ApiError(417, "Expect can be 100-continue, and nothing else.", code="unknown_expectation")
    if not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _received(request: web.Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise _too_large()
    return bytes(body)


def _unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    window_bits = WINDOW_BITS[encoding]
    if encoding == "deflate" and body[:1] and body[0] & 0x0F != zlib.DEFLATED:
        window_bits = RAW_DEFLATE
    unpacker = zlib.decompressobj(window_bits)
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise _broken() from error
    if len(unpacked) > max_bytes:
        raise _too_large()
    if not unpacker.eof or unpacker.unused_data:
        raise _broken()
    return unpacked


def _too_large() -> ApiError:
    return ApiError(
        413,
        "The body is larger than the server takes. Send less, or smaller images; the server's owner sets "
        "--max-body-bytes.",
        code="body_too_large",
        headers=CLOSING,
    )


def _broken() -> ApiError:
    return ApiError(
        400, "The body could not be read: its framing or its encoding is broken.", code="invalid_body", headers=CLOSING
    )
