"""InternLM, openPangu, InternLM3 and Seed-OSS: Llama under other keys of config.json."""

from __future__ import annotations

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.llama import Llama
from asyncllm.models.registry import register

__all__ = ["InternLM", "InternLM3", "SeedOss"]


@register(InternLMForCausalLM="InternLM 7B, 20B", PanguEmbeddedForCausalLM="openPangu Embedded 7B")
class InternLM(Llama):
    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        bias = hf.flag("bias", True)
        return ModelConfig(**hf.decoder(architecture), qkv_bias=bias, out_bias=bias)


@register(InternLM3ForCausalLM="InternLM3 8B")
class InternLM3(Llama):
    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        bias = hf.flag("bias", False)
        return ModelConfig(
            **hf.decoder(architecture), qkv_bias=hf.flag("qkv_bias", False), out_bias=bias, mlp_bias=bias
        )


@register(SeedOssForCausalLM="Seed-OSS 36B")
class SeedOss(Llama):
    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        return ModelConfig(
            **hf.decoder(architecture),
            qkv_bias=hf.flag("attention_bias", True),
            out_bias=hf.flag("attention_out_bias", False),
            mlp_bias=hf.flag("mlp_bias", False),
        )
