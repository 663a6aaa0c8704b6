"""The image preparation of Gemma 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from asyncllm.prompt_image import ImageProcessor
from asyncllm.vl.image_tokens import added_tokens, image_token, token_id_of
from asyncllm.vl.known_towers import tower_of
from asyncllm.vl.processing.gemma3 import Gemma3Processor
from asyncllm.vl.processing.gemma4 import Gemma4Processor
from asyncllm.vl.processing.settings import HALVES, Fields, PictureSettings, Preparation

__all__ = ["FAMILIES"]


def _gemma3(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = tower_of(fields)
    return Gemma3Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR),
        token_id=image_token(fields, 262144),
        tokens=fields.get("mm_tokens_per_image") or 256,
        side=vision["image_size"],
    )


def _gemma4(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    token_id, text = image_token(fields, 258880), fields.get("text_config") or {}
    texts = {int(number): text for text, number in added_tokens(Path(where).parent).items()}
    usual = {"do_normalize": False, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    return Gemma4Processor(
        PictureSettings({**usual, **settings}, where),
        token_id=token_id,
        placeholder=texts.get(token_id, "<|image|>"),
        before=[token_id_of(fields, "boi_token_id", 255999)],
        after=[token_id_of(fields, "eoi_token_id", 258882)],
        sees_whole=text.get("use_bidirectional_attention") == "vision",
    )


FAMILIES: Mapping[str, Preparation] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
}
