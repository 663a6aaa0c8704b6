"""Command A+: Command A with experts after its first layers, beside a shared MLP."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from torch import nn

from asyncllm.kernels import Routing
from asyncllm.layers.moe import AveragedMoE
from asyncllm.layers.norm import Norm, RMSNorm
from asyncllm.models.cohere import Cohere
from asyncllm.models.cohere2 import Cohere2, with_theta
from asyncllm.models.config import MAX_EXPERTS, ExpertsConfig, HFConfig, ModelConfig
from asyncllm.models.grouped_experts import DEEPSEEK_EXPERTS, leading_dense
from asyncllm.models.registry import register

__all__ = ["Cohere2MoE"]


class Cohere2MoEConfig(ModelConfig, frozen=True, kw_only=True):
    centered: bool
    """Whether norms subtract the mean."""
    averages_branches: bool
    """Whether the outputs of the shared MLP and of the experts are averaged instead of added."""


@register(Cohere2MoeForCausalLM="Command A+")
class Cohere2MoE(Cohere2):
    config: Cohere2MoEConfig
    weights = Cohere2.weights.replaced(DEEPSEEK_EXPERTS)
    tiny: ClassVar[dict[str, Any]] = {
        **Cohere2.tiny,
        "model_type": "cohere2_moe",
        "num_hidden_layers": 5,
        "head_dim": 24,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 80,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "sliding_window_pattern": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("use_qk_norm", False)
        hf.expect("expert_selection_fn", "softmax", "sigmoid")
        hf.expect("shared_expert_combination_strategy", "average", "sum")
        centered = hf.fields.get("rms_norm_eps") is None
        if not centered:
            hf = hf.changed({"layer_norm_eps": hf.fields["rms_norm_eps"]})
        if hf.fields.get("head_dim") is None:
            hf = hf.changed({"head_dim": 128})
        config = Cohere.configure(with_theta(hf), architecture)
        num_layers, dense = config.num_layers, leading_dense(hf, config.num_layers, 0)
        first, every = hf.integer("prefix_dense_sliding_window_pattern", 1), hf.integer("sliding_window_pattern", 4)
        # Which layers slide follows from this entry, even where another says which have experts.
        ahead = hf.integer("first_k_dense_replace", 0, minimum=0, maximum=num_layers)
        sliding = [(layer + 1) % first != 0 for layer in range(ahead)]
        sliding += [(layer + 1) % every != 0 for layer in range(num_layers - ahead)]
        windows = hf.windows(num_layers, hf.optional_integer("sliding_window", 4096), sliding)
        # Dense layers that all see every position are rotated nonetheless.
        rotated = [window is not None or (layer < dense and first == 1) for layer, window in enumerate(windows)]
        count, size = hf.integer("num_experts", 8, maximum=MAX_EXPERTS), config.intermediate_size
        by_sigmoid = hf.fields.get("expert_selection_fn") == "sigmoid"
        experts = ExpertsConfig(
            layers=frozenset(range(dense, num_layers)),
            count=count,
            size=size,
            routing=Routing(
                hf.integer("num_experts_per_tok", 2, maximum=count),
                scores="sigmoid" if by_sigmoid else "softmax",
                renormalize=hf.flag("norm_topk_prob", True) if by_sigmoid else True,
            ),
            shared_size=size * hf.integer("num_shared_experts", 0, minimum=0),
        )
        fields = msgspec.structs.asdict(config) | {
            "windows": windows,
            "layer_ropes": tuple(config.rope if each else None for each in rotated),
            "experts": experts,
            "intermediate_size": hf.integer("prefix_dense_intermediate_size", size),
        }
        return Cohere2MoEConfig(
            **fields,
            centered=centered,
            averages_branches=hf.fields.get("shared_expert_combination_strategy") != "sum",
        )

    def make_norm(self) -> Norm:
        config = self.config
        return super().make_norm() if config.centered else RMSNorm(config.hidden_size, config.norm_eps)

    def mlp(self, layer: int) -> nn.Module:
        config, experts = self.config, self.config.experts
        if experts is None or layer not in experts.layers or not (config.averages_branches and experts.shared_size):
            return super().mlp(layer)
        return AveragedMoE(
            config.hidden_size,
            experts.size,
            num_experts=experts.count,
            routing=experts.routing,
            shared_size=experts.shared_size,
        )
