"""The image preparation of LLaVA in all versions, and of Pixtral and the models with its tower."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncllm.prompt_image import ImageProcessor
from asyncllm.vl.image_tokens import fallback_token, fallback_token_id, image_token, token_id_of
from asyncllm.vl.known_towers import tower_fields, tower_of
from asyncllm.vl.processing.clip import AnyresProcessor, CenterProcessor, PaddedProcessor
from asyncllm.vl.processing.onevision import OneVisionImages, OneVisionProcessor
from asyncllm.vl.processing.pixtral import PixtralProcessor
from asyncllm.vl.processing.settings import HALVES, Fields, PictureSettings, Preparation

__all__ = ["FAMILIES"]

PINPOINTS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
"""Shapes of the pictures that LLaVA-NeXT cuts, where a file has none."""


def _llava(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = tower_of(fields, "clip_vision_model")
    if vision.get("model_type") == "pixtral":
        return _pixtral({"image_token_index": 32000, **fields}, settings, where)
    side, size = vision["image_size"] // vision["patch_size"], settings.get("size")
    if settings.get("do_center_crop") is False and isinstance(size, dict) and size.get("shortest_edge") is not None:
        raise ValueError("do_center_crop = false and a shortest_edge leave pictures that are not square")
    # CLIP has one more token than patches, and the default strategy drops the first token of any tower.
    kept = fields.get("vision_feature_select_strategy", "default") == "full"
    extra = int(kept) - (vision.get("model_type") == "siglip_vision_model")
    kind = PaddedProcessor if settings.get("do_pad") and "Llava" in str(settings.get("image_processor_type")) else None
    return (kind or CenterProcessor)(
        PictureSettings(settings, where),
        token_id=image_token(fields, 32000),
        placeholder="<image>\n",
        length=side * side + extra,
        side=vision["image_size"],
    )


def _llava_next(fields: Fields, settings: Fields, where: str, token_id: int = 32000) -> ImageProcessor:
    vision = tower_of(fields, "clip_vision_model")
    pinpoints = fields.get("image_grid_pinpoints") or PINPOINTS
    _check_pinpoints(settings, pinpoints)
    return AnyresProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, token_id),
        placeholder="<image>\n",
        side=vision["image_size"],
        patches=vision["image_size"] // vision["patch_size"],
        pinpoints=[(height, width) for height, width in pinpoints],
    )


def _check_pinpoints(settings: Fields, pinpoints: Any) -> None:
    """Raise ValueError if images are cut into other shapes than config.json names."""
    cut = settings.get("image_grid_pinpoints")
    if cut is not None and {tuple(each) for each in cut} != {tuple(each) for each in pinpoints}:
        raise ValueError("image_grid_pinpoints differ between the files")


def _original_llava(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder = Path(where).parent
    vision = tower_fields(folder, fields.get("mm_vision_tower"))
    patches, ratio = vision["image_size"] // vision["patch_size"], fields.get("image_aspect_ratio")
    same: dict[str, Any] = {
        "token_id": fallback_token_id(folder),
        "placeholder": f"{fallback_token(folder)}\n",
        "side": vision["image_size"],
    }
    if vision.get("model_type") == "siglip_vision_model":
        read = PictureSettings({"do_center_crop": False, **settings}, where, mean=HALVES, std=HALVES)
    else:
        read = PictureSettings(settings, where)
    pinpoints = [(height, width) for width, height in fields.get("image_grid_pinpoints") or PINPOINTS]
    if str(ratio).startswith("anyres_max_"):
        max_patches = int(str(ratio).removeprefix("anyres_max_")) * patches**2
        return OneVisionImages(read, patches=patches, pinpoints=pinpoints, max_patches=max_patches, **same)
    if ratio == "anyres":
        return AnyresProcessor(read, patches=patches, pinpoints=pinpoints, **same)
    extra = fields.get("mm_vision_select_feature") == "cls_patch"
    kind = PaddedProcessor if ratio == "pad" else CenterProcessor
    return kind(read, length=patches**2 + extra, **same)


def _onevision(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = tower_of(fields)
    steps = [vision["image_size"] * number for number in range(1, 7)]
    patches = vision["image_size"] // vision["patch_size"]
    tiles = str(fields.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_")
    pinpoints = fields.get("image_grid_pinpoints") or [(rows, columns) for rows in steps for columns in steps]
    _check_pinpoints(settings, pinpoints)
    read = PictureSettings({"do_center_crop": False, **settings}, where)
    if read.side("crop_size", vision["image_size"]) != vision["image_size"]:
        raise ValueError("crop_size is another than the tower's image_size")
    return OneVisionProcessor(
        read,
        video_token_id=token_id_of(fields, "video_token_index", 151647),
        token_id=image_token(fields, 151646),
        placeholder="<image>\n",
        side=vision["image_size"],
        patches=patches,
        pinpoints=pinpoints,
        max_patches=int(tiles) * patches**2,
    )


def _pixtral(fields: Fields, settings: Fields, where: str, merge: int = 1, **more: str) -> ImageProcessor:
    vision = {"patch_size": 16, **(fields.get("vision_config") or {})}
    read = PictureSettings(settings, where)
    return PixtralProcessor(read, token_id=image_token(fields, 10), patch=vision["patch_size"], merge=merge, **more)


def _mistral3(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    return _pixtral(fields, settings, where, fields.get("spatial_merge_size") or 2)


def _lighton_ocr(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    usual = {"image_token_id": 151655, **fields}
    return _pixtral(usual, settings, where, fields.get("spatial_merge_size") or 2, placeholder="<|image_pad|>")


FAMILIES: Mapping[str, Preparation] = {
    "LightOnOCRForConditionalGeneration": _lighton_ocr,
    "LightOnOcrForConditionalGeneration": _lighton_ocr,
    "LlavaForConditionalGeneration": _llava,
    "LlavaLlamaForCausalLM": _original_llava,
    "LlavaMistralForCausalLM": _original_llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "LlavaNextVideoForConditionalGeneration": partial(_llava_next, token_id=32001),
    "LlavaOnevisionForConditionalGeneration": _onevision,
    "LlavaQwenForCausalLM": _original_llava,
    "Mistral3ForConditionalGeneration": _mistral3,
    "VipLlavaForConditionalGeneration": _llava,
}
