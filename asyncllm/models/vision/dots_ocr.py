"""dots.ocr: config.json has the entries of the decoder, a Qwen2, at the top level, and a `vision_config`."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, rotary_heads, without
from asyncllm.vl.towers.dots_ocr import DotsConfig

__all__ = ["read_dots_ocr"]

_TOWER = {"embed_dim": 1536, "intermediate_size": 4224, "num_hidden_layers": 42, "num_attention_heads": 12}


def read_dots_ocr(hf: HFConfig) -> Composed:
    text, part = without(hf, "vision_config"), part_of(hf, "vision_config", _TOWER)
    part.expect("is_causal", False)
    part.expect("num_channels", 3)
    part.expect("temporal_patch_size", 1)
    part.expect("hidden_size", text.integer("hidden_size"))
    hidden = part.integer("embed_dim")
    vision = DotsConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size"),
        num_layers=part.integer("num_hidden_layers"),
        num_heads=rotary_heads(part, hidden, "num_attention_heads"),
        patch_size=part.integer("patch_size", 14),
        frames=1,
        merge=part.integer("spatial_merge_size", 2),
        activation="silu",
        eps=part.number("rms_norm_eps", 1e-5),
        bias=part.flag("use_bias", False),
        last_norm=part.flag("post_norm", True),
    )
    return Composed(text, "Qwen2ForCausalLM", vision)
