"""StarCoder2: Mistral with layer norms, biases and a plain MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["StarCoder2"]


@register(Starcoder2ForCausalLM="StarCoder2 3B, 7B, 15B")
class StarCoder2(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.mlp.c_fc": "layers.{i}.mlp.up",
            "model.layers.{i}.mlp.c_proj": "layers.{i}.mlp.down",
        }
    )
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "starcoder2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"norm_epsilon": "rms_norm_eps"})
        fields = hf.decoder(architecture, max_position=4096, norm_eps=1e-5, tied=True)
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window"))
        bias = hf.flag("use_bias", True)
        return ModelConfig(
            **fields,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            gated=False,
            activation=hf.activation("hidden_act", "gelu_pytorch_tanh"),
        )
