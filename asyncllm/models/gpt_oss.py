"""gpt-oss: sinks, a window in every other layer, and experts with biases and a special gate."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["GptOss"]

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""The rotation of files that do not specify one."""

_EXPERTS = "model.layers.{i}.mlp.experts"


@register(GptOssForCausalLM="gpt-oss-20b, gpt-oss-120b, in bfloat16 and MXFP4")
class GptOss(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.sinks": "layers.{i}.attn.sinks:sinks",
            "model.layers.{i}.mlp.router": "layers.{i}.mlp.router",
            f"{_EXPERTS}.gate_up_proj": "layers.{i}.mlp.gate_up:weight[gate+up:stacked_pairs]",
            f"{_EXPERTS}.gate_up_proj_bias": "layers.{i}.mlp.gate_up:bias[gate+up:stacked_pairs]",
            f"{_EXPERTS}.gate_up_proj_blocks": "layers.{i}.mlp.gate_up:blocks[gate+up:stacked_alternating]",
            f"{_EXPERTS}.gate_up_proj_scales": "layers.{i}.mlp.gate_up:scales[gate+up:stacked_alternating]",
            f"{_EXPERTS}.down_proj_blocks": "layers.{i}.mlp.down:blocks[:stacked]",
            f"{_EXPERTS}.down_proj_scales": "layers.{i}.mlp.down:scales[:stacked]",
            f"{_EXPERTS}.down_proj": "layers.{i}.mlp.down:weight[:stacked_transposed]",
            f"{_EXPERTS}.down_proj_bias": "layers.{i}.mlp.down:bias[:stacked]",
            **expert_rows(_EXPERTS),
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "gpt_oss",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("swiglu_alpha", 1.702)
        hf.expect("experts_per_token", hf.fields.get("num_experts_per_tok"))
        if hf.fields.get("rope_parameters") is None and hf.fields.get("rope_scaling") is None:
            hf = hf.changed({"rope_scaling": _YARN})
        fields = hf.decoder(architecture, max_position=131072, theta=150000.0, norm_eps=1e-5, head_dim=64)
        num_layers, bias = fields["num_layers"], hf.flag("attention_bias", True)
        window = hf.optional_integer("sliding_window", 128)
        fields["windows"] = hf.windows(num_layers, window, [layer % 2 == 0 for layer in range(num_layers)])
        count = hf.integer("num_local_experts", 128, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(num_layers)),
            count=count,
            size=fields["intermediate_size"],
            routing=Routing(hf.integer("num_experts_per_tok", 4, maximum=count), renormalize=True),
            bias=True,
            limit=hf.number("swiglu_limit", 7.0),
        )
        return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, sinks=True, experts=experts)
