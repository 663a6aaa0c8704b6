"""The first GPT: GPT-2 with norms after the additions, and none at the end."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.layers.block import StreamNormBlock
from asyncllm.layers.norm import NoNorm, Norm
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.gpt2 import GPT2
from asyncllm.models.registry import register

__all__ = ["OpenAIGPT"]


@register(OpenAIGPTLMHeadModel="GPT, the first")
class OpenAIGPT(GPT2):
    weights = GPT2.weights.without("transformer.wte", "transformer.wpe", "transformer.ln_f").replaced(
        {"transformer.tokens_embed": "embed", "transformer.positions_embed": "positions"}
    )
    tiny: ClassVar[dict[str, Any]] = {
        "model_type": "openai-gpt",
        "vocab_size": 320,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("n_inner")
        # Its own code says gelu for the approximation.
        hf.expect("afn", "gelu", "relu", "silu", "swish")
        named = {"gelu": "gelu_new"}.get(hf.fields.get("afn") or "gelu", hf.fields.get("afn"))
        return GPT2.configure(
            hf.changed({"n_positions": hf.integer("n_positions", 512), "activation_function": named}), architecture
        )

    def block(self, layer: int) -> StreamNormBlock:
        return StreamNormBlock(**self.block_parts(layer))

    def last_norm(self) -> Norm:
        return NoNorm()
