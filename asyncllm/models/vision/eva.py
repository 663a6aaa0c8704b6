"""GLM-4V-9B, CogVLM and CogVLM2, whose tower is EVA2-CLIP."""

from __future__ import annotations

import msgspec

from asyncllm.layers.image_rows import ImageExperts
from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, part_of, without
from asyncllm.vl.towers.eva import EvaConfig

__all__ = ["read_cogvlm", "read_glm4v_9b"]


_LAYER, _OWN = "model.layers.{i}", "layers.{i}"
_EXPERTS = {
    f"{_LAYER}.self_attn.language_expert_query_key_value": f"{_OWN}.attn.qkv[q+k+v]",
    f"{_LAYER}.self_attn.language_expert_dense": f"{_OWN}.attn.out",
    f"{_LAYER}.self_attn.vision_expert_query_key_value": f"{_OWN}.attn.qkv.image_rows.linear[q+k+v]",
    f"{_LAYER}.self_attn.vision_expert_dense": f"{_OWN}.attn.out.image_rows.linear",
    **{
        f"{_LAYER}.mlp.{kind}_mlp.{name}_proj": f"{_OWN}.mlp.{part.replace('*', rows)}"
        for kind, rows in (("language", ""), ("vision", ".image_rows.linear"))
        for name, part in (("gate", "gate_up*[gate]"), ("up", "gate_up*[up]"), ("down", "down*"))
    },
}
"""CogVLM's decoder, whose linear layers have a weight for tokens of text and one for tokens of images."""


def read_glm4v_9b(hf: HFConfig) -> Composed | None:
    """Read config.json. Return None for the text models of the same class."""
    if hf.fields.get("vision_config") is None:
        return None
    hidden = hf.integer("hidden_size")
    vision = _eva_of(
        part_of(hf, "vision_config"),
        fold=2,
        folded_size=hidden,
        projector_size=hf.integer("ffn_hidden_size", 13696),
        source="transformer.vision",
    )
    # Half of a head's features are rotated.
    pairs = hf.integer("kv_channels", hidden // hf.integer("num_attention_heads", 32)) // 4
    return Composed(without(hf, "vision_config"), "ChatGLMModel", vision, axes=(0,) * pairs)


def read_cogvlm(hf: HFConfig) -> Composed:
    part = part_of(hf, "vision_config")
    # The second generation has fewer key heads, folds patches and uses another rotary base, which has no entry.
    groups = hf.optional_integer("num_multi_query_heads")
    vision = _eva_of(
        part,
        fold=1 if groups is None else 2,
        folded_size=part.integer("hidden_size", 1792),
        projector_size=hf.integer("intermediate_size"),
        source="vision",
    )
    experts = ImageExperts(weights=_EXPERTS, qkv_bias=groups is not None)
    vision = msgspec.structs.replace(vision, image_rows=experts, divisor=1.0)
    heads = hf.integer("num_attention_heads")
    text = without(hf, "vision_config").changed(
        {
            "num_key_value_heads": heads if groups is None else groups,
            "rope_theta": 10000.0 if groups is None else 500000.0,
            "rms_norm_eps": hf.number("rms_norm_eps", 1e-6),
        }
    )
    return Composed(text, "LlamaForCausalLM", vision, axes=(0,) * (hf.integer("hidden_size") // heads // 2))


def _eva_of(part: HFConfig, *, fold: int, folded_size: int, projector_size: int, source: str) -> EvaConfig:
    """Return the config of the tower in `vision_config`. Raises InvalidCheckpoint, UnsupportedModel."""
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
