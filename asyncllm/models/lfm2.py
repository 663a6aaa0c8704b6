"""LFM2: short convolutions in most layers, attention with normalised queries and keys in the others."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.short_convolution import ShortConvolution
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.registry import register
from asyncllm.models.weights import WeightMap

__all__ = ["Lfm2", "Lfm2Config", "lfm2_fields"]

_LAYER, _ATTENTION = "model.layers.{i}", "model.layers.{i}.self_attn"

LFM2_WEIGHTS = WeightMap(
    {
        "model.embed_tokens": "embed",
        f"{_LAYER}.operator_norm": "layers.{i}.attn_norm",
        f"{_LAYER}.conv.in_proj": "layers.{i}.attn.gates",
        f"{_LAYER}.conv.conv": "layers.{i}.attn.conv",
        f"{_LAYER}.conv.out_proj": "layers.{i}.attn.out",
        f"{_ATTENTION}.q_proj": "layers.{i}.attn.qkv[q]",
        f"{_ATTENTION}.k_proj": "layers.{i}.attn.qkv[k]",
        f"{_ATTENTION}.v_proj": "layers.{i}.attn.qkv[v]",
        f"{_ATTENTION}.out_proj": "layers.{i}.attn.out",
        f"{_ATTENTION}.q_layernorm": "layers.{i}.attn.q_norm",
        f"{_ATTENTION}.k_layernorm": "layers.{i}.attn.k_norm",
        f"{_LAYER}.ffn_norm": "layers.{i}.mlp_norm",
        f"{_LAYER}.feed_forward.w1": "layers.{i}.mlp.gate_up[gate]",
        f"{_LAYER}.feed_forward.w3": "layers.{i}.mlp.gate_up[up]",
        f"{_LAYER}.feed_forward.w2": "layers.{i}.mlp.down",
        "model.embedding_norm": "norm",
        "lm_head": "head",
    }
)


class Lfm2Config(ModelConfig, frozen=True, kw_only=True):
    conv_layers: frozenset[int]
    """The layers without attention."""
    conv_length: int
    """Number of tokens that a convolution sees, including the newest."""
    conv_bias: bool
    """Whether the convolution and the products around it have biases."""


def lfm2_fields(hf: HFConfig, architecture: str) -> dict[str, Any]:
    """Return the entries common to files of LFM2 with and without experts."""
    named = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
    fields = hf.named(named).decoder(architecture, max_position=128000, theta=1e6, norm_eps=1e-5, tied=True)
    num_layers = fields["num_layers"]
    attention_layers = hf.fields.get("full_attn_idxs")
    if attention_layers is None:
        attention_layers = list(range(num_layers))
    if not isinstance(attention_layers, list) or any(layer not in range(num_layers) for layer in attention_layers):
        hf.invalid("full_attn_idxs", f"where a list of layers below {num_layers} belongs")
    by_index = ["full_attention" if layer in attention_layers else "conv" for layer in range(num_layers)]
    kinds = hf.layer_kinds(num_layers, ("full_attention", "conv"), by_index)
    length = hf.integer("conv_L_cache", 3, minimum=2, maximum=16)
    return {
        **fields,
        "qk_norm": "head",
        "conv_layers": frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        "conv_length": length,
        "conv_bias": hf.flag("conv_bias", False),
    }


@register(Lfm2ForCausalLM="LFM2 350M to 2.6B")
class Lfm2(DecoderLM):
    config: Lfm2Config
    weights = LFM2_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "lfm2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "full_attn_idxs": [1],
        "conv_L_cache": 4,
        "conv_bias": True,
        "block_multiple_of": 24,
        "block_ffn_dim_multiplier": 1.1,
        "block_auto_adjust_ff_dim": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        fields = lfm2_fields(hf, architecture)
        if hf.flag("block_auto_adjust_ff_dim", True):
            size = int(2 * fields["intermediate_size"] / 3)
            factor = hf.optional_number("block_ffn_dim_multiplier", 1.0)
            if factor is not None:
                multiple = hf.integer("block_multiple_of", 256)
                size = -(-int(factor * size) // multiple) * multiple
            fields["intermediate_size"] = size
        return Lfm2Config(**fields)

    def attention(self, layer: int) -> AnyAttention:
        config = self.config
        if layer not in config.conv_layers:
            return super().attention(layer)
        return ShortConvolution(layer, config.hidden_size, length=config.conv_length, bias=config.conv_bias)
