"""Towers that config.json names where others describe them: LLaVA's, under the names of its authors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from asyncllm.errors import UnsupportedModel, short
from asyncllm.text.checkpoint_files import read_json_object

__all__ = ["XComposer", "tower_fields", "tower_settings", "xcomposer_kind", "xcomposer_tower"]

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
    "openai/clip-vit-large-patch14": {**_LARGE, "image_size": 224},
    "openai/clip-vit-large-patch14-336": {**_LARGE, "image_size": 336},
}


def tower_fields(folder: Path, name: Any) -> Mapping[str, Any]:
    """Return the `vision_config` of the tower that a checkpoint's `mm_vision_tower` names: one of a few, or a folder
    within the checkpoint's (Yi-VL). Raises UnsupportedModel."""
    known = _KNOWN.get(name) if isinstance(name, str) else None
    if known is not None:
        return known
    own = _inner(folder, name, "config.json")
    fields = own.get("vision_config") or own
    if not fields:
        raise UnsupportedModel(
            f"{folder / 'config.json'}: mm_vision_tower = {short(name)} is not implemented. Supported: "
            f"{', '.join(_KNOWN)}, or a folder with a config.json within the checkpoint's."
        )
    return {"model_type": "clip_vision_model", **fields}


def tower_settings(folder: Path, name: Any) -> Mapping[str, Any]:
    """Return what the tower's preprocessor_config.json says; nothing where there is none."""
    return _inner(folder, name, "preprocessor_config.json")


XComposer = Literal["2", "4khd", "2.5"]


def xcomposer_kind(folder: Path) -> XComposer:
    """Return which InternLM-XComposer a checkpoint is of, by how the code in its folder, which is not run, calls its
    preparation of images."""
    file = folder / "ixc_utils.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "2.5" if "def Image_transform" in text else "4khd" if "def HD_transform" in text else "2"


def xcomposer_tower(fields: Mapping[str, Any], kind: XComposer) -> Mapping[str, Any]:
    """Return the `vision_config` of its tower, of which config.json has the size of pictures at most: CLIP's large one,
    unless there is such an entry all the same."""
    usual = {"2": 224, "4khd": 336, "2.5": 560}[kind]
    return {**_LARGE, "image_size": fields.get("img_size", usual), **(fields.get("vision_config") or {})}


def _inner(folder: Path, name: Any, file: str) -> Mapping[str, Any]:
    """Return what a file says in a folder within the checkpoint's; nothing for a name that leads elsewhere."""
    whole = folder.resolve()
    inner = (whole / name).resolve() if isinstance(name, str) else whole
    return read_json_object(inner / file) if whole in inner.parents else {}
