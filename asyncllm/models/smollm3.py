"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["SmolLM3"]


@register(SmolLM3ForCausalLM="SmolLM3 3B")
class SmolLM3(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "smollm3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, max_position=32768, theta=2e6, tied=True)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", False)
        interval = hf.integer("no_rope_layer_interval", 4)
        turns = hf.fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        if not isinstance(turns, list) or len(turns) < num_layers or not all(each in (0, 1) for each in turns):
            hf.invalid("no_rope_layers", f"where a list of {num_layers} times 0 or 1 belongs")
        window, listed = hf.optional_integer("sliding_window"), hf.fields.get("layer_types") is not None
        if listed or (window is not None and hf.flag("use_sliding_window", False)):
            fields["windows"] = hf.windows(num_layers, window, [not each for each in turns[:num_layers]])
        return ModelConfig(
            **fields,
            layer_ropes=tuple(fields["rope"] if each else None for each in turns[:num_layers]),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
        )
