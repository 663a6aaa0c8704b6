"""Images from untrusted sources become upright RGB, or raise a typed error."""

from __future__ import annotations

import base64
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from asyncllm import vl
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.vl.loading import MAX_IMAGE_PIXELS
from asyncllm.vl.utils import encode_image_base64, load_image
from tests.vl.checkpoints import picture


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def far_apart(one: Image.Image, other: Image.Image) -> float:
    return float(np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64)).max())


def png_of_size(width: int, height: int) -> bytes:
    """A PNG's beginning that claims a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 64) + b"IDAT" + bytes(68)


def test_every_way_in_gives_the_same_image(tmp_path: Path) -> None:
    image = picture(1)
    data = saved(image, "PNG")
    path = tmp_path / "a b.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    marked = tmp_path / "a%20b%.png"
    marked.write_bytes(data)
    files = [f"{head}{tmp_path}/a%20b.png" for head in ("file://", "FILE://", "file://localhost")]
    for source in (image, data, str(path), path, str(marked), marked, *files, url):
        loaded = load_image(source)
        assert loaded.mode == "RGB"
        assert far_apart(loaded, image) == 0
    assert far_apart(load_image(base64.b64decode(encode_image_base64(image))), image) == 0
    with pytest.raises(InvalidParameter, match="PNG or JPEG"):
        encode_image_base64(image, "nonsense")


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_formats(kind: str) -> None:
    assert far_apart(load_image(saved(picture(2), kind)), picture(2)) < 60


def test_it_is_turned_as_its_exif_entry_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    loaded = load_image(saved(picture(3), "PNG", exif=exif))
    assert far_apart(loaded, picture(3).transpose(Image.Transpose.ROTATE_270)) == 0


def test_of_an_animation_it_is_the_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert far_apart(load_image(data), frames[0]) == 0, kind


def test_sixteen_bits_become_eight() -> None:
    wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    narrow = np.arange(256, dtype=np.uint8).reshape(16, 16)
    loaded = load_image(saved(Image.fromarray(wide), "PNG"))
    assert (np.asarray(loaded) == narrow[..., None]).all()


@pytest.mark.parametrize("mode", ["CMYK", "L", "P", "LA", "RGBA", "1"])
def test_other_modes_become_rgb(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert load_image(saved(picture(1).convert(mode), kind)).mode == "RGB"


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_colours_multiplied_by_their_opacity(mode: str) -> None:
    whole = picture(1).convert("L" if mode == "La" else "RGB")
    whole.putalpha(Image.linear_gradient("L").resize(whole.size))
    assert far_apart(load_image(whole.convert(mode)), load_image(whole)) <= 1


def test_a_pil_image_whose_file_is_broken() -> None:
    """Pillow reads the pixels of an open file when they are asked for."""
    with Image.open(BytesIO(saved(picture(1), "PNG")[:-200])) as cut, pytest.raises(InvalidMessage, match="truncated"):
        load_image(cut)
    closed = Image.open(BytesIO(saved(picture(1), "JPEG")))
    closed.close()
    with pytest.raises(InvalidMessage, match="closed"):
        load_image(closed)


def half_seen(mode: str) -> Image.Image:
    """Return an image of more than one strip, whose upper rows are seen through."""
    seen = Image.linear_gradient("L").resize((9, 600))
    image = picture(1, 9, 600).convert("RGB")
    image.putalpha(seen)
    return image.convert(mode)


PALETTE = half_seen("RGB").quantize(16)


@pytest.mark.parametrize(
    "data",
    [
        saved(half_seen("RGBA"), "PNG"),
        saved(half_seen("LA"), "PNG"),
        saved(half_seen("RGBA"), "WEBP"),
        saved(PALETTE, "PNG", transparency=3),
        saved(PALETTE, "PNG", transparency=bytes(range(0, 256, 16))),
        saved(half_seen("RGB"), "PNG", transparency=half_seen("RGB").getpixel((0, 599))),
    ],
    ids=["RGBA", "LA", "WebP", "one colour", "alpha of each colour", "RGB"],
)
def test_what_is_seen_through_is_white(data: bytes) -> None:
    """As transformers and vLLM have it."""
    with Image.open(BytesIO(data)) as image:
        seen = image.convert("RGBA")
    loaded = load_image(data)
    assert far_apart(loaded, Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")) == 0
    assert far_apart(loaded, seen.convert("RGB")) > 0


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", InvalidMessage, "no bytes"),
        (b"nonsense" * 100, InvalidMessage, "no format that is supported"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", UnsupportedFeature, "SVG"),
        (b"\xef\xbb\xbf <?xml version='1.0'?><svg/>", UnsupportedFeature, "SVG"),
        (b"%PDF-1.7", InvalidMessage, "no format"),
        (saved(picture(1), "PNG")[:-200], InvalidMessage, "truncated"),
        (saved(picture(1), "JPEG")[:400], InvalidMessage, "truncated"),
        (png_of_size(MAX_IMAGE_PIXELS, 2), InvalidMessage, "pixels"),
        (png_of_size(9000, 9000), InvalidMessage, "pixels"),
        (saved(Image.new("F", (4, 4)), "TIFF"), UnsupportedFeature, "floats"),
    ],
    ids=["empty", "bytes", "svg", "xml", "pdf", "cut png", "cut jpeg", "bomb", "large", "floats"],
)
def test_what_is_refused(data: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_image(data)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/no/such/file.png", "cannot be read"),
        ("data:image/png,plain", "base64"),
        ("data:image/png;base64,***", "not base64"),
        (17, "a path, a URL, bytes or a PIL image"),
        ("http://127.0.0.1:9/x.png", "cannot be fetched"),
        ("\0", "cannot be read"),
    ],
)
def test_sources_that_are_none(source: Any, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        load_image(source)


def test_data_urls_as_browsers_take_them() -> None:
    data = saved(picture(1), "PNG")
    text = base64.b64encode(data).decode()
    for url in (
        f"DATA:image/png;BASE64,{text}",
        f"data:;base64,{text}",
        f"data:image/png;charset=utf-8; base64,{text}",
        f"data:image/png;base64,{base64.encodebytes(data).decode()}",
        f"data:image/png;base64,{text.rstrip('=')}",
        f"data:image/png;base64,{quote(text, safe='')}",
    ):
        assert far_apart(load_image(url), picture(1)) == 0, url[:40]
    for head in ("data:image/png", "data:image/png;base64;x=1", "data:image/pngbase64"):
        with pytest.raises(InvalidMessage, match="base64"):
            load_image(f"{head},{text}")
    with pytest.raises(InvalidMessage, match="not base64"):
        load_image(f"data:image/png;base64,{text}é")


@contextmanager
def answering(*pieces: bytes, pause: float = 0.0) -> Iterator[str]:
    """The URL of a server that answers each connection with these pieces, the last one again and again."""

    def answer(connection: socket.socket) -> None:
        connection.settimeout(20)
        with connection, suppress(OSError):
            connection.recv(2**16)
            for piece in chain(pieces, repeat(pieces[-1])):
                connection.sendall(piece)
                time.sleep(pause)

    def serve() -> None:
        with suppress(OSError):
            while True:
                answer(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: /y.png\r\n\r\n"


@pytest.mark.parametrize(
    "begins", [b"HTTP/1.1 200 OK\r\nServer: ", HEAD, REDIRECT], ids=["head", "content", "redirect"]
)
def test_a_slow_server_is_given_up(begins: bytes) -> None:
    with answering(begins, b"x", pause=0.01) as url:
        began = time.monotonic()
        with pytest.raises(InvalidMessage, match=r"cannot be fetched: .*(timed out|too long)"):
            load_image(url, timeout=0.2)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(("begins", "says"), [(HEAD, "more than 1000 bytes"), (REDIRECT, "too much")])
def test_what_never_ends_is_cut(begins: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.vl.loading.MAX_IMAGE_BYTES", 1000)
    with answering(begins, b"x" * 2**20) as url, pytest.raises(InvalidMessage, match=says):
        load_image(url)


def test_an_address_that_is_none() -> None:
    with pytest.raises(InvalidMessage, match="cannot be fetched"):
        load_image("http://a b/x.png")


def test_both_import_paths_of_lmdeploy() -> None:
    assert vl.load_image is load_image
    assert vl.encode_image_base64 is encode_image_base64
