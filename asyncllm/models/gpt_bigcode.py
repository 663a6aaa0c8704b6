"""GPTBigCode: GPT-2 with one KV head, and weights stored untransposed."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.gpt2 import GPT2, GPT2_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["GPTBigCode"]


@register(GPTBigCodeForCausalLM="SantaCoder, StarCoder, StarCoderBase, WizardCoder")
class GPTBigCode(GPT2):
    weights = GPT2_WEIGHTS
    tiny: ClassVar[dict[str, Any]] = {**GPT2.tiny, "model_type": "gpt_bigcode", "multi_query": True}

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        heads = {"num_key_value_heads": 1} if hf.flag("multi_query", True) else {}
        named = hf.changed({"activation_function": "gelu_pytorch_tanh", **hf.fields, **heads})
        return GPT2.configure(named, architecture)
