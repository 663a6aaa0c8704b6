"""Images from files, URLs and bytes, decoded with care: every way in ends in an RGB image or in a typed error.

An image from a stranger may be broken, may unfold to gigabytes, or may be a program (SVG). So its format is one of a
few, its size is checked before its pixels are decoded, and nothing of it is kept but the pixels.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import time
import urllib.parse
import urllib.request
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature, short
from asyncllm.text.image_marks import is_address, is_data_url

__all__ = [
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "decode_data_url",
    "decode_image",
    "encode_image_base64",
    "load_image",
    "media_bytes",
]

MAX_IMAGE_BYTES = 2**26
"""Of a file, compressed."""
MAX_IMAGE_PIXELS = 2**26
"""An image of 8192 x 8192 takes 200 MB once it is decoded."""

FETCH_SECONDS = 30.0
_PIECE = 2**16
_STRIP = 256
_SPACES = b" \t\n\r\f"

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_MARKUP = (b"<svg", b"<?xml", b"<!doctype", b"<html")
_SIXTEEN_BIT = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})


def load_image(image_url: str | bytes | Path | Image.Image, *, timeout: float = FETCH_SECONDS) -> Image.Image:
    """Return an RGB image from a path, an http(s) or `data:` URL, the bytes of a file, or an image of PIL's.

    It is turned as its EXIF entry says; of an animated one it is the first frame; 16 bits become 8, and what can be
    seen through is white behind. It reads files and calls any address that it is given, so it is for a program's own
    use: a server fetches for its clients by rules of its own. Raises InvalidMessage for what is no image or too large,
    UnsupportedFeature for SVG.
    """
    if isinstance(image_url, Image.Image):
        return _finished(image_url)
    if isinstance(image_url, bytes):
        return decode_image(image_url)
    if is_data_url(image_url):
        return decode_image(decode_data_url(image_url))
    if is_address(image_url):
        return decode_image(_fetched(image_url, timeout))
    if not isinstance(image_url, str | Path):
        raise InvalidMessage(
            f"An image is a path, a URL, bytes or a PIL image, not {type(image_url).__name__}. Load it by "
            f"asyncllm.vl.load_image."
        )
    return decode_image(_file_of(image_url, "image"))


def media_bytes(source: Any, what: str, *, timeout: float = FETCH_SECONDS) -> bytes:
    """Return the bytes of a file of media from a path, an http(s) or `data:` URL, or bytes, as `load_image` reads them:
    of too many, some more than are allowed. `what` it is goes into errors. Raises InvalidMessage."""
    if isinstance(source, bytes):
        return source
    if is_data_url(source):
        return decode_data_url(source, what)
    if is_address(source):
        return _fetched(source, timeout, what)
    if not isinstance(source, str | Path):
        raise InvalidMessage(f"A {what} is a path, a URL or bytes, not {type(source).__name__}. Give one of them.")
    return _file_of(source, what)


def _file_of(source: str | Path, what: str) -> bytes:
    path = Path(urllib.parse.unquote(str(source).removeprefix("file://")))
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidMessage(f"The {what} {short(str(source))} cannot be read: {reason}. Check the path.") from None


def decode_data_url(url: str, what: str = "image") -> bytes:
    """Return the bytes of `data:image/...;base64,...`. As browsers do, it takes what is percent-encoded, white space,
    and base64 without its padding. Raises InvalidMessage."""
    head, comma, text = url.partition(",")
    if not comma or not is_data_url(head) or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidMessage(
            f"The {what}'s URL begins with {short(head[:40])}, and is not data:{what}/...;base64,... Encode the file "
            f"by base64."
        )
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        _too_many_bytes(what)
    try:
        packed = (urllib.parse.unquote(text) if "%" in text else text).encode("ascii")
        # Looking for it is much quicker than taking it out, and the interpreter lock is held meanwhile.
        if any(space in packed for space in _SPACES):
            packed = packed.translate(None, _SPACES)
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage(f"The {what}'s data: URL is not base64 ({error}). Encode the file again.") from None


def decode_image(data: bytes) -> Image.Image:
    """Return the RGB image of a file's bytes. Raises InvalidMessage, UnsupportedFeature."""
    if len(data) > MAX_IMAGE_BYTES:
        _too_many_bytes()
    if not data:
        raise InvalidMessage("The image has no bytes. Send the file's content.")
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
        raise UnsupportedFeature(
            "The image is markup (SVG, XML or HTML), which is not drawn here. Send it as PNG or JPEG.", "messages"
        )
    try:
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            return _finished(image)
    except (InvalidMessage, UnsupportedFeature):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels("the image") from None
    except UnidentifiedImageError:
        raise InvalidMessage(
            f"The image's {len(data)} bytes are of no format that is read. Send one of: {', '.join(_FORMATS)}."
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # the decoders raise whatever a broken file leads them to
        raise InvalidMessage(
            f"The image is broken or truncated ({short(str(error))}). Send the whole file, or save it again."
        ) from None


def encode_image_base64(image: str | Path | Image.Image, format: str = "PNG") -> str:
    """Return an image, or the image of a path or URL, as base64 text of a file of this format.

    Raises InvalidMessage as `load_image`, InvalidParameter for a format that is not written.
    """
    buffer = BytesIO()
    try:
        load_image(image).save(buffer, format)
    except KeyError:
        raise InvalidParameter(
            f"format={format!r} is none that images are written in. Use PNG or JPEG.", "format"
        ) from None
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _finished(image: Image.Image) -> Image.Image:
    """Return the first frame upright and in RGB, with nothing of the file."""
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise _too_many_pixels(f"the image of {image.width} x {image.height}")
    if not image.width or not image.height:
        raise InvalidMessage("The image has no pixels. Send one with a width and a height.")
    if getattr(image, "is_animated", False):
        image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode in _SIXTEEN_BIT or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        narrow = np.clip(wide // 257 if wide.max() > 255 else wide, 0, 255)
        image = Image.fromarray(narrow.astype(np.uint8))
    elif image.mode == "F":
        raise UnsupportedFeature(
            "The image's pixels are floats, and nothing says what is white. Save it with 8 or 16 bits.", "messages"
        )
    converted = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    converted.info = {}
    return converted


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB as it looks on a white page, where black letters on nothing are seen."""
    page = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):  # so that a large image is not there several times
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
        page.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), (0, top))
    return page


def _fetched(url: str, timeout: float, what: str = "image") -> bytes:
    """Return what a program's own URL gives within so many seconds."""
    deadline, data = time.monotonic() + timeout, bytearray()
    request = urllib.request.Request(url, headers={"User-Agent": "asyncllm"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            while len(data) <= MAX_IMAGE_BYTES and (piece := answer.read1(_PIECE)):
                data += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes more than {timeout:g} s")
            return bytes(data)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidMessage(f"The {what} {short(url)} cannot be fetched: {error}. Check the URL.") from None


def _too_many_bytes(what: str = "image") -> NoReturn:
    raise InvalidMessage(f"The {what} has more than {MAX_IMAGE_BYTES} bytes. Send a smaller one.")


def _too_many_pixels(what: str) -> InvalidMessage:
    return InvalidMessage(f"There are more than {MAX_IMAGE_PIXELS} pixels in {what}. Send a smaller one.")
