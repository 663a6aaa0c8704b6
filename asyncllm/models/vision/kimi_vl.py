"""Kimi-VL and Kimi-K2.5 with images: MoonViT and DeepSeek-V3's decoder."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, expect_usual_rotation, part_of, rotary_heads, square_of, text_of
from asyncllm.vl.towers.moonvit import MoonViTConfig

__all__ = ["read_kimi_k25", "read_kimi_vl"]

_PUBLISHED_NAMES = {
    **{f"vt_{name}": name for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")},
    **{f"init_pos_emb_{name}": f"pos_emb_{name}" for name in ("height", "width")},
}
"""Keys of the authors' `vision_config` -> transformers' keys."""


def read_kimi_k25(hf: HFConfig) -> Composed:
    hf.expect("projection_layer_norm_eps", 1e-5)
    part = part_of(hf, "vision_config").named(_PUBLISHED_NAMES)
    for key, only in (
        ("merge_type", "sd2_tpool"),
        ("mm_projector_type", "patchmerger"),
        ("pos_emb_type", "divided_fixed"),
        ("projector_hidden_act", "gelu"),
        ("projector_ln_eps", 1e-5),
        ("hidden_act", "gelu_pytorch_tanh"),
    ):
        part.expect(key, only)
    expect_usual_rotation(part)
    sides = {f"init_pos_emb_{name}": part.integer(f"pos_emb_{name}", 64) for name in ("height", "width")}
    parts = read_kimi_vl(hf.changed({"vision_config": {**part.fields, **sides, "model_type": "moonvit"}}), tied=True)
    names = ("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2")
    return parts._replace(vision=msgspec.structs.replace(parts.vision, projector=names))


def read_kimi_vl(hf: HFConfig, *, tied: bool = False) -> Composed:
    """Read config.json. `tied`: as in `text_of`."""
    text, _ = text_of(hf, "deepseek_v3", tied=tied)
    text = text.changed({"num_nextn_predict_layers": text.fields.get("num_nextn_predict_layers", 0)})
    part = part_of(hf, "vision_config")
    part.expect("model_type", "moonvit")
    hidden = part.integer("hidden_size", 1152)
    vision = MoonViTConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4304),
        num_layers=part.integer("num_hidden_layers", 27),
        num_heads=rotary_heads(part, hidden, "num_attention_heads", 16),
        patch_size=square_of(part, "patch_size", 14),
        merge=square_of(part, "merge_kernel_size", 2),
        grid=(part.integer("init_pos_emb_height", 64), part.integer("init_pos_emb_width", 64)),
    )
    return Composed(text, "DeepseekV3ForCausalLM", vision)
