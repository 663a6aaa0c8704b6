"""GLM-4V-9B, whose tower is EVA2-CLIP."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, part_of
from asyncllm.vl.towers.eva import EvaConfig

__all__ = ["eva_of", "read_glm4v_9b"]


def read_glm4v_9b(hf: HFConfig) -> Composed | None:
    """None for the text models of the same class."""
    if hf.fields.get("vision_config") is None:
        return None
    hidden = hf.integer("hidden_size")
    vision = eva_of(
        part_of(hf, "vision_config"),
        fold=2,
        folded_size=hidden,
        projector_size=hf.integer("ffn_hidden_size", 13696),
        source="transformer.vision",
    )
    text = HFConfig(
        {key: value for key, value in hf.fields.items() if key != "vision_config"},
        source=hf.source,
        session_len=hf.session_len,
        rope_scaling_factor=hf.rope_scaling_factor,
    )
    # Half of a head's features are turned.
    pairs = hf.integer("kv_channels", hidden // hf.integer("num_attention_heads", 32)) // 4
    return Composed(text, "ChatGLMModel", vision, axes=(0,) * pairs)


def eva_of(part: HFConfig, *, fold: int, folded_size: int, projector_size: int, source: str) -> EvaConfig:
    """Return the tower that `vision_config` describes. Raises InvalidCheckpoint, UnsupportedModel."""
    part.expect("in_channels", 3)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    hidden, heads = part.integer("hidden_size", 1792), part.integer("num_heads", 16)
    size, patch = part.integer("image_size"), part.integer("patch_size", 14)
    if hidden % heads or size % (fold * patch):
        part.invalid("num_heads" if hidden % heads else "image_size", "which does not divide evenly")
    part.expect("num_positions", (size // patch) ** 2 + 1)
    return EvaConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 15360),
        num_layers=part.integer("num_hidden_layers", 63),
        num_heads=heads,
        image_size=size,
        patch_size=patch,
        eps=part.number("layer_norm_eps", 1e-6),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu")],
        fold=fold,
        folded_size=folded_size,
        projector_size=projector_size,
        divisor=part.number("scaling_factor", 1.0),
        source=source,
    )
