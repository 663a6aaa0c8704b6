"""The image preparation of Qwen-VL and other models that cut pictures of any size into patches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from asyncllm.prompt_image import ImageProcessor
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.vl.image_tokens import image_token, token_id_of
from asyncllm.vl.processing.qwen import FlatProcessor, Glm4vProcessor, PaddleOcrVlProcessor, QwenProcessor
from asyncllm.vl.processing.settings import Fields, PictureSettings, Preparation
from asyncllm.vl.processing.video import Qwen3VideoProcessor, QwenVideoProcessor

__all__ = ["FAMILIES"]


def _qwen(
    fields: Fields,
    settings: Fields,
    where: str,
    *,
    kind: type[QwenVideoProcessor] = QwenVideoProcessor,
    tokens_per_second: bool = False,
    token_ids: tuple[int, int] = (151655, 151656),
) -> ImageProcessor:
    """`token_ids`: the default placeholder tokens of images and of videos."""
    file = Path(where).parent / "video_preprocessor_config.json"
    own = read_json_object(file)
    if kind is Qwen3VideoProcessor and not own:
        # The bounds of pixels of an image do not apply to a whole video.
        rest = {key: value for key, value in settings.items() if key not in ("min_pixels", "max_pixels")}
        own, file = {**rest, "size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 2 * 12288}}, Path(where)
    vision = fields.get("vision_config") or {}
    return kind(
        PictureSettings(settings, where),
        token_id=image_token(fields, token_ids[0]),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        video_settings=PictureSettings(own or settings, str(file) if own else where),
        video_token_id=token_id_of(fields, "video_token_id", token_ids[1]),
        video_placeholder="<|vision_start|><|video_pad|><|vision_end|>",
        tokens_per_second=PictureSettings(vision, "config.json").integer("tokens_per_second", 4)
        if tokens_per_second
        else None,
    )


def _omni(fields: Fields, settings: Fields, where: str, marks: tuple[str, str, str]) -> ImageProcessor:
    """`marks`: the tokens that begin an image in a prompt, stand for it, and end it."""
    return QwenProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields.get("thinker_config") or fields, 151655),
        placeholder="".join(marks),
    )


def _exaone4_5(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    return FlatProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, 67),
        placeholder="<vision><|image_pad|></vision>",
    )


def _paddleocr_vl(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    bounds = {"size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}}
    return PaddleOcrVlProcessor(
        PictureSettings({**bounds, **settings}, where),
        token_id=image_token(fields, 100295),
        placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    )


def _glm4v(fields: Fields, settings: Fields, where: str, token_id: int = 151343) -> ImageProcessor:
    bounds = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
    return Glm4vProcessor(
        PictureSettings({**bounds, **settings}, where),
        token_id=image_token(fields, token_id),
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
    )


_omni_2_5 = partial(_omni, marks=("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"))
_omni_3 = partial(_omni, marks=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))
_qwen3 = partial(_qwen, kind=Qwen3VideoProcessor)
_qwen3_5 = partial(_qwen3, token_ids=(248056, 248057))

FAMILIES: Mapping[str, Preparation] = {
    "Exaone4_5_ForConditionalGeneration": _exaone4_5,
    "Glm46VForConditionalGeneration": _glm4v,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": partial(_glm4v, token_id=151363),
    "GlmOcrForConditionalGeneration": partial(_glm4v, token_id=59280),
    "PaddleOCRVLForConditionalGeneration": _paddleocr_vl,
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5OmniForConditionalGeneration": _omni_2_5,
    "Qwen2_5OmniModel": _omni_2_5,
    "Qwen2_5OmniThinkerForConditionalGeneration": _omni_2_5,
    "Qwen2_5_VLForConditionalGeneration": partial(_qwen, tokens_per_second=True),
    "Qwen3OmniMoeForConditionalGeneration": _omni_3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _omni_3,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
}
