"""Settings of preprocessor_config.json (sizes, resampling, means), and the conversion of pictures to numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.prompt_image import ImageProcessor
from asyncllm.vl.processing.pictures import Pixels

__all__ = ["HALVES", "Fields", "PictureSettings", "Preparation"]

Fields = Mapping[str, Any]
Preparation = Callable[[Fields, Fields, str], ImageProcessor]
"""Function of the entries of config.json, those of preprocessor_config.json and the path of the latter -> the image
preparation of a checkpoint. Raises InvalidCheckpoint and UnsupportedModel, or what wrong entries cause."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)


class PictureSettings:
    """Typed access to the settings of a preprocessor_config.json, and the conversion of pictures to numbers:
    (byte * `scale` - mean) / std, for each colour."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        where: str,
        *,
        mean: tuple[float, ...] = CLIP_MEAN,
        std: tuple[float, ...] = CLIP_STD,
        resample: Image.Resampling = Image.Resampling.BICUBIC,
    ) -> None:
        """`where`: the file's path, for errors. `mean`, `std` and `resample` are the defaults for absent entries.
        Raises InvalidCheckpoint, UnsupportedModel."""
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
        """Return a flag that is on by default. Raises InvalidCheckpoint."""
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
        """The mean colour as bytes, for padding; set even if `do_normalize` is off."""
        red, green, blue = (int(each * 255) for each in self._colour)
        return red, green, blue

    def integer(self, key: str, default: int, *, maximum: int = 2**31) -> int:
        """Return a positive integer. Raises InvalidCheckpoint."""
        value = self._given(key, default)
        if type(value) is not int or not 1 <= value <= maximum:
            self._refuse(key, f"where an integer from 1 to {maximum} belongs")
        return int(value)

    def longest(self, key: str, default: int) -> int:
        """Return the length of an image's longer side: a number, or `longest_edge` of an object. Raises
        InvalidCheckpoint."""
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
        """Return the side of a square: a number, or an object with `shortest_edge`, unbounded by `longest_edge`, or
        equal `height` and `width`. Raises InvalidCheckpoint."""
        value = self._given(key, default)
        if isinstance(value, dict):
            sides = {value[name] for name in ("shortest_edge", "height", "width") if value.get(name) is not None}
            value = sides.pop() if len(sides) == 1 and value.get("longest_edge") is None else None
        if type(value) is not int or not 1 <= value <= 2**14:
            self._refuse(key, "where the side of a square belongs")
        return int(value)

    def tower_side(self, side: int) -> int:
        """Return `side`, that of a tower's pictures in pixels. Raises InvalidCheckpoint if `size` is another."""
        if self.side("size", side) != side:
            self._refuse("size", f"where the tower's image_size in config.json, {side}, belongs")
        return side

    def numbers(self, pictures: NDArray[np.uint8]) -> Pixels:
        """Convert pictures [..., height, width, 3] uint8 to [..., 3, height, width] float32."""
        *leading, height, width, colours = pictures.shape
        values = np.empty((*leading, colours, height, width), np.float32)
        # Colour by colour, since numpy is slow along a short last axis.
        for colour in range(colours):
            plane = values[..., colour, :, :]
            np.multiply(pictures[..., colour], np.float32(self.scale), out=plane)
            plane -= self.mean[colour]
            plane /= self.std[colour]
        return values

    def _given(self, key: str, default: Any) -> Any:
        """Return an entry, or the default if it is absent or null."""
        return default if self.fields.get(key) is None else self.fields[key]

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise InvalidCheckpoint(f"{self.where}: {key} = {short(self.fields.get(key))}, {what}. Correct the file.")
