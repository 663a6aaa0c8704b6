"""GLM-5: DeepSeek-V3.2's computation with other defaults, an index whose neighbouring features are rotated together,
and layers that share an index."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.deepseek_v32 import DeepseekV32, with_index
from asyncllm.models.grouped_experts import leading_dense
from asyncllm.models.registry import register

__all__ = ["GlmMoEDsa"]

_USUAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1}
_KINDS = {"F": "full", "S": "shared"}


@register(GlmMoeDsaForCausalLM="GLM-5")
class GlmMoEDsa(DeepseekV32):
    tiny: ClassVar[dict[str, Any]] = {
        **DeepseekV32.tiny,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("rope_interleave", True)
        hf.expect("indexer_rope_interleave", True)
        dense = leading_dense(hf, hf.integer("num_hidden_layers"), 3)
        config = DeepseekV3.configure(hf.completed(_USUAL).changed({"first_k_dense_replace": dense}), architecture)
        kinds = _kinds(hf, config.num_layers)
        own = frozenset(layer for layer, kind in enumerate(kinds) if kind == "full")
        return with_index(hf, config, own, num_heads=32, interleaved=True)


def _kinds(hf: HFConfig, num_layers: int) -> list[str]:
    """Return for each layer whether it has an index ("full") or shares one. Raises InvalidCheckpoint."""
    key = "indexer_types" if hf.fields.get("indexer_types") is not None else "index_topk_pattern"
    kinds = hf.fields.get(key)
    if kinds is None:
        every, offset = hf.integer("index_topk_freq", 1), hf.integer("index_skip_topk_offset", 2, minimum=0)
        return ["full" if max(layer - offset + 1, 0) % every == 0 else "shared" for layer in range(num_layers)]
    if isinstance(kinds, str):
        kinds = [_KINDS.get(letter) for letter in kinds]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(_KINDS.values()).issuperset(kinds):
        hf.invalid(key, f"where 'full' or 'shared' belongs for each of {num_layers} layers")
    if kinds[0] != "full":
        hf.invalid(key, "where the first layer has no index to share")
    return kinds
