"""Settings of preprocessor_config.json (sizes, resampling, means), and images as the numbers that a tower reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from asyncllm.errors import InvalidCheckpoint, InvalidMessage, InvalidParameter, UnsupportedModel, short
from asyncllm.vl.loading import MAX_IMAGE_PIXELS

__all__ = [
    "PictureSettings",
    "Pixels",
    "canvas_of",
    "digest_of",
    "is_low",
    "padded_square",
    "refuse_options",
    "resized",
]

Pixels = NDArray[np.float32]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class PictureSettings:
    """The conversion of pictures to numbers: (bytes * `scale` - mean) / deviation, for each colour."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        where: str,
        *,
        mean: tuple[float, ...] = CLIP_MEAN,
        std: tuple[float, ...] = CLIP_STD,
        resample: Image.Resampling = Image.Resampling.BICUBIC,
    ) -> None:
        """`mean`, `std` and `resample` are the defaults of the file. Raises InvalidCheckpoint, UnsupportedModel."""
        self.fields, self.where = fields, where
        if self._given("do_resize", True) is not True:
            raise UnsupportedModel(
                f"{where}: do_resize = {short(fields['do_resize'])} is not implemented. Set it to true."
            )
        chosen = self._given("resample", resample)
        if chosen not in list(Image.Resampling):
            self._refuse("resample", "which is none of Pillow's filters")
        self.resample = Image.Resampling(chosen)
        self.scale = self.number("rescale_factor", 1 / 255) if self._flag("do_rescale") else 1.0
        if self.scale > 1:
            self._refuse("rescale_factor", "where a number up to 1 belongs")
        self.mean, self.std = self._colours("image_mean", mean), self._colours("image_std", std)
        if not self.std.all():
            self._refuse("image_std", "which may not be 0")
        self._colour = self.mean
        if not self._flag("do_normalize"):
            self.mean, self.std = np.zeros_like(self.mean), np.ones_like(self.std)

    def _flag(self, key: str) -> bool:
        """Return a flag that is on unless the file says otherwise."""
        value = self._given(key, True)
        if type(value) is not bool:
            self._refuse(key, "where true or false belongs")
        return bool(value)

    def _colours(self, key: str, default: tuple[float, ...]) -> Pixels:
        value = self._given(key, default)
        numbers = isinstance(value, list | tuple) and all(type(each) in (int, float) for each in value)
        if not numbers or len(value) != 3:
            self._refuse(key, "where three numbers belong")
        return np.array(value, np.float32)

    @property
    def background(self) -> tuple[int, int, int]:
        """The mean colour as bytes, of bars beside an image, also where it is not taken off."""
        red, green, blue = (int(each * 255) for each in self._colour)
        return red, green, blue

    def integer(self, key: str, default: int, *, maximum: int = 2**31) -> int:
        """Return a positive integer. Raises InvalidCheckpoint."""
        value = self._given(key, default)
        if type(value) is not int or not 1 <= value <= maximum:
            self._refuse(key, f"where an integer from 1 to {maximum} belongs")
        return int(value)

    def longest(self, key: str, default: int) -> int:
        """Return the length of an image's longer side: `longest_edge` of an object."""
        value = self._given(key, default)
        value = value.get("longest_edge") if isinstance(value, dict) else value
        if type(value) is not int or not 1 <= value <= 2**14:
            self._refuse(key, "where the length of the longer side belongs")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """Return a positive number. Raises InvalidCheckpoint."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
            self._refuse(key, "where a positive number belongs")
        return float(value)

    def side(self, key: str, default: int) -> int:
        """Return the side of a square: a number, or an object with `shortest_edge` or equal `height` and `width`."""
        value = self._given(key, default)
        if isinstance(value, dict):
            sides = {value[name] for name in ("shortest_edge", "height", "width") if value.get(name) is not None}
            value = sides.pop() if len(sides) == 1 else None
        if type(value) is not int or not 1 <= value <= 2**14:
            self._refuse(key, "where the side of a square belongs")
        return int(value)

    def numbers(self, pictures: NDArray[np.uint8]) -> Pixels:
        """pictures [..., height, width, 3] -> [..., 3, height, width]."""
        *leading, height, width, colours = pictures.shape
        values = np.empty((*leading, colours, height, width), np.float32)
        # Colour by colour, as numpy is slow where the last axis is short.
        for colour in range(colours):
            plane = values[..., colour, :, :]
            np.multiply(pictures[..., colour], np.float32(self.scale), out=plane)
            plane -= self.mean[colour]
            plane /= self.std[colour]
        return values

    def _given(self, key: str, default: Any) -> Any:
        """Return an entry; null is what absent is."""
        return default if self.fields.get(key) is None else self.fields[key]

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise InvalidCheckpoint(f"{self.where}: {key} = {short(self.fields.get(key))}, {what}. Correct the file.")


def resized(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    """Return the image in this size. Raises InvalidMessage for one of too many pixels."""
    _check_pixels(width, height)
    return image if image.size == (width, height) else image.resize((width, height), resample)


def canvas_of(width: int, height: int) -> Image.Image:
    """Return a black picture, for an image to be pasted into. Raises InvalidMessage as `resized`."""
    _check_pixels(width, height)
    return Image.new("RGB", (width, height))


def padded_square(image: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    """Return the image in the middle of a square, with bars of a colour. It is made smaller if the square would have
    more pixels than an image may have."""
    longest = math.isqrt(MAX_IMAGE_PIXELS)
    if max(image.size) > longest:
        image = ImageOps.contain(image, (longest, longest), Image.Resampling.BOX)
    side = max(image.size)
    canvas = Image.new("RGB", (side, side), colour)
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _check_pixels(width: int, height: int) -> None:
    """Raise InvalidMessage for a narrow image that would become too large when scaled."""
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidMessage(
            f"The image is so long that this model's preparation makes {width} x {height} pixels of it. Cut it into "
            f"several."
        )


def digest_of(*parts: object, pixels: NDArray[Any]) -> bytes:
    """Return the name of what a tower is shown: by its numbers, or by the bytes that these are made of."""
    digest = hashlib.sha256(repr((parts, pixels.shape)).encode())
    digest.update(pixels.data)
    return digest.digest()


def is_low(options: Mapping[str, Any]) -> bool:
    """Return whether `detail` asks for a single tile. Raises InvalidParameter for an unknown detail."""
    detail = options.get("detail", "auto")
    if detail not in ("auto", "low", "high"):
        raise InvalidParameter(f"detail={short(detail)} is none of 'auto', 'low' and 'high'.", "messages")
    return bool(detail == "low")


def refuse_options(options: Mapping[str, Any], *known: str, one_picture: bool = False) -> None:
    """Raise InvalidParameter for options of an image that the family does not have. Every family takes the `detail`s
    "auto" and "high", as one without a choice shows all that it can, and "low" where that is one picture."""
    details = ("auto", "high", "low") if one_picture else ("auto", "high")
    for name, value in options.items():
        if name not in known and not (name == "detail" and value in details):
            raise InvalidParameter(
                f"{name}={short(value)}: this model's images have no such choice. Leave it out.", "messages"
            )
