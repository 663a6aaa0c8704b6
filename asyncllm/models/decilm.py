"""Llama Nemotron Super and Ultra, DeciLM: Llama with numbers of KV heads and sizes of MLPs per layer, in some of which
a linear layer, or nothing, replaces attention or the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from asyncllm.layers.attention import Attention
from asyncllm.layers.block import Block
from asyncllm.layers.bypass import Bypass, LinearBypass
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.norm import NoNorm
from asyncllm.models.config import MAX_LAYERS, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["DeciLM"]

LINEAR, NOTHING = 0, -1
"""In the place of a size: one product of the stream, or nothing."""

_READ = {"n_heads_in_group", "ffn_mult", "hidden_act", "no_op", "replace_with_linear"}
_WIDTH_UNIT = 256
"""Features of MLPs are multiples of it."""


class DeciConfig(ModelConfig, frozen=True, kw_only=True):
    kv_heads: tuple[int, ...]
    """Number of KV heads of each layer, or LINEAR or NOTHING."""
    mlp_sizes: tuple[int, ...]
    """Inner features of each layer's MLP, or LINEAR or NOTHING."""


@register(DeciLMForCausalLM="Llama Nemotron 51B, Super 49B, Ultra 253B; DeciLM 7B")
class DeciLM(DecoderLM):
    config: DeciConfig
    weights = LLAMA_WEIGHTS.replaced(
        {
            "model.layers.{i}.self_attn.linear_attn": "layers.{i}.attn.product",
            "model.layers.{i}.mlp.linear_mlp": "layers.{i}.mlp.product",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "nemotron-nas",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 4.0, "no_op": False}},
            {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 9.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 4.0}},
            {"attention": {"n_heads_in_group": 4, "window_length": None}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"replace_with_linear": True}},
        ],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        num_layers = hf.integer("num_hidden_layers", maximum=MAX_LAYERS)
        num_heads, hidden_size = hf.integer("num_attention_heads", maximum=2**16), hf.integer("hidden_size")
        blocks = hf.fields.get("block_configs")
        if blocks is None:
            heads = hf.fields.get("num_key_value_heads_per_layer")
            if not isinstance(heads, list) or not all(type(each) is int and each > 0 for each in heads):
                hf.invalid("num_key_value_heads_per_layer", f"where a list of {num_layers} numbers belongs")
            sizes = [hf.integer("intermediate_size")] * num_layers
        else:
            parts = _parts(hf, blocks, num_layers)
            heads = [_kv_heads(part, num_heads) for part, _ in parts]
            sizes = [_mlp_size(part, hidden_size) for _, part in parts]
        if len(heads) != num_layers or any(count > 0 and num_heads % count for count in heads) or max(heads) <= 0:
            hf.invalid("num_attention_heads", f"which the KV heads of {num_layers} layers have to divide")
        named = hf.changed({"num_key_value_heads": None, "intermediate_size": max(*sizes, 1)})
        bias = hf.flag("attention_bias", False)
        return DeciConfig(
            **named.decoder(architecture, max_position=4096),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            kv_heads=tuple(heads),
            mlp_sizes=tuple(sizes),
        )

    def block(self, layer: int) -> Block:
        config, parts = self.config, self.block_parts(layer)
        if config.kv_heads[layer] == NOTHING:
            parts["attn_norm"] = NoNorm()
        if config.mlp_sizes[layer] == NOTHING:
            parts["mlp_norm"] = NoNorm()
        return Block(**parts)

    def attention(self, layer: int) -> Attention | Bypass | LinearBypass:  # type: ignore[override]
        config, count = self.config, self.config.kv_heads[layer]
        if count <= 0:
            return Bypass() if count == NOTHING else LinearBypass(config.hidden_size, bias=config.out_bias)
        # Layers without attention have no cache, and are not counted.
        place = sum(heads > 0 for heads in config.kv_heads[:layer])
        attention = Attention(place, config.hidden_size, replace(self.attention_config(layer), num_kv_heads=count))
        attention.kind = count
        return attention

    def mlp(self, layer: int) -> nn.Module:
        config, size = self.config, self.config.mlp_sizes[layer]
        if size <= 0:
            return Bypass() if size == NOTHING else LinearBypass(config.hidden_size)
        return GatedMLP(config.hidden_size, size, bias=config.mlp_bias)


def _parts(hf: HFConfig, blocks: Any, num_layers: int) -> list[tuple[HFConfig, HFConfig]]:
    """Return what the file says of each layer's attention and of its MLP."""
    if not isinstance(blocks, list) or len(blocks) != num_layers or not all(isinstance(each, dict) for each in blocks):
        hf.invalid("block_configs", f"where a list of {num_layers} objects belongs")
    parts = []
    for layer, block in enumerate(blocks):
        both = block.get("attention"), block.get("ffn")
        if not all(isinstance(each, dict) for each in both):
            hf.invalid("block_configs", f"where layer {layer} needs an object for attention and one for ffn")
        attention, mlp = (HFConfig(each, source=f"{hf.source}: block_configs[{layer}]") for each in both)
        for part in (attention, mlp):
            part.expect("hidden_act", "silu")
            for key in part.fields.keys() - _READ:
                part.expect(key, False)
        parts.append((attention, mlp))
    return parts


def _replaced(part: HFConfig) -> int | None:
    """Return the replacement of attention or of an MLP, or None without one."""
    if part.flag("no_op", False):
        return NOTHING
    return LINEAR if part.flag("replace_with_linear", False) else None


def _kv_heads(part: HFConfig, num_heads: int) -> int:
    """Return the KV heads of a layer, or what stands in attention's place."""
    instead = _replaced(part)
    return num_heads // part.integer("n_heads_in_group", maximum=num_heads) if instead is None else instead


def _mlp_size(part: HFConfig, hidden_size: int) -> int:
    """Return the inner features of a layer's MLP, two thirds of a factor times the hidden size in whole units, or what
    stands in its place."""
    instead = _replaced(part)
    if instead is not None:
        return instead
    return -(-int(2 * part.number("ffn_mult") * hidden_size / 3) // _WIDTH_UNIT) * _WIDTH_UNIT
