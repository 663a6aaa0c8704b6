"""Log-n scaling of queries, for engines that ask for it although the checkpoint does not."""

from __future__ import annotations

import msgspec

from asyncllm.errors import UnsupportedFeature
from asyncllm.layers.attention import Attention
from asyncllm.layers.block import AnyAttention
from asyncllm.layers.chunked_attention import ChunkedAttention
from asyncllm.layers.rotary import LogScaling
from asyncllm.models.config import ModelConfig
from asyncllm.models.decoder import DecoderLM

__all__ = ["check_log_scaling", "with_log_scaling"]


def with_log_scaling(config: ModelConfig) -> ModelConfig:
    """Return the config with queries scaled beyond the positions that the model was trained on, before linear or
    dynamic rotary scaling. A model that already does so is unchanged.

    Raises UnsupportedFeature if the model scales its queries differently.
    """
    if isinstance(config.query_scaling, LogScaling):
        return config
    if config.query_scaling is not None:
        raise _refusal(config, "scales its queries in a way of its own")
    rope, length = config.rope, config.max_position
    if rope is not None and rope.kind in ("linear", "dynamic"):
        length = rope.original_max_position
    if length < 2:
        raise _refusal(config, f"was trained on {length} position")
    return msgspec.structs.replace(config, query_scaling=LogScaling(length=length))


def check_log_scaling(model: DecoderLM) -> None:
    """Raise UnsupportedFeature unless every layer of the model scales its queries."""
    for module in model.modules():
        if isinstance(module, ChunkedAttention):
            raise _refusal(model.config, "attends within chunks, which no context outgrows")
        if isinstance(module, AnyAttention) and not (isinstance(module, Attention) and module.scale_queries):
            raise _refusal(model.config, f"has layers of {type(module).__name__}, which take no scale of queries")


def _refusal(config: ModelConfig, why: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"use_logn_attn: {config.architecture} {why}. Use use_logn_attn=False.", "use_logn_attn")
