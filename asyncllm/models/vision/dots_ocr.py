"""dots.ocr: config.json is the decoder's, which is Qwen2's, and has the tower's beside it."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, without
from asyncllm.vl.towers.dots_ocr import DotsConfig

__all__ = ["read_dots_ocr"]

_TOWER = {"embed_dim": 1536, "intermediate_size": 4224, "num_hidden_layers": 42, "num_attention_heads": 12}


def read_dots_ocr(hf: HFConfig) -> Composed:
    text, part = without(hf, "vision_config"), part_of(hf, "vision_config", _TOWER)
    part.expect("is_causal", False)
    part.expect("num_channels", 3)
    part.expect("temporal_patch_size", 1)
    part.expect("hidden_size", text.integer("hidden_size"))
    hidden, heads = part.integer("embed_dim"), part.integer("num_attention_heads")
    if hidden % heads or hidden // heads % 4:
        part.invalid("num_attention_heads", "which leaves heads of a size that is no multiple of 4")
    vision = DotsConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size"),
        num_layers=part.integer("num_hidden_layers"),
        num_heads=heads,
        patch_size=part.integer("patch_size", 14),
        frames=1,
        merge=part.integer("spatial_merge_size", 2),
        activation="silu",
        eps=part.number("rms_norm_eps", 1e-5),
        bias=part.flag("use_bias", False),
        last_norm=part.flag("post_norm", True),
    )
    return Composed(text, "Qwen2ForCausalLM", vision)
