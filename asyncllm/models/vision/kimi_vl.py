"""Kimi-VL: DeepSeek-V3's decoder behind MoonViT."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, square_of, text_of
from asyncllm.vl.towers.moonvit import MoonViTConfig

__all__ = ["read_kimi_vl"]


def read_kimi_vl(hf: HFConfig) -> Composed:
    text, _ = text_of(hf)
    text = text.changed({"num_nextn_predict_layers": text.fields.get("num_nextn_predict_layers", 0)})
    part = part_of(hf, "vision_config")
    part.expect("model_type", "moonvit")
    hidden, heads = part.integer("hidden_size", 1152), part.integer("num_attention_heads", 16)
    if hidden % heads or hidden // heads % 4:
        part.invalid("num_attention_heads", "which leaves heads of a size that is no multiple of 4")
    vision = MoonViTConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4304),
        num_layers=part.integer("num_hidden_layers", 27),
        num_heads=heads,
        patch_size=square_of(part, "patch_size", 14),
        merge=square_of(part, "merge_kernel_size", 2),
        grid=(part.integer("init_pos_emb_height", 64), part.integer("init_pos_emb_width", 64)),
    )
    return Composed(text, "DeepseekV3ForCausalLM", vision)
