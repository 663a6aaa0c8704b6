"""Configs of vision towers that config.json only names or leaves to the authors' code, as LLaVA's original
checkpoints do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from asyncllm.errors import UnsupportedModel, short
from asyncllm.text.checkpoint_files import read_json_object

__all__ = [
    "XComposer",
    "fine_tower_fields",
    "molmo_tower",
    "multi_modality_fields",
    "ocr_tile",
    "phi4_tower",
    "tower_fields",
    "tower_of",
    "tower_settings",
    "xcomposer_kind",
    "xcomposer_tower",
]

_LARGE = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}

_KNOWN: Mapping[str, Mapping[str, Any]] = {
    "google/siglip-so400m-patch14-384": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 384,
    },
    "openai/clip-vit-large-patch14": {**_LARGE, "image_size": 224},
    "openai/clip-vit-large-patch14-336": {**_LARGE, "image_size": 336},
}


def tower_fields(folder: Path, name: Any) -> Mapping[str, Any]:
    """Return the `vision_config` of the tower that a checkpoint's `mm_vision_tower` names: one of `_KNOWN`, or a folder
    inside the checkpoint's (Yi-VL). Raises UnsupportedModel."""
    # Compare last components only: some checkpoints name a local copy of the tower by its path.
    known = next((each for own, each in _KNOWN.items() if _last(own) == _last(name)), None)
    if known is not None:
        return known
    own = _inner(folder, name, "config.json")
    fields = own.get("vision_config") or own
    if not fields:
        raise UnsupportedModel(
            f"{folder / 'config.json'}: mm_vision_tower = {short(name)} is not implemented. Supported: "
            f"{', '.join(_KNOWN)}, or a folder with a config.json inside the checkpoint's."
        )
    return {"model_type": "clip_vision_model", **fields}


_FINE: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("xxlarge", ""): {"depths": [3, 4, 30, 3], "hidden_sizes": [384, 768, 1536, 3072]},
    ("large", "d-320"): {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]},
    ("base", "w-320"): {"depths": [3, 3, 27, 3], "hidden_sizes": [128, 256, 512, 1024]},
}
"""Words in the name of an OpenCLIP ConvNeXt -> its sizes."""


def fine_tower_fields(folder: Path, name: Any) -> Mapping[str, Any]:
    """Return `depths` and `hidden_sizes` of the ConvNeXt that a checkpoint's `mm_vision_tower_aux` names: one of
    OpenCLIP's, or a folder inside the checkpoint's. Raises UnsupportedModel."""
    last = _last(name)
    if "convnext" in last:
        for words, known in _FINE.items():
            if all(word in last for word in words):
                return known
    own = dict(_inner(folder, name, "config.json"))
    depths, sizes = own.get("depths"), own.get("hidden_sizes")
    if not _are_counts(depths) or not _are_counts(sizes) or len(depths) != len(sizes):
        raise UnsupportedModel(
            f"{folder / 'config.json'}: mm_vision_tower_aux = {short(name)} is not implemented. Supported: OpenCLIP's "
            f"convnext-large-d-320, convnext-base-w-320 and convnext-xxlarge, or a folder with a config.json inside "
            f"the checkpoint's, with as many depths as hidden_sizes."
        )
    return own


def tower_settings(folder: Path, name: Any) -> Mapping[str, Any]:
    """Return the entries of the tower's preprocessor_config.json; empty if there is none."""
    return _inner(folder, name, "preprocessor_config.json")


_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
    "hidden_act": "gelu",
}


def tower_of(fields: Mapping[str, Any], usual: str = "siglip_vision_model") -> dict[str, Any]:
    """Return `vision_config`, completed with transformers' default sizes. `usual`: the default model type."""
    vision = {key: value for key, value in (fields.get("vision_config") or {}).items() if value is not None}
    patch = 32 if vision.get("model_type", usual) == "clip_vision_model" else 16
    return {"image_size": 224, "patch_size": patch, **vision}


def multi_modality_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert the authors' config.json of DeepSeek-VL or Janus to the entries of transformers' DeepSeek-VL:
    `text_config`, `vision_config` and, for two towers, `high_res_vision_config`. The towers' names determine their
    sizes, which an entry `sizes` of `vision_config` overrides. Raises UnsupportedModel."""
    vision, joined = _object(fields, "vision_config"), _object(_object(fields, "aligner_config"), "params")
    params, own = _object(vision, "params"), _object(vision, "sizes")
    two = vision.get("cls") == "HybridVisionTower"
    low = _object(params, "low_res_cfg") if two else params
    high = _object(params, "high_res_cfg")
    names = (vision.get("cls"), low.get("model_name"), high.get("model_name"), joined.get("projector_type"))
    if list(names) not in _DEEPSEEK or joined.get("depth", 2) != 2 or low.get("select_layer", -1) != -1:
        raise UnsupportedModel(
            f"{where}: vision_config and aligner_config are of {short(names)}, which is not implemented. Supported: "
            f"those of DeepSeek-VL 1.3B and 7B, and of Janus."
        )
    large = {"model_type": "sam_vision_model", "image_size": high.get("image_size", 1024), **_object(own, "high")}
    return {
        **{key: value for key, value in fields.items() if key != "language_config"},
        "text_config": {"model_type": "llama", **_object(fields, "language_config")},
        "vision_config": {**_SIGLIP, "image_size": low.get("image_size", 384), **_object(own, "low")},
        **({"high_res_vision_config": large} if two else {}),
    }


def _object(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a nested object, or an empty one if the entry is missing or is not an object."""
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


_DEEPSEEK = (
    ["CLIPVisionTower", "siglip_large_patch16_384", None, "mlp_gelu"],
    ["HybridVisionTower", "siglip_large_patch16_384", "sam_b_downsample", "low_high_hybrid_split_mlp_gelu"],
)

XComposer = Literal["2", "4khd", "2.5"]


def xcomposer_kind(folder: Path) -> XComposer:
    """Return the version of an InternLM-XComposer2 checkpoint. Only the name of the image transform in the authors'
    code tells them apart; that code is read as text and never run."""
    file = folder / "ixc_utils.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "2.5" if "def Image_transform" in text else "4khd" if "def HD_transform" in text else "2"


def xcomposer_tower(fields: Mapping[str, Any], kind: XComposer) -> Mapping[str, Any]:
    """Return the `vision_config` of XComposer's tower: CLIP's large one, overridden by such an entry if there is one.
    The authors' config.json has at most the size of pictures."""
    usual = {"2": 224, "4khd": 336, "2.5": 560}[kind]
    given = fields.get("vision_config")
    return {**_LARGE, "image_size": fields.get("img_size", usual), **(given if isinstance(given, dict) else {})}


def molmo_tower(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `vision_config` of Molmo's tower: CLIP's large one without its last layer, as in the authors' code,
    overridden by such an entry if there is one."""
    return {**_LARGE, "num_hidden_layers": 23, "image_size": 336, **_object(fields, "vision_config")}


def ocr_tile(folder: Path) -> int:
    """Return the side of DeepSeek-OCR's tiles in pixels: `tile_size` of processor_config.json, or else the constant of
    the authors' code. Raises UnsupportedModel."""
    value = read_json_object(folder / "processor_config.json").get("tile_size", 640)
    if type(value) is not int or not 0 < value <= 2**13:
        raise UnsupportedModel(f"{folder / 'processor_config.json'}: tile_size = {short(value)} is not implemented.")
    return value


def phi4_tower(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `vision_config` of Phi-4-multimodal's tower, which the authors' config.json lacks."""
    known = {**_KNOWN["google/siglip-so400m-patch14-384"], "image_size": 448}
    return {**known, **{key: each for key, each in _object(fields, "vision_config").items() if each is not None}}


def _inner(folder: Path, name: Any, file: str) -> Mapping[str, Any]:
    """Return the JSON object in a file of a folder inside the checkpoint's; empty if `name` leads outside it."""
    whole = folder.resolve()
    inner = (whole / name).resolve() if isinstance(name, str) else whole
    return read_json_object(inner / file) if whole in inner.parents else {}


def _last(name: Any) -> str:
    return name.rpartition("/")[2].lower() if isinstance(name, str) else ""


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(each) is int and 0 < each < 2**16 for each in value)
