"""Gemma 4 with images: E2B, E4B, 26B-A4B and 31B."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, part_of, text_of
from asyncllm.vl.towers.gemma4 import Gemma4TowerConfig

__all__ = ["read_gemma4"]


def read_gemma4(hf: HFConfig) -> Composed | None:
    """Read config.json. Return None for a file without `vision_config`, whose checkpoint is the decoder alone."""
    if hf.fields.get("vision_config") is None:
        return None
    text, _ = text_of(hf, "gemma4_text", tied=True)
    part = part_of(hf, "vision_config")
    part.expect("model_type", "gemma4_vision")
    part.expect("attention_bias", False)
    part.expect("hidden_activation", *TOWER_ACTIVATIONS)
    heads, head_dim = part.integer("num_attention_heads", 12), part.integer("head_dim", 64)
    shared = part.integer("num_key_value_heads", 12)
    if heads % shared or head_dim % 4:
        part.invalid("num_key_value_heads" if heads % shared else "head_dim", "which does not divide evenly")
    rope = part.fields.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "axial") not in ("axial", "default"):
        part.unsupported("rope_parameters", "Supported: rope_type = 'axial'.")
    vision = Gemma4TowerConfig(
        hidden_size=part.integer("hidden_size", 768),
        intermediate_size=part.integer("intermediate_size", 3072),
        num_layers=part.integer("num_hidden_layers", 16),
        num_heads=heads,
        num_kv_heads=shared,
        head_dim=head_dim,
        patch_size=part.integer("patch_size", 16, maximum=1024),
        pool=part.integer("pooling_kernel_size", 3, maximum=64),
        places=part.integer("position_embedding_size", 10240),
        theta=part.changed({"rope_theta": rope.get("rope_theta", 100.0)}).number("rope_theta"),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_activation", "gelu_pytorch_tanh")],
        eps=part.number("rms_norm_eps", 1e-6),
        clipped=part.flag("use_clipped_linears", False),
        standardized=part.flag("standardize", False),
    )
    return Composed(text, "Gemma4ForCausalLM", vision)
