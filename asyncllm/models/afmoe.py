"""Trinity: gated attention, norms around each branch, rotation only in layers with a window, and experts chosen by
corrected sigmoid scores."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.attention import Attention
from asyncllm.layers.gated_attention import GatedAttention
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Afmoe"]


@register(AfmoeForCausalLM="Trinity Nano, Mini, Large")
class Afmoe(DecoderLM):
    weights = QWEN3_WEIGHTS.replaced(
        {
            **{key: row for key, row in DEEPSEEK_EXPERTS.items() if not key.endswith("mlp.gate")},
            "model.layers.{i}.self_attn.gate_proj": "layers.{i}.attn.qkv[gate]",
            "model.layers.{i}.post_attention_layernorm": "layers.{i}.attn_post_norm",
            "model.layers.{i}.pre_mlp_layernorm": "layers.{i}.mlp_norm",
            "model.layers.{i}.post_mlp_layernorm": "layers.{i}.mlp_post_norm",
            "model.layers.{i}.mlp.router.gate": "layers.{i}.mlp.router",
            "model.layers.{i}.mlp.expert_bias": "layers.{i}.mlp.correction:bias",
        }
    )
    scales_images = True
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "afmoe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "global_attn_every_n_layers": 2,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "route_scale": 2.5,
        "mup_enabled": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("score_func", "sigmoid")
        hf.expect("route_norm", True)
        hf.expect("attention_bias", False)
        hf.expect("n_group", 1)
        hf.expect("topk_group", 1)
        fields = hf.decoder(architecture, max_position=16384, norm_eps=1e-5, head_dim=128)
        num_layers, every = fields["num_layers"], hf.integer("global_attn_every_n_layers", 4)
        sliding = [(layer + 1) % every != 0 for layer in range(num_layers)]
        fields["windows"] = hf.windows(num_layers, hf.optional_integer("sliding_window", 1024), sliding)
        experts = grouped_experts(
            hf,
            num_layers,
            first=hf.integer("num_dense_layers", 1, minimum=0),
            count=hf.integer("num_experts", 64),
            shared=hf.integer("num_shared_experts", 2, minimum=0),
            size=hf.integer("moe_intermediate_size", 1408),
            corrected=True,
            routing=Routing(
                hf.integer("num_experts_per_tok", 6),
                scores="sigmoid",
                renormalize=True,
                scale=hf.number("route_scale", 1.0),
            ),
        )
        return ModelConfig(
            **fields,
            layer_ropes=tuple(None if window is None else fields["rope"] for window in fields["windows"]),
            qk_norm="head",
            embedding_scale=fields["hidden_size"] ** 0.5 if hf.flag("mup_enabled", False) else None,
            experts=experts,
        )

    block = Gemma2.block

    def attention(self, layer: int) -> Attention:
        return GatedAttention(layer, self.config.hidden_size, self.attention_config(layer))
