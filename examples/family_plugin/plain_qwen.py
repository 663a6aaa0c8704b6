"""PlainQwenForCausalLM: Qwen2 without biases, as a family of your own package."""

from __future__ import annotations

import msgspec

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.qwen2 import Qwen2
from asyncllm.models.registry import register


@register(PlainQwenForCausalLM="an example of a family in another package")
class PlainQwen(Qwen2):
    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        return msgspec.structs.replace(Qwen2.configure(hf, architecture), qkv_bias=False)
