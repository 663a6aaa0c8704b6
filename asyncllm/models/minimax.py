"""MiniMax-Text-01 and M1: lightning attention in most layers, and Mixtral's experts, around a stream that is normalised
before each branch and scaled behind it."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention, ScaledStreamBlock
from asyncllm.layers.lightning_attention import LightningAttention
from asyncllm.models.config import HFConfig, ModelConfig, alibi_slopes
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.mixtral import Mixtral, mixtral_experts
from asyncllm.models.registry import register

__all__ = ["MiniMax", "MiniMaxConfig"]

_ATTENTION = "model.layers.{i}.self_attn"
_PUBLISHED = {
    f"layernorm_{kind}_{name}": f"{usual}_{name}_factor"
    for kind, usual in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for name in ("alpha", "beta")
}
_NORM_EPS = 1e-6
"""Epsilon of lightning attention's norm, regardless of rms_norm_eps."""

Factors = tuple[float, float]
"""Of the normalised stream, and of the branch that is added to it."""


class MiniMaxConfig(ModelConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with full attention."""
    rates: tuple[float, ...]
    """How fast each head of lightning attention forgets, before a layer's factor."""
    full_factors: Factors
    linear_factors: Factors
    mlp_factors: Factors


@register(
    MiniMaxForCausalLM="MiniMax-Text-01, M1, in files of transformers",
    MiniMaxText01ForCausalLM="MiniMax-Text-01",
    MiniMaxM1ForCausalLM="MiniMax-M1",
)
class MiniMax(DecoderLM):
    config: MiniMaxConfig
    weights = Mixtral.weights.replaced(
        {
            f"{_ATTENTION}.qkv_proj": "layers.{i}.attn.inputs[q+k+v:by_head]",
            f"{_ATTENTION}.output_gate": "layers.{i}.attn.inputs[gate]",
            f"{_ATTENTION}.norm": "layers.{i}.attn.norm",
            f"{_ATTENTION}.out_proj": "layers.{i}.attn.out",
        }
    ).ignoring(
        # They follow from the number of heads.
        *(f"{_ATTENTION}.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "minimax",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "block_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "full_attn_alpha_factor": 1.7,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.4,
        "linear_attn_beta_factor": 0.9,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.7,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf = hf.named({"attn_type_list": "layer_types", **_PUBLISHED})
        hf.expect("hidden_act", "silu")
        hf.expect("sliding_window")
        hf.expect("shared_intermediate_size", 0)
        hf.expect("postnorm", True)
        rotated = hf.optional_integer("rotary_dim")
        if rotated is not None:
            hf = hf.changed({"partial_rotary_factor": rotated / hf.integer("head_dim")})
        fields = hf.decoder(architecture, max_position=131072, theta=1e6, norm_eps=1e-5, partial_rotary=1.0)
        num_layers = fields["num_layers"]
        kinds = hf.fields.get("layer_types")
        if isinstance(kinds, list) and all(type(kind) is int and kind in (0, 1) for kind in kinds):
            hf = hf.changed({"layer_types": [("linear_attention", "full_attention")[kind] for kind in kinds]})
        usual = ["linear_attention" if layer % 2 else "full_attention" for layer in range(num_layers)]
        kinds = hf.layer_kinds(num_layers, ("full_attention", "linear_attention"), usual)
        full, linear, mlp = (
            (hf.number(f"{name}_alpha_factor", 1.0), hf.number(f"{name}_beta_factor", 1.0))
            for name in ("full_attn", "linear_attn", "mlp")
        )
        # Published files count heads that are no power of two as ALiBi does, and those of transformers do not.
        num_heads = fields["num_heads"]
        published = architecture.startswith(("MiniMaxText01", "MiniMaxM1"))
        plain = tuple(2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads))
        return MiniMaxConfig(
            **fields,
            rates=alibi_slopes(num_heads) if published else plain,
            experts=mixtral_experts(hf, fields),
            attention_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
            full_factors=full,
            linear_factors=linear,
            mlp_factors=mlp,
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        # Earlier layers forget faster.
        factor = 1 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
        return LightningAttention(
            layer,
            config.hidden_size,
            head_dim=config.head_dim,
            rates=[factor * rate for rate in config.rates],
            norm_eps=_NORM_EPS,
        )

    def block(self, layer: int) -> ScaledStreamBlock:
        config = self.config
        factors = config.full_factors if layer in config.attention_layers else config.linear_factors
        return ScaledStreamBlock(**self.block_parts(layer), attn_factors=factors, mlp_factors=config.mlp_factors)
