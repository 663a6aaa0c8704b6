"""Llama 4 with images: Scout and Maverick."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, rotary_heads, square_of, text_of
from asyncllm.vl.towers.llama4 import Llama4TowerConfig

__all__ = ["read_llama4"]

MAX_FOLD = 64


def read_llama4(hf: HFConfig) -> Composed | None:
    """Read config.json. Return None for a file without `vision_config`, whose checkpoint is the decoder alone."""
    if hf.fields.get("vision_config") is None:
        return None
    text, _ = text_of(hf)
    part = part_of(hf, "vision_config")
    part.expect("num_channels", 3)
    part.expect("hidden_act", "gelu")
    part.expect("norm_eps", 1e-5)
    part.expect("multi_modal_projector_bias", False)
    part.expect("vision_feature_select_strategy", "default")
    hidden = part.integer("hidden_size", 768)
    side, patch = square_of(part, "image_size", 448), square_of(part, "patch_size", 14)
    fold = 1 / part.number("pixel_shuffle_ratio", 0.5)
    if not fold.is_integer() or not 1 <= fold <= MAX_FOLD or side % patch or side // patch % int(fold):
        part.invalid("pixel_shuffle_ratio", f"which does not fold {side} / {patch} patches evenly")
    inner, width = part.integer("intermediate_size", 5632), part.integer("projector_output_dim", 4096)
    part.expect("projector_input_dim", width)
    part.expect("vision_output_dim", width)
    if inner != hidden * int(fold) ** 2:
        part.unsupported("intermediate_size", f"Supported: that of a folded square, {hidden * int(fold) ** 2}.")
    rope = part.fields.get("rope_parameters")
    theta = part.changed(rope if isinstance(rope, dict) else {}).number("rope_theta", 10000.0)
    vision = Llama4TowerConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        projector_size=width,
        num_layers=part.integer("num_hidden_layers", 34),
        num_heads=rotary_heads(part, hidden, "num_attention_heads", 16),
        image_size=side,
        patch_size=patch,
        fold=int(fold),
        theta=theta,
    )
    return Composed(text, "Llama4ForCausalLM", vision)
