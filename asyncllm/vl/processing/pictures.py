"""Resizing, padding and cutting of pictures, and the digest of a tower's input."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from asyncllm.errors import InvalidMessage
from asyncllm.vl.loading import MAX_IMAGE_PIXELS

__all__ = ["Pixels", "canvas_of", "crops_of", "cut_squares", "cut_tiles", "digest_of", "padded_square", "resized"]

Pixels = NDArray[np.float32]


def resized(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    """Return the image in this size. Raises InvalidMessage if the size has too many pixels."""
    _check_pixels(width, height)
    return image if image.size == (width, height) else image.resize((width, height), resample)


def canvas_of(width: int, height: int) -> Image.Image:
    """Return a black picture to paste an image into. Raises InvalidMessage as `resized`."""
    _check_pixels(width, height)
    return Image.new("RGB", (width, height))


def padded_square(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Return the image at the centre of a square, padded with a colour. It is downscaled if the square would have more
    pixels than an image may have."""
    longest = math.isqrt(MAX_IMAGE_PIXELS)
    if max(image.size) > longest:
        image = ImageOps.contain(image, (longest, longest), Image.Resampling.BOX)
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), colour)
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _check_pixels(width: int, height: int) -> None:
    """Raise InvalidMessage if a scaled image, which must be a narrow one, would have too many pixels."""
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidMessage(
            f"The image is so long that this model's preparation makes {width} x {height} pixels of it. Cut it into "
            f"several."
        )


def digest_of(*parts: object, pixels: NDArray[Any]) -> bytes:
    """Return a digest that identifies a tower's input: of its pixels, or of the bytes that they are computed from."""
    digest = hashlib.sha256(repr((parts, pixels.shape)).encode())
    digest.update(pixels.data)
    return digest.digest()


def crops_of(image: Image.Image, height: int, width: int) -> list[Image.Image]:
    """Cut an image into crops of this size, row by row. Crops at the right and bottom edges are padded with black."""
    return [
        image.crop((left, top, left + width, top + height))
        for top in range(0, image.height, height)
        for left in range(0, image.width, width)
    ]


def cut_tiles(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Cut an image of whole tiles into these, row by row [rows * columns, side, side, 3]."""
    rows, columns = image.height // side, image.width // side
    tiles = np.asarray(image).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, side, side, 3))


def cut_squares(image: Image.Image, patch: int, merge: int) -> NDArray[np.uint8]:
    """Cut an image of whole squares of merge x merge patches into patches [patches, patch, patch, 3]. Squares are
    ordered row by row, and so are the patches of a square."""
    rows, columns = image.height // (patch * merge), image.width // (patch * merge)
    cut = np.asarray(image).reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    return np.ascontiguousarray(cut).reshape(-1, patch, patch, 3)
