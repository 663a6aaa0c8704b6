"""VaultGemma: Gemma 2 without the norms after its branches."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.gemma2 import Gemma2
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["VaultGemma"]


@register(VaultGemmaForCausalLM="VaultGemma 1B")
class VaultGemma(DecoderLM):
    weights = LLAMA_WEIGHTS.without("model.layers.{i}.post_attention_layernorm").replaced(
        {"model.layers.{i}.pre_feedforward_layernorm": "layers.{i}.mlp_norm"}
    )
    norm_class = OffsetRMSNorm
    tiny: ClassVar[dict[str, Any]] = {**Gemma2.tiny, "model_type": "vaultgemma", "attention_bias": True}

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        return Gemma2.configure(hf, architecture)
