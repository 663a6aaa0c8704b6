"""open_processor: what a checkpoint's family makes of images, read from its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidCheckpoint
from asyncllm.protocol import ImageProcessor
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.vl.processing.clip import AnyresProcessor, CenterProcessor
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["open_processor"]

_Fields = Mapping[str, Any]


def open_processor(folder: Path, overrides: Mapping[str, Any] | None = None) -> ImageProcessor | None:
    """Return what prepares images for the checkpoint in `folder`; None for a model that takes only text.

    `overrides` replaces entries of config.json. Raises InvalidCheckpoint, UnsupportedModel.
    """
    fields = {**read_json_object(folder / "config.json"), **(overrides or {})}
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    make = _FAMILIES.get(name) if isinstance(name, str) else None
    if make is None:
        return None
    file = folder / "preprocessor_config.json"
    settings = read_json_object(file)
    if not settings:
        # A processor that is saved whole has the image processor's settings within its own.
        file = folder / "processor_config.json"
        settings = read_json_object(file).get("image_processor") or {}
    if not settings:
        raise InvalidCheckpoint(
            f"{folder} has no preprocessor_config.json, which says how images are scaled. Download it beside "
            f"config.json."
        )
    return make(fields, settings, str(file))


def _llava(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 336, "patch_size": 14, **(fields.get("vision_config") or {})}
    side = vision["image_size"] // vision["patch_size"]
    extra = fields.get("vision_feature_select_strategy", "default") == "full" and "siglip" not in str(vision)
    return CenterProcessor(
        PictureSettings(settings, where),
        token_id=_image_token(fields, 32000),
        placeholder="<image>\n",
        length=side * side + extra,
        side=vision["image_size"],
    )


def _llava_next(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 336, "patch_size": 14, **(fields.get("vision_config") or {})}
    pinpoints = fields.get("image_grid_pinpoints") or PINPOINTS
    return AnyresProcessor(
        PictureSettings(settings, where),
        token_id=_image_token(fields, 32000),
        placeholder="<image>\n",
        side=vision["image_size"],
        patches=vision["image_size"] // vision["patch_size"],
        pinpoints=[(height, width) for height, width in pinpoints],
    )


PINPOINTS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]


def _image_token(fields: _Fields, default: int) -> int:
    value = fields.get("image_token_id", fields.get("image_token_index", default))
    if type(value) is not int or value < 0:
        raise InvalidCheckpoint(f"config.json: image_token_index = {value!r} is no token id. Correct the file.")
    return int(value)


_FAMILIES: Mapping[str, Callable[[_Fields, _Fields, str], ImageProcessor]] = {
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
}
