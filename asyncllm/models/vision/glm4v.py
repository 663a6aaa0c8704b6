"""GLM-4.1V and GLM-4.6V-Flash, GLM-4.5V and GLM-4.6V, which have experts, and GLM-OCR."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import (
    TOWER_ACTIVATIONS,
    Composed,
    axes_of,
    expect_usual_rotation,
    part_of,
    rotary_heads,
    square_of,
    text_of,
    with_text,
)
from asyncllm.vl.towers.glm4v import Glm4vConfig

__all__ = ["read_glm4v", "read_glm_ocr"]


def read_glm4v(hf: HFConfig) -> Composed:
    text, _ = text_of(with_text(hf, "glm4v_text"))
    text.expect("model_type", "glm4v_text", "glm4v_moe_text")
    sparse = text.fields.get("model_type", hf.fields.get("model_type")) in ("glm4v_moe", "glm4v_moe_text")
    rope = text.fields.get("rope_parameters") or text.fields.get("rope_scaling") or {}
    rotated = 0.5 if sparse else 1.0
    usual = {
        "partial_rotary_factor": rope.get("partial_rotary_factor", rotated) if isinstance(rope, dict) else 1.0,
        "head_dim": text.integer("hidden_size") // text.integer("num_attention_heads"),
        "rms_norm_eps": 1e-5,
    }
    bias = text.flag("attention_bias", True) if sparse else True
    text = text.changed({**usual, **text.fields, "attention_bias": bias})
    text, axes = axes_of(text, usual=(8, 12, 12))
    part = part_of(hf, "vision_config", {"hidden_size": 1536, "num_heads": 12})
    part.expect("attention_bias", False)
    vision = _tower(
        part,
        text,
        inner=part.integer("out_hidden_size", 4096),
        merger=part.integer("intermediate_size", 13696),
        side=square_of(part, "image_size", 336) // square_of(part, "patch_size", 14),
    )
    return Composed(text, "Glm4MoeForCausalLM" if sparse else "Glm4ForCausalLM", vision, axes)


def read_glm_ocr(hf: HFConfig) -> Composed:
    text, _ = text_of(hf, "glm_ocr_text")
    text.expect("model_type", "glm_ocr_text")
    usual = {"rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "num_key_value_heads": 8}
    text, axes = axes_of(text.changed({**usual, **text.fields, "attention_bias": False}), usual=(8, 12, 12))
    part = part_of(hf, "vision_config", {"hidden_size": 1024, "num_heads": 16})
    vision = _tower(
        part,
        text,
        inner=part.integer("intermediate_size", 4096),
        merger=part.integer("out_hidden_size", 1536) * 3,
        bias=part.flag("attention_bias", True),
    )
    return Composed(text, "Glm4ForCausalLM", vision, axes)


def _tower(
    part: HFConfig, text: HFConfig, *, inner: int, merger: int, side: int | None = None, bias: bool = False
) -> Glm4vConfig:
    """Read the tower's config. `inner` and `merger`: inner features of the blocks' MLPs and of the projector. `side`,
    `bias`: as in Glm4vConfig."""
    hidden = part.integer("hidden_size")
    part.expect("in_channels", 3)
    expect_usual_rotation(part)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    part.expect("out_hidden_size", text.integer("hidden_size"))
    return Glm4vConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        merger_size=merger,
        num_layers=part.integer("depth", 24),
        num_heads=rotary_heads(part, hidden, "num_heads"),
        patch_size=square_of(part, "patch_size", 14),
        frames=part.integer("temporal_patch_size", 2),
        merge=part.integer("spatial_merge_size", 2),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "silu")],
        eps=part.number("rms_norm_eps", 1e-5),
        side=side,
        bias=bias,
    )
