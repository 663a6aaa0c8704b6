"""PaddleOCR-VL, whose decoder is a Llama with M-RoPE."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import (
    TOWER_ACTIVATIONS,
    Composed,
    axes_of,
    expect_usual_rotation,
    part_of,
    rotary_heads,
    text_of,
    with_text,
)
from asyncllm.vl.towers.paddleocr_vl import PaddleOCRVLConfig

__all__ = ["read_paddleocr_vl"]


def read_paddleocr_vl(hf: HFConfig) -> Composed:
    hf = with_text(hf, "paddleocr_vl_text")
    text, _ = text_of(hf, "paddleocr_vl_text", tied=True)
    bias = text.flag("use_bias", False)
    text, axes = axes_of(text.changed({"attention_bias": bias, "mlp_bias": bias}))
    part = part_of(hf, "vision_config")
    part.expect("num_channels", 3)
    expect_usual_rotation(part)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    hidden = part.integer("hidden_size", 1152)
    side, patch = part.integer("image_size", 384), part.integer("patch_size", 14)

    vision = PaddleOCRVLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4304),
        num_layers=part.integer("num_hidden_layers", 27),
        num_heads=rotary_heads(part, hidden, "num_attention_heads", 16),
        patch_size=patch,
        frames=1,
        merge=part.integer("spatial_merge_size", 2),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu_pytorch_tanh")],
        eps=part.number("layer_norm_eps", 1e-6),
        side=side // patch,
    )
    return Composed(text, "LlamaForCausalLM", vision, axes)
