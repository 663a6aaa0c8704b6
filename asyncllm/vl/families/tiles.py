"""The image preparation of InternVL and other models that cut a picture into tiles of one size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from asyncllm.prompt_image import ImageProcessor
from asyncllm.vl.image_tokens import image_token, token_of
from asyncllm.vl.known_towers import tower_of
from asyncllm.vl.processing.idefics3 import Idefics3Processor
from asyncllm.vl.processing.lfm2_vl import Lfm2VlProcessor
from asyncllm.vl.processing.llama4 import Llama4Processor
from asyncllm.vl.processing.ovis2 import Ovis2Processor
from asyncllm.vl.processing.settings import HALVES, Fields, PictureSettings, Preparation
from asyncllm.vl.processing.tiles import AyaVisionProcessor, Cohere2VisionProcessor, InternVlProcessor, TileProcessor

__all__ = ["FAMILIES"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _aya_vision(
    fields: Fields, settings: Fields, where: str, kind: type[TileProcessor] = AyaVisionProcessor
) -> ImageProcessor:
    vision, read = tower_of(fields), PictureSettings(settings, where)
    side = read.tower_side(vision["image_size"])
    return kind(
        read,
        token_id=image_token(fields, 255036),
        placeholder="<|START_OF_IMG|><|IMG_PATCH|><|END_OF_IMG|>",
        before=(),
        after=(),
        side=side,
        tokens=(side // vision["patch_size"] // fields.get("downsample_factor", 2)) ** 2,
        min_tiles=settings.get("min_patches") or 1,
        max_tiles=settings.get("max_patches") or 12,
    )


def _cohere2_vision(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    # transformers' processor of Aya Vision always cuts images, whatever crop_to_patches is.
    whole = {"max_patches": 1} if settings.get("crop_to_patches") is False else {}
    return _aya_vision(fields, {**settings, **whole}, where, Cohere2VisionProcessor)


def _got_ocr2(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 1024, "patch_size": 16, **(fields.get("vision_config") or {})}
    read = PictureSettings(settings, where)
    side = read.tower_side(vision["image_size"])
    return TileProcessor(
        read,
        token_id=image_token(fields, 151859),
        placeholder="<img><imgpad></img>\n",
        before=(),
        after=(),
        side=side,
        tokens=(side // vision["patch_size"] // 4) ** 2,
        min_tiles=settings.get("min_patches") or 1,
        max_tiles=(settings.get("max_patches") or 12) if settings.get("crop_to_patches") else 1,
    )


def _idefics3(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 224, "patch_size": 32, **(fields.get("vision_config") or {})}
    return Idefics3Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.LANCZOS),
        token_id=image_token(fields, 128257),
        tokens=(vision["image_size"] // vision["patch_size"] // (fields.get("scale_factor") or 2)) ** 2,
        side=vision["image_size"],
    )


def _intern(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = fields.get("vision_config") or {}
    side = fields.get("force_image_size") or vision.get("image_size", 448)
    side = side[0] if isinstance(side, list) else side
    patch = vision.get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) else patch
    # In the authors' format the tokens around an image are text of the prompt; in transformers' the processor adds
    # them.
    remote = fields.get("llm_config") is not None
    # The defaults of the authors' class, on which InternVL-Chat 1.1 and 1.2 rely, give each image one picture.
    usual = {"dynamic_image_size": not remote, "use_thumbnail": not remote, "max_dynamic_patch": 6 if remote else None}
    fields = {**usual, **fields}
    folder, read = Path(where).parent, PictureSettings(settings, where, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if not remote:
        read.tower_side(side)
    frame = [] if remote else [[token_of(folder, text)] for text in ("<img>", "</img>")]
    return InternVlProcessor(
        read,
        token_id=token_of(folder, "<IMG_CONTEXT>") if remote else image_token(fields, 151667),
        placeholder="<img><IMG_CONTEXT></img>\n" if remote else "<IMG_CONTEXT>\n",
        before=frame[0] if frame else (),
        after=frame[1] if frame else (),
        side=side,
        tokens=(side // patch // 2) ** 2,
        min_tiles=fields.get("min_dynamic_patch") or settings.get("min_patches") or 1,
        max_tiles=(fields.get("max_dynamic_patch") or settings.get("max_patches") or 12)
        if fields["dynamic_image_size"]
        else 1,
        thumbnail=fields["use_thumbnail"],
    )


def _lfm2_vl(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    read = PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR)
    return Lfm2VlProcessor(read, token_id=image_token(fields, 396))


def _llama4(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = PictureSettings(fields["vision_config"], "config.json")
    side = vision.side("image_size", 448)
    patches = side // vision.side("patch_size", 14)
    return Llama4Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR),
        token_id=image_token(fields, 200092),
        tokens=round((patches * vision.number("pixel_shuffle_ratio", 0.5)) ** 2),
        side=side,
    )


def _ovis2(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = PictureSettings(fields.get("vision_config") or {}, "config.json: vision_config")
    read = PictureSettings(settings, where)
    side = read.tower_side(vision.side("image_size", 224))
    patches = side // vision.side("patch_size", 14)
    return Ovis2Processor(
        read,
        token_id=image_token(fields, 151665),
        placeholder="<IMG_ATOM>\n",
        before=(),
        after=(),
        side=side,
        tokens=(patches // vision.integer("hidden_stride", 1)) ** 2,
        min_tiles=read.integer("min_patches", 1, maximum=128),
        max_tiles=read.integer("max_patches", 12, maximum=128) if settings.get("crop_to_patches") else 1,
        covering=settings.get("use_covering_area_grid", True) is not False,
    )


FAMILIES: Mapping[str, Preparation] = {
    "AyaVisionForConditionalGeneration": _aya_vision,
    "Cohere2VisionForConditionalGeneration": _cohere2_vision,
    "GotOcr2ForConditionalGeneration": _got_ocr2,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InternS1ForConditionalGeneration": _intern,
    "InternVLChatModel": _intern,
    "InternVLForConditionalGeneration": _intern,
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
    "Llama4ForConditionalGeneration": _llama4,
    "Ovis2ForConditionalGeneration": _ovis2,
    "SmolVLMForConditionalGeneration": _idefics3,
}
