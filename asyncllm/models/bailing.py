"""Ling and Ring, the first two generations: GLM-4.5's computation under other names. The first generation has no head
norms, rotates whole heads, chooses experts by softmax, and has a head with columns of length 1."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.baichuan import NormalizedOutputEmbedding
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM, OutputHead
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Bailing", "BailingConfig"]

_ATTENTION = "model.layers.{i}.attention"


class BailingConfig(ModelConfig, frozen=True, kw_only=True):
    normalized_head: bool


@register(
    BailingMoeForCausalLM="Ling-lite, Ling-plus, Ling-coder-lite, Ring-lite",
    BailingMoeV2ForCausalLM="Ling 2.0 and Ring 2.0: mini, flash, 1T",
)
class Bailing(DecoderLM):
    config: BailingConfig
    weights = (
        LLAMA_WEIGHTS.without(
            "model.embed_tokens", *(f"model.layers.{{i}}.self_attn.{part}_proj" for part in ("q", "k", "v", "o"))
        )
        .replaced(DEEPSEEK_EXPERTS)
        .replaced(
            {
                "model.word_embeddings": "embed",
                f"{_ATTENTION}.query_key_value": "layers.{i}.attn.qkv[q+k+v]",
                f"{_ATTENTION}.dense": "layers.{i}.attn.out",
                f"{_ATTENTION}.query_layernorm": "layers.{i}.attn.q_norm",
                f"{_ATTENTION}.key_layernorm": "layers.{i}.attn.k_norm",
                "model.layers.{i}.mlp.gate.expert_bias": "layers.{i}.mlp.correction:bias",
            }
        )
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "bailing_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "score_function": "sigmoid",
        "routed_scaling_factor": 2.5,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> BailingConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("use_rmsnorm", True)
        hf.expect("use_sliding_window", False)
        hf.expect("norm_softmax", False)
        first = architecture.startswith("BailingMoe") and not architecture.startswith("BailingMoeV2")
        hf.expect("score_function", "softmax" if first else "sigmoid")
        size = hf.integer("moe_intermediate_size")
        hf.expect("moe_shared_expert_intermediate_size", size)
        fields = hf.decoder(architecture, max_position=16384, theta=600000.0, partial_rotary=1.0)
        corrected = not first and hf.flag("moe_router_enable_expert_bias", True)
        experts = grouped_experts(
            hf,
            fields["num_layers"],
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("num_experts"),
            shared=hf.integer("num_shared_experts", 0, minimum=0),
            size=size,
            corrected=corrected,
            routing=grouped_routing(hf, "softmax" if first else "sigmoid", renormalize=False),
        )
        bias = hf.flag("use_bias", False)
        return BailingConfig(
            **fields,
            normalized_head=hf.flag("norm_head", False),
            qkv_bias=bias or hf.flag("use_qkv_bias", False),
            out_bias=bias,
            qk_norm="head" if hf.flag("use_qk_norm", not first) else None,
            experts=experts,
            extra_layers=hf.integer("num_nextn_predict_layers", 0, minimum=0),
        )

    def output(self) -> OutputHead:
        config = self.config
        if config.normalized_head and not config.tied and config.has_head:
            return NormalizedOutputEmbedding(config.hidden_size, config.vocab_size, axis=0)
        return super().output()
