"""DeepSeek-V3.2, for contexts no longer than the number of tokens that its index selects: within it queries attend to
all tokens, as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.config import MAX_POSITION, HFConfig, ModelConfig
from asyncllm.models.deepseek_v3 import DeepseekV3
from asyncllm.models.grouped_experts import leading_dense
from asyncllm.models.registry import register

__all__ = ["DeepseekV32"]


@register(DeepseekV32ForCausalLM="DeepSeek-V3.2, in contexts of 2,048 tokens")
class DeepseekV32(DeepseekV3):
    weights = DeepseekV3.weights.skipping("model.layers.{i}.self_attn.indexer")
    tiny: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepseekV3.tiny.items() if key != "topk_method"},
        "model_type": "deepseek_v32",
        "index_topk": 256,
        "index_head_dim": 16,
        "index_n_heads": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("rope_interleave", True)
        dense = leading_dense(hf, hf.integer("num_hidden_layers"), 3)
        config = DeepseekV3.configure(hf.changed({"first_k_dense_replace": dense}), architecture)
        if config.dynamic_rope_from is not None:
            hf.unsupported("index_topk", "Dynamic rotary scaling asks for contexts beyond it. Leave the scaling out.")
        # Beyond this number of tokens, queries attend to a selection only.
        chosen = hf.integer("index_topk", 2048, maximum=MAX_POSITION)
        beyond = "each query attends to those tokens alone that an index chooses (index_topk)"
        return msgspec.structs.replace(config, max_position=min(config.max_position, chosen), beyond=beyond)
