"""XGLM: OPT's layers, with sinusoids of the positions added to scaled embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.sinusoid_embedding import SinusoidEmbedding
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["XGLM"]

_WORDS = {
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
}


@register(XGLMForCausalLM="XGLM 564M to 7.5B")
class XGLM(DecoderLM):
    weights = WeightMap(
        {
            "model.embed_tokens": "embed",
            "model.layers.{i}.self_attn_layer_norm": "layers.{i}.attn_norm",
            "model.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q]",
            "model.layers.{i}.self_attn.k_proj": "layers.{i}.attn.qkv[k]",
            "model.layers.{i}.self_attn.v_proj": "layers.{i}.attn.qkv[v]",
            "model.layers.{i}.self_attn.out_proj": "layers.{i}.attn.out",
            "model.layers.{i}.final_layer_norm": "layers.{i}.mlp_norm",
            "model.layers.{i}.fc1": "layers.{i}.mlp.up",
            "model.layers.{i}.fc2": "layers.{i}.mlp.down",
            "model.layer_norm": "norm",
            "lm_head": "head",
        },
        ignored=("model.embed_positions.weights",),
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "xglm",
        "vocab_size": 320,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 256,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(_WORDS)
        hf.expect("add_cross_attention", False)
        fields = hf.decoder(architecture, norm_eps=1e-5, tied=True, rotary=False)
        return ModelConfig(
            **fields,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            gated=False,
            activation=hf.activation("activation_function", "gelu"),
            embedding_scale=fields["hidden_size"] ** 0.5 if hf.flag("scale_embedding", True) else None,
        )

    def embedding(self) -> SinusoidEmbedding:
        config = self.config
        return SinusoidEmbedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale, offset=2)
