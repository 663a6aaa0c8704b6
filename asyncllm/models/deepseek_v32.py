"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an index chooses."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.grouped_experts import leading_dense
from asyncllm.models.latent import IndexConfig, LatentConfig
from asyncllm.models.registry import register
from asyncllm.models.typed_fields import MAX_POSITION
from asyncllm.models.weights import WeightMap

__all__ = ["DeepseekV32", "with_index"]

_INDEX = "model.layers.{i}.self_attn.indexer"


@register(DeepseekV32ForCausalLM="DeepSeek-V3.2")
class DeepseekV32(DeepseekV3):
    weights = DeepseekV3.weights.replaced(
        {
            f"{_INDEX}.wq_b": "layers.{i}.attn.index.q",
            f"{_INDEX}.wk": "layers.{i}.attn.index.k",
            f"{_INDEX}.k_norm": "layers.{i}.attn.index.k_norm",
            f"{_INDEX}.weights_proj": "layers.{i}.attn.index.weights",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV3.tiny.items() if key != "topk_method"},
        "model_type": "deepseek_v32",
        "index_topk": 20,
        "index_head_dim": 24,
        "index_n_heads": 16,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("rope_interleave", True)
        hf.expect("indexer_rope_interleave", False)
        dense = leading_dense(hf, hf.integer("num_hidden_layers"), 3)
        config = DeepseekV3.configure(hf.changed({"first_k_dense_replace": dense}), architecture)
        return with_index(hf, config, frozenset(range(config.num_layers)), num_heads=64, interleaved=False)

    @property
    def weight_map(self) -> WeightMap:
        index = self.config.index
        if index is None:
            return super().weight_map.skipping(_INDEX)
        shared = sorted(set(range(self.config.num_layers)) - index.layers)
        return super().weight_map.skipping(*(_INDEX.replace("{i}", str(layer)) for layer in shared))


def with_index(
    hf: HFConfig, config: ModelConfig, layers: frozenset[int], *, num_heads: int, interleaved: bool
) -> ModelConfig:
    """Return the config with the index of the file, which `layers` have; without it, if no session is so long that the
    index leaves out a token. `num_heads`: the default of index_n_heads.

    Raises InvalidCheckpoint.
    """
    assert isinstance(config, LatentConfig)
    if config.q_rank is None:
        hf.invalid("q_lora_rank", "where the index needs the queries' bottleneck")
    index = IndexConfig(
        top_k=hf.integer("index_topk", 2048, maximum=MAX_POSITION),
        num_heads=hf.integer("index_n_heads", num_heads),
        head_dim=hf.integer("index_head_dim", 128),
        interleaved=interleaved,
        layers=layers,
    )
    if index.head_dim < config.rope_dim:
        hf.invalid("index_head_dim", f"where at least the {config.rope_dim} rotated features belong")
    needed = (hf.session_len or config.max_position) > index.top_k
    return msgspec.structs.replace(config, index=index if needed else None)
