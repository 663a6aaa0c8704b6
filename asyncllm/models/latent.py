"""Decoders with latent attention: the common parts of DeepSeek-V2, V3 and MiniCPM3."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncllm.layers.block import AnyAttention
from asyncllm.layers.latent_attention import LatentAttention
from asyncllm.layers.rotary import RopeConfig
from asyncllm.layers.sparse_latent_attention import SparseLatentAttention, TokenIndex
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.rope import rope_fields, yarn_term

__all__ = ["LATENT_WEIGHTS", "IndexConfig", "LatentConfig", "LatentDecoder", "latent_fields"]

_ATTENTION = "model.layers.{i}.self_attn"

LATENT_WEIGHTS = LLAMA_WEIGHTS.without(*(f"{_ATTENTION}.{each}_proj" for each in "qkv")).replaced(
    {
        f"{_ATTENTION}.q_proj": "layers.{i}.attn.q",
        f"{_ATTENTION}.q_a_proj": "layers.{i}.attn.q_down",
        f"{_ATTENTION}.q_a_layernorm": "layers.{i}.attn.q_norm",
        f"{_ATTENTION}.q_b_proj": "layers.{i}.attn.q",
        f"{_ATTENTION}.kv_a_proj_with_mqa": "layers.{i}.attn.kv_down",
        f"{_ATTENTION}.kv_a_layernorm": "layers.{i}.attn.kv_norm",
        f"{_ATTENTION}.kv_b_proj": "layers.{i}.attn.kv",
    }
)


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The config of `layers.sparse_latent_attention`."""

    top_k: int
    """Number of tokens that a query attends to."""
    num_heads: int
    head_dim: int
    interleaved: bool
    """Whether neighbouring features are rotated together."""
    layers: frozenset[int]
    """The layers with an index of their own; the others share that of the nearest earlier one."""


class LatentConfig(ModelConfig, frozen=True, kw_only=True):
    """The config of a decoder with latent attention. `head_dim` is the head size of queries."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Whether neighbouring features are rotated together."""
    index: IndexConfig | None = None
    """The index that chooses what queries attend to; None: they attend to all tokens."""


class LatentDecoder(DecoderLM):
    """A decoder whose layers have latent attention."""

    config: LatentConfig

    def attention_sizes(self) -> dict[str, Any]:
        """Return the keywords of a `LatentAttention`."""
        config = self.config
        assert config.score_scale is not None
        return {
            "num_heads": config.num_heads,
            "q_rank": config.q_rank,
            "kv_rank": config.kv_rank,
            "nope_dim": config.nope_dim,
            "rope_dim": config.rope_dim,
            "value_dim": config.value_dim,
            "scale": config.score_scale,
            "interleaved": config.interleaved,
            "bias": config.out_bias,
            "scale_queries": config.query_scaling is not None,
        }

    def attention(self, layer: int) -> AnyAttention:
        config, index, sizes = self.config, self.config.index, self.attention_sizes()
        if index is None:
            return LatentAttention(layer, config.hidden_size, **sizes)
        own = None
        if layer in index.layers:
            assert config.q_rank is not None
            own = TokenIndex(
                config.hidden_size,
                config.q_rank,
                num_heads=index.num_heads,
                head_dim=index.head_dim,
                interleaved=index.interleaved,
            )
        return SparseLatentAttention(layer, config.hidden_size, top_k=index.top_k, index=own, **sizes)


def latent_fields(hf: HFConfig, architecture: str, **defaults: Any) -> dict[str, Any]:
    """Return the LatentConfig fields that all families read alike; `defaults`: see `HFConfig.decoder`.

    Raises InvalidCheckpoint and UnsupportedModel.
    """
    hf.expect("hidden_act", "silu")
    nope_dim, rope_dim = hf.integer("qk_nope_head_dim"), hf.integer("qk_rope_head_dim")
    if rope_dim % 2:
        hf.invalid("qk_rope_head_dim", "where rotary embedding needs an even size")
    fields = hf.decoder(architecture, rope_dim=rope_dim, **defaults)
    if fields["num_kv_heads"] != fields["num_heads"]:
        hf.unsupported("num_key_value_heads", "All heads have keys of their own, so leave it out.")
    bias = hf.flag("attention_bias", False)
    return {
        **fields,
        "head_dim": nope_dim + rope_dim,
        "q_rank": hf.optional_integer("q_lora_rank"),
        "kv_rank": hf.integer("kv_lora_rank"),
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "value_dim": hf.integer("v_head_dim", fields["hidden_size"] // fields["num_heads"]),
        "out_bias": bias,
        "score_scale": (nope_dim + rope_dim) ** -0.5 * _mscale(hf, fields["rope"]) ** 2,
    }


def _mscale(hf: HFConfig, rope: RopeConfig) -> float:
    """Return the factor of a longer context on queries and on keys, determined by mscale_all_dim in the file's rotary
    entries."""
    multiplier = rope_fields(hf).number("mscale_all_dim", 0.0, positive=False)
    return yarn_term(rope.factor, multiplier)
