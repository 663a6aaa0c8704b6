"""CodeGen: GPT-J with q, k and v in one tensor, in the layout of its four training devices."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.gptj import GPTJ, GPTJ_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["CodeGen"]


@register(CodeGenForCausalLM="CodeGen 350M to 16B")
class CodeGen(GPTJ):
    weights = GPTJ_WEIGHTS.replaced({"transformer.h.{i}.attn.qkv_proj": "layers.{i}.attn.qkv[q+k+v:quarters]"})
    tiny: ClassVar[dict[str, Any]] = {**GPTJ.tiny, "model_type": "codegen"}

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        config = GPTJ.configure(hf, architecture)
        if config.num_heads % 4:
            hf.invalid("n_head", "which four devices could not share, as the tensors of q, k and v have it")
        return config
