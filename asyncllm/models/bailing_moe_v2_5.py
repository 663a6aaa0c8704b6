"""Ling and Ring 2.5: lightning attention with rotated heads and, in the last layer of each group, DeepSeek's latent
attention; experts by corrected sigmoid scores."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.lightning_attention import RotatedLightningAttention
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register

__all__ = ["BailingMoEV25"]

_ATTENTION, _MLP = "model.layers.{i}.attention", "model.layers.{i}.mlp"
_USUAL = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
}


class BailingMoEV25Config(LatentConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with latent attention."""
    linear_head_dim: int
    norm_groups: int
    """Groups of heads that are normalised together behind lightning attention."""
    head_norms: bool
    linear_silu: bool
    linear_rotated: bool


@register(BailingMoeV2_5ForCausalLM="Ling 2.5, Ling 2.6 flash, Ring 2.5")
class BailingMoEV25(LatentDecoder):
    config: BailingMoEV25Config
    weights = LATENT_WEIGHTS.replaced(
        {
            "model.word_embeddings": "embed",
            **{
                name.replace("self_attn", "attention"): row
                for name, row in LATENT_WEIGHTS.rows.items()
                if "self_attn" in name
            },
            f"{_ATTENTION}.query_key_value": "layers.{i}.attn.inputs[q+k+v]",
            f"{_ATTENTION}.g_proj": "layers.{i}.attn.inputs[gate]",
            f"{_ATTENTION}.query_layernorm": "layers.{i}.attn.q_norm",
            f"{_ATTENTION}.key_layernorm": "layers.{i}.attn.k_norm",
            f"{_ATTENTION}.g_norm": "layers.{i}.attn.norm",
            f"{_ATTENTION}.dense": "layers.{i}.attn.out",
            **DEEPSEEK_EXPERTS,
            f"{_MLP}.gate.expert_bias": "layers.{i}.mlp.correction:bias",
            f"{_MLP}.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        # Published files have the type of Ling 3.0, and are told apart by the class.
        "model_type": "bailing_moe_v2_5",
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "head_dim": 16,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "use_qk_norm": True,
        "linear_silu": True,
        "group_norm_size": 3,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        size = hf.integer("moe_intermediate_size")
        for name, value in (
            *(("use_rmsnorm", True), ("use_bias", False), ("use_qkv_bias", False), ("use_sliding_window", False)),
            *(("norm_head", False), ("norm_softmax", False), ("score_function", "sigmoid")),
            *(("moe_router_enable_expert_bias", True), ("moe_shared_expert_intermediate_size", size)),
        ):
            hf.expect(name, value)
        num_heads = hf.integer("num_attention_heads", maximum=2**16)
        hf.expect("num_kv_heads_for_linear_attn", num_heads)
        head_dim = hf.integer("head_dim", hf.integer("hidden_size") // num_heads)
        # This entry concerns lightning attention, and the number of KV heads no layer.
        rotated = int(head_dim * hf.number("partial_rotary_factor", 1.0))
        silu = hf.flag("use_linear_silu", hf.flag("linear_silu", False))
        hf = hf.changed({"partial_rotary_factor": None, "num_key_value_heads": None}).completed(_USUAL)
        fields = latent_fields(hf, architecture, max_position=131072, theta=6e5)
        rotates = hf.flag("linear_rope", True)
        if rotates and rotated != fields["rope_dim"]:
            hf.unsupported("qk_rope_head_dim", f"Supported: {rotated}, as in the layers with lightning attention.")
        num_layers, groups = fields["num_layers"], hf.integer("group_norm_size", 1)
        if num_heads * head_dim % groups:
            hf.invalid("group_norm_size", f"which does not divide {num_heads} heads of {head_dim}")
        experts = grouped_experts(
            hf,
            num_layers,
            first=hf.integer("first_k_dense_replace", 0, minimum=0),
            count=hf.integer("num_experts"),
            shared=hf.integer("num_shared_experts", 0, minimum=0),
            size=size,
            corrected=True,
            routing=grouped_routing(hf),
        )
        group = hf.integer("layer_group_size", 1)
        tail = num_layers // group * group
        return BailingMoEV25Config(
            **fields,
            experts=experts,
            interleaved=hf.flag("rope_interleave", True),
            extra_layers=hf.integer("num_nextn_predict_layers", 0, minimum=0),
            attention_layers=frozenset(each for each in range(num_layers) if (each + 1) % group == 0 or each >= tail),
            linear_head_dim=head_dim,
            norm_groups=groups,
            head_norms=hf.flag("use_qk_norm", False),
            linear_silu=silu,
            linear_rotated=rotates,
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        # The published code counts layers from 1 here and from 0 elsewhere, so the first layer forgets fastest.
        factor = 1 - (layer - 1) / max(config.num_layers - 1, 1) + 1e-5
        return RotatedLightningAttention(
            layer,
            config.hidden_size,
            head_dim=config.linear_head_dim,
            rates=[factor * rate for rate in alibi_slopes(config.num_heads)],
            norm_eps=config.norm_eps,
            groups=config.norm_groups,
            head_norms=config.head_norms,
            silu=config.linear_silu,
            rotated=config.linear_rotated,
        )
