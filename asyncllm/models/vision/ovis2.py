"""Ovis2, in transformers' format."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, part_of, square_of, text_of
from asyncllm.vl.towers.ovis2 import NUM_MARKS, Ovis2TowerConfig

__all__ = ["read_ovis2"]


def read_ovis2(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, "qwen2", tied=True)
    part = part_of(hf, "vision_config", {"hidden_size": 1024, "num_attention_heads": 8, "hidden_act": "silu"})
    part.expect("tokenize_function", "softmax")
    part.expect("num_visual_indicator_tokens", NUM_MARKS)
    part.expect("num_channels", 3)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    hidden, heads = part.integer("hidden_size"), part.integer("num_attention_heads")
    size, patch = square_of(part, "image_size", 224), square_of(part, "patch_size", 14)
    if size % patch or hidden % heads:
        part.invalid("patch_size" if size % patch else "num_attention_heads", "which does not divide evenly")
    fold = part.integer("hidden_stride", 1)
    if size // patch % fold:
        part.unsupported("hidden_stride", f"Supported: one that divides {size // patch} patches.")
    words = part.integer("vocab_size", 16384)
    if words <= NUM_MARKS:
        part.invalid("vocab_size", f"which must exceed the {NUM_MARKS} marks around tiles")
    vision = Ovis2TowerConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 2816),
        num_layers=part.integer("num_hidden_layers", 24),
        num_heads=heads,
        side=size // patch,
        patch_size=patch,
        eps=part.number("rms_norm_eps", 1e-5),
        activation=TOWER_ACTIVATIONS[part.fields["hidden_act"]],
        qkv_bias=part.flag("qkv_bias", False),
        mlp_bias=part.flag("mlp_bias", False),
        num_words=words,
        fold=fold,
    )
    return Composed(text, decoder, vision)
