"""OPT: learned positions behind an offset of 2, layer norms, ReLU."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["OPT"]


@register(OPTForCausalLM="OPT 125M, 1.3B to 66B")
class OPT(DecoderLM):
    weights = WeightMap(
        {
            "model.decoder.embed_tokens": "embed",
            "model.decoder.embed_positions": "positions",
            "model.decoder.layers.{i}.self_attn_layer_norm": "layers.{i}.attn_norm",
            "model.decoder.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q]",
            "model.decoder.layers.{i}.self_attn.k_proj": "layers.{i}.attn.qkv[k]",
            "model.decoder.layers.{i}.self_attn.v_proj": "layers.{i}.attn.qkv[v]",
            "model.decoder.layers.{i}.self_attn.out_proj": "layers.{i}.attn.out",
            "model.decoder.layers.{i}.final_layer_norm": "layers.{i}.mlp_norm",
            "model.decoder.layers.{i}.fc1": "layers.{i}.mlp.up",
            "model.decoder.layers.{i}.fc2": "layers.{i}.mlp.down",
            "model.decoder.final_layer_norm": "norm",
            "lm_head": "head",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "opt",
        "vocab_size": 320,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 64,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"ffn_dim": "intermediate_size"})
        hf.expect("layer_norm_elementwise_affine", True)
        hf.expect("_remove_final_layer_norm", False)
        if hf.fields.get("word_embed_proj_dim", hf.integer("hidden_size")) != hf.integer("hidden_size"):
            hf.unsupported("word_embed_proj_dim", "Embeddings are as wide as layers. Use another size than OPT-350M.")
        if not hf.flag("do_layer_norm_before", True):
            hf.unsupported("do_layer_norm_before", "Norms are before each branch. Use another size than OPT-350M.")
        bias = hf.flag("enable_bias", True)
        return ModelConfig(
            **hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False),
            position_offset=2,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            gated=False,
            activation=hf.activation("activation_function", "relu"),
        )
