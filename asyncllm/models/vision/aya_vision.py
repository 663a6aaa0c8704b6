"""Aya Vision and Command A Vision."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, depth_of, text_of
from asyncllm.vl.towers.aya_vision import AyaVisionConfig

__all__ = ["read_aya_vision", "read_cohere2_vision"]


def read_cohere2_vision(hf: HFConfig) -> Composed:
    hf.expect("vision_feature_layer", -1)
    width = hf.integer("alignment_intermediate_size", 36864)
    parts = read_aya_vision(hf.changed({"alignment_intermediate_size": width}))
    assert isinstance(parts.vision, AyaVisionConfig)
    encoder = msgspec.structs.replace(parts.vision.encoder, final_norm=True)
    return parts._replace(vision=msgspec.structs.replace(parts.vision, encoder=encoder, eps=None))


def read_aya_vision(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, "cohere2", tied=True)
    # transformers' class, the original implementation, does not scale the decoder's logits.
    text = text.changed({"logit_scale": 1.0})
    encoder = clip_of(hf, usual={"model_type": "siglip_vision_model"})
    if encoder.has_class_token:
        hf.unsupported("vision_config", "Supported: model_type = 'siglip_vision_model'.")
    hf.expect("vision_feature_select_strategy", "full")
    fold = hf.integer("downsample_factor", 2)
    if encoder.side % fold:
        hf.invalid("downsample_factor", f"which does not divide {encoder.side} patches")
    width = hf.integer("alignment_intermediate_size", text.integer("hidden_size"))
    if width % 2:
        hf.invalid("alignment_intermediate_size", "which has no halves")
    vision = AyaVisionConfig(
        encoder=encoder,
        read_layers=depth_of(hf, "vision_feature_layer", hf.fields.get("vision_feature_layer", -1), encoder.num_layers),
        fold=fold,
        projector_size=width // 2,
        eps=hf.number("adapter_layer_norm_eps", 1e-6),
    )
    return Composed(text, decoder, vision)
