"""DeepSeek-VL 7B, which has two towers, and all DeepSeek-VLs and Janus in their authors' format."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.llava import read_deepseek_vl
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, clip_of, part_of, square_of, text_of
from asyncllm.vl.known_towers import multi_modality_fields
from asyncllm.vl.towers.deepseek_vl_hybrid import HybridConfig
from asyncllm.vl.towers.sam import SamConfig

__all__ = ["read_deepseek_vl_hybrid", "read_multi_modality", "sam_of"]


def read_deepseek_vl_hybrid(hf: HFConfig) -> Composed:
    text, decoder = text_of(hf, tied=True)
    if text.integer("hidden_size") % 2:
        text.invalid("hidden_size", "which must be even, since each tower provides half of the features")
    small = msgspec.structs.replace(clip_of(hf, usual={"model_type": "siglip_vision_model"}), final_norm=True)
    if small.has_class_token:
        hf.unsupported("vision_config", "Supported: model_type = 'siglip_vision_model'.")
    return Composed(text, decoder, HybridConfig(small=small, large=sam_of(_large(hf))))


def read_multi_modality(hf: HFConfig) -> Composed:
    hf = hf.changed(multi_modality_fields(hf.fields, hf.source))
    if hf.fields.get("high_res_vision_config") is None:
        parts, key = read_deepseek_vl(hf), "encoder"
    else:
        parts, key = read_deepseek_vl_hybrid(hf), "small"
    encoder = msgspec.structs.replace(getattr(parts.vision, key), stacked_positions=True)
    return parts._replace(vision=msgspec.structs.replace(parts.vision, **{key: encoder}))


def _large(hf: HFConfig) -> HFConfig:
    part = part_of(hf, "high_res_vision_config")
    part.expect("model_type", "sam_vision_model")
    return part


def sam_of(part: HFConfig) -> SamConfig:
    """Return the config of the SAM encoder in an object of config.json. Raises InvalidCheckpoint, UnsupportedModel."""
    part.expect("num_channels", 3)
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    part.expect("use_abs_pos", True)
    part.expect("use_rel_pos", True)
    hidden, heads = part.integer("hidden_size", 768), part.integer("num_attention_heads", 12)
    side, patch = square_of(part, "image_size", 1024), square_of(part, "patch_size", 16)
    if hidden % heads or side % patch:
        part.invalid("patch_size" if side % patch else "num_attention_heads", "which does not divide evenly")
    depth, layers = part.integer("num_hidden_layers", 12), part.fields.get("global_attn_indexes", [2, 5, 8, 11])
    fits = isinstance(layers, list) and all(type(each) is int and 0 <= each < depth for each in layers)
    if not fits or not layers:
        part.invalid("global_attn_indexes", f"where layers below {depth} belong")
    return SamConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("mlp_dim", int(hidden * part.number("mlp_ratio", 4.0))),
        output_channels=part.integer("output_channels", 256),
        num_layers=depth,
        num_heads=heads,
        image_size=side,
        patch_size=patch,
        window=part.integer("window_size", 14),
        global_layers=tuple(layers),
        eps=part.number("layer_norm_eps", 1e-6),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu")],
        qkv_bias=part.flag("qkv_bias", True),
    )
