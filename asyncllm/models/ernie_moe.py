"""ERNIE 4.5 with experts chosen by corrected softmax scores, and shared experts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from asyncllm.kernels import Routing
from asyncllm.layers.layer import PartKey
from asyncllm.layers.moe import Correction, MoE
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.ernie import Ernie
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS
from asyncllm.models.llama import LLAMA_WEIGHTS
from asyncllm.models.registry import register

__all__ = ["ErnieMoE"]


class CorrectionRow(Correction):
    """A correction that checkpoints store as a matrix of one row."""

    def expected_parts(self) -> dict[PartKey, tuple[int, ...]]:
        return {("bias", None, None): (1, *self.bias.shape)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        super().load_part(suffix, part, index, tensor[0])


@register(Ernie4_5_MoeForCausalLM="ERNIE 4.5 21B-A3B, 300B-A47B")
class ErnieMoE(DecoderLM):
    weights = LLAMA_WEIGHTS.replaced(
        {
            **DEEPSEEK_EXPERTS,
            **{
                f"model.layers.{{i}}.mlp.{each}moe_statics.e_score_correction_bias": "layers.{i}.mlp.correction:bias"
                for each in ("", "gate.")
            },
        }
        # These layers predict tokens beyond the next one.
    ).skipping(*(f"model.mtp_{part}.{{i}}" for part in ("block", "emb_norm", "hidden_norm", "linear_proj")))
    tiny: ClassVar[dict[str, Any]] = {
        **Ernie.tiny,
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "use_bias": False,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        hf.expect("use_bias", False)
        hf.expect("moe_norm_min", 1e-12)
        fields = hf.decoder(architecture, max_position=131072, theta=5e5, norm_eps=1e-5, tied=True)
        num_layers = fields["num_layers"]
        last = hf.fields.get("moe_layer_end_index")
        last = num_layers - 1 if last in (None, -1) else hf.integer("moe_layer_end_index", minimum=0)
        first, step = hf.integer("moe_layer_start_index", 1, minimum=0), hf.integer("moe_layer_interval", 1)
        count, size = hf.integer("moe_num_experts", 64, maximum=MAX_EXPERTS), hf.integer("moe_intermediate_size", 1536)
        experts = ExpertsConfig(
            layers=frozenset(
                layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % step == 0
            ),
            count=count,
            size=size,
            routing=Routing(hf.integer("moe_k", 6, maximum=count), renormalize=True),
            corrected=True,
            exact_router=True,
            shared_size=size * hf.integer("moe_num_shared_experts", 2, minimum=0),
        )
        return ModelConfig(**fields, paired_rotary=True, experts=experts)

    def mlp(self, layer: int) -> nn.Module:
        mlp = super().mlp(layer)
        if isinstance(mlp, MoE) and self.config.experts is not None:
            mlp.correction = CorrectionRow(self.config.experts.count)
        return mlp
