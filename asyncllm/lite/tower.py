"""The parts of a vision-language model other than its decoder, which stay unquantized."""

from __future__ import annotations

import json
from pathlib import Path

from asyncllm.errors import UnsupportedModel
from asyncllm.lite.walk import Walk
from asyncllm.models.loading.output_folder import copy_companions

__all__ = ["copy_tower_files", "tower_modules"]


def tower_modules(walk: Walk) -> list[str]:
    """Return the names of the tower and the projector and of all modules in them; none for a model without them.

    Readers compare names differently: a part of the name, its beginning in memory, perhaps with "model." first, or the
    whole name. Raises UnsupportedModel if a name would also match the decoder's, or if image tokens have weights in the
    decoder, for which texts give no statistics.
    """
    vision = walk.model.config.vision
    if vision is not None and vision.image_rows is not None:
        raise UnsupportedModel(
            f"{walk.checkpoint.folder}: images' tokens have weights of their own in the decoder, which is quantized by "
            f"texts. Serve the model as it is."
        )
    found = (name for name, target in walk.plan.targets.items() if target.module.partition(".")[0] == "vision")
    parts = dict.fromkeys(part for name in found if "." in (part := _part_of(name)))
    own = {_part_of(name) for name, target in walk.plan.targets.items() if target.module.partition(".")[0] == "layers"}
    if own & parts.keys():
        raise UnsupportedModel(
            f"{walk.checkpoint.folder}: the tower lies among the decoder's modules ({', '.join(sorted(own))}), so that "
            f"a quantized file could not name it apart. Serve the model as it is."
        )
    inner = [
        name.removesuffix(".weight")
        for name, entry in walk.checkpoint.tensors.items()
        if _part_of(name) in parts and name.endswith(".weight") and len(entry.shape) == 2
    ]
    return [*(name for part in parts for name in (part.removeprefix("model."), part)), *inner]


def copy_tower_files(source: Path, folder: Path) -> None:
    """Copy the configuration of a tower that has a folder of its own inside the checkpoint's, as Yi-VL's does."""
    name = json.loads((source / "config.json").read_text(encoding="utf-8")).get("mm_vision_tower")
    inner = (source.resolve() / name).resolve() if isinstance(name, str) else source.resolve()
    if source.resolve() not in inner.parents or not inner.is_dir():
        return
    destination = folder / inner.relative_to(source.resolve())
    destination.mkdir(parents=True)
    copy_companions(inner, destination)


def _part_of(name: str) -> str:
    """Return the name in memory of the model's part that contains tensor `name`."""
    first, _, rest = name.removeprefix("model.").partition(".")
    return f"model.{first}" if rest else first
