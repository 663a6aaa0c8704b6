"""ChatGLM2, ChatGLM3, GLM-4-9B and CodeGeeX4 with their original names: GLM with q, k and v in one tensor."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["ChatGLM"]


@register(ChatGLMModel="ChatGLM2, ChatGLM3, GLM-4-9B, CodeGeeX4", ChatGLMForConditionalGeneration="files of the same")
class ChatGLM(DecoderLM):
    weights = WeightMap(
        {
            "transformer.embedding.word_embeddings": "embed",
            "transformer.encoder.layers.{i}.input_layernorm": "layers.{i}.attn_norm",
            "transformer.encoder.layers.{i}.self_attention.query_key_value": "layers.{i}.attn.qkv[q+k+v]",
            "transformer.encoder.layers.{i}.self_attention.dense": "layers.{i}.attn.out",
            "transformer.encoder.layers.{i}.post_attention_layernorm": "layers.{i}.mlp_norm",
            "transformer.encoder.layers.{i}.mlp.dense_h_to_4h": "layers.{i}.mlp.gate_up[gate+up]",
            "transformer.encoder.layers.{i}.mlp.dense_4h_to_h": "layers.{i}.mlp.down",
            "transformer.encoder.final_layernorm": "norm",
            "transformer.output_layer": "head",
        }
    )
    base_prefix = "transformer."
    head_name = "transformer.output_layer.weight"
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "chatglm",
        "padded_vocab_size": 320,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_layers": 2,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "kv_channels": 24,
        "seq_length": 128,
        "layernorm_epsilon": 1e-5,
        "rope_ratio": 0.5,
        "add_qkv_bias": True,
        "add_bias_linear": False,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        for key in ("rmsnorm", "post_layer_norm", "original_rope"):
            hf.expect(key, True)
        for key in ("apply_residual_connection_post_layernorm", "vision_config", "pre_seq_len"):
            hf.expect(key, False)
        bias = hf.flag("add_bias_linear", False)
        named = hf.named(
            {
                "padded_vocab_size": "vocab_size",
                "ffn_hidden_size": "intermediate_size",
                "num_layers": "num_hidden_layers",
                "kv_channels": "head_dim",
                "seq_length": "max_position_embeddings",
                "layernorm_epsilon": "rms_norm_eps",
            }
        )
        shared = hf.flag("multi_query_attention", False)
        named = named.changed(
            {
                "num_key_value_heads": hf.integer("multi_query_group_num") if shared else None,
                "rope_theta": 10000.0 * hf.number("rope_ratio", 1.0),
                "partial_rotary_factor": 0.5,
            }
        )
        fields = named.decoder(architecture, norm_eps=1e-5, partial_rotary=1.0)
        qkv_bias = bias or hf.flag("add_qkv_bias", False)
        return ModelConfig(**fields, paired_rotary=True, qkv_bias=qkv_bias, out_bias=bias, mlp_bias=bias)
