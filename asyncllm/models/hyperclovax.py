"""HyperCLOVA X: Granite's multipliers, except that logits are multiplied, not divided; and additional norms after each
branch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.layers.block import AnyBlock, SandwichBlock
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.granite import Granite
from asyncllm.models.registry import register

__all__ = ["HyperCLOVAX"]


class HyperCLOVAXConfig(ModelConfig, frozen=True, kw_only=True):
    post_norms: bool
    """Whether there are norms after the branches."""


@register(HyperCLOVAXForCausalLM="HyperCLOVA X SEED Think 14B")
class HyperCLOVAX(Granite):
    config: HyperCLOVAXConfig
    weights = Granite.weights.replaced(
        {
            "model.layers.{i}.post_norm1": "layers.{i}.attn_post_norm",
            "model.layers.{i}.post_norm2": "layers.{i}.mlp_post_norm",
        }
    )
    tiny: ClassVar[dict[str, Any]] = {
        **Granite.tiny,
        "model_type": "hyperclovax",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "logits_scaling": 0.4,
        "attention_bias": True,
        "mlp_bias": True,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        base = Granite.configure(hf, architecture)
        fields = msgspec.structs.asdict(base)
        fields["score_scale"] = hf.number("attention_multiplier", base.head_dim**-0.5)
        fields["logit_scale"] = hf.number("logits_scaling", 1.0)
        return HyperCLOVAXConfig(**fields, post_norms=hf.flag("use_post_norm", True))

    def block(self, layer: int) -> AnyBlock:
        if not self.config.post_norms:
            return super().block(layer)
        return SandwichBlock(**self.sandwich_parts(layer))
