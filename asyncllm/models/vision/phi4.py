"""Phi-4-multimodal with images, in its authors' format and in transformers'."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, clip_of, depth_of
from asyncllm.vl.known_towers import phi4_tower
from asyncllm.vl.towers.phi4 import FOLD, Phi4VisionConfig

__all__ = ["read_phi4"]


def read_phi4(hf: HFConfig) -> Composed:
    tower = phi4_tower(hf.fields)
    encoder = clip_of(hf.changed({"vision_config": tower}), "phi4_multimodal_vision")
    if encoder.side % FOLD or tower.get("crop_size", encoder.image_size) != encoder.image_size:
        hf.unsupported("vision_config", "Supported: an even number of patches along each side of a crop.")
    depth = depth_of(hf, "vision_config", tower.get("feature_layer", -2), encoder.num_layers)
    vision = Phi4VisionConfig(encoder=encoder, read_layers=depth)
    return Composed(hf, "Phi3ForCausalLM", vision)
