"""Kimi Linear: delta nets with a decay of each feature and, in some layers, DeepSeek's latent attention without
rotation; DeepSeek-V3's experts under Mixtral's names."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.kimi_delta import KimiDeltaNet
from asyncllm.layers.rotary import RopeConfig
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, grouped_experts, grouped_routing, leading_dense
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["KimiLinear"]

_ATTENTION = "model.layers.{i}.self_attn"
_EXPERTS = "model.layers.{i}.block_sparse_moe"

_WORDS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_USUAL = {
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_UNREAD = ("rope_parameters", "rope_scaling", "rope_theta", "head_dim")
"""Entries of published files that have no effect: no layer is rotated, and heads have other sizes."""


class KimiLinearConfig(LatentConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with attention."""
    delta_heads: int
    delta_head_dim: int
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""


@register(KimiLinearForCausalLM="Kimi-Linear 48B-A3B")
class KimiLinear(LatentDecoder):
    config: KimiLinearConfig
    weights = LATENT_WEIGHTS.replaced(
        {
            **{f"{_ATTENTION}.{each}_proj": f"layers.{{i}}.attn.inputs[{each}]" for each in "kv"},
            **{f"{_ATTENTION}.{each}_conv1d": f"layers.{{i}}.attn.conv[{each}]" for each in "qkv"},
            f"{_ATTENTION}.b_proj": "layers.{i}.attn.weights[beta]",
            f"{_ATTENTION}.f_a_proj": "layers.{i}.attn.weights[step]",
            f"{_ATTENTION}.f_b_proj": "layers.{i}.attn.steps",
            f"{_ATTENTION}.g_a_proj": "layers.{i}.attn.weights[gate]",
            f"{_ATTENTION}.g_b_proj": "layers.{i}.attn.gates",
            f"{_ATTENTION}.A_log": "layers.{i}.attn.decay:log_rate",
            f"{_ATTENTION}.dt_bias": "layers.{i}.attn.decay:step_bias",
            f"{_ATTENTION}.o_norm": "layers.{i}.attn.norm",
            # As transformers has them in memory, and as it writes the MLPs of the first layers.
            f"{_ATTENTION}.conv1d": "layers.{i}.attn.conv[q+k+v]",
            f"{_ATTENTION}.forget_gate.f_a_proj": "layers.{i}.attn.weights[step]",
            f"{_ATTENTION}.forget_gate.f_b_proj": "layers.{i}.attn.steps",
            f"{_ATTENTION}.forget_gate.A_log": "layers.{i}.attn.decay:log_rate",
            f"{_ATTENTION}.forget_gate.dt_bias": "layers.{i}.attn.decay:step_bias",
            **DEEPSEEK_EXPERTS,
            "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            f"{_EXPERTS}.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_EXPERTS}.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_EXPERTS}.down_proj": "layers.{i}.mlp.down",
            f"{_EXPERTS}.gate": "layers.{i}.mlp.router",
            f"{_EXPERTS}.gate.e_score_correction_bias": "layers.{i}.mlp.correction:bias",
            **expert_rows(f"{_EXPERTS}.experts", names=("w1", "w3", "w2")),
            f"{_EXPERTS}.shared_experts.gate_proj": "layers.{i}.mlp.shared.gate_up[gate]",
            f"{_EXPERTS}.shared_experts.up_proj": "layers.{i}.mlp.shared.gate_up[up]",
            f"{_EXPERTS}.shared_experts.down_proj": "layers.{i}.mlp.shared.down",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "kimi_linear",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "model_max_length": 128,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_expert_group": 4,
        "topk_group": 2,
        "linear_attn_config": {
            "full_attn_layers": [2, 5],
            "kda_layers": [1, 3, 4],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("mla_use_nope", True)
        hf.expect("moe_router_activation_func", "sigmoid")
        hf.expect("use_grouped_topk", True)
        hf = hf.named(_WORDS).completed(_USUAL).changed(dict.fromkeys(_UNREAD))
        fields = latent_fields(hf, architecture, max_position=1048576)
        num_layers = fields["num_layers"]
        experts = grouped_experts(
            hf,
            num_layers,
            first=leading_dense(hf, num_layers, 1),
            count=hf.integer("n_routed_experts", 256),
            shared=hf.integer("n_shared_experts", 1),
            size=hf.integer("moe_intermediate_size", 1024),
            corrected=True,
            routing=grouped_routing(hf, top_k=8, scale=2.446),
        )
        # The features of keys that DeepSeek rotates are as they are: all their frequencies are 0.
        fields["rope"] = RopeConfig(kind="proportional", theta=10000.0, dim=fields["rope_dim"], rotated_pairs=0)
        return KimiLinearConfig(
            **fields,
            experts=experts,
            interleaved=False,
            extra_layers=hf.integer("num_nextn_predict_layers", 0, minimum=0),
            **_delta_fields(hf, num_layers),
        )

    @property
    def weight_map(self) -> WeightMap:
        # Queries have the same name in both kinds of layers.
        others = set(range(self.config.num_layers)) - self.config.attention_layers
        return super().weight_map.replaced(
            {
                f"{prefix}layers.{layer}.self_attn.q_proj": f"layers.{layer}.attn.inputs[q]"
                for layer in others
                for prefix in (self.base_prefix, "")
            }
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        return KimiDeltaNet(
            layer,
            config.hidden_size,
            num_heads=config.delta_heads,
            head_dim=config.delta_head_dim,
            conv_length=config.conv_length,
            norm_eps=config.norm_eps,
        )


def _delta_fields(hf: HFConfig, num_layers: int) -> dict[str, Any]:
    """Return the fields of a KimiLinearConfig for delta nets. Raises InvalidCheckpoint, UnsupportedModel."""
    own = hf.fields.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        hf.invalid("linear_attn_config", "where an object belongs")
    sizes = HFConfig(own, source=f"{hf.source}: linear_attn_config")
    kinds = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(num_layers)]
    if "full_attn_layers" in own and "kda_layers" in own:
        # Layers are counted from 1.
        lists = (own["full_attn_layers"], own["kda_layers"])
        attended, others = (each if isinstance(each, list) else [] for each in lists)
        listed = [layer for layer in (*attended, *others) if type(layer) is int]
        if sorted(listed) != list(range(1, num_layers + 1)) or len(listed) < len(attended) + len(others):
            hf.invalid("linear_attn_config", f"whose lists do not name each of {num_layers} layers once")
        kinds = ["full_attention" if layer + 1 in attended else "linear_attention" for layer in range(num_layers)]
    kinds = hf.layer_kinds(num_layers, ("full_attention", "linear_attention"), kinds)
    length = hf.integer("linear_conv_kernel_dim", 4)
    return {
        "attention_layers": frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
        "delta_heads": sizes.integer("num_heads", hf.integer("linear_num_heads", 32)),
        "delta_head_dim": sizes.integer("head_dim", hf.integer("linear_head_dim", 128)),
        "conv_length": sizes.integer("short_conv_kernel_size", length, minimum=2, maximum=16),
    }
