"""Ling 3.0: Kimi's delta nets without bottlenecks and, in the last layer of each group, latent attention with gates of
heads; DeepSeek-V3's experts."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.kimi_delta import BoundedDeltaNet
from asyncllm.layers.latent_attention import GatedLatentAttention
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing, leading_dense
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["BailingHybrid"]

_LAYER = "model.layers.{i}"
_OWN = {
    **{f"{each}_proj": f"layers.{{i}}.attn.inputs[{each}]" for each in "kv"},
    **{f"{each}_conv1d": f"layers.{{i}}.attn.conv[{each}]" for each in "qkv"},
    "b_proj": "layers.{i}.attn.weights[beta]",
    "f_proj": "layers.{i}.attn.weights[step]",
    "A_log": "layers.{i}.attn.decay:log_rate",
    "dt_bias": "layers.{i}.attn.decay:step_bias",
    "o_norm": "layers.{i}.attn.norm",
    "g_proj": "layers.{i}.attn.gate",
    "dense": "layers.{i}.attn.out",
}
"""Rows of attention, and of delta nets, besides those of latent attention."""
_WORDS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_USUAL = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128}


class BailingHybridConfig(LatentConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with attention."""
    delta_heads: int
    delta_head_dim: int
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""
    decay_bound: float | None
    """What no logarithm of a delta net's decay per token falls below."""


@register(BailingHybridForCausalLM="Ling 3.0 flash, in files of transformers", BailingMoeV3ForCausalLM="Ling 3.0 flash")
class BailingHybrid(LatentDecoder):
    config: BailingHybridConfig
    weights = LATENT_WEIGHTS.replaced(
        {
            "model.word_embeddings": "embed",
            **{
                name.replace("self_attn", "attention"): row
                for name, row in LATENT_WEIGHTS.rows.items()
                if "self_attn" in name
            },
            **{f"{_LAYER}.{place}.{name}": row for place in ("attention", "self_attn") for name, row in _OWN.items()},
            **DEEPSEEK_EXPERTS,
            f"{_LAYER}.mlp.gate.expert_bias": "layers.{i}.mlp.correction:bias",
            # As transformers has them in memory.
            f"{_LAYER}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_LAYER}.self_attn.conv1d": "layers.{i}.attn.conv[q+k+v]",
            **{f"{_LAYER}.self_attn.forget_gate.{name}": _OWN[name] for name in ("f_proj", "A_log", "dt_bias")},
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "bailing_hybrid",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "attention_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
        "kda_lower_bound": -2.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named(_WORDS).completed(_USUAL)
        fields = latent_fields(hf, architecture, max_position=262144, theta=6e6)
        num_layers, heads = fields["num_layers"], fields["num_heads"]
        if fields["q_rank"] is not None:
            hf.unsupported("q_lora_rank", "Leave it out.")
        experts = grouped_experts(
            hf,
            num_layers,
            first=leading_dense(hf, num_layers, 2),
            count=hf.integer("n_routed_experts", 512),
            shared=hf.integer("n_shared_experts", 1),
            size=hf.integer("moe_intermediate_size", 768),
            corrected=True,
            routing=grouped_routing(hf, top_k=8, scale=2.5, groups=8, top_groups=4),
        )
        conv_length = hf.integer("short_conv_kernel_size", 4, minimum=2, maximum=16)
        hf.expect("linear_conv_kernel_dim", conv_length)  # transformers writes both
        size = hf.integer("layer_group_size", 6)
        usual = ["linear_attention" if (layer + 1) % size else "full_attention" for layer in range(num_layers)]
        kinds = hf.layer_kinds(num_layers, ("full_attention", "linear_attention"), usual)
        return BailingHybridConfig(
            **fields,
            experts=experts,
            interleaved=True,
            extra_layers=hf.integer("num_nextn_predict_layers", 1, minimum=0),
            attention_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
            delta_heads=hf.integer("linear_num_heads", heads),
            # Files of transformers have another size as head_dim.
            delta_head_dim=hf.integer("linear_head_dim", hf.integer("head_dim")),
            conv_length=conv_length,
            decay_bound=_decay_bound(hf) if hf.flag("kda_safe_gate", True) else None,
        )

    @property
    def weight_map(self) -> WeightMap:
        # Queries and gates have the same names in both kinds of layers.
        others = set(range(self.config.num_layers)) - self.config.attention_layers
        return super().weight_map.replaced(
            {
                f"{prefix}layers.{layer}.{place}.{name}_proj": f"layers.{layer}.attn.inputs[{part}]"
                for layer in others
                for prefix in (self.base_prefix, "")
                for place in ("attention", "self_attn")
                for name, part in (("q", "q"), ("g", "gate"))
            }
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return GatedLatentAttention(layer, config.hidden_size, **self.attention_sizes())
        return BoundedDeltaNet(
            layer,
            config.hidden_size,
            num_heads=config.delta_heads,
            head_dim=config.delta_head_dim,
            conv_length=config.conv_length,
            norm_eps=config.norm_eps,
            bound=config.decay_bound,
        )


def _decay_bound(hf: HFConfig) -> float:
    bound = hf.fields.get("kda_lower_bound")
    if bound is None:
        return -5.0
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e30 <= bound < 0:
        hf.invalid("kda_lower_bound", "where a number below 0 belongs")
    return float(bound)
