"""InternVL, in its authors' format and in transformers'."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import TOWER_ACTIVATIONS, Composed, depth_of, part_of, square_of, text_of
from asyncllm.vl.towers.intern_vl import InternVLConfig

__all__ = ["read_intern_vl"]


def read_intern_vl(hf: HFConfig) -> Composed:
    remote = hf.fields.get("llm_config") is not None
    if remote:
        hf = hf.changed({"text_config": hf.fields["llm_config"]})
    text, decoder = text_of(hf, "llama" if remote else "qwen2", tied=not remote)
    if remote:
        names = text.fields.get("architectures")
        decoder = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else decoder
    part = part_of(hf, "vision_config")
    part.expect("hidden_act", *TOWER_ACTIVATIONS)
    part.expect("norm_type", "layer_norm", "rms_norm")
    part.expect("use_mask_token", False)
    part.expect("use_absolute_position_embeddings", True)
    part.expect("use_mean_pooling", True)
    hf.expect("downsample_ratio", 0.5)
    hf.expect("pad2square", False)
    hf.expect("ps_version", "v1", "v2")
    hf.expect("projector_hidden_act", "gelu")
    hf.expect("vision_feature_select_strategy", "default")
    hf.expect("use_backbone_lora", 0)
    hf.expect("use_llm_lora", 0)
    layers = part.integer("num_hidden_layers", 24)
    key = "vision_feature_layer" if "vision_feature_layer" in hf.fields else "select_layer"
    heads = part.integer("num_attention_heads", 16)
    hidden = part.integer("hidden_size", 1024)
    side, patch = square_of(part, "image_size", 448), square_of(part, "patch_size", 14)
    if remote and square_of(hf, "force_image_size", side) != side:
        hf.unsupported("force_image_size", f"Supported: {side}, the tower's image_size.")
    if hidden % heads or side % (2 * patch):
        part.invalid("image_size" if side % (2 * patch) else "num_attention_heads", "which does not divide evenly")
    vision = InternVLConfig(
        hidden_size=hidden,
        intermediate_size=part.integer("intermediate_size", 4096),
        num_layers=layers,
        read_layers=depth_of(hf, key, hf.fields.get(key, -1), layers),
        num_heads=heads,
        image_size=side,
        patch_size=patch,
        eps=part.number("layer_norm_eps", 1e-6),
        activation=TOWER_ACTIVATIONS[part.fields.get("hidden_act", "gelu")],
        qkv_bias=part.flag("qkv_bias" if remote else "attention_bias", remote),
        qk_norm=part.flag("qk_normalization" if remote else "use_qk_norm", False),
        rms_norm=part.fields.get("norm_type", "layer_norm") == "rms_norm",
        fold=2,
        transposed=remote and hf.fields.get("ps_version", "v1") == "v1",
    )
    return Composed(text, decoder, vision)
