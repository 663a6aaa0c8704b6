"""Kolibri 1: sandwich norms, windows with rotation in four of five layers, and experts chosen by corrected logits."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from asyncllm.kernels import Routing
from asyncllm.layers.logit_corrected_moe import LogitCorrectedMoE
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Kolibri1"]

_LAYER = "model.layers.{i}"


@register(Kolibri1ForCausalLM="Kolibri 1")
class Kolibri1(DecoderLM):
    # As published, and as transformers has them in memory.
    weights = QWEN3_WEIGHTS.replaced(
        {
            **DEEPSEEK_EXPERTS,
            f"{_LAYER}.moe.router.expert_bias": "layers.{i}.mlp.correction:bias",
            f"{_LAYER}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_LAYER}.post_attn_norm": "layers.{i}.attn_post_norm",
            f"{_LAYER}.post_self_attn_layernorm": "layers.{i}.attn_post_norm",
            f"{_LAYER}.post_ffn_norm": "layers.{i}.mlp_post_norm",
            f"{_LAYER}.post_mlp_layernorm": "layers.{i}.mlp_post_norm",
        }
    )
    block = Gemma2.block
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "kolibri1",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"num_local_experts": "num_experts"})
        hf.expect("hidden_act", "silu")
        size = hf.integer("moe_intermediate_size", 512)
        fields = hf.decoder(architecture, max_position=262144, head_dim=128, intermediate_size=size)
        num_layers, window = fields["num_layers"], hf.optional_integer("sliding_window", 513)
        fields["windows"] = hf.windows(num_layers, window, [(layer + 1) % 5 > 0 for layer in range(num_layers)])
        ropes = tuple(fields["rope"] if each or not window else None for each in fields["windows"])
        count = hf.integer("num_experts", 384, maximum=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=frozenset(range(num_layers)),
            count=count,
            size=size,
            routing=Routing(
                hf.integer("num_experts_per_tok", 6, maximum=count),
                scores="sigmoid",
                renormalize=hf.flag("norm_topk_prob", False),
            ),
            shared_size=hf.integer("shared_expert_intermediate_size", 512),
        )
        return ModelConfig(**fields, layer_ropes=ropes, qk_norm="head", experts=experts)

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        assert experts is not None
        return LogitCorrectedMoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            routing=experts.routing,
            corrected=True,
            exact_router=True,
            shared_size=experts.shared_size,
        )
