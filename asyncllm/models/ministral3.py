"""Ministral 3: Mistral with queries scaled by position beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from asyncllm.layers.rotary import QueryScaling
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["Ministral3", "growing_queries"]

_QUERY_SCALE = "llama_4_scaling_beta"
_UNREAD = ("max_position_embeddings",)
"""Entries of the rope object that repeat the file's."""
_USUAL = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, _QUERY_SCALE: 0.1}


@register(Ministral3ForCausalLM="Ministral 3 3B, 8B, 14B: the text model")
class Ministral3(DecoderLM):
    weights = LLAMA_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "ministral3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "sliding_window": 40,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf, scaling = growing_queries(
            hf, {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
        )
        fields = hf.decoder(architecture, max_position=262144, theta=1e6, norm_eps=1e-5, head_dim=128)
        fields["windows"] = hf.windows(fields["num_layers"], hf.optional_integer("sliding_window"))
        return ModelConfig(**fields, query_scaling=scaling)


def growing_queries(hf: HFConfig, usual: Mapping[str, Any]) -> tuple[HFConfig, QueryScaling | None]:
    """Return the file with plain rotary entries, and the scaling of queries that they contain. `usual`: entries for a
    file that has none."""
    if all(hf.fields.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        hf = hf.changed({"rope_parameters": {**_USUAL, **usual}})
    key = next((key for key in ("rope_parameters", "rope_scaling") if hf.fields.get(key) is not None), None)
    if key is None or not isinstance(hf.fields[key], dict):
        return hf, None
    scaling, rope = None, HFConfig(hf.fields[key], source=f"{hf.source}: {key}")
    if rope.fields.get(_QUERY_SCALE) is not None:
        scaling = QueryScaling(
            length=rope.integer("original_max_position_embeddings"), weight=rope.number(_QUERY_SCALE)
        )
    kept = {name: value for name, value in rope.fields.items() if name not in (_QUERY_SCALE, *_UNREAD)}
    return hf.changed({key: kept}), scaling
