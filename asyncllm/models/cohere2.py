"""Command R7B and Command A: Command R with sliding layers, and layers without rotation in between."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from asyncllm.models.cohere import Cohere
from asyncllm.models.config import HFConfig, ModelConfig
from asyncllm.models.registry import register

__all__ = ["Cohere2", "with_theta"]


def with_theta(hf: HFConfig) -> HFConfig:
    """Return this with a base of rotation where it names none: not that of Command R."""
    return hf if hf.fields.get("rope_theta") is not None else hf.changed({"rope_theta": 1e4})


@register(Cohere2ForCausalLM="Command R7B, Command A")
class Cohere2(Cohere):
    tiny: ClassVar[dict[str, Any]] = {
        **Cohere.tiny,
        "model_type": "cohere2",
        "use_qk_norm": False,
        "num_hidden_layers": 4,
        "sliding_window": 8,
    }

    @staticmethod
    def configure(hf: HFConfig, architecture: str) -> ModelConfig:
        hf.expect("use_qk_norm", False)
        config = Cohere.configure(with_theta(hf), architecture)
        every = hf.integer("sliding_window_pattern", 4)
        sliding = [(layer + 1) % every != 0 for layer in range(config.num_layers)]
        windows = hf.windows(config.num_layers, hf.optional_integer("sliding_window", 4096), sliding)
        # Only sliding layers are rotated; the others see no positions.
        ropes = tuple(None if window is None else config.rope for window in windows)
        return msgspec.structs.replace(config, windows=windows, layer_ropes=ropes)
