"""Gemma 3 with images: 4B, 12B and 27B."""

from __future__ import annotations

import math

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, text_of
from asyncllm.vl.towers.gemma3 import Gemma3TowerConfig

__all__ = ["read_gemma3"]


def read_gemma3(hf: HFConfig) -> Composed:
    text, _ = text_of(hf, "gemma3_text", tied=True)
    encoder = msgspec.structs.replace(clip_of(hf, usual={"model_type": "siglip_vision_model"}), final_norm=True)
    if encoder.has_class_token:
        hf.unsupported("vision_config", "Supported: model_type = 'siglip_vision_model'.")
    side = math.isqrt(hf.integer("mm_tokens_per_image", 256))
    if side**2 != hf.integer("mm_tokens_per_image", 256) or encoder.side % side:
        hf.invalid("mm_tokens_per_image", f"where a square that divides {encoder.side} x {encoder.side} belongs")
    return Composed(text, "Gemma3ForCausalLM", Gemma3TowerConfig(encoder=encoder, pool=encoder.side // side))
