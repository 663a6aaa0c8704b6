"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotation is not scaled."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.olmo2 import Olmo2
from asyncllm.models.registry import register

__all__ = ["Olmo3"]


@register(Olmo3ForCausalLM="OLMo 3")
class Olmo3(Olmo2):
    tiny: ClassVar[dict[str, Any]] = {
        **Olmo2.tiny,
        "model_type": "olmo3",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("attention_bias", False)
        fields = hf.of_layers("full_attention").decoder(architecture, theta=5e5, norm_eps=1e-5)
        num_layers = fields["num_layers"]
        window = hf.optional_integer("sliding_window", 4096)
        fields["windows"] = hf.windows(num_layers, window, [(layer + 1) % 4 != 0 for layer in range(num_layers)])
        local = hf.of_layers("sliding_attention").changed({"rope_scaling": None}, rope_scaling_factor=0.0)
        local_rope = local.decoder(architecture, theta=5e5)["rope"]
        ropes = tuple(fields["rope"] if window is None else local_rope for window in fields["windows"])
        return ModelConfig(**fields, layer_ropes=ropes, qk_norm="whole")
