"""Gemma 3, text: Gemma 2's norms, head norms, no caps, and separate rotations for sliding layers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.rotary import RopeConfig
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.registry import register

__all__ = ["Gemma3", "local_rope_of"]


def local_rope_of(hf: HFConfig, architecture: str) -> RopeConfig:
    """Return the rotation of layers with a window, which is not scaled."""
    theta = hf.number("rope_local_base_freq", 1e4)
    local = hf.of_layers("sliding_attention").changed(
        {"rope_theta": theta, "rope_scaling": None}, rope_scaling_factor=0.0
    )
    rope: RopeConfig = local.decoder(architecture)["rope"]
    return rope


@register(Gemma3ForCausalLM="Gemma 3, text")
class Gemma3(Gemma2):
    weights = Gemma2.weights.replaced(
        {
            "model.layers.{i}.self_attn.q_norm": "layers.{i}.attn.q_norm",
            "model.layers.{i}.self_attn.k_norm": "layers.{i}.attn.k_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gemma3_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "query_pre_attn_scalar": 40,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        for key in ("hidden_activation", "hidden_act"):
            hf.expect(key, "gelu_pytorch_tanh")
        hf.expect("use_bidirectional_attention", False)
        # transformers reads this entry but caps nothing.
        hf.expect("attn_logit_softcapping")
        # Files that also hold a vision model omit entries that equal the defaults of the text model's class.
        usual = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
        hf = hf.changed({key: hf.fields.get(key) or value for key, value in usual.items()})
        fields = hf.of_layers("full_attention").decoder(architecture, max_position=131072, theta=1e6, tied=True)
        # Their 128 Ki positions already include the scaling.
        fields["max_position"] = hf.integer("max_position_embeddings", 131072)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        pattern, window = hf.integer("sliding_window_pattern", 6), hf.optional_integer("sliding_window", 4096)
        fields["windows"] = hf.windows(num_layers, window, [(layer + 1) % pattern != 0 for layer in range(num_layers)])
        local_rope = local_rope_of(hf, architecture)
        return ModelConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if window is None else local_rope for window in fields["windows"]),
            qkv_bias=bias,
            out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=fields["hidden_size"] ** 0.5,
            score_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            logit_softcap=hf.optional_number("final_logit_softcapping"),
            qk_norm="head",
        )
