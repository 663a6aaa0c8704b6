"""DeepSeek-VL2, whose decoder is a DeepSeek of the first, second or third generation."""

from __future__ import annotations

from asyncllm.models.config import HFConfig
from asyncllm.models.vision.parts import Composed, part_of, text_of
from asyncllm.vl.towers.clip import ClipConfig
from asyncllm.vl.towers.deepseek_vl2 import DeepseekVL2Config

__all__ = ["decoder_of", "read_deepseek_vl2"]

_TEXT = {
    "use_mla": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "max_position_embeddings": 2048,
    "scoring_func": "softmax",
    "n_shared_experts": 0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
"""Defaults of the authors' class for entries that language_config leaves out."""


def decoder_of(hf: HFConfig) -> tuple[HFConfig, str]:
    """Return the decoder's part and its architecture, which the entries determine."""
    text, _ = text_of(hf.changed({"text_config": part_of(hf, "language_config").fields}))
    # Null means that queries are projected directly from the hidden states.
    rank = {"q_lora_rank": None} if hf.fields["language_config"].get("q_lora_rank", 0) is None else {}
    text = text.changed({**_TEXT, **text.fields, **rank})
    if not text.flag("use_mla"):
        decoder = "DeepseekForCausalLM"
        text.expect("topk_method", "greedy")
        text.expect("routed_scaling_factor", 1.0)
    else:
        decoder = "DeepseekV3ForCausalLM" if text.fields["scoring_func"] == "sigmoid" else "DeepseekV2ForCausalLM"
    if decoder == "DeepseekV3ForCausalLM":
        text = text.changed({"num_nextn_predict_layers": 0})
    return text, decoder


def read_deepseek_vl2(hf: HFConfig) -> Composed:
    text, decoder = decoder_of(hf)
    hf.expect("tile_tag", "2D")
    hf.expect("global_view_pos", "head", "tail")
    part, joined = part_of(hf, "vision_config"), part_of(hf, "projector_config")
    part.expect("class_token", False)
    part.expect("ignore_head", True)
    joined.expect("projector_type", "downsample_mlp_gelu")
    joined.expect("depth", 2)
    joined.expect("token_pooling", False)
    width, heads = part.integer("width", 1024), part.integer("heads", 16)
    size, patch = part.integer("image_size", 384), part.integer("patch_size", 16)
    if width % heads or size < patch:
        part.invalid("heads" if width % heads else "patch_size", "which does not divide what it is a part of")
    joined.expect("input_dim", width)
    joined.expect("n_embed", text.integer("hidden_size"))
    vision = DeepseekVL2Config(
        encoder=ClipConfig(
            hidden_size=width,
            intermediate_size=int(width * part.number("mlp_ratio", 4.0)),
            num_layers=part.integer("layers", 24),
            num_heads=heads,
            image_size=size,
            patch_size=patch,
            eps=1e-6,
            activation="gelu_tanh",
            final_norm=True,
            has_class_token=False,
            stacked_positions=True,
        ),
        fold=joined.integer("downsample_ratio", 2, maximum=64),
        inner_size=text.integer("hidden_size") * joined.integer("mlp_ratio", 1, maximum=64),
        whole_first=hf.fields.get("global_view_pos", "head") == "head",
    )
    return Composed(text, decoder, vision)
