"""EXAONE 4: norms after each branch and of each head; a window and rotation in three of four layers."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.olmo2 import Olmo2
from asyncllm.models.registry import register

__all__ = ["Exaone4"]


@register(Exaone4ForCausalLM="EXAONE 4.0")
class Exaone4(Olmo2):
    tiny: ClassVar[dict[str, Any]] = {
        **Olmo2.tiny,
        "model_type": "exaone4",
        "head_dim": 24,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("hidden_act", "silu")
        fields = hf.decoder(architecture, norm_eps=1e-5)
        num_layers, window = fields["num_layers"], hf.optional_integer("sliding_window", 4096)
        fields["windows"] = hf.windows(num_layers, window, _sliding(hf, num_layers))
        if window is None:
            # The smaller models attend to the whole context, with rotation in every layer.
            return ModelConfig(**fields, qk_norm="head")
        ropes = tuple(None if window is None else fields["rope"] for window in fields["windows"])
        return ModelConfig(**fields, layer_ropes=ropes, qk_norm="head")


def _sliding(hf: HFConfig, num_layers: int) -> list[bool]:
    """Return which layers slide, by the pattern: a number n, where every nth layer is global, or a repeated string of
    letters L and G, where the last layer is always global."""
    pattern = hf.fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
        return [layer < num_layers - 1 and pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
    step = hf.integer("sliding_window_pattern", 4)
    return [(layer + 1) % step != 0 for layer in range(num_layers)]
