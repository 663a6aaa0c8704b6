"""Qwen-VL of the first generation: config.json has the decoder's entries at the top level, and the tower's in
`visual`."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, without
from asyncllm.vl.towers.qwen_visual import HEAD_SIZE, QwenVisualConfig

__all__ = ["read_qwen_visual"]


def read_qwen_visual(hf: HFConfig) -> Composed | None:
    """Read config.json. Return None for the text models of the same class."""
    if hf.fields.get("visual") is None:
        return None
    part, hidden = part_of(hf, "visual"), hf.integer("hidden_size")
    part.expect("output_dim", hidden)
    part.expect("n_queries", 256)
    width, heads = part.integer("width"), part.integer("heads")
    size, patch = part.integer("image_size", 448), part.integer("patch_size", 14)
    if width % heads or size % patch:
        part.invalid("heads" if width % heads else "patch_size", "which does not divide what it is a part of")
    if hidden % HEAD_SIZE:
        hf.invalid("hidden_size", f"which is not a multiple of {HEAD_SIZE}")
    vision = QwenVisualConfig(
        hidden_size=width,
        intermediate_size=int(width * part.number("mlp_ratio", 4.0)),
        num_layers=part.integer("layers"),
        num_heads=heads,
        image_size=size,
        patch_size=patch,
    )
    return Composed(without(hf, "visual"), "QWenLMHeadModel", vision)
