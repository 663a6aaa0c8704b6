"""MPT: ALiBi, clipped queries, keys and values, layer norms and linear layers without biases; Replit has fewer KV
heads."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Mpt"]


WORDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""MPT's names of entries -> the usual names."""


@register(MptForCausalLM="MPT 7B, 30B", MPTForCausalLM="the first files of MPT; Replit Code 1.5")
class Mpt(DecoderLM):
    weights = WeightMap(
        {
            "transformer.wte": "embed",
            "transformer.blocks.{i}.norm_1": "layers.{i}.attn_norm",
            "transformer.blocks.{i}.attn.Wqkv": "layers.{i}.attn.qkv[q+k+v]",
            "transformer.blocks.{i}.attn.out_proj": "layers.{i}.attn.out",
            "transformer.blocks.{i}.norm_2": "layers.{i}.mlp_norm",
            "transformer.blocks.{i}.ffn.up_proj": "layers.{i}.mlp.up",
            "transformer.blocks.{i}.ffn.down_proj": "layers.{i}.mlp.down",
            "transformer.norm_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "mpt",
        "vocab_size": 320,
        "d_model": 96,
        "n_layers": 2,
        "n_heads": 6,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3},
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(WORDS)
        hf.expect("no_bias", True)
        hf.expect("logit_scale")
        hf.expect("norm_type", "low_precision_layernorm", "layernorm")
        entries = hf.fields.get("attn_config") or {}
        if not isinstance(entries, dict):
            hf.invalid("attn_config", "where an object belongs")
        attention = HFConfig(entries, source=f"{hf.source}: attn_config")
        attention.expect("attn_type", "multihead_attention", "grouped_query_attention", "multiquery_attention")
        attention.expect("alibi", True)
        for key in ("prefix_lm", "qk_ln", "rope"):
            attention.expect(key, False)
        inner = hf.integer("expansion_ratio", 4) * hf.integer("hidden_size")
        shared = {"grouped_query_attention": attention.fields.get("kv_n_heads"), "multiquery_attention": 1}
        kv_heads = shared.get(str(attention.fields.get("attn_type")))
        attention.expect("kv_n_heads", *([] if kv_heads is None else [kv_heads]))
        hf = hf.changed({"num_key_value_heads": kv_heads})
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False, intermediate_size=inner)
        return ModelConfig(
            **fields,
            alibi=alibi_slopes(fields["num_heads"], max_bias=attention.number("alibi_bias_max", 8)),
            qkv_clip=attention.optional_number("clip_qkv"),
            score_scale=attention.optional_number("softmax_scale"),
            norm_bias=False,
            gated=False,
            activation="gelu",
        )
