"""What a vision-language model has besides its decoder, which stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

from asyncllm.lite.walk import Walk
from asyncllm.models.output_folder import copy_companions

__all__ = ["copy_tower_files", "tower_modules"]


def tower_modules(walk: Walk) -> list[str]:
    """Return the names of the tower and the projector, and those of all modules in them; none of a model without.

    Readers differ in what they look for: a part of a name, its beginning in memory, where "model." may come first, or
    the whole of it.
    """
    found = (name for name, target in walk.plan.targets.items() if target.module.partition(".")[0] == "vision")
    parts = dict.fromkeys(part for name in found if "." in (part := _part_of(name)))
    inner = [
        name.removesuffix(".weight")
        for name, entry in walk.checkpoint.tensors.items()
        if _part_of(name) in parts and name.endswith(".weight") and len(entry.shape) == 2
    ]
    return [*(name for part in parts for name in (part.removeprefix("model."), part)), *inner]


def copy_tower_files(source: Path, folder: Path) -> None:
    """Copy the configuration of a tower that has a folder of its own within the checkpoint's, as Yi-VL's has."""
    name = json.loads((source / "config.json").read_text(encoding="utf-8")).get("mm_vision_tower")
    inner = (source.resolve() / name).resolve() if isinstance(name, str) else source.resolve()
    if source.resolve() not in inner.parents or not inner.is_dir():
        return
    destination = folder / inner.relative_to(source.resolve())
    destination.mkdir(parents=True)
    copy_companions(inner, destination)


def _part_of(name: str) -> str:
    """Return the name in memory of the part of a model that tensor `name` is in."""
    first, _, rest = name.removeprefix("model.").partition(".")
    return f"model.{first}" if rest else first
