"""The image preparation of DeepSeek-VL and Janus, from files of transformers or of their authors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from asyncllm.prompt_image import ImageProcessor
from asyncllm.vl.image_tokens import added_tokens, image_token, token_of
from asyncllm.vl.known_towers import multi_modality_fields, tower_of
from asyncllm.vl.processing.deepseek_vl import DeepseekVlHybridProcessor, DeepseekVlProcessor
from asyncllm.vl.processing.settings import HALVES, Fields, PictureSettings, Preparation

__all__ = ["FAMILIES"]


def _janus(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 384, **(fields.get("vision_config") or {})}
    processor = _deepseek({"image_token_id": 100581, **fields, "vision_config": vision}, settings, where)
    begin, end = (token_of(Path(where).parent, f"<{name}_of_image>") for name in ("begin", "end"))
    processor.before, processor.after = (begin,), (end,)
    return processor


def _padded(settings: Fields, where: str) -> PictureSettings:
    if settings.get("do_pad") is False:
        raise ValueError("do_pad = false leaves pictures that are not square")
    return PictureSettings({**settings, "do_center_crop": False}, where)


def _deepseek(fields: Fields, settings: Fields, where: str) -> DeepseekVlProcessor:
    vision = tower_of(fields)
    return DeepseekVlProcessor(
        _padded(settings, where),
        token_id=image_token(fields, 100015),
        placeholder="<image_placeholder>",
        length=(vision["image_size"] // vision["patch_size"]) ** 2,
        side=vision["image_size"],
    )


def _deepseek_hybrid(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = tower_of(fields)
    large = {"image_size": 1024, **(fields.get("high_res_vision_config") or {})}
    names = ("size", "resample", "image_mean", "image_std")
    own = {name: settings[f"high_res_{name}"] for name in names if f"high_res_{name}" in settings}
    same: dict[str, Any] = {
        "token_id": image_token(fields, 100015),
        "placeholder": "<image_placeholder>",
        "length": (vision["image_size"] // vision["patch_size"]) ** 2,
    }
    usual = {key: value for key, value in settings.items() if key not in names}
    return DeepseekVlHybridProcessor(
        _padded(settings, where),
        large=DeepseekVlProcessor(_padded({**usual, **own}, where), side=large["image_size"], **same),
        side=vision["image_size"],
        **same,
    )


def _multi_modality(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    known, params = added_tokens(Path(where).parent), (fields.get("vision_config") or {}).get("params") or {}
    draws = "gen_vision_config" in fields
    fields = multi_modality_fields(fields, "config.json")
    fields["image_token_id"] = int(known.get("<image_placeholder>", 100015))
    small = _janus if draws else _deepseek
    make = small if fields.get("high_res_vision_config") is None else _deepseek_hybrid
    if settings.get("image_processor_type") == "VLMImageProcessor":
        settings = {**settings, "size": settings.get("image_size")}
        if make is _deepseek_hybrid:
            # Each tower has its own mean colours, and the smaller picture is made from the larger one.
            low, high = params.get("low_res_cfg") or {}, params.get("high_res_cfg") or {}
            settings |= {"do_normalize": True, "high_res_size": settings["size"], "size": low.get("image_size", 384)}
            settings |= {"image_mean": low.get("pixel_mean", HALVES), "image_std": low.get("pixel_std", HALVES)}
            settings |= {f"high_res_image_{key}": high[f"pixel_{key}"] for key in ("mean", "std") if high}
            settings |= {"resample": int(Image.Resampling.BILINEAR), "high_res_resample": int(Image.Resampling.BICUBIC)}
    return make(fields, settings, where)


FAMILIES: Mapping[str, Preparation] = {
    "DeepseekVLForConditionalGeneration": _deepseek,
    "DeepseekVLHybridForConditionalGeneration": _deepseek_hybrid,
    "JanusForConditionalGeneration": _janus,
    "MultiModalityCausalLM": _multi_modality,
}
