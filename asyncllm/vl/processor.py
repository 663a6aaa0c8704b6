"""open_processor selects and configures the image preparation of a checkpoint from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm.errors import InvalidCheckpoint
from asyncllm.prompt_image import ImageProcessor
from asyncllm.text.checkpoint_files import classes_of, read_json_object
from asyncllm.text.config_overrides import overridden
from asyncllm.vl.families import deepseek_vl, gemma, llava, published, qwen, tiles
from asyncllm.vl.known_towers import tower_settings
from asyncllm.vl.prepared_images import PreparedImages
from asyncllm.vl.processing.gemma4 import Gemma4Processor
from asyncllm.vl.processing.lfm2_vl import Lfm2VlProcessor
from asyncllm.vl.processing.qwen import QwenProcessor
from asyncllm.vl.processing.settings import Preparation

__all__ = ["open_images", "open_processor"]

_BySquares = Gemma4Processor | Lfm2VlProcessor | QwenProcessor


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
    if not settings and name not in published.UNSAID:
        raise InvalidCheckpoint(
            f"{folder} has no preprocessor_config.json, which says how images are scaled. Download it into the folder "
            f"of config.json."
        )
    try:
        processor = make(fields, settings, str(file))
        if isinstance(processor, _BySquares):
            _check_squares(name, processor, fields)
        return processor
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{folder}: the image settings in config.json and {file.name} are not those of {name} ({error}). "
            f"Download both again."
        ) from None


def open_images(folder: Path, overrides: Mapping[str, Any] | None = None) -> PreparedImages | None:
    """Return `open_processor` with a cache of prepared images."""
    processor = open_processor(folder, overrides)
    return None if processor is None else PreparedImages(processor)


def _check_squares(name: str, processor: _BySquares, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if images are cut into other squares of patches than config.json says."""
    decoder = fields.get("thinker_config") or fields
    tower = {**decoder, **(decoder.get("vision_config") or {})}
    key = {Gemma4Processor: "pooling_kernel_size", Lfm2VlProcessor: "downsample_factor"}.get(type(processor))
    patch = tower.get("patch_size") or (16 if name.startswith(("Gemma4", "Lfm2", "Qwen3")) else 14)
    merge = tower.get(key or "spatial_merge_size") or (3 if name.startswith("Gemma4") else 2)
    if (patch, merge) != (processor.patch, processor.merge):
        raise ValueError(
            f"{merge} x {merge} patches of {patch} pixels a token, and {processor.merge} x {processor.merge} of "
            f"{processor.patch}"
        )


_FAMILIES: Mapping[str, Preparation] = {
    **deepseek_vl.FAMILIES,
    **gemma.FAMILIES,
    **llava.FAMILIES,
    **published.FAMILIES,
    **qwen.FAMILIES,
    **tiles.FAMILIES,
}
"""Class in config.json -> how its images are prepared."""

_ALSO_TEXT = {
    **published.ALSO_TEXT,
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Llama4ForConditionalGeneration"), "vision_config"),
}
"""Class -> entry of config.json that it has only with a tower. Without the entry, the files hold the decoder alone."""

_OF_TOWER = ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM")
"""Classes whose image settings are in the tower's files."""
