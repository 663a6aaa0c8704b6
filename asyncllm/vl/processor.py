"""open_processor selects and configures the image preparation of a checkpoint from the files in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from asyncllm.errors import InvalidCheckpoint
from asyncllm.prompt_image import ImageProcessor
from asyncllm.text.checkpoint_files import classes_of, read_json_object
from asyncllm.text.config_overrides import overridden
from asyncllm.vl.image_tokens import added_tokens, fallback_token, fallback_token_id, image_token, token_id_of, token_of
from asyncllm.vl.known_towers import multi_modality_fields, tower_fields, tower_settings
from asyncllm.vl.prepared_images import PreparedImages
from asyncllm.vl.processing.clip import AnyresProcessor, CenterProcessor, PaddedProcessor
from asyncllm.vl.processing.deepseek_vl import DeepseekVlHybridProcessor, DeepseekVlProcessor
from asyncllm.vl.processing.gemma3 import Gemma3Processor
from asyncllm.vl.processing.gemma4 import Gemma4Processor
from asyncllm.vl.processing.idefics3 import Idefics3Processor
from asyncllm.vl.processing.lfm2_vl import Lfm2VlProcessor
from asyncllm.vl.processing.llama4 import Llama4Processor
from asyncllm.vl.processing.onevision import OneVisionImages, OneVisionProcessor
from asyncllm.vl.processing.ovis2 import Ovis2Processor
from asyncllm.vl.processing.pixtral import PixtralProcessor
from asyncllm.vl.processing.qwen import FlatProcessor, Glm4vProcessor, PaddleOcrVlProcessor, QwenProcessor
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.tiles import AyaVisionProcessor, Cohere2VisionProcessor, InternVlProcessor, TileProcessor
from asyncllm.vl.processing.video import Qwen3VideoProcessor, QwenVideoProcessor
from asyncllm.vl.published import ALSO_TEXT, PUBLISHED, UNSAID

__all__ = ["open_images", "open_processor"]

_Fields = Mapping[str, Any]


def open_processor(folder: Path, overrides: Mapping[str, Any] | None = None) -> ImageProcessor | None:
    """Return the image preparation of the checkpoint in `folder`, or None for a text-only model.

    `overrides` replaces entries of config.json. Raises InvalidCheckpoint, UnsupportedModel.
    """
    fields = overridden(read_json_object(folder / "config.json"), overrides or {})
    name = next(iter(classes_of(fields)), "")
    make = _FAMILIES.get(name)
    if make is None or (name in _ALSO_TEXT and fields.get(_ALSO_TEXT[name]) is None):
        return None
    file = folder / "preprocessor_config.json"
    settings = read_json_object(file)
    if not settings:
        # transformers 5 may save the image processor's settings inside the processor's.
        file = folder / "processor_config.json"
        whole = read_json_object(file)
        settings = whole.get("image_processor") or (whole if "image_mean" in whole else {})
    if not settings and name in _OF_TOWER:
        settings = {"image_processor_type": "CLIP", **tower_settings(folder, fields.get("mm_vision_tower"))}
    if not settings and name not in UNSAID:
        raise InvalidCheckpoint(
            f"{folder} has no preprocessor_config.json, which says how images are scaled. Download it into the folder "
            f"of config.json."
        )
    try:
        return make(fields, settings, str(file))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{folder}: the image settings in config.json and {file.name} are not those of {name} ({error}). "
            f"Download both again."
        ) from None


def open_images(folder: Path, overrides: Mapping[str, Any] | None = None) -> PreparedImages | None:
    """Return `open_processor` with a cache of prepared images."""
    processor = open_processor(folder, overrides)
    return None if processor is None else PreparedImages(processor)


def _tower_of(fields: _Fields, usual: str = "siglip_vision_model") -> dict[str, Any]:
    """Return `vision_config`, completed with transformers' default sizes. `usual`: the default model type."""
    vision = {key: value for key, value in (fields.get("vision_config") or {}).items() if value is not None}
    patch = 32 if vision.get("model_type", usual) == "clip_vision_model" else 16
    return {"image_size": 224, "patch_size": patch, **vision}


def _llava(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = _tower_of(fields, "clip_vision_model")
    if vision.get("model_type") == "pixtral":
        return _pixtral({"image_token_index": 32000, **fields}, settings, where)
    side = vision["image_size"] // vision["patch_size"]
    extra = fields.get("vision_feature_select_strategy", "default") == "full" and "siglip" not in str(vision)
    kind = PaddedProcessor if settings.get("do_pad") and "Llava" in str(settings.get("image_processor_type")) else None
    return (kind or CenterProcessor)(
        PictureSettings(settings, where),
        token_id=image_token(fields, 32000),
        placeholder="<image>\n",
        length=side * side + extra,
        side=vision["image_size"],
    )


def _llava_next(fields: _Fields, settings: _Fields, where: str, token_id: int = 32000) -> ImageProcessor:
    vision = _tower_of(fields, "clip_vision_model")
    pinpoints = fields.get("image_grid_pinpoints") or PINPOINTS
    return AnyresProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, token_id),
        placeholder="<image>\n",
        side=vision["image_size"],
        patches=vision["image_size"] // vision["patch_size"],
        pinpoints=[(height, width) for height, width in pinpoints],
    )


def _original_llava(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
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


def _onevision(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = _tower_of(fields)
    steps = [vision["image_size"] * number for number in range(1, 7)]
    patches = vision["image_size"] // vision["patch_size"]
    tiles = str(fields.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_")
    return OneVisionProcessor(
        PictureSettings({"do_center_crop": False, **settings}, where),
        video_token_id=token_id_of(fields, "video_token_index", 151647),
        token_id=image_token(fields, 151646),
        placeholder="<image>\n",
        side=vision["image_size"],
        patches=patches,
        pinpoints=fields.get("image_grid_pinpoints") or [(rows, columns) for rows in steps for columns in steps],
        max_patches=int(tiles) * patches**2,
    )


def _pixtral(fields: _Fields, settings: _Fields, where: str, merge: int = 1, **more: str) -> ImageProcessor:
    vision = {"patch_size": 16, **(fields.get("vision_config") or {})}
    read = PictureSettings(settings, where)
    return PixtralProcessor(read, token_id=image_token(fields, 10), patch=vision["patch_size"], merge=merge, **more)


def _mistral3(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    return _pixtral(fields, settings, where, fields.get("spatial_merge_size") or 2)


def _lighton_ocr(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    usual = {"image_token_id": 151655, **fields}
    return _pixtral(usual, settings, where, fields.get("spatial_merge_size") or 2, placeholder="<|image_pad|>")


def _idefics3(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 224, "patch_size": 32, **(fields.get("vision_config") or {})}
    return Idefics3Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.LANCZOS),
        token_id=image_token(fields, 128257),
        tokens=(vision["image_size"] // vision["patch_size"] // (fields.get("scale_factor") or 2)) ** 2,
    )


def _qwen(
    fields: _Fields,
    settings: _Fields,
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


def _omni(fields: _Fields, settings: _Fields, where: str, marks: tuple[str, str, str]) -> ImageProcessor:
    """`marks`: the tokens that begin an image in a prompt, stand for it, and end it."""
    return QwenProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields.get("thinker_config") or fields, 151655),
        placeholder="".join(marks),
    )


def _exaone4_5(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    return FlatProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, 67),
        placeholder="<vision><|image_pad|></vision>",
    )


def _paddleocr_vl(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    bounds = {"size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}}
    return PaddleOcrVlProcessor(
        PictureSettings({**bounds, **settings}, where),
        token_id=image_token(fields, 100295),
        placeholder="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    )


def _gemma3(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = _tower_of(fields)
    return Gemma3Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR),
        token_id=image_token(fields, 262144),
        tokens=fields.get("mm_tokens_per_image") or 256,
        side=vision["image_size"],
    )


def _gemma4(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
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


def _glm4v(fields: _Fields, settings: _Fields, where: str, token_id: int = 151343) -> ImageProcessor:
    bounds = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
    return Glm4vProcessor(
        PictureSettings({**bounds, **settings}, where),
        token_id=image_token(fields, token_id),
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
    )


def _llama4(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = PictureSettings(fields["vision_config"], "config.json")
    patches = vision.side("image_size", 448) // vision.side("patch_size", 14)
    return Llama4Processor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR),
        token_id=image_token(fields, 200092),
        tokens=round((patches * vision.number("pixel_shuffle_ratio", 0.5)) ** 2),
    )


def _cohere2_vision(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    return _aya_vision(fields, settings, where, Cohere2VisionProcessor)


def _aya_vision(
    fields: _Fields, settings: _Fields, where: str, kind: type[TileProcessor] = AyaVisionProcessor
) -> ImageProcessor:
    vision = _tower_of(fields)
    side = vision["image_size"]
    return kind(
        PictureSettings(settings, where),
        token_id=image_token(fields, 255036),
        placeholder="<|START_OF_IMG|><|IMG_PATCH|><|END_OF_IMG|>",
        before=(),
        after=(),
        side=side,
        tokens=(side // vision["patch_size"] // fields.get("downsample_factor", 2)) ** 2,
        min_tiles=settings.get("min_patches") or 1,
        max_tiles=settings.get("max_patches") or 12,
    )


def _got_ocr2(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 1024, "patch_size": 16, **(fields.get("vision_config") or {})}
    side = vision["image_size"]
    return TileProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, 151859),
        placeholder="<img><imgpad></img>\n",
        before=(),
        after=(),
        side=side,
        tokens=(side // vision["patch_size"] // 4) ** 2,
        min_tiles=settings.get("min_patches") or 1,
        max_tiles=(settings.get("max_patches") or 12) if settings.get("crop_to_patches") else 1,
    )


def _lfm2_vl(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    read = PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR)
    return Lfm2VlProcessor(read, token_id=image_token(fields, 396))


def _janus(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = {"image_size": 384, **(fields.get("vision_config") or {})}
    processor = _deepseek({"image_token_id": 100581, **fields, "vision_config": vision}, settings, where)
    begin, end = (token_of(Path(where).parent, f"<{name}_of_image>") for name in ("begin", "end"))
    processor.before, processor.after = (begin,), (end,)
    return processor


def _ovis2(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = PictureSettings(fields.get("vision_config") or {}, "config.json: vision_config")
    read = PictureSettings(settings, where)
    side = read.side("size", 384)
    if side != vision.side("image_size", 224):
        raise InvalidCheckpoint(f"{where}: size is {side}, unlike the tower's image_size in config.json. Correct it.")
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


def _deepseek(fields: _Fields, settings: _Fields, where: str) -> DeepseekVlProcessor:
    vision = _tower_of(fields)
    return DeepseekVlProcessor(
        PictureSettings(settings, where),
        token_id=image_token(fields, 100015),
        placeholder="<image_placeholder>",
        length=(vision["image_size"] // vision["patch_size"]) ** 2,
        side=vision["image_size"],
    )


def _deepseek_hybrid(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
    vision = _tower_of(fields)
    large = {"image_size": 1024, **(fields.get("high_res_vision_config") or {})}
    names = ("size", "resample", "image_mean", "image_std")
    own = {name: settings[f"high_res_{name}"] for name in names if f"high_res_{name}" in settings}
    same: dict[str, Any] = {
        "token_id": image_token(fields, 100015),
        "placeholder": "<image_placeholder>",
        "length": (vision["image_size"] // vision["patch_size"]) ** 2,
    }
    usual = {key: value for key, value in settings.items() if key not in names}
    processor = DeepseekVlHybridProcessor(
        PictureSettings(settings, where),
        large=DeepseekVlProcessor(PictureSettings({**usual, **own}, where), side=large["image_size"], **same),
        side=vision["image_size"],
        **same,
    )
    if (processor.edge, processor.large.edge) != (vision["image_size"], large["image_size"]):
        raise InvalidCheckpoint(
            f"{where}: size and high_res_size are {processor.edge} and {processor.large.edge}, but config.json has "
            f"towers for {vision['image_size']} and {large['image_size']} pixels. Correct the file."
        )
    return processor


def _multi_modality(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
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


def _intern(fields: _Fields, settings: _Fields, where: str) -> ImageProcessor:
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
    folder = Path(where).parent
    frame = [] if remote else [[token_of(folder, text)] for text in ("<img>", "</img>")]
    return InternVlProcessor(
        PictureSettings(settings, where, mean=IMAGENET_MEAN, std=IMAGENET_STD),
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


HALVES = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PINPOINTS = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]

_omni_2_5 = partial(_omni, marks=("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"))
_omni_3 = partial(_omni, marks=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"))
_qwen3 = partial(_qwen, kind=Qwen3VideoProcessor)
_qwen3_5 = partial(_qwen3, token_ids=(248056, 248057))

_FAMILIES: Mapping[str, Callable[[_Fields, _Fields, str], ImageProcessor]] = {
    **PUBLISHED,
    "AyaVisionForConditionalGeneration": _aya_vision,
    "Cohere2VisionForConditionalGeneration": _cohere2_vision,
    "DeepseekVLForConditionalGeneration": _deepseek,
    "DeepseekVLHybridForConditionalGeneration": _deepseek_hybrid,
    "Exaone4_5_ForConditionalGeneration": _exaone4_5,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Glm46VForConditionalGeneration": _glm4v,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": partial(_glm4v, token_id=151363),
    "GlmOcrForConditionalGeneration": partial(_glm4v, token_id=59280),
    "GotOcr2ForConditionalGeneration": _got_ocr2,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InternS1ForConditionalGeneration": _intern,
    "InternVLChatModel": _intern,
    "InternVLForConditionalGeneration": _intern,
    "JanusForConditionalGeneration": _janus,
    "Lfm2VlForConditionalGeneration": _lfm2_vl,
    "LightOnOCRForConditionalGeneration": _lighton_ocr,
    "LightOnOcrForConditionalGeneration": _lighton_ocr,
    "Llama4ForConditionalGeneration": _llama4,
    "LlavaForConditionalGeneration": _llava,
    "LlavaLlamaForCausalLM": _original_llava,
    "LlavaMistralForCausalLM": _original_llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "LlavaNextVideoForConditionalGeneration": partial(_llava_next, token_id=32001),
    "LlavaOnevisionForConditionalGeneration": _onevision,
    "LlavaQwenForCausalLM": _original_llava,
    "Mistral3ForConditionalGeneration": _mistral3,
    "MultiModalityCausalLM": _multi_modality,
    "Ovis2ForConditionalGeneration": _ovis2,
    "PaddleOCRVLForConditionalGeneration": _paddleocr_vl,
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5OmniForConditionalGeneration": _omni_2_5,
    "Qwen2_5OmniModel": _omni_2_5,
    "Qwen2_5OmniThinkerForConditionalGeneration": _omni_2_5,
    "Qwen3OmniMoeForConditionalGeneration": _omni_3,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _omni_3,
    "Qwen2_5_VLForConditionalGeneration": partial(_qwen, tokens_per_second=True),
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "SmolVLMForConditionalGeneration": _idefics3,
    "VipLlavaForConditionalGeneration": _llava,
}

_ALSO_TEXT = {
    **ALSO_TEXT,
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Llama4ForConditionalGeneration"), "vision_config"),
}
"""Class -> entry of config.json that it has only with a tower. Without the entry, the files hold the decoder alone."""

_OF_TOWER = ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM")
"""Classes whose image settings are in the tower's files."""
