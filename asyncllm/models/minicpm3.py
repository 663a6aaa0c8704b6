"""MiniCPM3: latent attention, an MLP in every layer, and MiniCPM's multipliers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.latent import LATENT_WEIGHTS, LatentConfig, LatentDecoder, latent_fields
from asyncllm.models.registry import register

__all__ = ["MiniCPM3"]


@register(MiniCPM3ForCausalLM="MiniCPM3 4B")
class MiniCPM3(LatentDecoder):
    weights = LATENT_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "minicpm3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "q_lora_rank": 24,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "scale_emb": 3,
        "scale_depth": 0.6,
        "dim_model_base": 16,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        fields = latent_fields(hf, architecture, max_position=32768, norm_eps=1e-5, tied=True)
        depth = hf.optional_number("scale_depth", 1.4)
        base = hf.optional_integer("dim_model_base", 256)
        return LatentConfig(
            **fields,
            interleaved=False,
            mlp_bias=hf.flag("mlp_bias", False),
            embedding_scale=hf.number("scale_emb", 12),
            branch_scale=1.0 if depth is None else depth / fields["num_layers"] ** 0.5,
            logit_scale=1.0 if base is None else base / fields["hidden_size"],
        )
