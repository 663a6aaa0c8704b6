"""Image preparation of families that only their authors' code implements, configured from a checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from asyncllm.errors import InvalidCheckpoint, UnsupportedModel, short
from asyncllm.prompt_image import ImageProcessor
from asyncllm.text.checkpoint_files import read_json_object
from asyncllm.text.image_marks import NUMBER_MARK
from asyncllm.vl.image_tokens import added_tokens, fallback_token, fallback_token_id, token_id_of, token_of
from asyncllm.vl.known_towers import (
    molmo_tower,
    ocr_tile,
    phi4_tower,
    tower_fields,
    tower_settings,
    xcomposer_kind,
    xcomposer_tower,
)
from asyncllm.vl.processing.clip import CenterProcessor, PaddedProcessor
from asyncllm.vl.processing.deepseek_ocr import DeepseekOcrProcessor
from asyncllm.vl.processing.deepseek_vl import DeepseekVl2Processor
from asyncllm.vl.processing.hd import HdProcessor, XComposer25Processor
from asyncllm.vl.processing.kimi_vl import KimiK25Processor, KimiVlProcessor
from asyncllm.vl.processing.minicpm_v import MiniCpmVProcessor
from asyncllm.vl.processing.molmo import MolmoProcessor, crop_grid
from asyncllm.vl.processing.phi4 import Phi4Processor
from asyncllm.vl.processing.qwen import FlatProcessor
from asyncllm.vl.processing.settings import HALVES, Fields, PictureSettings, Preparation
from asyncllm.vl.processing.squeezed import SqueezedProcessor

__all__ = ["ALSO_TEXT", "FAMILIES", "UNSAID"]


def _deepseek_vl2(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision, joined = fields.get("vision_config") or {}, fields.get("projector_config") or {}
    shapes: Any = settings.get("candidate_resolutions")
    side = vision.get("image_size", 384)
    read = PictureSettings(settings, where, mean=HALVES, std=HALVES)
    if not is_grid(shapes, side):
        raise InvalidCheckpoint(
            f"{where}: candidate_resolutions = {short(shapes)}, where pairs of multiples of {side} belong, "
            f"the first one [{side}, {side}]. Correct the file."
        )
    return DeepseekVl2Processor(
        read,
        token_id=token_of(Path(where).parent, str(settings.get("image_token", "<image>"))),
        placeholder="<image>\n",
        tokens=-(-(side // vision.get("patch_size", 16)) // joined.get("downsample_ratio", 2)),
        shapes=[(height, width) for width, height in shapes],
    )


def _deepseek_ocr(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder = Path(where).parent
    vision = PictureSettings(fields.get("vision_config") or {}, "config.json: vision_config")
    return DeepseekOcrProcessor(
        PictureSettings(settings, where, mean=HALVES, std=HALVES),
        token_id=token_of(folder, str(settings.get("image_token", "<image>"))),
        placeholder="<image>\n",
        side=vision.side("image_size", 1024),
        tile=ocr_tile(folder),
        shrunk=64,
    )


def _dots_ocr(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    read = PictureSettings({"min_pixels": 3136, "max_pixels": 11289600, **settings}, where)
    token_id = token_id_of(fields, "image_token_id", 151665)
    return FlatProcessor(read, token_id=token_id, placeholder="<|img|><|imgpad|><|endofimg|>")


def _glm4v_9b(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = {"patch_size": 14, **fields["vision_config"]}
    return SqueezedProcessor(
        PictureSettings(settings, where),
        token_id=token_id_of(fields, "boi_token_id", 151339),
        placeholder="<|begin_of_image|>",
        length=(vision["image_size"] // vision["patch_size"] // 2) ** 2 + 2,
        side=vision["image_size"],
        shares_position=True,
    )


def _cogvlm(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = {"patch_size": 14, **(fields.get("vision_config") or {})}
    fold = 1 if fields.get("num_multi_query_heads") is None else 2
    token_id = token_id_of(fields, "pad_token_id", 0)
    texts = {int(number): text for text, number in added_tokens(Path(where).parent).items()}
    return SqueezedProcessor(
        PictureSettings(settings, where),
        token_id=token_id,
        placeholder=texts.get(token_id, "<unk>"),
        length=(vision["image_size"] // vision["patch_size"] // fold) ** 2 + 2,
        side=vision["image_size"],
        shares_position=True,
    )


def _xcomposer2(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder = Path(where).parent
    kind = xcomposer_kind(folder)
    tower = xcomposer_tower(fields, kind)
    side = tower["image_size"]
    patches = side // tower["patch_size"]
    same: dict[str, Any] = {
        "token_id": fallback_token_id(folder),
        "placeholder": "<image>" if "<image>" in added_tokens(folder) else "<unk>",
        "side": side,
    }
    if kind == "2":
        return SqueezedProcessor(PictureSettings(settings, where), length=patches**2, **same)
    read = PictureSettings(settings, where, resample=Image.Resampling.BILINEAR)
    if kind == "4khd":
        return HdProcessor(read, tokens=patches // 2, max_tiles=25, **same)
    return XComposer25Processor(read, tokens=patches // 2, max_tiles=24, few_tiles=6, **same)


def _kimi_vl(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    read = PictureSettings(settings, where, mean=HALVES, std=HALVES)
    if settings.get("pad_input", False) is not True:
        raise UnsupportedModel(f"{where}: pad_input is not true, and cut images are not implemented.")
    token_id = token_id_of(fields, "media_placeholder_token_id", 163605)
    max_patches = read.integer("in_token_limit", 4096)
    return KimiVlProcessor(read, token_id=token_id, max_patches=max_patches, **_moonvit(fields, settings))


def _kimi_k25(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    # The authors' file nests the settings in an object.
    own = settings.get("media_proc_cfg") or {}
    names = {"max_patches": "in_patch_limit", "longest": "patch_limit_on_one_side"}
    flat = {**settings, "longest": (settings.get("size") or {}).get("max_height")}
    flat |= {key: own[key] for key in ("image_mean", "image_std") if key in own}
    flat |= {key: own[theirs] for key, theirs in names.items() if theirs in own}
    read = PictureSettings(flat, where, mean=HALVES, std=HALVES)
    key = "media_placeholder_token_id" if "media_placeholder_token_id" in fields else "image_token_id"
    return KimiK25Processor(
        read,
        token_id=token_id_of(fields, key, 163605),
        max_patches=read.integer("max_patches", 16384),
        longest=read.integer("longest", 512, maximum=2**12),
        **_moonvit(fields, own or settings),
    )


def _moonvit(fields: Fields, settings: Fields) -> dict[str, int]:
    """Return the side of a patch in pixels and that of a square, which becomes a token, in patches. Raises ValueError
    if the settings have others."""
    vision = PictureSettings(fields.get("vision_config") or {}, "config.json")
    patch, merge = vision.integer("patch_size", 14, maximum=1024), vision.fields.get("merge_kernel_size", [2, 2])
    merge = merge[0] if isinstance(merge, list) else merge
    _check_patches(settings, patch)
    if any(settings.get(key, merge) not in (merge, [merge, merge]) for key in ("merge_size", "merge_kernel_size")):
        raise ValueError(f"squares of {merge} patches, and other squares in the settings")
    return {"patch": patch, "merge": merge}


def _check_patches(settings: Fields, patch: int) -> None:
    """Raise ValueError if images are cut into other patches than the tower takes."""
    if settings.get("patch_size", patch) != patch:
        raise ValueError(f"patches of {short(settings['patch_size'])} pixels, and a tower that takes {patch}")


def _minicpm_v(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    half = [0.5, 0.5, 0.5]
    colours = {"image_mean": settings.get("norm_mean", half), "image_std": settings.get("norm_std", half)}
    read, vision = PictureSettings({**settings, **colours}, where), fields.get("vision_config") or {}
    _check_patches(settings, vision.get("patch_size", 14))
    return MiniCpmVProcessor(
        read,
        token_id=token_of(Path(where).parent, "<unk>"),
        tokens=PictureSettings(fields, "config.json").integer("query_num", 64),
        sliced=str(fields.get("version")) != "2.5",
    )


def _qwen_visual(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    vision = fields["visual"]
    begin = token_id_of(vision, "image_start_id", 151857)
    return SqueezedProcessor(
        PictureSettings(settings, where),
        # The ids of the begin and end tokens come first.
        token_id=begin + 2,
        placeholder=f"Picture {NUMBER_MARK}: <img><imgpad></img>\n",
        length=256,
        side=vision.get("image_size", 448),
    )


def _mgm(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder, name = Path(where).parent, fields.get("mm_vision_tower")
    tower, own = tower_fields(folder, name), settings or tower_settings(folder, name)
    config = PictureSettings(fields, "config.json")
    side, grid = config.integer("image_size_aux", 768, maximum=2**13), config.integer("image_grid", 1, maximum=8)
    # Pictures are prepared in the larger tower's size.
    read = PictureSettings({**own, "size": side, "crop_size": side}, where)
    kind = PaddedProcessor if fields.get("image_aspect_ratio") == "pad" else CenterProcessor
    return kind(
        read,
        token_id=fallback_token_id(folder),
        placeholder=("<image>" if "<image>" in added_tokens(folder) else "<unk>") + "\n",
        length=(grid**2 + bool(fields.get("image_global"))) * (tower["image_size"] // tower["patch_size"]) ** 2,
        side=side,
    )


def _molmo(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder = Path(where).parent
    read = PictureSettings(settings, where, resample=Image.Resampling.BILINEAR)
    return MolmoProcessor(
        read,
        token_id=fallback_token_id(folder),
        placeholder=fallback_token(folder),
        grid=crop_grid(molmo_tower(fields), read),
        max_crops=read.integer("max_crops", 12, maximum=256),
    )


def _phi3_v(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    folder = Path(where).parent
    tokenizer = read_json_object(folder / "tokenizer_config.json")
    vision = tower_fields(folder, (fields.get("img_processor") or {}).get("model_name"))
    # Each piece of text between images is encoded separately, so the tokenizer puts its begin token in front of each.
    begins = tokenizer.get("add_bos_token", str(tokenizer.get("tokenizer_class")).startswith("Llama"))
    read = PictureSettings(settings, where, resample=Image.Resampling.BILINEAR)
    return HdProcessor(
        read,
        token_id=token_of(folder, "<|image|>"),
        placeholder="<|image|>\n",
        after=[token_id_of(fields, "bos_token_id", 1)] if begins else (),
        side=vision["image_size"],
        tokens=vision["image_size"] // vision["patch_size"] // 2,
        max_tiles=read.integer("num_crops", 1, maximum=256),
    )


def _phi4(fields: Fields, settings: Fields, where: str) -> ImageProcessor:
    tower = phi4_tower(fields)
    token_id = token_id_of(tower, "image_token_id", 200010)
    texts = {int(number): text for text, number in added_tokens(Path(where).parent).items()}
    read = PictureSettings(settings, where, mean=HALVES, std=HALVES, resample=Image.Resampling.BILINEAR)
    side, patch = tower["image_size"], tower["patch_size"]
    return Phi4Processor(
        read,
        token_id=token_id,
        placeholder=texts.get(token_id, "<|endoftext10|>"),
        side=side,
        tokens=side // patch // 2,
        patch=patch,
        max_tiles=read.integer("dynamic_hd", 36, maximum=256),
    )


def is_grid(shapes: Any, side: int) -> bool:
    """Return whether `shapes` lists widths and heights in whole tiles of this side, that of one tile first."""
    pairs = isinstance(shapes, list) and all(isinstance(each, list) and len(each) == 2 for each in shapes)
    return (
        pairs
        and shapes[:1] == [[side, side]]
        and all(type(each) is int and 0 < each <= 64 * side and each % side == 0 for pair in shapes for each in pair)
    )


FAMILIES: Mapping[str, Preparation] = {
    "ChatGLMForConditionalGeneration": _glm4v_9b,
    "ChatGLMModel": _glm4v_9b,
    "CogVLMForCausalLM": _cogvlm,
    "DeepseekOCRForCausalLM": _deepseek_ocr,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2,
    "DotsOCRForCausalLM": _dots_ocr,
    "InternLMXComposer2ForCausalLM": _xcomposer2,
    "KimiK25ForConditionalGeneration": _kimi_k25,
    "KimiVLForConditionalGeneration": _kimi_vl,
    "Kimi_K25ForConditionalGeneration": _kimi_k25,
    "MGMLlamaForCausalLM": _mgm,
    "MiniCPMV": _minicpm_v,
    "MiniGeminiLlamaForCausalLM": _mgm,
    "MolmoForCausalLM": _molmo,
    "Phi3VForCausalLM": _phi3_v,
    "Phi4MMForCausalLM": _phi4,
    "Phi4MultimodalForCausalLM": _phi4,
    "QWenLMHeadModel": _qwen_visual,
}

ALSO_TEXT: Mapping[str, str] = {
    "ChatGLMForConditionalGeneration": "vision_config",
    "ChatGLMModel": "vision_config",
    "QWenLMHeadModel": "visual",
}
"""Class of models with and without a tower -> entry of config.json that only those with one have."""

UNSAID = frozenset(
    {
        "ChatGLMForConditionalGeneration",
        "ChatGLMModel",
        "CogVLMForCausalLM",
        "DeepseekOCRForCausalLM",
        "InternLMXComposer2ForCausalLM",
        "MGMLlamaForCausalLM",
        "MiniGeminiLlamaForCausalLM",
        "QWenLMHeadModel",
    }
)
"""Classes whose image settings are constants of the authors' code rather than entries of a file."""
