"""Safe loading of images from files, URLs and bytes: every input yields an RGB image or a typed error.

An untrusted image may be broken, may expand to gigabytes, or may be a program (SVG). Therefore only a few formats are
accepted, the size is checked before the pixels are decoded, and nothing but the pixels is kept.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature, short
from asyncllm.text.image_marks import is_address, is_data_url
from asyncllm.vl.fetching import fetch

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
"""Maximum size of an encoded file."""
MAX_IMAGE_PIXELS = 2**26
"""Maximum number of pixels, that of 8192 x 8192, which take 200 MB decoded."""

FETCH_SECONDS = 30.0
_STRIP = 256
_SPACES = b" \t\n\r\f"

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_MARKUP = (b"<svg", b"<?xml", b"<!doctype", b"<html")
_SIXTEEN_BIT = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})


def load_image(image_url: str | bytes | Path | Image.Image, *, timeout: float = FETCH_SECONDS) -> Image.Image:
    """Return an RGB image from a path, an http(s) or `data:` URL, the bytes of a file, or a PIL image.

    The image is rotated as its EXIF entry says, 16 bits per colour are reduced to 8, and transparency is blended with
    white. An animated image yields its first frame. `timeout` is in seconds. The function opens any path and address,
    so pass it trusted ones only; the server fetches its clients' images under stricter rules. Raises InvalidMessage for
    an input that is not an image or too large, UnsupportedFeature for SVG.
    """
    if isinstance(image_url, Image.Image):
        with _decoding():
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
    """Return the bytes of a media file from a path, an http(s) or `data:` URL, or bytes. Reading stops soon after
    MAX_IMAGE_BYTES, so that the decoder refuses the file. `what`: the kind of file, for errors. Raises
    InvalidMessage."""
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
    text = str(source)
    if text[:7].lower() == "file://":
        text = urllib.parse.unquote(text[7:].removeprefix("localhost"))
    try:
        with Path(text).open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidMessage(f"The {what} {short(str(source))} cannot be read: {reason}. Check the path.") from None


def decode_data_url(url: str, what: str = "image") -> bytes:
    """Return the bytes of `data:image/...;base64,...`. Like browsers, it accepts percent-encoding, white space, and
    base64 without padding. Raises InvalidMessage."""
    head, comma, text = url.partition(",")
    if not comma or not is_data_url(head) or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidMessage(
            f"The {what}'s URL begins with {short(head[:40])} and is not data:{what}/...;base64,... Encode the file "
            f"as base64."
        )
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        _too_many_bytes(what)
    try:
        packed = (urllib.parse.unquote(text) if "%" in text else text).encode("ascii")
        # Searching is much faster than removing, and both hold the interpreter lock.
        if any(space in packed for space in _SPACES):
            packed = packed.translate(None, _SPACES)
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage(f"The {what}'s data: URL is not base64 ({error}). Encode the file again.") from None


def decode_image(data: bytes) -> Image.Image:
    """Decode the bytes of a file to an RGB image. Raises InvalidMessage, UnsupportedFeature."""
    if len(data) > MAX_IMAGE_BYTES:
        _too_many_bytes()
    if not data:
        raise InvalidMessage("The image has no bytes. Send the file's content.")
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
        raise UnsupportedFeature(
            "The image is markup (SVG, XML or HTML), which is not drawn here. Send it as PNG or JPEG.", "messages"
        )
    with _decoding():
        try:
            opened = Image.open(BytesIO(data), formats=_FORMATS)
        except UnidentifiedImageError:
            raise InvalidMessage(
                f"The image's {len(data)} bytes are in no format that is supported. Send one of: {', '.join(_FORMATS)}."
            ) from None
        with opened as image:
            return _finished(image)


@contextmanager
def _decoding() -> Iterator[None]:
    """Turn errors of Pillow's decoders, which may read a PIL image's file only now, into InvalidMessage."""
    try:
        yield
    except (InvalidMessage, UnsupportedFeature, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels("the image") from None
    except Exception as error:  # a broken file can make the decoders raise any exception
        raise InvalidMessage(
            f"The image is broken or truncated ({short(str(error))}). Send the whole file, or save it again."
        ) from None


def encode_image_base64(image: str | Path | Image.Image, format: str = "PNG") -> str:
    """Return the base64 text of a file in `format` with an image, or with the image at a path or URL.

    Raises InvalidMessage as `load_image`, InvalidParameter for a format that cannot be written.
    """
    buffer = BytesIO()
    try:
        load_image(image).save(buffer, format)
    except KeyError:
        raise InvalidParameter(
            f"format={format!r} is not a format that images can be written in. Use PNG or JPEG.", "format"
        ) from None
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _finished(image: Image.Image) -> Image.Image:
    """Return the first frame, upright, in RGB and without the file's metadata."""
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
            "The image's pixels are floats without a defined white. Save it with 8 or 16 bits.", "messages"
        )
    converted = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    converted.info = {}
    return converted


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image in RGB, blended with white, on which black letters on a transparent ground are legible."""
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    page = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):  # in strips, so that no copy of a large image is made
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
        page.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), (0, top))
    return page


def _fetched(url: str, timeout: float, what: str = "image") -> bytes:
    """Return the content of a trusted URL. Raises InvalidMessage, also if it takes longer than `timeout` seconds."""
    try:
        return fetch(url, seconds=timeout, max_bytes=MAX_IMAGE_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidMessage(f"The {what} {short(url)} cannot be fetched: {error}. Check the URL.") from None


def _too_many_bytes(what: str = "image") -> NoReturn:
    raise InvalidMessage(f"The {what} has more than {MAX_IMAGE_BYTES} bytes. Send a smaller one.")


def _too_many_pixels(what: str) -> InvalidMessage:
    return InvalidMessage(f"There are more than {MAX_IMAGE_PIXELS} pixels in {what}. Send a smaller one.")
