"""Qwen3-Next: gated delta nets and, in every fourth layer, gated attention; experts in all layers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.delta_net import GatedDeltaNet
from asyncllm.layers.gated_attention import GatedAttention
from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.qwen2_moe import Qwen2MoE
from asyncllm.models.qwen3 import QWEN3_WEIGHTS
from asyncllm.models.qwen3_moe import qwen_experts
from asyncllm.models.registry import register

__all__ = ["DELTA_WEIGHTS", "Qwen3Next", "Qwen3NextConfig", "delta_fields", "delta_net"]

_LINEAR = "model.layers.{i}.linear_attn"

DELTA_WEIGHTS = {
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attn.qkv[q+gate:by_head]",
    f"{_LINEAR}.conv1d": "layers.{i}.attn.conv",
    f"{_LINEAR}.A_log": "layers.{i}.attn.decay:log_rate",
    f"{_LINEAR}.dt_bias": "layers.{i}.attn.decay:step_bias",
    f"{_LINEAR}.norm": "layers.{i}.attn.norm",
    f"{_LINEAR}.out_proj": "layers.{i}.attn.out",
}
"""Rows of a weight table common to Qwen3-Next and Qwen3.5."""


class Qwen3NextConfig(ModelConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with attention."""
    delta_heads: int
    delta_key_heads: int
    delta_head_dim: int
    delta_key_dim: int
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""


@register(Qwen3NextForCausalLM="Qwen3-Next-80B-A3B")
class Qwen3Next(DecoderLM):
    config: Qwen3NextConfig
    # Its layer that predicts further tokens is not loaded.
    weights = (
        Qwen2MoE.weights.replaced(QWEN3_WEIGHTS.rows)
        .replaced(
            {
                **DELTA_WEIGHTS,
                f"{_LINEAR}.in_proj_qkvz": "layers.{i}.attn.inputs[q+k+v+gate:by_head]",
                f"{_LINEAR}.in_proj_ba": "layers.{i}.attn.weights[beta+step:by_head]",
            }
        )
        .skipping("mtp")
    )
    norm_class = OffsetRMSNorm
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_next",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-2,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf = hf.changed({"norm_topk_prob": hf.flag("norm_topk_prob", True)})
        fields = hf.decoder(architecture, max_position=32768, head_dim=256, partial_rotary=0.25)
        num_layers = fields["num_layers"]
        shared_size = hf.integer("shared_expert_intermediate_size", 512)
        return Qwen3NextConfig(
            **fields,
            **delta_fields(hf, num_layers),
            experts=qwen_experts(hf, num_layers, count=512, per_token=10, size=512, shared_size=shared_size),
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return GatedAttention(layer, config.hidden_size, self.attention_config(layer))
        return delta_net(layer, config, norm_eps=config.norm_eps)


def delta_net(
    layer: int,
    config: Qwen3NextConfig,
    *,
    norm_eps: float,
    kind: type[GatedDeltaNet] = GatedDeltaNet,
    **options: Any,
) -> GatedDeltaNet:
    """Return the delta net of a layer, from the fields of `delta_fields`. `options`: other arguments of
    `GatedDeltaNet`."""
    return kind(
        layer,
        config.hidden_size,
        num_heads=config.delta_heads,
        num_key_heads=config.delta_key_heads,
        head_dim=config.delta_head_dim,
        key_dim=config.delta_key_dim,
        conv_length=config.conv_length,
        norm_eps=norm_eps,
        **options,
    )


def delta_fields(hf: HFConfig, num_layers: int) -> dict[str, Any]:
    """Return the fields of a Qwen3NextConfig for its attention and delta nets. Raises InvalidCheckpoint,
    UnsupportedModel."""
    interval = hf.integer("full_attention_interval", 4)
    by_turns = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]
    kinds = hf.layer_kinds(num_layers, ("full_attention", "linear_attention"), by_turns)
    heads, key_heads = hf.integer("linear_num_value_heads", 32), hf.integer("linear_num_key_heads", 16)
    if heads % key_heads:
        hf.invalid("linear_num_value_heads", f"which linear_num_key_heads = {key_heads} does not divide")
    bias = hf.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": "head",
        "attention_layers": frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
        "delta_heads": heads,
        "delta_key_heads": key_heads,
        "delta_head_dim": hf.integer("linear_value_head_dim", 128),
        "delta_key_dim": hf.integer("linear_key_head_dim", 128),
        "conv_length": hf.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=16),
    }
