"""RecurrentGemma (Griffin): gated recurrences in most layers, attention with a window in the others."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.gated_recurrence import GatedRecurrence
from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["RecurrentGemma"]

_LAYER, _BLOCK = "model.layers.{i}", "model.layers.{i}.temporal_block"


class RecurrentGemmaConfig(ModelConfig, frozen=True, kw_only=True):
    attention_layers: frozenset[int]
    """The layers with attention."""
    recurrent_size: int
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""


@register(RecurrentGemmaForCausalLM="RecurrentGemma 2B, 9B")
class RecurrentGemma(DecoderLM):
    config: RecurrentGemmaConfig
    norm_class = OffsetRMSNorm
    scales_images = True
    weights = WeightMap(
        {
            "model.embed_tokens": "embed",
            f"{_LAYER}.temporal_pre_norm": "layers.{i}.attn_norm",
            **{f"{_BLOCK}.{part}_proj": f"layers.{{i}}.attn.qkv[{part}]" for part in "qkv"},
            f"{_BLOCK}.o_proj": "layers.{i}.attn.out",
            f"{_BLOCK}.linear_x": "layers.{i}.attn.inputs[x]",
            f"{_BLOCK}.linear_y": "layers.{i}.attn.inputs[gate]",
            f"{_BLOCK}.linear_out": "layers.{i}.attn.out",
            f"{_BLOCK}.conv_1d": "layers.{i}.attn.conv",
            f"{_BLOCK}.rg_lru.recurrent_param": "layers.{i}.attn.rates:log_rate",
            f"{_BLOCK}.rg_lru.input_gate_weight": "layers.{i}.attn.gates:input_weight",
            f"{_BLOCK}.rg_lru.input_gate_bias": "layers.{i}.attn.gates:input_bias",
            f"{_BLOCK}.rg_lru.recurrent_gate_weight": "layers.{i}.attn.gates:forget_weight",
            f"{_BLOCK}.rg_lru.recurrent_gate_bias": "layers.{i}.attn.gates:forget_bias",
            f"{_LAYER}.channel_pre_norm": "layers.{i}.mlp_norm",
            f"{_LAYER}.mlp_block.gate_proj": "layers.{i}.mlp.gate_up[gate]",
            f"{_LAYER}.mlp_block.up_proj": "layers.{i}.mlp.gate_up[up]",
            f"{_LAYER}.mlp_block.down_proj": "layers.{i}.mlp.down",
            "model.final_norm": "norm",
            "lm_head": "head",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "recurrent_gemma",
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "lru_width": 80,
        "attention_window_size": 8,
        "attention_bias": True,
        "conv1d_width": 3,
        "logits_soft_cap": 3.0,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_activation", "gelu_pytorch_tanh")
        hf.expect("embeddings_scale_by_sqrt_dim", True)
        fields = hf.decoder(architecture, max_position=8192, tied=True, partial_rotary=0.5)
        num_layers, hidden_size, num_heads = fields["num_layers"], fields["hidden_size"], fields["num_heads"]
        if fields["intermediate_size"] % 2:
            hf.invalid("intermediate_size", "where an even number belongs: that of gate and up together")
        fields["intermediate_size"] //= 2
        pattern = hf.fields.get("block_types") or ["recurrent", "recurrent", "attention"]
        if not isinstance(pattern, list) or not {"recurrent", "attention"}.issuperset(map(str, pattern)):
            hf.invalid("block_types", "where a list of recurrent and attention belongs")
        attended = frozenset(layer for layer in range(num_layers) if pattern[layer % len(pattern)] == "attention")
        window = hf.integer("attention_window_size", 2048)
        fields["windows"] = tuple(window if layer in attended else None for layer in range(num_layers))
        size = hf.integer("lru_width", hidden_size)
        if size % num_heads:
            hf.invalid("lru_width", f"which is no multiple of num_attention_heads = {num_heads}")
        return RecurrentGemmaConfig(
            **fields,
            qkv_bias=hf.flag("attention_bias", False),
            out_bias=True,
            mlp_bias=True,
            activation="gelu_tanh",
            # transformers stores the factor in bfloat16 in a model of any dtype.
            embedding_scale=torch.tensor(hidden_size**0.5).bfloat16().item(),
            logit_softcap=hf.number("logits_soft_cap", 30.0),
            attention_layers=attended,
            recurrent_size=size,
            conv_length=hf.integer("conv1d_width", 4, minimum=2, maximum=16),
        )

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer in config.attention_layers:
            return super().attention(layer)
        return GatedRecurrence(
            layer,
            config.hidden_size,
            size=config.recurrent_size,
            num_heads=config.num_heads,
            conv_length=config.conv_length,
        )
