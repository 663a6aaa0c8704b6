"""DBRX: layer norms without biases, clipped queries, keys and values, all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.kernels import Routing
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.expert_rows import expert_rows
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Dbrx"]

_BLOCK = "transformer.blocks.{i}"


@register(DbrxForCausalLM="DBRX base and instruct")
class Dbrx(DecoderLM):
    weights = WeightMap(
        {
            "transformer.wte": "embed",
            f"{_BLOCK}.norm_attn_norm.norm_1": "layers.{i}.attn_norm",
            f"{_BLOCK}.norm_attn_norm.attn.Wqkv": "layers.{i}.attn.qkv[q+k+v]",
            f"{_BLOCK}.norm_attn_norm.attn.out_proj": "layers.{i}.attn.out",
            f"{_BLOCK}.norm_attn_norm.norm_2": "layers.{i}.mlp_norm",
            f"{_BLOCK}.ffn.router.layer": "layers.{i}.mlp.router",
            f"{_BLOCK}.ffn.experts.mlp.w1": "layers.{i}.mlp.gate_up:weight[gate:joined]",
            f"{_BLOCK}.ffn.experts.mlp.v1": "layers.{i}.mlp.gate_up:weight[up:joined]",
            f"{_BLOCK}.ffn.experts.mlp.w2": "layers.{i}.mlp.down:weight[:joined_transposed]",
            **expert_rows(f"{_BLOCK}.ffn.experts.mlp", names=("w1", "v1", "w2")),
            "transformer.norm_f": "norm",
            "lm_head": "head",
        }
    )
    base_prefix = "transformer."
    norm_class = LayerNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "dbrx",
        "vocab_size": 320,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 128,
        "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 5, "moe_top_k": 2},
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        attention, ffn = (_inner(hf, key) for key in ("attn_config", "ffn_config"))
        activation = ffn.fields.get("ffn_act_fn") or {"name": "silu"}
        if activation != {"name": "silu"}:
            ffn.unsupported("ffn_act_fn", "Supported: {'name': 'silu'}.")
        ffn.expect("moe_normalize_expert_weights", 1, 1.0)
        named = hf.named(
            {
                "d_model": "hidden_size",
                "n_layers": "num_hidden_layers",
                "n_heads": "num_attention_heads",
                "max_seq_len": "max_position_embeddings",
            }
        )
        size = ffn.integer("ffn_hidden_size", 3584)
        theta = attention.number("rope_theta", 10000.0)
        fields = named.changed(
            {"num_key_value_heads": attention.integer("kv_n_heads", 1), "intermediate_size": size}
        ).decoder(architecture, theta=theta, norm_eps=1e-5)
        count = ffn.integer("moe_num_experts", 4, maximum=MAX_EXPERTS)
        # Without this entry the weights of the chosen experts are not renormalised.
        renormalize = ffn.fields.get("moe_normalize_expert_weights", 1.0) is not None
        experts = ExpertsConfig(
            layers=frozenset(range(fields["num_layers"])),
            count=count,
            size=size,
            routing=Routing(ffn.integer("moe_top_k", 1, maximum=count), renormalize=renormalize),
        )
        return ModelConfig(**fields, norm_bias=False, qkv_clip=attention.optional_number("clip_qkv"), experts=experts)


def _inner(hf: HFConfig, key: str) -> HFConfig:
    """Return a nested object of the file as a config."""
    fields = hf.fields.get(key) or {}
    if not isinstance(fields, dict):
        hf.invalid(key, "where an object belongs")
    return HFConfig(fields, source=f"{hf.source}: {key}")
